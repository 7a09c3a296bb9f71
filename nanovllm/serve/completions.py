"""`POST /v1/completions`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

from starlette.responses import Response

from nanovllm.client.request_stream import RequestStream
from nanovllm.openai_answers import Completion, TextChoice, TextLogprobs
from nanovllm.openai_format import ENDPOINTS, prompt_positions, text_logprobs
from nanovllm.outputs import CompletionOutput, RequestOutput, TokensPrompt
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.event_stream import DONE, event
from nanovllm.serve.field_types import prompt_list
from nanovllm.serve.protocol import CompletionBody
from nanovllm.serve.service import Service
from nanovllm.serve.text_offsets import TextOffsets
from nanovllm.serve.usage import Usage
from nanovllm.text.detokenizer import decode_options

_ENDPOINT = ENDPOINTS["/v1/completions"]


async def answer_completion(service: Service, body: CompletionBody) -> Response:
    """Complete prompts, whole or as the completions come."""
    service.check_model(body.model)
    given = prompt_list(body.prompt)
    params = _sampling_params(service, body)
    service.check_num_outputs(params.n * len(given))
    prompts = await service.encode(given, body, params)
    service.check_room(prompts, body.max_tokens, "prompt")
    answer = _CompletionAnswer(service, body, params, prompts)
    if not body.stream:
        outputs = await service.complete(prompts, params, body.priority)
        return await service.json_answer(lambda: answer.whole(outputs), outputs, params)
    streams = await service.begin(prompts, params, body.priority)
    return service.event_stream(answer.events(streams), streams)


def _sampling_params(service: Service, body: CompletionBody) -> SamplingParams:
    """Return a request's sampling parameters.

    Raises:
        ValueError: see `Service.sampling_params`, or they do not go together.
    """
    if not _shows_output(body):
        body = body.model_copy(update={"max_tokens": 1})
    params = service.sampling_params(body, _ENDPOINT)
    num_answers = body.n or 1
    if body.best_of is not None and body.best_of != num_answers:
        if body.best_of < num_answers or body.stream:
            raise ValueError(f"best_of={body.best_of} must be at least n, and cannot be streamed")
        # The choice among them is by log-probability.
        params = replace(params, n=body.best_of, logprobs=params.logprobs or 0)
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise ValueError("echo with logprobs cannot be streamed")
        params.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    return params


def _shows_output(body: CompletionBody) -> bool:
    """Whether there is more than an echo, after which one token is computed that is not shown."""
    return body.max_tokens != 0 or not body.echo


class _CompletionAnswer:
    """The answer to one request, in the API's form. Choice `i * n + j` is answer j to prompt i."""

    def __init__(
        self, service: Service, body: CompletionBody, params: SamplingParams, prompts: list[TokensPrompt]
    ) -> None:
        self._service = service
        self._params = params
        self._num_answers = body.n or 1
        self._shows_output = _shows_output(body)
        self._body = body.without_content()
        self._names = service.shown_tokens(body).names
        self._usage = Usage(sum(len(prompt["prompt_token_ids"]) for prompt in prompts), body.stream_options)
        self._id, self._created = f"cmpl-{uuid4().hex}", int(time.time())
        # Of each choice: characters that were sent, where its tokens begin, and tokens that wait for their text.
        self._lengths: dict[int, int] = {}
        self._offsets: dict[int, TextOffsets] = {}
        self._waiting: dict[int, TextLogprobs] = {}

    def whole(self, outputs: list[RequestOutput]) -> Completion:
        """Return the body of a whole answer."""
        choices = []
        for i, output in enumerate(outputs):
            for j, choice in enumerate(self._best(output)):
                item = self._choice(i * self._num_answers + j, output, choice)
                if self._body.echo and item["logprobs"] is not None:
                    item["logprobs"] = _joined(self._prompt_logprobs(output), item["logprobs"])
                if self._body.prompt_logprobs is not None:
                    item["prompt_logprobs"] = prompt_positions(output, self._names)
                choices.append(item)
            self._usage.add(output if self._shows_output else replace(output, outputs=[]))
        return {**self._answer(*choices), "usage": self._usage.body()}

    async def events(self, streams: list[RequestStream]) -> AsyncIterator[bytes]:
        """Yield the answer's events."""
        async for i, output in self._service.read(streams):
            self._usage.add(output if self._shows_output else replace(output, outputs=[]))
            for choice in output.outputs:
                answer = self._answer(self._choice(i * self._num_answers + choice.index, output, choice))
                if self._usage.is_shown:
                    answer["usage"] = self._usage.so_far()
                yield event(answer)
        if self._usage.is_shown:
            yield event({**self._answer(), "usage": self._usage.body()})
        yield DONE

    def _answer(self, *choices: TextChoice) -> Completion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.model,
            "system_fingerprint": self._service.fingerprint,
            "choices": [*choices],
        }

    def _best(self, output: RequestOutput) -> list[CompletionOutput]:
        if len(output.outputs) <= self._num_answers:
            return output.outputs
        # By the mean log-probability of a token, as in OpenAI's API.
        key = [-(choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids)) for choice in output.outputs]
        return [choice for _, _, choice in sorted(zip(key, range(len(key)), output.outputs, strict=True))][
            : self._num_answers
        ]

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> TextChoice:
        """Return what is new in a choice; the first time with the prompt, if that is asked for."""
        is_first = index not in self._lengths
        text = self._prompt_text(output) if self._body.echo and is_first else ""
        start = self._lengths.get(index, len(text))
        text += choice.text if self._shows_output else ""
        self._lengths[index] = self._lengths.get(index, 0) + len(text)
        item: TextChoice = {"index": index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}
        if choice.logprobs is not None and self._body.logprobs is not None:
            if index not in self._offsets:
                options, prompt = decode_options(self._params), output.prompt_token_ids
                self._offsets[index] = TextOffsets(self._service.tokenizer, start, prompt, **options)
            item["logprobs"] = self._logprobs(index, choice)
        if choice.finish_reason is not None:
            item["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            item["token_ids"] = choice.token_ids if self._shows_output else []
            if is_first:
                item["prompt_token_ids"] = output.prompt_token_ids
        return item

    def _logprobs(self, index: int, choice: CompletionOutput) -> TextLogprobs:
        """Return the log-probabilities of new tokens."""
        if not self._shows_output or choice.logprobs is None:
            return text_logprobs([], [], [])
        length = self._lengths[index]
        offsets = self._offsets[index].take(choice.token_ids)
        logprobs = text_logprobs(choice.logprobs, choice.token_ids, offsets, names=self._names)
        logprobs = _joined(self._waiting.pop(index, None), logprobs)
        if choice.finish_reason is not None:
            # After a stop string there is no text.
            logprobs["text_offset"] = [min(offset, length) for offset in logprobs["text_offset"]]
            return logprobs
        # Text that may become a stop string is held back.
        num_sent = bisect_left(logprobs["text_offset"], length)
        self._waiting[index] = _part(logprobs, slice(num_sent, None))
        return _part(logprobs, slice(num_sent))

    def _prompt_logprobs(self, output: RequestOutput) -> TextLogprobs:
        token_ids, text, llm = output.prompt_token_ids, self._prompt_text(output), self._service.llm.llm
        # Special tokens that the tokenizer has added are not in the text.
        offsets = TextOffsets(llm.tokenizer, skip_special_tokens=self._service.decode(token_ids) != text)
        first = llm.output_processor.decode_token(token_ids[0]) or ""
        positions = output.prompt_logprobs or [None] * len(token_ids)
        places = [min(offset, len(text)) for offset in offsets.take(token_ids)]
        return text_logprobs(positions, token_ids, places, first, self._names)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        # A character that token ids begin is the output's, which completes it.
        return self._service.decode(output.prompt_token_ids).rstrip("\ufffd")


def _joined(first: TextLogprobs | None, second: TextLogprobs) -> TextLogprobs:
    if first is None:
        return second
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def _part(logprobs: TextLogprobs, part: slice) -> TextLogprobs:
    return {
        "tokens": logprobs["tokens"][part],
        "token_logprobs": logprobs["token_logprobs"][part],
        "top_logprobs": logprobs["top_logprobs"][part],
        "text_offset": logprobs["text_offset"][part],
    }
