"""Endpoint `/v1/chat/completions`, also the target of other APIs' translations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from nanovllm.client.engine_thread import RequestStream
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serve.answers import Answer, answer_head
from nanovllm.serve.errors import answers
from nanovllm.serve.openai_format import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    chat_choice,
    chat_finish_reason,
    chat_logprobs,
    prompt_positions,
)
from nanovllm.serve.protocol import ChatBody
from nanovllm.serve.service import Service, ServiceDep, make_router
from nanovllm.text.answer_parsers import ToolCallDelta
from nanovllm.text.answers import AnswerOptions, AnswerSplitter
from nanovllm.text.chat_template import plain_messages

router = make_router(
    prompt=["messages"], max_tokens=["max_completion_tokens"], logprobs=["top_logprobs"],
    structured_outputs=["tools", "response_format", "structured_outputs"],
)  # fmt: skip


@router.post("/v1/chat/completions", response_model=None, responses=answers(ChatCompletion))
async def chat_completions(body: ChatBody, service: ServiceDep) -> Response:
    """Answer messages."""
    streams, splitters = await submit_chat(service, body)
    return await ChatAnswer(service, streams, splitters, body).respond(body.stream)


async def submit_chat(
    service: Service, body: ChatBody, *, cuts_output: bool = False
) -> tuple[list[RequestStream], list[AnswerSplitter]]:
    """Queue a chat and return what splits each of its answers; ValueError or ApiError if the request is invalid.

    `cuts_output`: whether `max_tokens` may exceed the model's room and is reduced to it.
    """
    service.check_model(body.model)
    options, params = answer_options(service, body), service.sampling_params(body)
    max_tokens = None if cuts_output else body.max_completion_tokens or body.max_tokens
    template, constrained = service.template(body, options.template_tools()), options.constrain(params)
    streams = await service.submit([body.messages], constrained, body, template=template, max_tokens=max_tokens)
    return streams, options.splitters(streams[0].state.request.token_ids, params, body.n or 1)


def answer_options(service: Service, body: ChatBody) -> AnswerOptions:
    """Return a request's options for tool calls and reasoning; ValueError if a required tool does not exist."""
    settings, separates = service.settings, body.separate_reasoning
    if separates is None:
        separates = settings.separate_reasoning or settings.reasoning_parser is not None
    given = body.model_dump(include={"tools", "tool_choice"}, exclude_unset=True)
    form, parallel = service.answer_format, body.parallel_tool_calls
    return AnswerOptions.of(form, given.get("tools"), given.get("tool_choice"), parallel, separates)


class ChatAnswer(Answer):
    """An answer to messages."""

    def __init__(
        self, service: Service, streams: list[RequestStream], splitters: list[AnswerSplitter], body: ChatBody
    ) -> None:
        super().__init__(
            service, streams, body.stream_options, answer_head(service, "chatcmpl", "chat.completion.chunk")
        )
        self._echo, self._shows_prompt_logprobs = _echoed(body), body.prompt_logprobs is not None
        self._splitters, self._shown = splitters, service.shown_tokens(body)

    def _whole(self, outputs: list[RequestOutput]) -> ChatCompletion:
        (output,) = outputs
        pairs = zip(output.outputs, self._splitters, strict=True)
        choices = [chat_choice(choice, splitter, self._shown, self._echo) for choice, splitter in pairs]
        answer: Any = {**self.head, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        if self._shows_prompt_logprobs:
            answer["prompt_logprobs"] = prompt_positions(output, self._shown)
        return answer | self._prompt_ids()

    def _first_chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the role of each choice, with echoed text."""
        for index in range(len(self._splitters)):
            delta: AnswerMessage = {"role": "assistant", "content": self._echo, "refusal": None}
            yield self._chunk([_delta_choice(index, delta)]) | self._prompt_ids()

    def _new_chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Yield new parts of each choice; the first of several parts has the tokens."""
        for choice in output.outputs:
            splitter = self._splitters[choice.index]
            items = [_delta_choice(choice.index, delta) for delta in _deltas(choice, splitter)]
            shows_ids = self._shown.ids and bool(choice.token_ids)
            if not items and (shows_ids or choice.logprobs):
                items.append(_delta_choice(choice.index, {}))
            if items and choice.logprobs is not None:
                items[0]["logprobs"] = chat_logprobs(choice, self._shown)
            if items and shows_ids:
                items[0]["token_ids"] = choice.token_ids
            yield from (self._chunk([item]) for item in items)
            if output.finished:
                last = _delta_choice(choice.index, {}, chat_finish_reason(choice, splitter))
                yield self._chunk([{**last, "stop_reason": choice.stop_reason}])

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": [*self.requests[0].token_ids]} if self._shown.ids else {}


def _delta_choice(index: int, delta: AnswerMessage, finish_reason: str | None = None) -> ChatChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _deltas(choice: CompletionOutput, splitter: AnswerSplitter) -> list[AnswerMessage]:
    new, delta = splitter.append(choice.text, choice.finish_reason is not None), AnswerMessage()
    if new.reasoning:
        delta["reasoning"] = delta["reasoning_content"] = new.reasoning
    if new.content:
        delta["content"] = new.content
    # One piece of a call per chunk: clients join pieces across chunks, but not within a chunk.
    calls: list[AnswerMessage] = [{"tool_calls": [_call_delta(call, splitter)]} for call in new.calls]
    return [delta, *calls] if delta else calls


def _call_delta(call: ToolCallDelta, splitter: AnswerSplitter) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": splitter.call_ids[call.index], "type": "function", "function": function}


def _echoed(body: ChatBody) -> str:
    """Return the text before the answer: the last message, if it is the assistant's and echoed."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    return str(plain_messages([last.model_dump(exclude_unset=True)])[0].get("content") or "")
