"""Endpoints `/v1/completions`, and `/inference/v1/generate` from token ids to token ids, vLLM's for trainers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from nanovllm.client.engine_thread import RequestStream
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams, make_params
from nanovllm.serve.answers import Answer, answer_head
from nanovllm.serve.errors import ERRORS, answers
from nanovllm.serve.openai_format import (
    Completion,
    ShownTokens,
    TextChoice,
    chat_logprobs,
    prompt_positions,
    text_logprobs,
)
from nanovllm.serve.protocol import CompletionBody, GenerateBody, SamplingBody, prompt_list
from nanovllm.serve.service import Service, ServiceDep, make_router

router = make_router(
    prompt=["token_ids", "prompt"], prompts=["prompt"], structured_outputs=["response_format", "structured_outputs"]
)


@router.post("/v1/completions", response_model=None, responses=answers(Completion))
async def completions(body: CompletionBody, service: ServiceDep) -> Response:
    """Complete prompts."""
    service.check_model(body.model)
    given = prompt_list(body.prompt)
    params = _sampling_params(service, body)
    streams = await service.submit(given, params, body, max_tokens=body.max_tokens)
    return await CompletionAnswer(service, streams, body).respond(body.stream)


def _sampling_params(service: Service, body: CompletionBody) -> SamplingParams:
    if not _shows_output(body):
        body = body.model_copy(update={"max_tokens": 1})
    params = service.sampling_params(body)
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise ValueError("echo with logprobs cannot be streamed")
        params.prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
    return params


def _shows_output(body: CompletionBody) -> bool:
    """Whether the answer shows more than an echo; for an echo alone, one token is computed and hidden."""
    return body.max_tokens != 0 or not body.echo


class CompletionAnswer(Answer):
    """The completions of prompts. Choice `i * n + j` is answer j to prompt i."""

    def __init__(self, service: Service, streams: list[RequestStream], body: CompletionBody) -> None:
        super().__init__(service, streams, body.stream_options, answer_head(service, "cmpl", "text_completion"))
        self._num_answers = body.n or 1
        self.shows_output = _shows_output(body)
        self._echo, self._shows_logprobs = bool(body.echo), body.logprobs is not None
        self._shows_prompt_logprobs, self._shown = body.prompt_logprobs is not None, service.shown_tokens(body)
        # The number of characters so far by choice, counted where there are log-probabilities.
        self._num_characters: dict[int, int] = {}

    def _whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for i, output in enumerate(outputs):
            for choice in output.outputs:
                item = self._choice(i * self._num_answers + choice.index, output, choice)
                if self._shows_prompt_logprobs:
                    item["prompt_logprobs"] = prompt_positions(output, self._shown)
                choices.append(item)
        return {**self.head, "choices": choices, "usage": self._usage()}

    def _new_chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for choice in output.outputs:
            yield self._chunk([self._choice(index * self._num_answers + choice.index, output, choice)])

    def _choice(self, index: int, output: RequestOutput, choice: CompletionOutput) -> TextChoice:
        """Return the new part of a choice; the first part includes an echoed prompt."""
        is_first = index not in self._num_characters
        self._num_characters.setdefault(index, 0)
        text = choice.text if self.shows_output else ""
        if self._echo and is_first:
            text = self._prompt_text(output) + text
        item: TextChoice = {"index": index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}
        if self._shows_logprobs:
            item["logprobs"] = self._logprobs(index, output, choice)
        if choice.finish_reason is not None:
            item["stop_reason"] = choice.stop_reason
        if self._shown.ids:
            item["token_ids"] = choice.token_ids if self.shows_output else []
            if is_first:
                item["prompt_token_ids"] = output.prompt_token_ids
        return item

    def _logprobs(self, index: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, list[Any]]:
        """Return log-probabilities of new tokens, after an echoed prompt's, which is not streamed."""
        token_ids = choice.token_ids if self.shows_output else []
        positions: Sequence[dict[int, Logprob] | None] = [*(choice.logprobs or ())][: len(token_ids)]
        first = ""
        if self._echo:
            prompt = output.prompt_token_ids
            token_ids, positions = [*prompt, *token_ids], [*(output.prompt_logprobs or ()), *positions]
            first = self.service.llm.llm.output_processor.decode_token(prompt[0]) or ""
        start = self._num_characters[index]
        logprobs, self._num_characters[index] = text_logprobs(positions, token_ids, self._shown, start, first)
        return logprobs

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        # An incomplete character at the end belongs to the output, which completes it.
        return self.service.decode(output.prompt_token_ids).rstrip("\ufffd")


@router.post("/inference/v1/generate", response_model=None, responses=ERRORS)
async def generate(body: GenerateBody, service: ServiceDep) -> Response:
    """Complete token ids with token ids."""
    service.check_model(body.model)
    values = {name: value for name, value in body.sampling_params.items() if value is not None}
    sampling = SamplingBody.model_validate({"stream": body.stream, "priority": body.priority})
    streams = await service.submit([body.token_ids], make_params({"detokenize": False, **values}), sampling)
    return await GenerateAnswer(service, streams, body).respond(body.stream)


class GenerateAnswer(Answer):
    """The answer to token ids, in the format of vLLM's API."""

    def __init__(self, service: Service, streams: list[RequestStream], body: GenerateBody) -> None:
        super().__init__(service, streams, body.stream_options, {"request_id": body.request_id or uuid4().hex})
        self._shown = ShownTokens(self.requests[0].params.logprobs)

    def _whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,), (answer,) = outputs, self._new_chunks(0, outputs[0])
        return {**answer, "prompt_logprobs": prompt_positions(output, self._shown), "usage": self._usage()}

    def _new_chunks(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        # All choices together, and without usage, which is sent once at the end.
        choices = [
            {
                "index": choice.index,
                "token_ids": choice.token_ids,
                "logprobs": chat_logprobs(choice, self._shown),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ]
        yield {**self.head, "choices": choices}
