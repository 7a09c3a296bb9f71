"""`POST /v1/messages`, Anthropic's chats, and `/v1/messages/count_tokens`: text and calls of tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from nanovllm.client.request_stream import RequestStream
from nanovllm.openai_format import ENDPOINTS
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serve.anthropic_input import Block, chat_messages, sampling_body, tool_use
from nanovllm.serve.anthropic_protocol import CountTokensBody, MessagesBody
from nanovllm.serve.errors import JsonResponse
from nanovllm.serve.event_stream import event
from nanovllm.serve.service import Service
from nanovllm.text.answers import AnswerDelta, AnswerOptions, AnswerSplitter

Event = tuple[str, dict[str, Any]]


async def count_tokens(service: Service, body: CountTokensBody) -> dict[str, int]:
    """Return how many tokens messages have with the chat template."""
    service.check_model(body.model)
    return {"input_tokens": len(await _render(service, body, tool_use(body, service.answer_format)))}


async def answer_messages(service: Service, body: MessagesBody) -> Response:
    """Answer messages, whole or as the answer comes."""
    service.check_model(body.model)
    options = tool_use(body, service.answer_format)
    plain = service.sampling_params(sampling_body(body), ENDPOINTS["/v1/chat/completions"])
    params = options.constrain(plain)
    prompt = await _render(service, body, options)
    answer = _MessagesAnswer(service, options.make_splitter(prompt, plain)(), len(prompt))
    if not body.stream:
        (output,) = await service.complete([prompt], params, 0)
        return JsonResponse(answer.whole(output))
    streams = await service.begin([prompt], params, 0)
    return service.event_stream(answer.events(streams), streams)


async def _render(service: Service, body: CountTokensBody, options: AnswerOptions) -> list[int]:
    # The model continues a last message that is its own.
    continues = body.messages[-1].role == "assistant"
    variables = None if body.thinking is None else {"enable_thinking": False}
    return await service.render_chat(
        chat_messages(body),
        variables,
        tools=options.template_tools(),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


class _Content:
    """The blocks of an answer. What is added to them is told by events."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._pieces: list[str] = []

    def append(self, new: AnswerDelta, call_ids: list[str]) -> Iterator[Event]:
        """Add what is new, and yield the events' types and fields."""
        if new.content:
            if not self.blocks or self.blocks[-1]["type"] != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._add({"type": "text_delta", "text": new.content}, new.content)
        for call in new.calls:
            if call.name is not None:
                call_id = f"toolu_{call_ids[call.index].removeprefix('call_')}"
                yield from self._begin({"type": "tool_use", "id": call_id, "name": call.name, "input": {}})
            if call.arguments:
                yield self._add({"type": "input_json_delta", "partial_json": call.arguments}, call.arguments)

    def finish(self) -> Iterator[Event]:
        """End the last block."""
        if not self.blocks:
            return
        block, text = self.blocks[-1], "".join(self._pieces)
        block |= {"text": text} if block["type"] == "text" else {"input": _input(text)}
        yield "content_block_stop", {"index": len(self.blocks) - 1}

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self.finish()
        self.blocks.append(block)
        self._pieces = []
        yield "content_block_start", {"index": len(self.blocks) - 1, "content_block": block}

    def _add(self, delta: Block, piece: str) -> Event:
        self._pieces.append(piece)
        return "content_block_delta", {"index": len(self.blocks) - 1, "delta": delta}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; without any, or if the answer was cut within them, none."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _MessagesAnswer:
    """The answer to one request, in the API's form."""

    def __init__(self, service: Service, splitter: AnswerSplitter, num_prompt_tokens: int) -> None:
        self._service = service
        self._splitter = splitter
        self._content = _Content()
        self._usage = {"input_tokens": num_prompt_tokens, "output_tokens": 0}
        self._head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": service.model}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the body of a whole answer."""
        for _ in self._take(output):
            pass
        return {**self._head, "content": self._content.blocks, **self._end(output.outputs[0]), "usage": self._usage}

    async def events(self, streams: list[RequestStream]) -> AsyncIterator[bytes]:
        """Yield the answer's events."""
        begun: Block = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage}
        yield _event("message_start", {"message": begun})
        async for _, output in self._service.read(streams):
            for kind, values in self._take(output):
                yield _event(kind, values)
            if output.finished:
                yield _event("message_delta", {"delta": self._end(output.outputs[0]), "usage": self._usage})
        yield _event("message_stop", {})

    def _take(self, output: RequestOutput) -> Iterator[Event]:
        """Add what is new in the only output, and yield its events."""
        (choice,) = output.outputs
        self._usage["output_tokens"] += len(choice.token_ids)
        new = self._splitter.append(choice.text, choice.finish_reason is not None)
        yield from self._content.append(new, self._splitter.call_ids)
        if output.finished:
            yield from self._content.finish()

    def _end(self, choice: CompletionOutput) -> dict[str, Any]:
        """Return why the answer has ended."""
        if choice.finish_reason != "stop":
            reason = "max_tokens"
        elif isinstance(choice.stop_reason, str):
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._splitter.call_ids else "end_turn"
        return {"stop_reason": reason, "stop_sequence": choice.stop_reason if reason == "stop_sequence" else None}


def _event(kind: str, values: dict[str, Any]) -> bytes:
    return event({"type": kind, **values}, kind)
