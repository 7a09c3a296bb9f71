"""The server as OpenAI's own package sees it, on a real port; `test_serve_errors.py` has what is refused."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any, Literal

import pytest
from transformers import AutoTokenizer

from nanovllm.assets import BUNDLED_MODEL
from tests.server_process import PATIENCE_SECONDS, ServerProcess, serving

openai = pytest.importorskip("openai")
pytest.importorskip("pydantic")

from pydantic import BaseModel  # noqa: E402

MODEL = "qwen3-tiny"
KEY = "a secret"
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
HELLO: Any = [{"role": "user", "content": "introduce yourself"}]
INTRODUCTION = (
    "Hello! I am Nano, a tiny language model that ships with nanovllm. I can count, list primes, add and sort numbers."
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    limits = ("--max-outputs", "8", "--max-output-tokens", "400", "--max-logprobs", "100")
    with serving(*limits, "--allow-priority", "--log-requests", key=KEY, NANOVLLM_API_KEY=KEY) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client
    server.check_idle()


def ids(text: str) -> list[int]:
    token_ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return token_ids


def test_a_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    (choice,) = whole.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (INTRODUCTION, "assistant", "stop")
    assert whole.usage.completion_tokens == len(ids(INTRODUCTION)) + 1 and whole.usage.prompt_tokens == 19
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(
        model=MODEL, messages=HELLO, temperature=0, stream=True, stream_options=options
    ))  # fmt: skip
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(text or "" for text in texts) == INTRODUCTION and len([text for text in texts if text]) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_sampling_fields_in_the_forms_of_clients(client: Any) -> None:
    """`test_serve_service.py` has the others."""

    def tokens(**fields: Any) -> list[list[str]]:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, logprobs=True, **{"max_tokens": 6, "temperature": 0, **fields}
        )
        return [[at.token for at in choice.logprobs.content] for choice in answer.choices]

    first = tokens()[0]
    assert first[:3] == ["Hello", "! ", "I"]
    assert tokens(max_completion_tokens=2, max_tokens=None) == [first[:2]]
    assert tokens(stop=["!"]) == [first[:2]] == tokens(stop="!")
    assert tokens(logit_bias={ids("Hello")[0]: -100})[0][0] != "Hello"
    # The API's seeds are signed.
    assert tokens(temperature=3, seed=-5) == tokens(temperature=3, seed=2**64 - 5)
    sampled = tokens(temperature=3, n=3, seed=5, extra_body={"min_p": 0.0, "top_k": -1}, top_p=1.0)
    assert len({*map(tuple, sampled)}) == 3 and sampled == tokens(temperature=3, n=3, seed=5)
    assert tokens(user="me", store=False, metadata={"a": "b"}, extra_body={"priority": -5}) == [first]


def test_logprobs_of_a_chat(client: Any) -> None:
    fields = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(top_logprobs=3, **fields).choices[0].logprobs.content
    streamed = client.chat.completions.create(top_logprobs=3, stream=True, **fields)
    parts = [at for chunk in streamed if chunk.choices[0].logprobs for at in chunk.choices[0].logprobs.content]
    assert len(whole) == len(parts) == 5
    for at, part in zip(whole, parts, strict=True):
        assert len(at.top_logprobs) == 3 and at.top_logprobs[0].token == at.token == part.token
        assert bytes(at.bytes).decode() == at.token and at.logprob == pytest.approx(part.logprob, abs=1e-4)
    assert not client.chat.completions.create(**fields).choices[0].logprobs.content[0].top_logprobs
    # A token that is none of the most likely ones is not shown among them.
    (rare,) = ids("z")
    (at,) = (
        client.chat.completions.create(**fields | {"logit_bias": {str(rare): 100}, "max_tokens": 1}, top_logprobs=2)
        .choices[0]
        .logprobs.content
    )
    assert at.token == "z" and at.logprob < whole[0].top_logprobs[2].logprob
    assert [top.token for top in at.top_logprobs] == [top.token for top in whole[0].top_logprobs[:2]]


class Person(BaseModel):
    """The content of a structured answer."""

    name: Literal["Ann", "Bob"]
    is_tall: bool


def test_structured_answers(client: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 60}
    parsed = client.chat.completions.parse(response_format=Person, **fields).choices[0].message.parsed
    assert isinstance(parsed, Person)
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **{**fields, "max_tokens": 300})
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    for structured, texts in (({"choice": ["left", "right"]}, {"left", "right"}), ({"regex": "a{3}b"}, {"aaab"})):
        extra = {"structured_outputs": structured}
        assert client.chat.completions.create(extra_body=extra, **fields).choices[0].message.content in texts


def test_completions(client: Any) -> None:
    create = client.completions.create
    whole = create(model=MODEL, prompt="The sea", temperature=0, max_tokens=8, logprobs=2, n=1)
    text = whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    # The EOS is a token and has no text.
    assert "".join(logprobs.tokens).removesuffix("<|im_end|>") == text and logprobs.text_offset[0] == 0
    shown = (token.removesuffix("<|im_end|>") for token in logprobs.tokens)
    assert all(text[offset:].startswith(token) for offset, token in zip(logprobs.text_offset, shown, strict=True))
    assert all(2 <= len(at) <= 3 for at in logprobs.top_logprobs)
    # Several prompts, as texts and as token ids.
    texts = ["The sea", "a", "b"]
    for prompts in (texts, [ids(text) for text in texts]):
        many = create(model=MODEL, prompt=prompts, temperature=0, max_tokens=8)
        assert [choice.index for choice in many.choices] == [0, 1, 2] and many.choices[0].text == text
        stream = list(create(model=MODEL, prompt=prompts, temperature=0, max_tokens=8, stream=True))
        for choice in many.choices:
            parts = [chunk.choices[0] for chunk in stream if chunk.choices[0].index == choice.index]
            assert (
                "".join(part.text for part in parts) == choice.text and parts[-1].finish_reason == choice.finish_reason
            )
    assert create(model=MODEL, prompt=ids("The sea"), temperature=0, max_tokens=8).choices[0].text == text
    assert create(model=MODEL, prompt="a").usage.completion_tokens <= 16


def test_echo(client: Any) -> None:
    create = client.completions.create
    text = create(model=MODEL, prompt="The sea", temperature=0, max_tokens=5).choices[0].text
    for prompt in ("The sea", ids("The sea")):
        assert (
            create(model=MODEL, prompt=prompt, temperature=0, max_tokens=5, echo=True).choices[0].text
            == "The sea" + text
        )
        chunks = create(model=MODEL, prompt=prompt, temperature=0, max_tokens=5, echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "The sea" + text
    # A harness scores texts this way.
    scored = create(model=MODEL, prompt="The sea", max_tokens=0, echo=True, logprobs=1)
    (choice,) = scored.choices
    assert choice.text == "The sea" and scored.usage.completion_tokens == 0
    assert "".join(choice.logprobs.tokens) == "The sea" and choice.logprobs.token_logprobs[0] is None
    extra = {"ignore_eos": True}
    fields = {"prompt": "The sea", "temperature": 0, "max_tokens": 5, "echo": True, "logprobs": 1, "extra_body": extra}
    answered = create(model=MODEL, **fields).choices[0].logprobs
    assert answered.tokens[:-5] == choice.logprobs.tokens and None not in answered.token_logprobs[1:]
    for n, best_of in ((1, 1), (2, 2)):
        assert len(create(model=MODEL, prompt="a", temperature=2, n=n, best_of=best_of).choices) == n


# Characters of two to four bytes; each byte is a token.
WRITTEN = "ab é字🙂 STOP xyz"


def test_bytes_and_offsets_are_those_of_the_text(client: Any) -> None:
    extra = {"structured_outputs": {"choice": [WRITTEN]}}
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": extra}
    chat = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=1, **fields).choices[0]
    parts = [bytes(at.bytes) for at in chat.logprobs.content]
    assert b"".join(parts).decode().removesuffix("<|im_end|>") == WRITTEN == chat.message.content
    fields |= {"prompt": "字 a", "logprobs": 0}
    for stop, echo in ((None, False), ("STOP", False), ("STOP", True)):
        choice = client.completions.create(stop=stop, echo=echo, **fields).choices[0]
        assert choice.text == "字 a" * echo + (WRITTEN[: WRITTEN.index("STOP")] if stop else WRITTEN)
        offsets, tokens = choice.logprobs.text_offset, choice.logprobs.tokens
        assert offsets[0] == 0 and offsets == sorted(offsets)
        for at, token in zip(offsets, tokens, strict=True):
            # Tokens after a stop string have no text.
            if "\ufffd" not in token and at + len(token) <= len(choice.text):
                assert choice.text[at:].startswith(token)
        # The bytes of a character are all at its place.
        assert offsets.count(choice.text.index("字")) == 3
        if not echo:
            chunks = [
                c.choices[0] for c in client.completions.create(stop=stop, stream=True, n=2, temperature=1, **fields)
            ]
            streamed: list[list[int]] = [[], []]
            for chunk in chunks:
                streamed[chunk.index] += chunk.logprobs.text_offset if chunk.logprobs else []
            assert streamed == [offsets] * 2 and len(chunks) > 6


def test_token_ids_and_prompts_in_answers(client: Any) -> None:
    extra: dict[str, Any] = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 5}
    whole = client.chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=1, extra_body=extra | {"prompt_logprobs": 2}, **fields
    )
    (choice,) = whole.choices
    tokens = [at.token for at in choice.logprobs.content]
    assert TOKENIZER.decode(choice.token_ids) == choice.message.content and len(choice.token_ids) == 5
    assert tokens == [f"token_id:{i}" for i in choice.token_ids] == [
        at.top_logprobs[0].token for at in choice.logprobs.content
    ]  # fmt: skip
    assert bytes(choice.logprobs.content[0].bytes).decode() == "Hello" and choice.message.refusal is None
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens == len(whole.prompt_logprobs)
    first, *others = zip(whole.prompt_logprobs, whole.prompt_token_ids, strict=True)
    assert first[0] is None and all(str(i) in at and 2 <= len(at) <= 3 for at, i in others)
    chunks = list(client.chat.completions.create(messages=HELLO, stream=True, extra_body=extra, **fields))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    streamed = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", None) or []]
    assert streamed == choice.token_ids
    create = client.completions.create
    text = create(prompt="The sea", logprobs=1, extra_body=extra | {"prompt_logprobs": 0}, **fields)
    assert text.choices[0].prompt_token_ids == ids("The sea") and len(text.choices[0].token_ids) == 5
    assert text.choices[0].logprobs.tokens == [f"token_id:{i}" for i in text.choices[0].token_ids]
    assert len(text.choices[0].prompt_logprobs) == len(ids("The sea"))
    assert text.system_fingerprint == whole.system_fingerprint == chunks[1].system_fingerprint != None  # noqa: E711
    # Trainers ask for a hundred.
    many = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=100, **fields)
    assert {len(at.top_logprobs) for at in many.choices[0].logprobs.content} == {100}


def test_what_is_made_of_a_prompt(client: Any) -> None:
    create = client.completions.create
    fields: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    # Longer than the model takes, and by its characters than it can take.
    for text in ("The sea " * 1000, "The sea " * 100_000):
        cut = create(prompt=text, extra_body={"truncate_prompt_tokens": 3}, echo=True, **fields)
        assert cut.usage.prompt_tokens == 3 and cut.choices[0].text.startswith(TOKENIZER.decode(ids(text)[-3:]))
        most = create(prompt=text, extra_body={"truncate_prompt_tokens": -1}, **fields)
        assert (most.usage.prompt_tokens, most.usage.completion_tokens) == (508, 4)
    chat = client.chat.completions.create(messages=LONG, extra_body={"truncate_prompt_tokens": 20}, **fields)
    assert chat.usage.prompt_tokens == 20
    prompt = [*ids("The sea is wide and deep")] * 3
    cached = []
    for salt in (None, "a", "b", "a", None):
        answer = create(prompt=prompt, extra_body={"cache_salt": salt}, **fields)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[:3] == [0, 0, 0] and cached[3] == cached[4] > 0
    turns = [*HELLO, {"role": "assistant", "content": "Hello! I"}]
    extra = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    told = client.chat.completions.create(messages=turns, extra_body=extra, **fields).choices[0].message.content
    chunks = list(client.chat.completions.create(messages=turns, extra_body=extra, stream=True, **fields))
    assert INTRODUCTION.startswith(told) and len(told) > len("Hello! I")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == told


def test_usage_of_streams(client: Any) -> None:
    def usages(**options: Any) -> list[Any]:
        with client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=HELLO, max_tokens=6, temperature=0, stream=True, stream_options=options
        ) as answer:
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
        return [json.loads(line).get("usage", "none") for line in lines]

    assert set(usages()) == {"none"}
    *before, last = usages(include_usage=True)
    assert set(before) == {None} and last["completion_tokens"] == 6
    counts = [item["completion_tokens"] for item in usages(include_usage=True, continuous_usage_stats=True)]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 2


def test_responses(client: Any) -> None:
    whole = client.responses.create(model=MODEL, input="introduce yourself", temperature=0)
    assert whole.output_text == INTRODUCTION and whole.status == "completed" and whole.usage.output_tokens > 20
    items = [{"role": "user", "content": [{"type": "input_text", "text": "introduce yourself"}]}]
    with client.responses.stream(model=MODEL, input=items, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == INTRODUCTION
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ] and kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    short = client.responses.create(
        model=MODEL, input="introduce yourself", max_output_tokens=3, instructions="Be short."
    )
    assert short.status == "incomplete" and short.incomplete_details.reason == "max_output_tokens"
    form = {"format": {"type": "json_schema", "name": "p", "schema": {"type": "string", "enum": ["yes"]}}}
    assert client.responses.create(model=MODEL, input="x", text=form).output_text == '"yes"'


def test_reasoning_is_split_off(client: Any) -> None:
    extra = {"separate_reasoning": True, "structured_outputs": {"regex": "<think>\nab\n</think>\n\ncd"}}
    message = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra).choices[0].message
    assert (message.reasoning_content, message.reasoning, message.content) == ("ab", "ab", "cd")
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, extra_body=extra)
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "ab"
    assert "".join(delta.content or "" for delta in deltas) == "cd"
    extra = {"structured_outputs": extra["structured_outputs"]}
    message = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra).choices[0].message
    assert message.content == "<think>\nab\n</think>\n\ncd"


TOOL: dict[str, Any] = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_tool_calls_of_chats(client: Any, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}] * (choice is NAMED)
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tool_choice": choice, "parallel_tool_calls": False}
    fields["tools"] = [*tools, {"type": "function", "function": TOOL}]
    answer = client.chat.completions.create(**fields).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and answer.message.content is None and call.type == "function"
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **fields)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    # Clients add up pieces of a call from chunk to chunk, but not those within one.
    assert all(len(chunk.delta.tool_calls or []) <= 1 for chunk in chunks)
    # The name comes first, and then the arguments as they are written.
    assert calls[0].id and calls[0].function.name == "weather" and calls[0].function.arguments == ""
    assert len(calls) > 3 and all(call.index == 0 and call.id is call.function.name is None for call in calls[1:])
    assert json.loads("".join(call.function.arguments for call in calls))["city"] in ("Paris", "Rome")
    assert chunks[-1].finish_reason == "tool_calls" and not any(chunk.delta.content for chunk in chunks)


def test_after_a_call_and_instead_of_an_answer(client: Any) -> None:
    called = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns: Any = [{"role": "assistant", "content": None, "tool_calls": [called]}]
    turns = [*HELLO, *turns, {"role": "tool", "tool_call_id": "1", "content": "sunny"}]
    fields: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", "function": TOOL}]}
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(messages=turns, tool_choice=choice, max_tokens=2, **fields)
        assert answer.choices[0].finish_reason == "length"
    # An answer of a given form, or a call instead.
    fields |= {"messages": HELLO, "max_tokens": 100, "temperature": 1, "n": 8, "seed": 1}
    for item in client.chat.completions.create(response_format=RESPONSE_FORMAT, **fields).choices:
        assert json.loads(item.message.content) == "yes" if item.finish_reason == "stop" else item.message.tool_calls


RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"enum": ["yes"]}}}


def test_a_model_may_call(client: Any) -> None:
    written = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": [{"type": "function", "function": TOOL}]}
    # What a larger model would write by itself.
    fields["extra_body"] = {"structured_outputs": {"choice": [written]}}
    answer = client.chat.completions.create(**fields).choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.message.content, call.function.arguments) == ("Well.", '{"city": "Rome"}')
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.content == "Well."
    assert streamed.message.tool_calls[0].function.arguments == '{"city": "Rome"}'
    plain = client.chat.completions.create(**fields, tool_choice="none").choices[0]
    assert plain.message.content == written and not plain.message.tool_calls and plain.finish_reason == "stop"


def test_tool_calls_of_responses(client: Any) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": HELLO, "tools": [{"type": "function", "strict": None, **TOOL}]}
    named = {"type": "function", "name": "weather"}
    (call,) = client.responses.create(**fields, tool_choice=named).output
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    with client.responses.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
        events = list(stream)
        assert stream.get_final_response().output[0].type == "function_call"
    kinds = [event.type.removeprefix("response.") for event in events]
    delta = "function_call_arguments.delta"
    assert kinds[:4] == ["created", "in_progress", "output_item.added", delta] and kinds.count(delta) > 3
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    returned = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = client.responses.create(**{**fields, "input": [*HELLO, call.model_dump(), returned]}, max_output_tokens=2)
    assert after.output[0].type == "message"


def test_tokenize_and_detokenize(server: ServerProcess) -> None:
    def post(path: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())

    found = post("/tokenize", prompt="The sea", return_token_strs=True)
    assert found["tokens"] == ids("The sea") and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert post("/detokenize", tokens=found["tokens"]) == {"prompt": "The sea"}
    chat = post("/tokenize", messages=HELLO)
    assert post("/detokenize", tokens=chat["tokens"])["prompt"].startswith("<|im_start|>user")
    assert chat["max_model_len"] == 512
    turns = [*HELLO, {"role": "assistant", "content": "Hello! I"}]
    open_ended = post("/tokenize", messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert post("/detokenize", tokens=open_ended["tokens"])["prompt"].endswith("assistant\nHello! I")
    # Templates without developers would drop what they say.
    prompts = [post("/tokenize", messages=[{"role": role, "content": "Be brief."}]) for role in ("developer", "system")]
    assert prompts[0] == prompts[1]


LONG: Any = [{"role": "user", "content": "a " * 4000}]


def test_unknown_fields_are_ignored_and_logged(client: Any, server: ServerProcess) -> None:
    # Clients of older and newer versions of vLLM send both.
    extra = {"no_such\nfield": 1, "guided_choice": ["no"], "structured_outputs": {"choice": ["yes"]}}
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=extra)
    assert answer.choices[0].message.content == "yes"
    assert "fields that ChatBody lacks: guided_choice, no_such\\nfield\n" in server.log()
    neutral: dict[str, Any] = {"n": 1, "audio": None, "functions": [], "modalities": ["text"]}
    # `verbosity` is no argument of older clients.
    neutral["extra_body"] = {"use_beam_search": False, "length_penalty": 1, "guided_json": None, "verbosity": "low"}
    assert client.chat.completions.create(model=MODEL, messages=HELLO, **neutral).choices[0].message.content


def test_a_grammar_that_becomes_too_complex_is_no_answer(client: Any) -> None:
    # What may come after the first letters is more than llguidance takes.
    grammar = "start: /[xy]{4}/ rest\nrest: " + " | ".join(f'"a{i}"' for i in range(2500))
    fields = {"model": MODEL, "messages": HELLO, "extra_body": {"structured_outputs": {"grammar": grammar}}}
    with pytest.raises(openai.BadRequestError, match="structured_outputs cannot be used"):
        client.chat.completions.create(**fields)
    # Status 200 and some text have been sent.
    with pytest.raises(openai.APIError, match="structured_outputs cannot be used"):
        list(client.chat.completions.create(stream=True, **fields))


def test_errors_are_openais_and_models_have_names(client: Any, server: ServerProcess) -> None:
    assert [model.id for model in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    errors = []
    for asked, fields in ((client, {"model": "another"}), (stranger, {}), (client, {"temperature": -1})):
        with pytest.raises(openai.APIStatusError) as caught:
            asked.completions.create(**{"model": MODEL, "prompt": "a", **fields})
        errors.append((caught.type, caught.value.type, caught.value.code, caught.value.param))
    assert errors == [
        (openai.NotFoundError, "invalid_request_error", "model_not_found", "model"),
        (openai.AuthenticationError, "invalid_request_error", "invalid_api_key", None),
        (openai.BadRequestError, "invalid_request_error", "invalid_value", "temperature"),
    ]
    # The answer arrives although the server does not want the body.
    connection = HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_SECONDS)
    connection.request("POST", "/v1/completions", b" " * 20_000_000, {"Authorization": "Bearer wrong"})
    assert connection.getresponse().status == 401
    connection.close()
