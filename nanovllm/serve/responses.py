"""`POST /v1/responses`, in its text form: nothing is stored, and there are no tools."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from nanovllm.async_llm import OutputStream
from nanovllm.openai_format import ENDPOINTS
from nanovllm.serve.event_stream import event
from nanovllm.serve.protocol import ChatMessage, ResponseBody, SamplingBody
from nanovllm.serve.service import Service
from nanovllm.serve.usage import Usage

_TEXT_PARTS = ("input_text", "output_text", "text")


async def answer_response(service: Service, body: ResponseBody) -> Response:
    """Answer an input, whole or as the answer comes."""
    service.check_model(body.model)
    given = {"temperature": body.temperature, "top_p": body.top_p, "max_tokens": body.max_output_tokens}
    sampling = SamplingBody.model_validate({**given, "response_format": _response_format(body)})
    params = service.sampling_params(sampling, ENDPOINTS["/v1/chat/completions"])
    prompt = await service.render_chat(_messages(body))
    answer = _ResponseAnswer(service, body)
    if not body.stream:
        (output,) = await service.complete([prompt], params, 0)
        answer.usage.add(output)
        choice = output.outputs[0]
        return await service.json_answer(lambda: answer.finished(choice.text, choice.finish_reason), [output])
    streams = await service.begin([prompt], params, 0)
    return service.event_stream(answer.events(streams), streams)


def _response_format(body: ResponseBody) -> dict[str, Any] | None:
    """Return the form of the text as chats have it."""
    form = None if body.text is None else body.text.format
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _messages(body: ResponseBody) -> list[ChatMessage]:
    """Return the input as messages."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages = [_message(item) for item in items]
    if body.instructions is not None:
        messages.insert(0, ChatMessage(role="system", content=body.instructions))
    return messages


def _message(item: dict[str, Any]) -> ChatMessage:
    role, content = item.get("role"), item.get("content")
    if item.get("type", "message") != "message" or not isinstance(role, str):
        raise ValueError(f"an item of input is a message with role and content, not {item!r:.80}")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") in _TEXT_PARTS for part in content):
            raise ValueError("a message's content is a string, or a list of parts of text")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise ValueError("a message's content is a string, or a list of parts of text")
    return ChatMessage(role=role, content=content)


class _ResponseAnswer:
    """The answer to one request, in the API's form."""

    def __init__(self, service: Service, body: ResponseBody) -> None:
        self._service = service
        self.usage = Usage()
        self._item_id = f"msg_{uuid4().hex}"
        self._number = -1
        text = {} if body.text is None else body.text.model_dump(exclude_none=True)
        self._head = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": service.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": {"format": {"type": "text"}, **text},
            "metadata": body.metadata or {},
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "store": False,
            "error": None,
        }

    def finished(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        """Return the body of a whole answer."""
        status = {"stop": "completed", "abort": "cancelled"}.get(finish_reason or "", "incomplete")
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._item(text, "completed" if status == "completed" else "incomplete")],
            "usage": {
                "input_tokens": self.usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": self.usage.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": self.usage.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.usage.num_prompt_tokens + self.usage.num_tokens,
            },
        }

    async def events(self, streams: list[OutputStream]) -> AsyncIterator[bytes]:
        """Yield the answer's events."""
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        empty = {**self._item("", "in_progress"), "content": []}
        yield self._event("response.output_item.added", output_index=0, item=empty)
        yield self._event("response.content_part.added", **place, part=_part(""))
        text, finish_reason = "", None
        async for _, output in self._service.read(streams):
            self.usage.add(output)
            for choice in output.outputs:
                text, finish_reason = text + choice.text, choice.finish_reason
                if choice.text:
                    yield self._event("response.output_text.delta", **place, delta=choice.text, logprobs=[])
        whole = self.finished(text, finish_reason)
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event("response.completed" if finish_reason == "stop" else "response.incomplete", response=whole)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(text)],
        }

    def _event(self, kind: str, **values: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **values}, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
