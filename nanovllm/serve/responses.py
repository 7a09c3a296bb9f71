"""`POST /v1/responses`, with text and calls of functions: nothing is stored."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from nanovllm.client.request_stream import RequestStream
from nanovllm.openai_answers import CallItem, MessageItem, OutputText, ResponseAnswer
from nanovllm.openai_format import ENDPOINTS
from nanovllm.outputs import RequestOutput, TokensPrompt
from nanovllm.serve.errors import encode_json
from nanovllm.serve.event_stream import event
from nanovllm.serve.protocol import SamplingBody
from nanovllm.serve.response_input import response_messages
from nanovllm.serve.response_protocol import ResponseBody, ResponseTool, ResponseToolChoice
from nanovllm.serve.service import Service
from nanovllm.serve.usage import Usage
from nanovllm.text.answers import AnswerDelta, AnswerOptions, AnswerSplitter


async def answer_response(service: Service, body: ResponseBody) -> Response:
    """Answer an input, whole or as the answer comes."""
    service.check_model(body.model)
    given = {"temperature": body.temperature, "top_p": body.top_p, "max_tokens": body.max_output_tokens}
    sampling = SamplingBody.model_validate({**given, "response_format": _response_format(body)})
    tools = [{"type": "function", "function": _function(tool)} for tool in body.tools or []]
    options = AnswerOptions.of(service.answer_format, tools, _tool_choice(body), body.parallel_tool_calls)
    plain = service.sampling_params(sampling, ENDPOINTS["/v1/chat/completions"])
    params = options.constrain(plain)
    token_ids = await service.render_chat(response_messages(body), tools=options.template_tools())
    prompts: list[TokensPrompt] = [{"prompt_token_ids": token_ids}]
    service.check_room(prompts, body.max_output_tokens, "input")
    splitter = options.make_splitter(token_ids, plain)()
    answer = _ResponseAnswer(service, body, splitter, Usage(len(token_ids)))
    if not body.stream:
        (output,) = await service.complete(prompts, params, 0)
        return await service.json_answer(lambda: answer.whole(output), [output], params)
    streams = await service.begin(prompts, params, 0)
    return service.event_stream(answer.events(streams), streams)


def _tool_choice(body: ResponseBody) -> str | dict[str, Any] | None:
    """Return the choice as chats have it."""
    choice = body.tool_choice
    return {"function": {"name": choice.name}} if isinstance(choice, ResponseToolChoice) else choice


def _function(tool: ResponseTool) -> dict[str, Any]:
    return tool.model_dump(exclude={"type"}, exclude_unset=True)


def _response_format(body: ResponseBody) -> dict[str, Any] | None:
    """Return the form of the text as chats have it."""
    form = None if body.text is None else body.text.format
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


class _Output:
    """The items of a response: a message, and calls of functions. What is added to them is told by events."""

    def __init__(self) -> None:
        self.items: list[MessageItem | CallItem] = []
        self._is_open = False
        self._pieces: list[str] = []

    def append(self, new: AnswerDelta, call_ids: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add what is new, and yield the events' types and fields."""
        if new.content:
            if not self._is_open or self.items[-1]["type"] != "message":
                yield from self._begin_message()
            self._pieces.append(new.content)
            yield (
                "response.output_text.delta",
                {**self._place(), "content_index": 0, "delta": new.content, "logprobs": []},
            )
        for call in new.calls:
            if call.name is not None:
                yield from self._begin_call(call_ids[call.index], call.name)
            if call.arguments:
                self._pieces.append(call.arguments)
                yield "response.function_call_arguments.delta", {**self._place(), "delta": call.arguments}

    def finish(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """End the last item; without any, there is an empty message."""
        if not self.items:
            yield from self._begin_message()
        yield from self._close(status)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, item: MessageItem | CallItem) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._close("completed")
        self.items.append(item)
        self._is_open, self._pieces = True, []
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item}

    def _begin_message(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._begin(
            {
                "id": f"msg_{uuid4().hex}",
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
        )
        yield "response.content_part.added", {**self._place(), "content_index": 0, "part": _part("")}

    def _begin_call(self, call_id: str, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._begin(
            {
                "id": f"fc_{uuid4().hex}",
                "type": "function_call",
                "call_id": call_id,
                "name": name,
                "arguments": "",
                "status": "in_progress",
            }
        )

    def _close(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._is_open:
            return
        self._is_open, text, item, place = False, "".join(self._pieces), self.items[-1], self._place()
        item["status"] = status
        if item["type"] == "message":
            item["content"] = [_part(text)]
            yield "response.output_text.done", {**place, "content_index": 0, "text": text, "logprobs": []}
            yield "response.content_part.done", {**place, "content_index": 0, "part": _part(text)}
        else:
            item["arguments"] = text
            yield "response.function_call_arguments.done", {**place, "arguments": text, "name": item["name"]}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}


class _ResponseAnswer:
    """The answer to one request, in the API's form."""

    def __init__(self, service: Service, body: ResponseBody, splitter: AnswerSplitter, usage: Usage) -> None:
        self._service = service
        self._splitter = splitter
        self._output = _Output()
        self._usage = usage
        self._number = -1
        # As JSON: parsed, what a client has sent may take twenty times its size, for as long as its answer comes.
        self._begun = encode_json(_begun(service, body))

    def whole(self, output: RequestOutput) -> ResponseAnswer:
        """Return the body of a whole answer."""
        for _ in self._take(output):
            pass
        return self._finished(output.outputs[0].finish_reason)

    async def events(self, streams: list[RequestStream]) -> AsyncIterator[bytes]:
        """Yield the answer's events."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._copy_begun())
        finish_reason = None
        async for _, output in self._service.read(streams):
            for kind, values in self._take(output):
                yield self._event(kind, **values)
            finish_reason = output.outputs[0].finish_reason
        kind = "response.completed" if finish_reason == "stop" else "response.incomplete"
        yield self._event(kind, response=self._finished(finish_reason))

    def _take(self, output: RequestOutput) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add what is new in the only output, and yield its events."""
        self._usage.add(output)
        (choice,) = output.outputs
        new = self._splitter.append(choice.text, choice.finish_reason is not None)
        yield from self._output.append(new, self._splitter.call_ids)
        if output.finished:
            yield from self._output.finish("completed" if choice.finish_reason == "stop" else "incomplete")

    def _finished(self, finish_reason: str | None) -> ResponseAnswer:
        status = {"stop": "completed", "abort": "cancelled"}.get(finish_reason or "", "incomplete")
        usage = self._usage
        return {
            **self._copy_begun(),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output.items,
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.num_prompt_tokens + usage.num_tokens,
            },
        }

    def _copy_begun(self) -> ResponseAnswer:
        begun: ResponseAnswer = json.loads(self._begun)
        return begun

    def _event(self, kind: str, **values: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **values}, kind)


def _begun(service: Service, body: ResponseBody) -> ResponseAnswer:
    """Return an answer that has begun."""
    choice = body.tool_choice
    text = {} if body.text is None else body.text.model_dump(exclude_none=True)
    return {
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
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": choice.model_dump() if isinstance(choice, ResponseToolChoice) else choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or []],
        "store": False,
        "error": None,
        "status": "in_progress",
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def _part(text: str) -> OutputText:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
