"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from nanovllm.async_llm import OutputStream
from nanovllm.openai_format import ENDPOINTS, chat_choice, chat_logprobs
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serve.event_stream import DONE, event
from nanovllm.serve.protocol import ChatBody
from nanovllm.serve.reasoning import ReasoningSplitter
from nanovllm.serve.service import Service
from nanovllm.serve.usage import Usage

_ENDPOINT = ENDPOINTS["/v1/chat/completions"]


async def answer_chat(service: Service, body: ChatBody) -> Response:
    """Answer messages, whole or as they come."""
    service.check_model(body.model)
    params = service.sampling_params(body, _ENDPOINT)
    add_generation_prompt = body.add_generation_prompt is not False
    prompt = await service.render_chat(
        body.messages,
        body.chat_template_kwargs,
        tools=None if body.tool_choice == "none" else body.tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    answer = _ChatAnswer(service, body, prompt)
    if not body.stream:
        (output,) = await service.complete([prompt], params, body.priority)
        return await service.json_answer(lambda: answer.whole(output), [output])
    streams = await service.begin([prompt], params, body.priority)
    return service.event_stream(answer.events(streams), streams)


class _ChatAnswer:
    """The answer to one request, in the API's form."""

    def __init__(self, service: Service, body: ChatBody, prompt: list[int]) -> None:
        self._service = service
        self._body = body.without_content()
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": service.model}
        separates = body.separate_reasoning
        self._separates = service.settings.separate_reasoning if separates is None else separates
        self._is_inside = self._separates and service.ends_with_think(prompt)
        self._splitters: dict[int, ReasoningSplitter] = {}

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
                delta = self._delta(choice)
                if delta or choice.logprobs:
                    yield self._chunk(choice.index, delta, chat_logprobs(choice, self._body.top_logprobs))
                if output.finished:
                    yield self._chunk(choice.index, {}, finish_reason=choice.finish_reason)
        if with_usage:
            chunk = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage.body()}
            yield event(chunk)
        yield DONE

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event({**self._head, "object": "chat.completion.chunk", "choices": [choice]})

    def _delta(self, choice: CompletionOutput) -> dict[str, Any]:
        if not self._separates:
            return {"content": choice.text} if choice.text else {}
        reasoning, content = self._split(choice)
        delta = {"reasoning_content": reasoning, "content": content}
        return {name: text for name, text in delta.items() if text}

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        answer = chat_choice(choice, self._body.top_logprobs)
        if self._separates:
            reasoning, content = self._split(choice)
            answer["message"] |= {"reasoning_content": reasoning or None, "content": content}
        return answer

    def _split(self, choice: CompletionOutput) -> tuple[str, str]:
        splitter = self._splitters.setdefault(choice.index, ReasoningSplitter(self._is_inside))
        return splitter.append(choice.text, final=choice.finish_reason is not None)
