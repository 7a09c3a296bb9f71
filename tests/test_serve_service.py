"""The way from a body to the engine's requests, and back, with an engine that the test plays."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest

pytest.importorskip("uvicorn")

from nanovllm import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.client import async_llm
from nanovllm.config import Config
from nanovllm.engine.request import Request, RequestLimits
from nanovllm.engine.stats import StepHistograms
from nanovllm.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput, pack_records
from nanovllm.serve import answers, anthropic, responses, service
from nanovllm.serve.answers import EventStream, json_answer
from nanovllm.serve.anthropic import MessagesBody
from nanovllm.serve.chat_completions import chat_completions
from nanovllm.serve.completions import completions
from nanovllm.serve.errors import ApiError, encode_json, parse_json
from nanovllm.serve.pooling import RerankBody, rank
from nanovllm.serve.protocol import ChatBody, CompletionBody
from nanovllm.serve.responses import ResponseBody, response_chat
from nanovllm.serve.service import Service
from nanovllm.serve.settings import ServeSettings
from nanovllm.tasks.ranking import RankBy
from nanovllm.text.output_processor import OutputProcessor


class PlayedStream:
    """A stream of given outputs."""

    def __init__(self, request: Request, outputs: list[RequestOutput]) -> None:
        self.state = SimpleNamespace(request=request)
        self.outputs = outputs
        self._outputs = iter(outputs)
        self.is_closed = False

    def __aiter__(self) -> PlayedStream:
        return self

    async def __anext__(self) -> RequestOutput:
        for output in self._outputs:
            return output
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.is_closed = True


class PlayedTokenizer:
    """A token for each character."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(map(chr, token_ids))

    def encode(self, text: str, **_: Any) -> list[int]:
        return [*map(ord, text)]

    def get_vocab(self) -> dict[str, int]:
        return {}


class PlayedLLM:
    """The part of an `AsyncLLM` that a `Service` needs. It knows what it was asked for.

    Args:
        outputs: answer each prompt, the last one as a whole.
        recommended: by the model.
    """

    def __init__(self, outputs: list[RequestOutput], recommended: dict[str, Any] | None = None) -> None:
        self.llm = SimpleNamespace(
            config=Config("some/model", device="cpu"),
            recommended_values=lambda: recommended or {},
            stats=lambda: Counter(num_used_blocks=3, num_free_blocks=4),
            tokenizer=PlayedTokenizer(),
            output_processor=OutputProcessor(PlayedTokenizer()),
            model_config=SimpleNamespace(hidden_size=8),
            limits=RequestLimits(1000, 512, 512, 512, 20),
            step_histograms=StepHistograms,
            device_name="CPU",
        )
        self.llm.input_processor = SimpleNamespace(process=self._process)
        self.asked: list[SamplingParams] = []
        self._outputs = outputs

    def _process(self, prompts: list[Any], params: list[SamplingParams], *_: Any, **__: Any) -> list[Request]:
        self.asked.append(params[0])
        return [Request(array("i", [1]), params[0]) for _ in prompts]

    async def enqueue(self, count: int, process: Callable[[], list[Request]], work: str) -> list[PlayedStream]:
        return [PlayedStream(request, self._outputs) for request in process()]

    async def gather(self, streams: list[PlayedStream]) -> list[RequestOutput]:
        return [stream.outputs[-1] for stream in streams]


def make_service(llm: Any) -> Service:
    return Service(llm, ServeSettings())


def output(*texts: str, finished: bool = True, logprob: float = -1.0) -> RequestOutput:
    """Outputs of one token for each character, all of them equally likely."""
    reason = "stop" if finished else None
    items = []
    for i, text in enumerate(texts):
        at = [{ord(character): Logprob(logprob, 1, character)} for character in text]
        items.append(CompletionOutput(i, text, [*map(ord, text)], logprob * len(text), at, reason))
    return RequestOutput(0, "a", [1], items, finished)


def test_metrics_report_capacity_and_use_of_the_same_pool() -> None:
    text = make_service(PlayedLLM([output("a")])).metrics.render()[0].decode()
    assert 'num_gpu_blocks="7"' in text
    assert re.search(r"^vllm:kv_cache_usage_perc\S* 0.4285", text, re.MULTILINE)


def test_requests_name_the_model_as_the_server_or_as_its_command_does() -> None:
    llm: Any = PlayedLLM([output("a")])
    for name in ("some/model", "model", None):
        Service(llm, ServeSettings()).check_model(name)
    named = Service(llm, ServeSettings(served_model_name=["mine"]))
    named.check_model("mine")
    for name in ("some/model", "model"):
        with pytest.raises(ApiError, match="does not exist; this server has 'mine'"):
            named.check_model(name)


def test_a_body_is_in_utf_8() -> None:
    assert parse_json('\ufeff{"a": 1}'.encode()) == {"a": 1}
    with pytest.raises(ApiError, match="cannot be read as JSON"):
        parse_json('{"a": 1}'.encode("utf-16"))
    assert encode_json("é字\u2028") == '"é字\u2028"'.encode()
    # A call may have half a character.
    assert encode_json({"é": "\ud83d"}) == b'{"\\u00e9":"\\ud83d"}'


def test_a_completion_has_16_tokens_and_a_chat_what_the_model_recommends() -> None:
    async def run(recommended: dict[str, Any], **given: Any) -> list[int | None]:
        llm = PlayedLLM([output("a")], recommended)
        service = make_service(llm)
        await completions(CompletionBody.model_validate({"prompt": "a", **given}), service)
        chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], **given})
        await chat_completions(chat, service)
        return [params.max_tokens for params in llm.asked]

    # 64 is the class's own default, which is no reason to forget that the model says so.
    assert asyncio.run(run({"max_tokens": 64})) == [16, 64]
    assert asyncio.run(run({"max_tokens": 7}, max_tokens=5)) == [5, 5]
    assert asyncio.run(run({})) == [16, None]


SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "max_tokens": 9, "ignore_eos": True, "seed": 5, "n": 2, "top_p": 0.5, "top_k": 3, "min_p": 0.5,
    "presence_penalty": 0.25, "frequency_penalty": 0.5, "repetition_penalty": 2.0, "logit_bias": {5: 1.0},
    "bad_words": ["b"], "allowed_token_ids": [9], "min_tokens": 4, "stop": ["x"], "include_stop_str_in_output": True,
    "stop_token_ids": [7], "prompt_logprobs": 1, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "structured_outputs": StructuredOutputsParams(regex="a"),
}  # fmt: skip


def test_every_sampling_field_reaches_the_engine() -> None:
    llm, body = (
        PlayedLLM([output("a", "b")]),
        {**SAMPLING, "logit_bias": {"5": 1}, "structured_outputs": {"regex": "a"}},
    )
    asyncio.run(completions(CompletionBody.model_validate({**body, "prompt": "a", "logprobs": 1}), make_service(llm)))
    said = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}
    asyncio.run(chat_completions(ChatBody.model_validate({**body, **said}), make_service(llm)))
    assert llm.asked == [SamplingParams(**SAMPLING, logprobs=1)] * 2
    default = SamplingParams()
    assert not [name for name, value in SAMPLING.items() if getattr(default, name) == value]
    # These are another API's.
    assert {item.name for item in fields(SamplingParams)} - SAMPLING.keys() - {"logprobs"} == {
        "detokenize", "hidden_states", "prompt_logprobs_start"
    }  # fmt: skip


def test_an_echo_leaves_a_character_that_its_prompt_begins_to_the_output() -> None:
    # A replacement is what the tokens of half a character decode to.
    whole = RequestOutput(0, None, [ord("a"), 0xFFFD], output("éb").outputs, True)
    body = CompletionBody.model_validate({"prompt": [97, 233], "echo": True})
    answer = asyncio.run(completions(body, make_service(PlayedLLM([whole]))))
    assert json.loads(bytes(answer.body))["choices"][0]["text"] == "aéb"


def test_instructions_come_before_the_input() -> None:
    said = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "second"}]
    chat = response_chat(ResponseBody.model_validate({"input": said, "instructions": "Be brief."}))
    messages = [message.model_dump() for message in chat.messages]
    assert messages == [{"role": "system", "content": "Be brief."}, *said]


PIECES = ["Well.", " <tool_call>", '{"name": "f", "argume', 'nts": {"a"', ": 1}}</tool_call>", ""]


@pytest.mark.parametrize("whole", [True, False])
def test_translated_answers_are_the_same_whole_and_streamed(whole: bool) -> None:
    *pieces, last = [output(piece, finished=i == len(PIECES) - 1) for i, piece in enumerate(PIECES)]
    played = make_service(PlayedLLM([output("".join(PIECES))] if whole else [*pieces, last]))
    schema, said = {"type": "object"}, [{"role": "user", "content": "a"}]
    asked: dict[str, Any] = {"input": said, "tools": [{"type": "function", "name": "f"}], "stream": not whole}
    events = read_answer(asyncio.run(responses.responses(ResponseBody.model_validate(asked), played)))
    asked = {"model": "model", "messages": said, "max_tokens": 9, "stream": not whole}
    asked["tools"] = [{"name": "f", "input_schema": schema}]
    messages = read_answer(asyncio.run(anthropic.messages(MessagesBody.model_validate(asked), played)))
    final = events[-1] if whole else events[-1]["response"]
    text, call = final["output"]
    assert (text["content"][0]["text"], call["name"], call["arguments"]) == ("Well.", "f", '{"a": 1}')
    assert final["status"] == "completed" and final["usage"]["output_tokens"] == len("".join(PIECES))
    if whole:
        assert messages[0]["content"][1]["input"] == {"a": 1} and messages[0]["stop_reason"] == "tool_use"
        return
    # An item is empty when it begins, whatever comes in the same step.
    kinds = [event["type"] for event in events]
    begun = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item.get("content", item.get("arguments")) for item in begun] == [[], ""] and kinds.count(kinds[-1]) == 1
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    blocks = [event["content_block"] for event in messages if event["type"] == "content_block_start"]
    assert [block.get("text", block.get("input")) for block in blocks] == ["", {}]
    assert messages[-2]["delta"]["stop_reason"] == "tool_use" and messages[-1] == {"type": "message_stop"}


def read_answer(answer: Any) -> list[dict[str, Any]]:
    """The body of a whole answer, or the data of all events."""

    async def events() -> list[bytes]:
        return [event async for event in answer._events]

    if not isinstance(answer, EventStream):
        return [json.loads(bytes(answer.body))]
    return [json.loads(event.partition(b"data: ")[2]) for event in asyncio.run(events())]


def test_a_client_that_does_not_read_keeps_no_request_running() -> None:
    async def run() -> None:
        reads = asyncio.Event()
        stream = PlayedStream(Request(array("i"), SamplingParams()), [])

        async def events() -> AsyncIterator[bytes]:
            yield b"data: a\n\n"

        async def receive() -> Any:
            await asyncio.Future[None]()

        async def send(_: Any) -> None:
            await reads.wait()

        answer = EventStream(
            events(), [cast("Any", stream)], ServeSettings(max_request_seconds=0.1), list[str]().append
        )
        scope = {"type": "http", "path": "/v1/completions", "root_path": ""}
        sending = asyncio.ensure_future(answer(scope, receive, send))
        while not stream.is_closed:
            await asyncio.sleep(0.01)
        assert not sending.done()
        reads.set()
        await sending

    asyncio.run(asyncio.wait_for(run(), 240))


def test_a_stream_without_events_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_PING_SECONDS", 0.01)

    async def run() -> list[bytes]:
        pinged, sent = asyncio.Event(), list[bytes]()

        async def events() -> AsyncIterator[bytes]:
            yield b"data: a\n\n"
            await pinged.wait()
            yield b"data: b\n\n"

        async def receive() -> Any:
            await asyncio.Future[None]()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if sent[-1].startswith(b":"):
                pinged.set()

        await EventStream(events(), [], ServeSettings(), list[str]().append)({"type": "http"}, receive, send)
        await asyncio.sleep(0.05)
        return sent

    start, first, *pings, last, end = asyncio.run(asyncio.wait_for(run(), 240))
    assert (start, first, last, end) == (b"", b"data: a\n\n", b"data: b\n\n", b"")
    assert set(pings) == {b": ping\n\n"}


def test_an_error_keeps_no_request() -> None:
    kept: list[weakref.ref[Any]] = []

    async def fail() -> None:
        body = set[int]()
        kept.append(weakref.ref(body))
        raise ValueError("a")

    async def run() -> None:
        with pytest.raises(ValueError, match="a"):
            await service.until_disconnect(asyncio.Future[Any], fail(), 30)

    gc.disable()
    try:
        asyncio.run(run())
        assert kept[0]() is None
    finally:
        gc.enable()


def test_log_probabilities_are_counted_without_being_made() -> None:
    def refuse(_: int) -> str:
        raise AssertionError("a token's text is made")

    def built_by(num_positions: int) -> str:
        records = pack_records(np.zeros((num_positions, 3)), np.ones((num_positions, 3)), np.ones(num_positions))
        choice = CompletionOutput(0, "", [], 0.0, Logprobs(records, 3, refuse), "stop")
        outputs = [RequestOutput(0, None, [1], [choice], True)]
        name = json_answer(lambda: threading.current_thread().name, outputs, SamplingParams(logprobs=2))
        answer = asyncio.run(name)
        return str(json.loads(bytes(answer.body)))

    own = threading.current_thread().name
    assert built_by(3000) == own != built_by(4000)


def test_ranks_are_those_of_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    query, documents = "Monday", ["2, 3, 5, 7", "Tuesday"]
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "kvcache_block_size": 16, "max_logprobs": 512}
    methods: tuple[RankBy, ...] = get_args(RankBy)
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=50, **settings) as alone:
        expected = {by: alone.rank(query, documents, by=by, use_tqdm=False) for by in methods}
    llm = AsyncLLM(BUNDLED_MODEL, num_kvcache_blocks=50, **settings)

    async def check(by: RankBy) -> None:
        monkeypatch.setattr(async_llm, "rank_method", lambda *_: by)
        body = RerankBody.model_validate({"query": query, "documents": documents})
        results = json.loads(bytes((await rank(body, make_service(llm))).body))["results"]
        found = [(item["index"], item["relevance_score"]) for item in results]
        assert found == [(item.index, pytest.approx(item.score, abs=1e-5)) for item in expected[by]]

    for by in methods:
        asyncio.run(check(by))
    llm.exit()
