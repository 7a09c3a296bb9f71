"""The command line, on the bundled checkpoint: requests and answers, errors, bounded memory, flags, chat."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.cli import main, make_parsers
from nanovllm.cli.batch_files import AnsweredRequests, request_digest
from nanovllm.cli.batch_lines import RequestParser
from nanovllm.cli.chat import Conversation
from nanovllm.cli.run import BatchRun
from nanovllm.config import Config
from nanovllm.serve.openai_format import ENDPOINTS, request_params
from nanovllm.serve.settings import ServeSettings
from nanovllm.utils.flags import field_texts, flag_values
from tests.batch_lines import CHAT, ENGINE, INTRODUCTION, ROOT, RUN, TEXT, command, encode, openai

BODY = {"messages": INTRODUCTION, "temperature": 0, "max_tokens": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    sizes: dict[str, Any] = {
        "max_model_len": 256,
        "num_kvcache_blocks": 40,
        "kvcache_block_size": 16,
        "max_num_seqs": 4,
    }
    with LLM(BUNDLED_MODEL, device="cpu", seed=3, **sizes) as llm:
        yield llm


def unanswered(source: Iterable[bytes], answered: AnsweredRequests | None = None) -> Iterator[tuple[int, int, bytes]]:
    return (AnsweredRequests() if answered is None else answered).unanswered(source)


def requests_of(llm: LLM, **defaults: Any) -> RequestParser:
    """Return what makes requests of lines."""
    return RequestParser({}, defaults, llm.answer_format)


def answer(llm: LLM, lines: list[Any], answered: AnsweredRequests | None = None, **defaults: Any) -> dict[int, Any]:
    """Return the output for lines, by line number."""
    written: list[bytes] = []
    BatchRun(llm, unanswered(encode(lines), answered), requests_of(llm, **defaults), RUN, written.extend).run()
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in written)
    results = [json.loads(line) for line in written]
    assert len({result["line"] for result in results}) == len(results)
    return {result["line"]: result for result in results}


def test_lines_in_our_form(llm: LLM) -> None:
    results = answer(
        llm,
        [
            {"prompt": "Hello", "id": 7},
            b"\n",
            {"prompt": [40, 41, 42], "custom_id": "x", "max_tokens": 3, "hidden_states": [0, 6]},
            {"messages": INTRODUCTION, "max_tokens": 40, "stop": ["tiny"], "logprobs": 1, "prompt_logprobs": 0},
            {"prompt": "1 2 3", "temperature": 1.0, "seed": 5, "n": 2},
        ],
        temperature=0.0,
        max_tokens=5,
    )
    params = [SamplingParams(0, 5), SamplingParams(0, 3), SamplingParams(1.0, 5, seed=5, n=2)]
    first, ids, sampled = llm.generate(["Hello", [40, 41, 42], "1 2 3"], params, use_tqdm=False)
    (talk,) = llm.chat(INTRODUCTION, SamplingParams(0, 40, stop=["tiny"]), use_tqdm=False)
    assert sorted(results) == [1, 3, 4, 5]
    assert results[1]["id"] == 7 and results[3]["custom_id"] == "x"
    assert [len(layer) for layer in results[3]["hidden_states"]] == [3, 3]
    assert results[4]["outputs"][0]["stop_reason"] == "tiny" and len(results[4]["prompt_logprobs"]) == 19
    for number, output in zip([1, 3, 4, 5], [first, ids, talk, sampled], strict=True):
        assert results[number]["num_prompt_tokens"] == len(output.prompt_token_ids)
        for written, own in zip(results[number]["outputs"], output.outputs, strict=True):
            assert written["text"] == own.text and written["token_ids"] == own.token_ids
            assert written["finish_reason"] == own.finish_reason


def test_chat_requests_in_openais_form(llm: LLM) -> None:
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "introduce "}, {"type": "text", "text": "yourself"}]}
    ]
    body = {"temperature": 0, "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2, "top_k": None}
    primes = [{"role": "user", "content": "list all prime numbers within 100"}]
    results = answer(llm, [openai(CHAT, messages=parts, **body), openai(CHAT, messages=primes, temperature=0)])
    result = results[1]
    assert (result["id"], result["custom_id"], result["error"]) == ("batch_req_1", "c", None)
    assert result["response"]["status_code"] == 200
    answered = result["response"]["body"]
    assert answered["object"] == "chat.completion" and answered["model"] == BUNDLED_MODEL
    assert isinstance(answered["created"], int) and answered["id"] == "chatcmpl-1"
    assert answered["usage"] == {"prompt_tokens": 19, "completion_tokens": 4, "total_tokens": 23}
    (choice,) = answered["choices"]
    (expected,) = llm.chat(INTRODUCTION, SamplingParams(0, 4), use_tqdm=False)
    assert choice["message"] == {"role": "assistant", "content": expected["text"], "refusal": None}
    assert choice["finish_reason"] == "length"
    written = choice["logprobs"]["content"]
    assert [at["token"] for at in written] == [*map(llm.tokenizer.decode, expected["token_ids"])]
    assert {len(at["top_logprobs"]) for at in written} == {2}
    # The API's default is no limit; `SamplingParams` has one of 64 tokens.
    assert results[2]["response"]["body"]["choices"][0]["finish_reason"] == "stop"


def test_lines_may_have_what_the_servers_chats_have(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"enum": [1]}}}}}
    hello: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 120}
    written = '<think>no <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call></think>Yes.'
    results = answer(
        llm,
        [
            openai(CHAT, **hello, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=-7),
            openai(CHAT, **hello, tools=[tool], separate_reasoning=True, structured_outputs={"choice": [written]}),
            openai(CHAT, **hello, reasoning_effort="low", verbosity="low", documents=[], return_token_ids=True),
            openai(CHAT, **hello, truncate_prompt_tokens=3, cache_salt="s", add_special_tokens=False),
            {
                **hello,
                "tools": [tool],
                "structured_outputs": {"choice": [written.split("</think>", maxsplit=1)[0][10:]]},
            },
            openai(CHAT, **hello, tools=[tool], tool_choice={"function": {"name": "g"}}),
            openai(CHAT, **hello, truncate_prompt_tokens=0),
        ],
    )
    (called,), (thought,), (shown,) = (results[number]["response"]["body"]["choices"] for number in (1, 2, 3))
    (call,) = called["message"]["tool_calls"]
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
    assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) in ({}, {"a": 1})
    message = thought["message"]
    assert message["content"] == "Yes." and "<tool_call>" in message["reasoning"] and "tool_calls" not in message
    assert len(shown["token_ids"]) == results[3]["response"]["body"]["usage"]["completion_tokens"]
    assert results[4]["response"]["body"]["usage"]["prompt_tokens"] == 3
    (own,) = results[5]["outputs"]
    assert own["tool_calls"] == [{"name": "f", "arguments": {}}] and own["text"].startswith("<tool_call>")
    assert "none of the tools" in results[6]["error"]["message"]
    assert "truncate_prompt_tokens must be in 1 ... " in results[7]["error"]["message"]


def test_every_field_of_the_servers_chats_is_known_to_lines() -> None:
    protocol = pytest.importorskip("nanovllm.serve.protocol", exc_type=ImportError)
    for url, body in ((CHAT, protocol.ChatBody), (TEXT, protocol.CompletionBody)):
        fields = {field.alias or name for name, field in body.model_fields.items()}
        # Fields that have no value but null.
        assert fields - ENDPOINTS[url] <= {"audio", "prediction", "web_search_options", "prompt_embeds"}


def test_what_is_chosen_comes_before_the_endpoint_and_what_is_recommended_after() -> None:
    recommended = {"max_tokens": 99, "top_p": 0.5}

    def found(is_chat: bool, body: dict[str, Any], **chosen: Any) -> SamplingParams:
        return request_params(body, is_chat=is_chat, recommended=recommended, chosen=chosen)

    assert [found(is_chat, {}).max_tokens for is_chat in (True, False)] == [99, 16]
    assert [found(is_chat, {}, max_tokens=5).max_tokens for is_chat in (True, False)] == [5, 5]
    assert found(False, {"max_tokens": 7, "top_p": 0.9}, max_tokens=5) == SamplingParams(max_tokens=7, top_p=0.9)
    assert [found(False, {"seed": seed}).seed for seed in (-1, -7, 3)] == [None, 2**64 - 7, 3]


def test_completion_requests_in_openais_form(llm: LLM) -> None:
    requests = [
        openai(TEXT, prompt="1 2 3", temperature=0, ignore_eos=True),
        openai(TEXT, prompt=["1 2 3"], temperature=0, ignore_eos=True, logprobs=1),
        openai(TEXT, prompt=[[40, 41]], temperature=0, max_tokens=2, echo=False, stream=False, hidden_states=[6]),
        openai(TEXT, prompt="1 2 3", n=2, seed=1, max_tokens=3, response_format={"type": "text"}),
        # Of one token id, which is no list of one prompt.
        openai(TEXT, prompt=[40], temperature=0, max_tokens=2),
    ]
    results = answer(llm, requests)
    bodies = [results[number]["response"]["body"] for number in (1, 2, 3, 4, 5)]
    assert {body["object"] for body in bodies} == {"text_completion"}
    assert [body["usage"]["completion_tokens"] for body in bodies[:3]] == [16, 16, 2]
    assert [len(body.get("hidden_states", [[]])[0]) for body in bodies] == [0, 0, 2, 0, 0]
    assert bodies[4]["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert bodies[0]["choices"][0]["text"] == bodies[1]["choices"][0]["text"]
    # The text leaves special tokens out.
    pieces = [piece for piece in bodies[1]["choices"][0]["logprobs"]["tokens"] if piece != "<|im_end|>"]
    assert "".join(pieces) == bodies[1]["choices"][0]["text"]
    assert [choice["index"] for choice in bodies[3]["choices"]] == [0, 1]


BAD_LINES: list[tuple[Any, str]] = [
    (b"nonsense\n", "not JSON"),
    (b'"text"\n', "not a JSON object"),
    (b"[" * 100000 + b"\n", "not JSON"),
    ({"prompt": "x", "what": 3, "id": "a"}, "unknown field 'what'"),
    ({"prompt": "x", "top_p": 3}, "top_p must be"),
    ({"prompt": "x" * 2000, "custom_id": 5}, "over max_model_len"),
    ({"prompt": {"prompt": "x"}}, "a prompt is a string or a list"),
    ({"prompt": "x", "messages": INTRODUCTION}, "either a prompt or messages"),
    ({"id": "a"}, "either a prompt or messages"),
    ({"prompt": "x", "tools": []}, "need messages"),
    ({"messages": [INTRODUCTION]}, "one conversation"),
    (openai("/v1/embeddings", input="x"), "POST to /v1/chat/completions"),
    ({"url": CHAT, "method": "GET", "body": BODY}, "POST to"),
    ({"url": CHAT, "body": 3}, "body must be an object"),
    ({"url": CHAT, "body": BODY, "temperature": 0}, "unknown field 'temperature'"),
    (openai(CHAT, prompt="x"), "unknown field 'prompt'"),
    (openai(CHAT), "body needs messages"),
    (openai(CHAT, **BODY, stream=True), "stream=True is not supported"),
    (openai(CHAT, **BODY, response_format={"type": "xml"}), "response_format is"),
    (openai(TEXT, prompt=["a", "b"]), "a prompt"),
]


def test_bad_lines_become_errors_and_the_run_goes_on(llm: LLM) -> None:
    lines = [line for pair in BAD_LINES for line in (pair[0], {"prompt": "x", "max_tokens": 1})]
    results = answer(llm, lines)
    assert sorted(results) == list(range(1, len(lines) + 1))
    for number, (line, part) in enumerate(BAD_LINES):
        error = results[2 * number + 1]["error"]
        assert error["code"] == "invalid_request" and part in error["message"], error
        assert results[2 * number + 1]["response"] is None
        for name in ("id", "custom_id"):
            assert isinstance(line, bytes) or results[2 * number + 1].get(name) == line.get(name)
        assert len(results[2 * number + 2]["outputs"][0]["token_ids"]) == 1


def test_an_answer_that_cannot_be_written_is_an_error() -> None:
    # A token that alone may come, and may not, has a log-probability of NaN, which JSON lacks.
    settings: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 8, "logprobs_mode": "processed_logprobs"}
    with LLM(BUNDLED_MODEL, **settings) as llm:
        contradiction = {"allowed_token_ids": llm.tokenizer.encode("h"), "bad_words": ["h"]}
        results = answer(llm, [{"prompt": "x", "logprobs": 1, **contradiction}, {"prompt": "x"}], max_tokens=3)
    assert "cannot be written: Out of range float" in results[1]["error"]["message"]
    assert len(results[2]["outputs"]) == 1


def test_a_failed_step_fails_its_lines_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.llm_engine.require_open()
    forward, steps = runner.forward, iter([False, True])

    def fail_once(*arguments: Any) -> Any:
        if next(steps, False):
            raise RuntimeError("a fault")
        return forward(*arguments)

    monkeypatch.setattr(runner, "forward", fail_once)
    results = answer(llm, [{"prompt": "x", "max_tokens": 8, "ignore_eos": True, "id": i} for i in range(12)])
    failed = [result for result in results.values() if "outputs" not in result]
    assert len(results) == 12 and 1 <= len(failed) <= 4
    assert all(result["error"]["code"] == "server_error" and "a fault" in str(result["error"]) for result in failed)
    assert llm.is_finished()


def test_a_lost_device_writes_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(BUNDLED_MODEL, device="cpu", max_model_len=64, num_kvcache_blocks=4) as llm:
        written: list[bytes] = []
        runner = llm.llm_engine.require_open()

        def fail(*arguments: Any) -> None:
            raise RuntimeError("lost")

        for name in ("forward", "synchronize"):
            monkeypatch.setattr(runner, name, fail)
        lines = unanswered(encode([{"prompt": "x"}]))
        with pytest.raises(RuntimeError, match="closed"):
            BatchRun(llm, lines, requests_of(llm), RUN, written.extend).run()
        assert not written


def test_sampled_answers_follow_from_the_engines_seed_and_the_line(llm: LLM) -> None:
    lines = [{"prompt": "x", "max_tokens": 12, "ignore_eos": True}] * 6
    answered = AnsweredRequests()
    for number in (1, 2, 4):
        answered.add(number, request_digest(encode(lines)[0]))
    whole, rest = answer(llm, lines), answer(llm, lines, answered)
    assert sorted(rest) == [3, 5, 6] and all(rest[number] == whole[number] for number in rest)
    assert len({str(result["outputs"]) for result in whole.values()}) > 1


def test_few_lines_are_held_and_the_batch_stays_full(llm: LLM) -> None:
    num_read, most_held, written = 0, 0, list[bytes]()
    lengths = [1, 12] * 20

    def lines() -> Iterator[bytes]:
        nonlocal num_read, most_held
        for length in lengths:
            num_read += 1
            most_held = max(most_held, num_read - len(written))
            yield encode([{"prompt": "x", "max_tokens": length, "ignore_eos": True}])[0]

    steps = llm.stats()["num_steps"]
    BatchRun(llm, unanswered(lines()), requests_of(llm), RUN, written.extend, chunk_size=1).run()
    assert len(written) == num_read == len(lengths)
    # Four run, four wait in the engine, two are prepared, one waits for room, and one is in the reader's hand.
    assert 8 <= most_held <= 4 + 4 + 4 + 2
    # If blocks drained, it would take at least half more steps.
    assert llm.stats()["num_steps"] - steps <= sum(lengths) // 4 + 32


def test_a_slow_input_does_not_hold_up_answers(llm: LLM) -> None:
    written: list[bytes] = []

    def lines() -> Iterator[bytes]:
        yield encode([{"prompt": "x", "max_tokens": 2}])[0]
        while not written:
            time.sleep(0.01)
        yield encode([{"prompt": "y", "max_tokens": 2}])[0]

    BatchRun(llm, unanswered(lines()), requests_of(llm), RUN, written.extend).run()
    assert len(written) == 2


LISTS = "allowed_hosts allowed_origins api_key bad_words served_model_name stop"
CHOICES = {
    "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "dtype": "float16", "device": "cpu",
    "attention_backend": "sdpa", "load_format": "dummy", "model_impl": "transformers", "quantization": "fp8",
    "logprobs_mode": "processed_logprobs", "kv_cache_dtype": "fp8",
}  # fmt: skip
TEXTS = "revision model host uds weights_root root_path ssl_keyfile ssl_certfile ssl_ca_certs tokenizer"
VALUES: dict[str, tuple[list[str], Any]] = {
    **{name: (["a", "b c"], ["a", "b c"]) for name in LISTS.split()},
    **{name: (["3", "4"], [3, 4]) for name in ("stop_token_ids", "allowed_token_ids", "hidden_states")},
    **{name: ([text], text) for name, text in CHOICES.items()},
    **{name: (["/x"], "/x") for name in TEXTS.split()},
    "chat_template": (["{{ x }}"], "{{ x }}"),
    "logit_bias": (['{"5": -1.5}'], {"5": -1.5}),
    "structured_outputs": (['{"regex": "a+"}'], StructuredOutputsParams(regex="a+")),
    "max_tokens": (["none"], None),
    "gpu_memory_utilization": (["0.5"], 0.5),
    "top_p": (["0.5"], 0.5),
    "default_chat_template_kwargs": (['{"enable_thinking": false}'], {"enable_thinking": False}),
    "speculative_config": ([json.dumps(NGRAM)], NGRAM),
}


REQUIRED: dict[str, list[str]] = {"generate": ["x"], "run": ["-i", "x", "-o", "y"], "chat": [], "serve": []}
SAMPLING = ["generate", "run", "chat"]


@pytest.mark.parametrize(
    ("cls", "commands"), [(Config, REQUIRED), (SamplingParams, SAMPLING), (ServeSettings, ["serve"])]
)
def test_every_field_is_a_flag(cls: Any, commands: list[str]) -> None:
    given, expected = list[str](), dict[str, Any]()
    for item in fields(cls):
        flag = "sampling-seed" if cls is SamplingParams and item.name == "seed" else item.name.replace("_", "-")
        if isinstance(item.default, bool):
            given.append(f"--no-{flag}" if item.default else f"--{flag}")
            expected[item.name] = not item.default
            continue
        texts, value = VALUES.get(item.name, (["32"], 32))
        if item.name.endswith("penalty") or item.name in ("min_p", "temperature"):
            texts, value = ["0.25"], 0.25
        given += [part for text in texts for part in (f"--{flag}", text)]
        expected[item.name] = value
        assert value != item.default
    for name in commands:
        parser, required = make_parsers()[0][name], REQUIRED[name]
        assert flag_values(parser.parse_args([*given, *required]), cls) == expected
        # Only the model has a default of the command's.
        bare = flag_values(parser.parse_args(required), cls)
        assert bare == ({"model": BUNDLED_MODEL} if cls is Config else {})
        named = flag_values(parser.parse_args(["some/model", *required]), cls)
        assert named == ({"model": "some/model"} if cls is Config else {})
    assert set(field_texts(cls)) == {item.name for item in fields(cls)}
    # These contradict others.
    unchecked = "detokenize", "min_tokens", "n", "swap_space"
    checked = {name: value for name, value in expected.items() if name not in unchecked}
    assert cls(**checked)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["chat", "one/model", "--model", "another"], "not allowed with argument MODEL"),
        (["generate", *ENGINE, "--n", "2", "x"], "n must be 1"),
        (["generate", *ENGINE, ""], "empty"),
        (["generate", *ENGINE, "some/model"], "the prompt is missing: nanovllm generate MODEL PROMPT"),
        (["generate", "/nowhere", *ENGINE, "x"], "/nowhere"),
        (["walk"], "walk"),
        (["run", "-i", "x"], "-o"),
        (["chat", "--temp", "1"], "nanovllm chat: error: unrecognized arguments: --temp"),
        (["chat", "--max-tokens", "0"], "max_tokens must be"),
        (["chat", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["chat", "--logit-bias", "[1]"], "--logit-bias"),
        (["chat", "--structured-outputs", '{"what": 1}'], "unknown argument what"),
        (["serve", "--speculative-config", "ngram"], "--speculative-config: not JSON: ngram: "),
        (
            ["bench", "--speculative-config", '{"method": "x"}'],
            "method of speculative_config must be one of ngram, eagle3, mtp, not 'x'",
        ),
        (["chat", "--model", "/nowhere"], "/nowhere"),
        (["chat", *ENGINE, "--stop-token-ids", "99999"], "outside the vocabulary"),
        (["run", "-i", "/nowhere", "-o", "-"], "/nowhere"),
        (["run", "-i", "/dev/null", "-o", "/nowhere/x"], "/nowhere/x"),
        (["run", "-i", "/dev/null", "-o", "-", *ENGINE, "--logit-bias", '{"99999": 1}'], "outside the vocabulary"),
        (["bench", "--workload", "what"], "--workload"),
    ],
)
def test_a_bad_value_ends_with_code_2_and_one_line(
    arguments: list[str], part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    output, errors = capfd.readouterr()
    assert exit_info.value.code == 2
    assert not output and part in errors and errors.count("\n") == 1 and errors.startswith("nanovllm")


def test_a_used_port_is_found_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.setattr("nanovllm.serve.main._load", Mock(side_effect=AssertionError))
    with socket.create_server(("127.0.0.1", 0)) as used, pytest.raises(SystemExit) as exit_info:
        main(["serve", "--port", str(used.getsockname()[1])])
    output, errors = capfd.readouterr()
    assert exit_info.value.code == 2 and not output
    assert errors.startswith("nanovllm serve: error: ") and "address already in use" in errors
    assert errors.count("\n") == 1


def test_nobody_reads_the_output() -> None:
    process = command("run", "-i", "-", "-o", "-", *ENGINE, stdin=-1, stdout=-1, stderr=-1)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(b"bad\n", timeout=240)
    assert process.returncode == 1 and errors.splitlines()[-1].startswith(b"nanovllm run: error: [Errno")


def test_what_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n    {name} " in listed for name in (*REQUIRED, "bench", "eval"))
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0 and capsys.readouterr().out == f"nanovllm {nanovllm.__version__}\n"


def test_the_shell_completes_flags_of_commands(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    line = "nanovllm serve --po"
    # What argcomplete's shell function sets.
    shell = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"), "_ARGCOMPLETE_IFS": "\n"}
    shell |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SHELL": "bash"}
    subprocess.run([sys.executable, "-m", "nanovllm"], env=os.environ | shell, check=False, timeout=240)
    assert set((tmp_path / "out").read_text().splitlines()) == {"--port "}


@pytest.mark.parametrize(("name", "module"), [("bench", "cli.bench"), ("chat", "cli.chat")])
def test_ctrl_c_ends_a_command_with_one_line(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"nanovllm.{module}.LLM", Mock(side_effect=KeyboardInterrupt))
    assert main([name]) == 130
    assert capsys.readouterr().err == f"nanovllm {name}: interrupted\n"


def test_a_conversation_has_a_history(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(llm, SamplingParams(0, 40), "be short")
    conversation.answer("introduce yourself")
    printed = capsys.readouterr().out
    history = [{"role": "system", "content": "be short"}, *INTRODUCTION]
    (expected,) = llm.chat(history, SamplingParams(0, 40), use_tqdm=False)
    assert printed == expected["text"] + "\n"
    assert conversation.messages == [*history, {"role": "assistant", "content": expected["text"]}]
    asked = [*conversation.messages, {"role": "user", "content": "1 + 1"}]
    (expected,) = llm.chat(asked, SamplingParams(0, 40), use_tqdm=False)
    conversation.answer("1 + 1")
    assert capsys.readouterr().out == expected["text"] + "\n" and len(conversation.messages) == 5
    with pytest.raises(ValueError, match="over max_model_len"):
        conversation.answer("x" * 1000)
    assert len(conversation.messages) == 5 and llm.is_finished()
    conversation.clear()
    assert conversation.messages == history[:1]


class Terminal:
    """A command that runs in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = os.openpty()
        # One that is made has no columns, and a bar no room.
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))
        self.process = command(*arguments, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.file = open(ours, "r+b", buffering=0)  # noqa: SIM115 (the test closes it)

    def read_until(self, end: str) -> str:
        """Return what is shown until the end of it is `end`."""
        shown = b""
        while not shown.endswith(end.encode()):
            shown += self.file.read(4096)
        return shown.decode()

    def type(self, line: str, end: str) -> str:
        """Type a line, and return what is shown until the end of it is `end`."""
        self.file.write(line.encode() + b"\n")
        return self.read_until(end)


def test_a_chat_on_a_terminal() -> None:
    terminal = Terminal("chat", *ENGINE)
    shown = terminal.read_until("/quit ends.\r\n> ")
    assert "Starting nanovllm" in shown and "Loading weights" in shown
    assert f"nanovllm {nanovllm.__version__}: qwen3-tiny, 4.85M parameters, float32 on the CPU" in shown
    assert "4.85M toy" in shown and "--model Qwen/Qwen3-0.6B" in shown
    assert "/clear " in terminal.type("/help", "stop an answer\r\n> ")
    assert "/what is no command" in terminal.type("/what", "lists them\r\n> ")
    terminal.file.write(b"/quit\n")
    assert terminal.process.wait(240) == 0
    terminal.file.close()


def test_a_run_on_a_terminal_shows_how_many_lines_are_left(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"".join(encode([{"prompt": "x", "max_tokens": 9}, b"\n", b"bad\n", *[{"prompt": "y"}] * 3])))
    assert main(["run", *ENGINE, "--max-tokens", "9", "-i", str(source), "-o", str(output)]) == 1
    answers = [line for line in output.read_bytes().splitlines(keepends=True) if line.startswith(b'{"line": 4,')]
    output.write_bytes(b"".join(answers))
    terminal = Terminal("run", *ENGINE, "--max-tokens", "9", "-i", str(source), "-o", str(output))
    shown = terminal.read_until("which " + str(output) + " has\r\n")
    # Of six lines one is blank, and one has an answer.
    assert "4/4" in shown and "tok/s" in shown and "00:00<" in shown
    assert terminal.process.wait(240) == 1
    terminal.file.close()


def test_a_prompt_from_the_command_line_or_the_standard_input(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(0, 8, ignore_eos=True)
    (completed,) = llm.generate(["1 + 1"], params, use_tqdm=False)
    (answered,) = llm.chat([{"role": "user", "content": "1 + 1"}], params, use_tqdm=False)
    arguments = [*ENGINE, "--max-tokens", "8", "--temperature", "0", "--ignore-eos"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("1 + 1\n"))
    for given, expected in (
        (["1 + 1", *arguments], answered),
        ([BUNDLED_MODEL, *arguments, "1 + 1"], answered),
        ([BUNDLED_MODEL, "-", *arguments], answered),
        ([*arguments, "1 + 1", "--raw"], completed),
    ):
        assert main(["generate", *given]) == 0
        assert capsys.readouterr().out == expected["text"] + "\n"


def test_a_model_without_a_chat_template_completes(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(BUNDLED_MODEL, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (completed,) = llm.generate(["My name is"], SamplingParams(0, 8), use_tqdm=False)
    assert main(["generate", str(folder), *ENGINE, "--max-tokens", "8", "--temperature", "0", "My name is"]) == 0
    assert capsys.readouterr().out == completed["text"] + "\n"


@pytest.mark.parametrize("recommended", [{"max_new_tokens": 8}, {}])
def test_commands_take_what_the_model_recommends(
    recommended: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in Path(BUNDLED_MODEL).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, **recommended}))
    (tmp_path / "in.jsonl").write_bytes(
        b'{"messages": [{"role": "user", "content": "x"}]}\n' + encode([{"prompt": "x"}])[0]
    )
    arguments = [str(tmp_path), *ENGINE, "--max-model-len", "40", "--ignore-eos"]
    with LLM(tmp_path, device="cpu", max_model_len=40, num_kvcache_blocks=40, kvcache_block_size=16) as llm:
        params = SamplingParams(0, recommended.get("max_new_tokens"), ignore_eos=True)
        (completed,) = llm.generate(["x"], params, use_tqdm=False)
        (answered,) = llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)
    assert main(["generate", *arguments, "x"]) == 0
    assert capsys.readouterr().out == answered["text"] + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    assert main(["chat", *arguments]) == 0
    assert capsys.readouterr().out == answered["text"] + "\n"
    assert main(["run", *arguments, "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 0
    results = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    texts = {result["line"]: result["outputs"][0]["text"] for result in results}
    assert texts == {1: answered["text"], 2: completed["text"]}


def test_a_chat_through_pipes() -> None:
    arguments = [*ENGINE, "--max-model-len", "2048", "--num-kvcache-blocks", "130", "--ignore-eos"]
    process = command("chat", *arguments, stdin=-1, stdout=-1, stderr=-1)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"introduce yourself\n")
    process.stdin.flush()
    # It streams; the answer would have 2000 tokens.
    begun = process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/clear\n\n" + b"x" * 5000 + b"\n/exit\nintroduce yourself\n")
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0
    assert begun == b"Hello! I am"[:10] and output.count(b"\n") == 1 and len(output) < 4000
    assert b"over max_model_len" in errors and b"Traceback" not in errors


def test_help_without_docstrings() -> None:
    program = [sys.executable, "-OO", "-m", "nanovllm", "serve", "--help"]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0 and not result.stderr and result.stdout.startswith("usage: nanovllm")


def test_an_extra_that_is_missing_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "nanovllm.integrations.lm_eval", raising=False)
    assert main(["eval", "--tasks", "x"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanovllm eval: error: ") and "pip install 'nanovllm[eval]'" in line


def test_convert_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.gguf").write_text("no GGUF")
    for file, part in (("text.gguf", "is no GGUF file"), ("absent.gguf", "No such file")):
        with patch("nanovllm.utils.gguf.find_spec"), pytest.raises(SystemExit):
            main(["convert", str(tmp_path / file), str(tmp_path / "out")])
        assert part in capsys.readouterr().err
    with patch("nanovllm.utils.gguf.find_spec", return_value=None), pytest.raises(SystemExit):
        main(["convert", "any.gguf", "out"])
    assert "pip install 'nanovllm[gguf]'" in capsys.readouterr().err
