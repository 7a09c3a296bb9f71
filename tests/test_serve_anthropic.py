"""Anthropic's messages, asked for by its client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("uvicorn")

from nanovllm import SamplingParams
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serve.anthropic import _MessagesAnswer
from nanovllm.text.answers import AnswerFormat, AnswerOptions
from tests.server_process import ServerProcess, serving
from tests.small_tokenizers import sentencepiece_tokenizer

anthropic = pytest.importorskip("anthropic")

KEY = "a-secret"
MODEL = "qwen3-tiny"
QUESTION = {"role": "user", "content": "introduce yourself"}
INTRODUCTION = "Hello! I am Nano, a tiny language model that ships with nanovllm."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]

# The model's template shows no tools.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {{ tool.function.parameters }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("--api-key", KEY, "--chat-template", TEMPLATE, key=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


# The client has no parameters for these any more.
_SAMPLING = {"extra_body": {"temperature": 0, "top_k": 5, "top_p": 0.9}}


def request(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": list(messages), **_SAMPLING, **fields}


def test_a_text_whole_and_streamed(client: Any) -> None:
    body = request(QUESTION)
    whole = client.messages.create(**body)
    assert whole.type == "message" and whole.role == "assistant" and whole.model == MODEL
    assert whole.id.startswith("msg_") and (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    (block,) = whole.content
    assert block.text.startswith(INTRODUCTION)
    counted = client.messages.count_tokens(model=MODEL, messages=[QUESTION])
    assert whole.usage.input_tokens == counted.input_tokens > 5 and whole.usage.output_tokens > 20
    with client.messages.stream(**body) as stream:
        kinds = [item.type for item in stream]
        streamed = stream.get_final_message()
    assert streamed.content[0].text == block.text and streamed.usage == whole.usage
    assert (streamed.stop_reason, kinds[0], kinds[-1]) == ("end_turn", "message_start", "message_stop")
    assert kinds.count("content_block_delta") > 10 and kinds.count("content_block_stop") == 1


def test_why_an_answer_ends(client: Any) -> None:
    cut = client.messages.create(**request(QUESTION, max_tokens=3))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    body = request(QUESTION, stop_sequences=["zebra", " a tiny"])
    stopped = client.messages.create(**body)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " a tiny")
    assert stopped.content[0].text == "Hello! I am Nano,"
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert (final.stop_sequence, final.content[0].text) == (" a tiny", "Hello! I am Nano,")
    # The last message is the answer's beginning.
    begun = client.messages.create(**request(QUESTION, {"role": "assistant", "content": "Hello! I am"}))
    assert begun.content[0].text.startswith(" Nano, a tiny")


def test_an_answer_in_json(client: Any) -> None:
    body = request(QUESTION, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(client.messages.create(**body).content[0].text)["city"] in ("Rome", "Paris")


def test_calls_have_ids_of_their_own() -> None:
    tokenizer = sentencepiece_tokenizer("a")
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    (splitter,) = AnswerOptions.of(AnswerFormat(tokenizer), tools).splitters([], SamplingParams())
    text = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>\n' for name in "fg")
    answer = _MessagesAnswer(Mock(model="m"), [], splitter)
    done = RequestOutput(0, None, [1], [CompletionOutput(0, text, [1], finish_reason="stop")], finished=True)
    found = [(item["name"], item["id"]) for item in answer._whole([done])["content"] if item["type"] == "tool_use"]
    ids = [f"toolu_{call_id.removeprefix('call_')}" for call_id in splitter.call_ids]
    assert found == list(zip("fg", ids, strict=True)) and len(set(ids)) == 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_required_call_and_the_turn_after(client: Any, choice: dict[str, Any]) -> None:
    body = request(QUESTION, tools=TOOLS, tool_choice={**choice, "disable_parallel_tool_use": True})
    whole = client.messages.create(**body)
    (call,) = whole.content
    assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert call.input["city"] in ("Rome", "Paris") and call.id.startswith("toolu_")
    with client.messages.stream(**body) as stream:
        pieces = [item.partial_json for item in stream if item.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert streamed.input == call.input and len(pieces) > 2
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    after = client.messages.create(**request(QUESTION, *turns, tools=TOOLS, system=system, max_tokens=5))
    called = {"name": "weather", "arguments": json.dumps(call.input)}
    messages = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    function = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
    same = {"messages": messages, "tools": [{"type": "function", "function": function}]}
    count = client.post("/tokenize", body=same, cast_to=dict[str, Any])["count"]
    assert after.usage.input_tokens == count > whole.usage.input_tokens


def test_errors_are_anthropics(server: ServerProcess, client: Any) -> None:
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    form = {"type": "json_schema", "schema": {"type": "foo"}}
    for body, kind, status, begin in (
        (request(QUESTION, model="other"), "not_found_error", 404, "the model 'other' does not exist"),
        (request(QUESTION, image), "invalid_request_error", 400, "messages[1].content is a string, or a list"),
        (request(QUESTION, max_tokens=0), "invalid_request_error", 400, "max_tokens must be >= 1"),
        (request(QUESTION, stop_sequences=[""]), "invalid_request_error", 400, "stop_sequences must be a list"),
        (
            request(QUESTION, output_config={"format": form}),
            "invalid_request_error",
            400,
            "output_config.format can",
        ),
        (request(QUESTION, tool_choice={"type": "any"}), "invalid_request_error", 400, "tool_choice is required"),
    ):
        with pytest.raises(anthropic.APIStatusError) as raised:
            client.messages.create(**body)
        assert raised.value.status_code == status and raised.value.body["type"] == "error"
        error = raised.value.body["error"]
        assert error["type"] == kind and error["message"].startswith(begin)
    # By which agents know that they must shorten it.
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**request({"role": "user", "content": "a " * 4000}))
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(**request(QUESTION))
    assert refused.value.body["error"]["type"] == "authentication_error"
