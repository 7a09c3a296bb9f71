"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from uuid import uuid4

from starlette.responses import Response

from nanovllm.client.request_stream import RequestStream
from nanovllm.openai_answers import (
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChunkChoice,
    FunctionDelta,
    ToolCallPiece,
)
from nanovllm.openai_format import (
    ENDPOINTS,
    chat_choice,
    chat_finish_reason,
    chat_logprobs,
    prompt_positions,
    template_values,
)
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.serve.event_stream import DONE, event
from nanovllm.serve.protocol import ChatBody
from nanovllm.serve.reasoning import answer_options
from nanovllm.serve.service import Service
from nanovllm.serve.usage import Usage
from nanovllm.text.answers import AnswerDelta, AnswerSplitter
from nanovllm.text.chat_template import plain_messages
from nanovllm.text.tool_call_reader import ToolCallDelta

_ENDPOINT = ENDPOINTS["/v1/chat/completions"]
_TEMPLATE_FIELDS = {"chat_template_kwargs", "documents", "reasoning_effort"}


async def answer_chat(service: Service, body: ChatBody) -> Response:
    """Answer messages, whole or as they come."""
    service.check_model(body.model)
    options, given = answer_options(service, body), service.sampling_params(body, _ENDPOINT)
    params = options.constrain(given)
    token_ids = await service.render_chat(
        body.messages,
        template_values(body.model_dump(include=_TEMPLATE_FIELDS, exclude_none=True)),
        tools=options.template_tools(),
        chat_template=body.chat_template,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        max_prompt_tokens=service.max_prompt_tokens(body, params),
    )
    prompts = [service.salted({"prompt_token_ids": token_ids}, body)]
    service.check_room(prompts, body.max_completion_tokens or body.max_tokens, "messages")
    answer = _ChatAnswer(service, body, token_ids, options.make_splitter(token_ids, given))
    if not body.stream:
        (output,) = await service.complete(prompts, params, body.priority)
        return await service.json_answer(lambda: answer.whole(output), [output], params)
    streams = await service.begin(prompts, params, body.priority)
    return service.event_stream(answer.events(streams), streams)


class _ChatAnswer:
    """The answer to one request, in the API's form."""

    def __init__(
        self, service: Service, body: ChatBody, prompt: list[int], make_splitter: Callable[[], AnswerSplitter]
    ) -> None:
        self._service = service
        self._id, self._created = f"chatcmpl-{uuid4().hex}", int(time.time())
        self._echo = _echoed(body)
        self._body = body.without_content()
        self._prompt = prompt
        self._shown = service.shown_tokens(body)
        self._usage = Usage(len(prompt), body.stream_options)
        self._make_splitter = make_splitter
        self._splitters: dict[int, AnswerSplitter] = {}

    def whole(self, output: RequestOutput) -> ChatCompletion:
        """Return the body of a whole answer."""
        self._usage.add(output)
        answer: ChatCompletion = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._service.model,
            "system_fingerprint": self._service.fingerprint,
            "choices": [
                chat_choice(choice, self._make_splitter(), self._shown, self._echo) for choice in output.outputs
            ],
            "usage": self._usage.body(),
        }
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_positions(output, self._shown.names)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompt
        return answer

    async def events(self, streams: list[RequestStream]) -> AsyncIterator[bytes]:
        """Yield the answer's events."""
        for index in range(self._body.n or 1):
            begin: ChatDelta = {"role": "assistant", "content": self._echo, "refusal": None}
            first = self._chunk(self._choice_delta(index, begin))
            if self._body.return_token_ids:
                first["prompt_token_ids"] = self._prompt
            yield event(first)
        async for _, output in self._service.read(streams):
            self._usage.add(output)
            for choice in output.outputs:
                for item in self._new(choice):
                    yield event(self._chunk(item))
                if output.finished:
                    last = self._choice_delta(
                        choice.index, {}, chat_finish_reason(choice, self._splitters[choice.index])
                    )
                    yield event(self._chunk({**last, "stop_reason": choice.stop_reason}))
        if self._usage.is_shown:
            yield event({**self._chunk(), "usage": self._usage.body()})
        yield DONE

    def _chunk(self, *choices: ChunkChoice) -> ChatChunk:
        chunk: ChatChunk = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._service.model,
            "system_fingerprint": self._service.fingerprint,
            "choices": [*choices],
        }
        if self._usage.is_shown:
            chunk["usage"] = self._usage.so_far()
        return chunk

    def _choice_delta(self, index: int, delta: ChatDelta, finish_reason: str | None = None) -> ChunkChoice:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _new(self, choice: CompletionOutput) -> list[ChunkChoice]:
        """Return what is new in an answer; the first of several has the tokens."""
        shows_ids = bool(self._body.return_token_ids and choice.token_ids)
        deltas = self._deltas(choice)
        if not deltas and (shows_ids or choice.logprobs):
            deltas.append({})
        items = [self._choice_delta(choice.index, delta) for delta in deltas]
        if items and choice.logprobs is not None:
            items[0]["logprobs"] = chat_logprobs(choice, self._shown.num_logprobs, self._shown.names)
        if items and shows_ids:
            items[0]["token_ids"] = choice.token_ids
        return items

    def _deltas(self, choice: CompletionOutput) -> list[ChatDelta]:
        new, delta = self._split(choice), ChatDelta()
        if new.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = new.reasoning
        if new.content:
            delta["content"] = new.content
        # Each piece of a call alone: clients add up those of one call from chunk to chunk, but not within one.
        calls: list[ChatDelta] = [{"tool_calls": [self._call_delta(choice.index, call)]} for call in new.calls]
        return [delta, *calls] if delta else calls

    def _call_delta(self, index: int, call: ToolCallDelta) -> ToolCallPiece:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function: FunctionDelta = {"name": call.name, "arguments": call.arguments}
        call_id = self._splitters[index].call_ids[call.index]
        return {"index": call.index, "id": call_id, "type": "function", "function": function}

    def _split(self, choice: CompletionOutput) -> AnswerDelta:
        if choice.index not in self._splitters:
            self._splitters[choice.index] = self._make_splitter()
        return self._splitters[choice.index].append(choice.text, choice.finish_reason is not None)


def _echoed(body: ChatBody) -> str:
    """Return what comes before the answer: the last message, if it is to be echoed and is the assistant's."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    return str(plain_messages([last.model_dump(exclude_unset=True)])[0].get("content") or "")
