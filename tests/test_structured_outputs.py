"""Outputs that match a grammar: alone, beside others, preempted, on several ranks; and grammars that cannot be used."""

from __future__ import annotations

import json
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.outputs import CompletionOutput, StepError
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text import grammar_trials
from nanovllm.text.constraints import ConstraintFactory
from nanovllm.text.grammar_trials import MAX_SECONDS, QUICK_SECONDS, GrammarError, SlowGrammarError, patiently
from nanovllm.text.grammars import AfterThinkingConstraint, GrammarCompiler, lark_json
from tests.mock_runner import make_request

pytest.importorskip("llguidance")
pytest.importorskip("pydantic")

from pydantic import BaseModel, Field

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "seed": 0}
PROMPT = "introduce yourself"
# Spaces between JSON's tokens are what a model of this size likes best.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
SCHEMA: dict[str, Any] = COMPACT | {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 3, "maximum": 77},
        "kinds": {"type": "array", "items": {"enum": ["a", "é"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}
CHOICES = ["été", 'a "quoted"\\ line\n', "maybe 😀", "may"]
# Words in balanced brackets.
BRACKETS = 'start: "(" inner ")"\ninner: "x" | "(" inner ")" | /[a-c]{2}/'


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    assert set(value) == {"name", "size", "kinds"} and len(value["name"]) <= 6
    return value["size"] in range(3, 78) and set(value["kinds"]) <= {"a", "é"} and len(value["kinds"]) in (1, 2, 3)


def fits_brackets(text: str) -> bool:
    inner = text.strip("()")
    depth = len(text) - len(text.lstrip("("))
    return depth > 0 and text == "(" * depth + inner + ")" * depth and bool(re.fullmatch("x|[a-c]{2}", inner))


CASES: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "schema": ({"json": SCHEMA}, fits_schema),
    "regex": ({"regex": r"[a-c]{3}\d{2,4}é+[^x]?"}, lambda text: re.fullmatch(r"[a-c]{3}\d{2,4}é+[^x]?", text)),
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "grammar": ({"grammar": BRACKETS}, fits_brackets),
}


@pytest.fixture(scope="module")
def module_llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=100, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    yield module_llm
    assert module_llm.is_finished() and module_llm.stats()["num_used_blocks"] == 0


def constrained(seed: int | None = None, temperature: float = 1.5, **given: Any) -> SamplingParams:
    names = {"json", "regex", "choice", "grammar", "json_object"}
    fields = {name: value for name, value in given.items() if name in names}
    others = {name: value for name, value in given.items() if name not in names} or {}
    others.setdefault("max_tokens", 120)
    return SamplingParams(temperature, seed=seed, structured_outputs=StructuredOutputsParams(**fields), **others)


def check(item: CompletionOutput, fits: Callable[[str], Any], eos: frozenset[int]) -> None:
    """Check that an output fits its grammar, or has its full length."""
    if item.finish_reason == "stop":
        assert fits(item.text), item.text
        assert item.token_ids[-1] in eos and item.stop_reason is None
        assert not eos & set(item.token_ids[:-1])


@pytest.mark.parametrize(("fields", "fits"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_outputs_match(llm: LLM, fields: dict[str, Any], fits: Callable[[str], Any], temperature: float) -> None:
    params = constrained(1, temperature, n=6 if temperature else 1, logprobs=1, **fields)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    for item in output.outputs:
        check(item, fits, llm.eos_token_ids)
    assert sum(item.finish_reason == "stop" for item in output.outputs) > len(output.outputs) / 2


def mixed() -> tuple[list[Any], list[SamplingParams]]:
    """Rows with grammars, with words that may not come, with both, and with neither."""
    params = [constrained(10 + i, max_tokens=60, **fields) for i, (fields, _) in enumerate(CASES.values())]
    params += [constrained(20, max_tokens=60, choice=["may", "maybe not"], bad_words=["maybe"])]
    params += [SamplingParams(1.0, 25, seed=30), SamplingParams(0, 25, bad_words=["ship rain"], repetition_penalty=1.2)]
    return [f"{PROMPT} {i} please and thank you" for i in range(len(params))], params


def results(llm: LLM, prompts: Any, params: Any) -> list[tuple[list[int], str, str | None]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]


def test_rows_with_and_without_grammars_also_when_preempted_and_on_two_ranks(llm: LLM) -> None:
    prompts, params = mixed()
    alone = [results(llm, prompt, param)[0] for prompt, param in zip(prompts, params, strict=True)]
    assert results(llm, prompts, params) == alone
    assert alone[len(CASES)][1] == "may"
    tight = SETTINGS | {"max_num_batched_tokens": 24, "num_kvcache_blocks": 8}
    with LLM(BUNDLED_MODEL, **tight) as small:
        runner: Any = small.llm_engine._runner
        runner.pipeline_depth = 1
        assert results(small, prompts, params) == alone
        assert small.stats()["num_preemptions"] > 0 == small.stats()["num_used_blocks"]
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=40, dtype="float32", tensor_parallel_size=2, **SETTINGS) as two:
        assert results(two, prompts, params) == alone


def test_what_ends_an_output_besides_its_grammar(llm: LLM) -> None:
    def one(**given: Any) -> CompletionOutput:
        return llm.generate(PROMPT, constrained(3, **given), use_tqdm=False)[0].outputs[0]

    stopped = one(regex="[a-d]{5}e[a-d]{5}", stop=["e"])
    assert re.fullmatch("[a-d]{5}", stopped.text) and stopped.stop_reason == "e"
    short = one(regex="[a-d]{50}", max_tokens=4)
    assert re.fullmatch("[a-d]+", short.text) and short.finish_reason == "length"
    long = one(regex="[a-d]+", min_tokens=12, temperature=0)
    assert len(long.token_ids) > 12 and re.fullmatch("[a-d]+", long.text)
    # Where nothing but the end is left, the end comes.
    assert (ended := one(regex="ab", min_tokens=12)).text == "ab" and ended.finish_reason == "stop"
    padded = one(regex="ab", ignore_eos=True, max_tokens=9)
    assert padded.text == "ab" and padded.finish_reason == "length" and len(padded.token_ids) == 9
    streamed = "".join(o.text for part in llm.stream(PROMPT, constrained(5, choice=CHOICES)) for o in part.outputs)
    assert streamed in CHOICES


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "a(("}, "unclosed group"),
        ({"grammar": "start: nothing_known"}, "unknown name"),
        ({"grammar": 'root ::= "yes" | "no"'}, r"Lark's syntax .* not in GBNF"),
        ({"json": "{nope"}, "structured_outputs cannot be used"),
        ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
        ({"json": {"type": {1, 2}}}, "not JSON serializable$"),
        ({"json": {"type": "array", "uniqueItems": True}}, "instead of uniqueItems, bound the array by maxItems"),
        ({"json": {"not": {"type": "string"}}}, "instead of not, say what is allowed"),
        ({"json": {"if": {"type": "string"}, "then": {"minLength": 3}}}, "instead of if, then and else, give anyOf"),
        ({"json": 5}, "structured_outputs cannot be used"),
        ({"regex": 5}, "structured_outputs cannot be used"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, r"minimum \(5\) is greater than maximum \(3\)"),
    ],
)
def test_bad_grammars_are_refused_before_anything_is_queued(llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([PROMPT, PROMPT], [SamplingParams(0, 3), constrained(**fields)], use_tqdm=False)
    assert llm.is_finished()
    assert results(llm, PROMPT, constrained(choice=["yes"]))[0][1] == "yes"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, not none"),
        ({"json": {}, "regex": "a"}, r"exactly one of json.*, not \['json', 'regex'\]"),
        ({"json_object": "yes"}, "json_object must be True or False, not 'yes'"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
        ({"json": {}, "disable_additional_properties": None}, "disable_additional_properties must be True or False"),
        ({"json": int}, "json is a schema or a pydantic model's class"),
        ({"choice": []}, "choice is empty"),
        ({"choice": "abc"}, "choice must be a list of strings"),
        ({"choice": ["a", 1]}, "choice must be a list of strings"),
        ({"schema": {}}, "unknown argument schema; StructuredOutputsParams takes json"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**fields)


class Person(BaseModel):
    """Something that pydantic knows."""

    name: str = Field(max_length=4)
    properties: dict[str, int] | None = None


@pytest.mark.parametrize(
    ("fields", "text", "fits"),
    [
        # Small models fill white space up to max_tokens where they may.
        ({}, '{"name": "x", "properties": null}', True),
        ({}, '{"name":"x","properties":null}', False),
        ({}, '{\n"name": "x", "properties": null}', False),
        ({"disable_any_whitespace": True}, '{"name":"x","properties":null}', True),
        ({"disable_any_whitespace": True}, '{"name": "x","properties":null}', False),
        ({"disable_any_whitespace": False}, '{\n  "name" : "x","properties":null }', True),
        ({"whitespace_pattern": " ?"}, '{ "name":"x", "properties" :null}', True),
        ({"whitespace_pattern": " ?"}, '{  "name":"x", "properties" :null}', False),
        ({}, '{"name": "x", "properties": {"a": 1}, "more": 2}', True),
        ({"disable_additional_properties": True}, '{"name": "x", "properties": {"a": 1}}', True),
        ({"disable_additional_properties": True}, '{"name": "x", "properties": {"a": 1}, "more": 2}', False),
        # A schema may ask for white space of its own.
        ({"json": {"type": "object", "x-guidance": {"whitespace_flexible": True}}}, "{\n\n}", True),
        ({"json_object": True}, "{}", True),
        ({"json_object": True}, "{\n\n}", False),
    ],
)
def test_white_space_and_other_properties(llm: LLM, fields: dict[str, Any], text: str, fits: bool) -> None:
    compile_grammar = llm.input_processor.constraints.grammars.compile
    schemas: list[Any] = [{"json": Person}, {"json": json.dumps(Person.model_json_schema())}]
    if {"json", "json_object"} & fields.keys():
        schemas = [{}]
    for schema in schemas:
        matcher = compile_grammar(StructuredOutputsParams(**schema, **fields)).compiled.deep_copy()
        token_ids = llm.tokenizer.encode(text, add_special_tokens=False)
        accepted = matcher.try_consume_tokens(token_ids)
        assert (accepted == len(token_ids) and matcher.is_accepting()) == fits


def test_equal_grammars_are_compiled_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = llm.input_processor.constraints.grammars
    matcher, compiled = grammars.library.LLMatcher, []

    def counted(*args: Any, **options: Any) -> Any:
        compiled.append(args)
        return matcher(*args, **options)

    for name in ("grammar_from_json_schema", "grammar_from_regex", "grammar_from_lark"):
        setattr(counted, name, getattr(matcher, name))
    monkeypatch.setattr(grammars.library, "LLMatcher", counted)
    monkeypatch.setattr("nanovllm.text.grammars._MAX_GRAMMARS", 2)
    grammars._grammars.clear()
    # Each output has a state of its own; parameters that are equal share a grammar though they are other objects.
    params = [constrained(i, regex="[a-d]{6}", n=3) for i in range(3)]
    outputs = [item.text for output in llm.generate([PROMPT] * 3, params, use_tqdm=False) for item in output.outputs]
    assert all(re.fullmatch("[a-d]{6}", text) for text in outputs) and len(set(outputs)) > 6
    assert len(compiled) == 1
    # The two used last are kept.
    for regex in ("[ab]", "[a-d]{6}", "[bc]", "[a-d]{6}", "[ab]"):
        llm.generate(PROMPT, constrained(1, regex=regex), use_tqdm=False)
    assert len(compiled) == 4 and len(grammars._grammars) == 2
    # A call's grammars are all compiled before its first step, and not again when it is queued.
    llm.generate([PROMPT] * 4, [constrained(1, regex=regex) for regex in "efgh"], use_tqdm=False)
    assert len(compiled) == 8


@pytest.fixture
def bounded() -> GrammarCompiler:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset({2}))
    compiler.bound(compiles_here=False)
    return compiler


def test_grammars_are_compiled_on_trial_in_a_process_that_is_replaced(bounded: GrammarCompiler) -> None:
    trials = bounded._trials
    assert trials is not None
    grammar = bounded.compile(StructuredOutputsParams(regex="[ab]{3}"))
    # The engine compiles it, in another process, and counts the same bytes.
    assert grammar.compiled is None and pickle.loads(pickle.dumps(grammar)).num_bytes == grammar.num_bytes > 0
    with pytest.raises(GrammarError, match=r"invalid regex|unclosed"):
        bounded.compile(StructuredOutputsParams(regex="("))
    process = trials.start().process
    process.kill()
    assert bounded.compile(StructuredOutputsParams(regex="[ab]{3}")) is grammar
    assert bounded.compile(StructuredOutputsParams(regex="[ab]{4}")).num_bytes > 0
    assert process.returncode == -signal.SIGKILL
    process = trials.start().process
    bounded._trials = trials = None
    assert process.returncode == -signal.SIGKILL


def test_a_grammar_of_minutes_is_tried_twice_and_never_again(
    bounded: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = StructuredOutputsParams(json={"type": "integer", "multipleOf": 4_000_037})
    tried: list[float] = []
    try_grammar = grammar_trials._TrialProcess.try_grammar

    def noted(self: Any, text: str, is_choice: bool, seconds: float) -> int | str:
        tried.append(seconds)
        return try_grammar(self, text, is_choice, seconds)

    monkeypatch.setattr(grammar_trials._TrialProcess, "try_grammar", noted)
    for _ in range(2):
        # Another request may ask for the same before the long trial ends.
        with pytest.raises(SlowGrammarError):
            bounded.compile(number)
    for _ in range(2):
        with pytest.raises(GrammarError, match="more than 2 s of CPU time or 64 MiB"):
            patiently(partial(bounded.compile, number))
    with pytest.raises(GrammarError, match="more than 2 s"):
        bounded.compile(number)
    assert tried == [QUICK_SECONDS, QUICK_SECONDS, MAX_SECONDS]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not limit memory")
def test_memory_to_compile_is_limited() -> None:
    program = """
        from nanovllm.text.grammar_trials import MAX_BYTES, _compile_within_limits

        def reserve(num_bytes):
            _compile_within_limits(lambda: bytearray(num_bytes), 9)

        reserve(MAX_BYTES // 2)
        print("half")
        reserve(2 * MAX_BYTES)
    """
    run = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, check=False)
    assert run.stdout == "half\n" and run.stderr.endswith("MemoryError\n")


def test_grammars_are_kept_up_to_a_number_of_bytes(bounded: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded._compiles_here = True
    sizes = {"a": 10, "b": 10, "c": 10, "d": 31}
    trials = SimpleNamespace(start=int, num_bytes=lambda text, *_: sizes[text.partition("/")[2][0]] * 2**20)
    monkeypatch.setattr(bounded, "_trials", trials)
    monkeypatch.setattr("nanovllm.text.grammars._MAX_GRAMMAR_BYTES", 30.5 * 2**20)
    kept = {}
    for name in "abcd":
        assert bounded.compile(StructuredOutputsParams(regex=name)).compiled is not None
        kept[name] = len(bounded._grammars)
    # One that is larger than all of it is compiled for its request alone.
    assert kept == {"a": 1, "b": 2, "c": 3, "d": 0}


def chain(count: int) -> dict[str, Any]:
    """Return a schema of references in a row."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": links | {f"d{count}": {"enum": ["ok"]}}, "$ref": "#/$defs/d0"}


def rules(count: int) -> str:
    """Return Lark rules; each begins with the next one."""
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "ok"'


# These end the process where the stack is a thread's usual 8 MiB: 3,000 of either are enough.
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"grammar": 'start: "::="'}, "::="),
        ({"json": chain(10_000)}, '"ok"'),
        ({"json": chain(200_000)}, "schema too large"),
        ({"grammar": rules(15_000)}, "ok"),
        ({"grammar": rules(100_000)}, "more than 20000 lines and brackets"),
        ({"grammar": "start: " + "(" * 30_000}, "more than 20000 lines and brackets"),
        ({"json": '{"type":"array","items":' * 100_000}, "recursion limit"),
        ({"regex": "(" * 20_000 + "a" + ")" * 10_000}, "invalid regex|unclosed"),
        ({"regex": "ab" * 20_000}, "more than 32768 characters"),
        # Too much for one step: not an empty answer that claims to be good.
        ({"regex": "a{1000000}"}, "too many expressions"),
        ({"json": {"anyOf": [{"type": "object", "required": [f"x{i}"]} for i in range(2100)]}}, "fuel|items"),
        ({"choice": [f"one of many choices, number {i}" for i in range(10_000)]}, "one of many choices, number "),
    ],
)
def test_large_grammars_are_served_or_refused(llm: LLM, fields: dict[str, Any], text: str) -> None:
    try:
        answer = results(llm, PROMPT, constrained(1, max_tokens=60, **fields))[0]
    except (ValueError, StepError) as error:
        assert re.search(text, str(error)) and len(str(error)) < 700
    else:
        assert answer[1].startswith(text) and answer[2] == "stop"


def allowed(constraint: Any, num_tokens: int) -> set[int]:
    words = np.zeros((1, (num_tokens + 31) // 32), np.int32)
    constraint.fill([(constraint, 0)], words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:num_tokens]).tolist())


@pytest.mark.parametrize("has_token", [False, True])
def test_a_grammar_binds_after_the_thoughts(has_token: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    if has_token:
        tokenizer.add_tokens(["<think>", "</think>"])
    count = len(tokenizer)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="q", after_thinking=True))
    factory = ConstraintFactory(tokenizer, count, frozenset({2}))
    assert params.structured_outputs is not None
    grammar = factory.grammars.compile(params.structured_outputs)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def begin(prompt: str) -> Any:
        constraint = factory(make_request(ids(prompt), params, grammar=grammar))
        assert isinstance(constraint, AfterThinkingConstraint)
        return constraint

    def take(constraint: Any, text: str) -> set[int]:
        for token_id in ids(text):
            constraint.accept(token_id)
        return allowed(constraint, count)

    (answer,) = ids("q")
    # The model may begin to think, if it has a token for that; once ended, thoughts do not begin again.
    begun = {*ids("<think>")} if has_token else set()
    assert allowed(begin("user"), count) == {answer} | begun
    assert allowed(begin("<think>\n\n</think>\n\n"), count) == {answer}
    assert take(begin("user"), "q") == {2}
    inside = begin("assistant <think>\n")
    assert len(allowed(inside, count)) == count == len(take(inside, "some q thoughts </thin"))
    inside = begin("assistant <think>\n")
    assert take(inside, "some q thoughts </think>") == {answer} and take(inside, "q") == {2}
    if has_token:
        own = begin("user")
        assert len(take(own, "<think>ab")) == count and take(own, "</think>") == {answer}
    # Where the tag that ends thoughts is given, they have begun.
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="q", after_thinking="</think>"))
    assert len(allowed(begin("hi"), count)) == count and take(begin("hi"), "a</think>") == {answer}
    assert allowed(begin("hi </think>"), count) == {answer}
    with pytest.raises(ValueError, match="after_thinking"):
        StructuredOutputsParams(regex="q", after_thinking="")


def test_what_it_needs(llm: LLM, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must be StructuredOutputsParams, not dict"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with LLM(checkpoint, num_kvcache_blocks=10, **SETTINGS) as other:
        with pytest.raises(ValueError, match="needs a model with a fast tokenizer"):
            other.generate([[1, 2]], constrained(regex="a"))
        monkeypatch.setitem(sys.modules, "llguidance", None)
        other.input_processor.constraints.grammars.__dict__.pop("library", None)
        with pytest.raises(ValueError, match=r"pip install 'nanovllm\[structured\]'"):
            other.generate([[1, 2]], constrained(regex="a"))


def test_a_tokenizer_may_have_more_tokens_than_its_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    vocab_size = len(tokenizer)
    tokenizer.add_tokens([f"<more {i}>" for i in range(40)])
    factory = ConstraintFactory(tokenizer, vocab_size, frozenset({2}))
    fewer = ConstraintFactory(AutoTokenizer.from_pretrained(BUNDLED_MODEL), vocab_size, frozenset({2}))
    masks = []
    for own in (factory, fewer):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]+"))
        request = make_request([5], params.checked())
        request.grammar = own.grammars.compile(StructuredOutputsParams(regex="[ab]+"))
        words = np.zeros((4, -(-vocab_size // 32)), dtype=np.int32)
        first, second = (own(request) for _ in range(2))
        assert first is not None
        first.fill([(first, 1), (second, 3)], words)
        masks.append(words)
    assert (masks[0] == masks[1]).all() and masks[0][1].any() and not masks[0][[0, 2]].any()


def test_formats_that_no_grammar_expresses_are_ignored(llm: LLM) -> None:
    schema = {"properties": {"format": {"type": "string", "format": "password", "maxLength": 2}}, **COMPACT}
    compile_grammar = llm.input_processor.constraints.grammars.compile
    with pytest.warns(UserWarning, match="a format in a JSON schema is ignored"):
        compile_grammar(StructuredOutputsParams(json=schema))
    with pytest.warns(UserWarning, match="ignored"):
        compile_grammar(StructuredOutputsParams(grammar=f"start: {lark_json(schema)}"))
    # This one is known, and binds.
    date = {"type": "string", "format": "date"}
    (output,) = llm.generate(PROMPT, constrained(1, json=date), use_tqdm=False)
    assert re.fullmatch(r'"\d{4}-\d\d-\d\d"', output.outputs[0].text)
