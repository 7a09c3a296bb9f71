"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from nanovllm.async_llm import OutputStream
from nanovllm.openai_format import ENDPOINTS, chat_choice, chat_logprobs
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serve.event_stream import DONE, event
from nanovllm.serve.protocol import ChatBody
from nanovllm.serve.service import Service
from nanovllm.serve.tools import AnswerDelta, AnswerSplitter, ToolUse, whole_calls
from nanovllm.serve.usage import Usage
from nanovllm.text.tool_calls import ToolCallDelta

_ENDPOINT = ENDPOINTS["/v1/chat/completions"]


async def answer_chat(service: Service, body: ChatBody) -> Response:
    """Answer messages, whole or as they come."""
    service.check_model(body.model)
    use = ToolUse.of(body.tools, body.tool_choice, body.parallel_tool_calls, service.tool_call_format)
    separates = service.settings.separate_reasoning if body.separate_reasoning is None else body.separate_reasoning
    params = use.constrain(service.sampling_params(body, _ENDPOINT))
    if separates and params.structured_outputs is not None:
        params.structured_outputs.after_thinking = True
    prompt = await service.render_chat(
        body.messages,
        body.chat_template_kwargs,
        tools=use.template_tools(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )
    is_inside = separates and service.ends_with_think(prompt)
    answer = _ChatAnswer(service, body, partial(AnswerSplitter, use.make_parser(), separates, is_inside))
    if not body.stream:
        (output,) = await service.complete([prompt], params, body.priority)
        return await service.json_answer(lambda: answer.whole(output), [output])
    streams = await service.begin([prompt], params, body.priority)
    return service.event_stream(answer.events(streams), streams)


class _ChatAnswer:
    """The answer to one request, in the API's form."""

    def __init__(self, service: Service, body: ChatBody, make_splitter: Callable[[], AnswerSplitter]) -> None:
        self._service = service
        self._body = body.without_content()
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": service.model}
        self._make_splitter = make_splitter
        self._splitters: dict[int, AnswerSplitter] = {}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the body of a whole answer."""
        usage = Usage()
        usage.add(output)
        choices = [self._choice(choice) for choice in output.outputs]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage.body()}

    async def events(self, streams: list[OutputStream]) -> AsyncIterator[bytes]:
        """Yield the answer's events."""
        options, usage = self._body.stream_options, Usage()
        with_usage = options is not None and bool(options.include_usage)
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async for _, output in self._service.read(streams):
            usage.add(output)
            for choice in output.outputs:
                logprobs = chat_logprobs(choice, self._body.top_logprobs)
                for delta in self._deltas(choice) or [{}] * bool(choice.logprobs):
                    yield self._chunk(choice.index, delta, logprobs)
                    logprobs = None
                if output.finished:
                    yield self._chunk(choice.index, {}, finish_reason=self._finish_reason(choice))
        if with_usage:
            chunk = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage.body()}
            yield event(chunk)
        yield DONE

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice]})

    def _deltas(self, choice: CompletionOutput) -> list[dict[str, Any]]:
        new = self._split(choice)
        texts = {"reasoning_content": new.reasoning, "content": new.content}
        delta = {name: text for name, text in texts.items() if text}
        # Each piece of a call alone: clients add up those of one call from chunk to chunk, but not within one.
        calls = [{"tool_calls": [self._call_delta(choice.index, call)]} for call in new.calls]
        return [delta, *calls] if delta else calls

    def _call_delta(self, index: int, call: ToolCallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        call_id = self._splitters[index].call_ids[call.index]
        return {"index": call.index, "id": call_id, "type": "function", "function": function}

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        answer, new = chat_choice(choice, self._body.top_logprobs), self._split(choice)
        calls = zip(self._splitters[choice.index].call_ids, whole_calls(new.calls), strict=True)
        tool_calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, (name, arguments) in calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": new.content}
        if tool_calls:
            message |= {"content": new.content or None, "tool_calls": tool_calls}
        if self._splitters[choice.index].separates:
            message["reasoning_content"] = new.reasoning or None
        return {**answer, "message": message, "finish_reason": self._finish_reason(choice)}

    def _finish_reason(self, choice: CompletionOutput) -> str | None:
        has_calls = bool(self._splitters[choice.index].call_ids)
        return "tool_calls" if has_calls and choice.finish_reason == "stop" else choice.finish_reason

    def _split(self, choice: CompletionOutput) -> AnswerDelta:
        if choice.index not in self._splitters:
            self._splitters[choice.index] = self._make_splitter()
        return self._splitters[choice.index].append(choice.text, choice.finish_reason is not None)
