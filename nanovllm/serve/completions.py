"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from nanovllm.async_llm import OutputStream
from nanovllm.logprobs import Logprob
from nanovllm.openai_format import ENDPOINTS, text_logprobs
from nanovllm.outputs import CompletionOutput, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.event_stream import DONE, event
from nanovllm.serve.protocol import CompletionBody, prompt_list
from nanovllm.serve.service import Service
from nanovllm.serve.usage import Usage

_ENDPOINT = ENDPOINTS["/v1/completions"]


async def answer_completion(service: Service, body: CompletionBody) -> Response:
    """Complete prompts, whole or as the completions come."""
    service.check_model(body.model)
    prompts = prompt_list(body.prompt)
    answer = _CompletionAnswer(service, body, prompts)
    if not body.stream:
        outputs = await service.complete(prompts, answer.params, body.priority)
        return await service.json_answer(lambda: answer.whole(outputs), outputs)
    streams = await service.begin(prompts, answer.params, body.priority)
    return service.event_stream(answer.events(streams), streams)


class _CompletionAnswer:
    """The answer to one request, in the API's form. Choice `i * n + j` is answer j to prompt i."""

    def __init__(self, service: Service, body: CompletionBody, prompts: list[Any]) -> None:
        self._service = service
        self._num_answers = body.n or 1
        # An echo alone, whose one token is not shown.
        self._shows_output = body.max_tokens != 0 or not body.echo
        self.params = self._sampling_params(body)
        self._body = body.without_content()
        service.check_num_outputs(self.params.n * len(prompts))
        self._head = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
        }

    def _sampling_params(self, body: CompletionBody) -> SamplingParams:
        if not self._shows_output:
            body = body.model_copy(update={"max_tokens": 1})
        params = self._service.sampling_params(body, _ENDPOINT)
        if body.best_of is not None and body.best_of != self._num_answers:
            if body.best_of < self._num_answers or body.stream:
                raise ValueError(f"best_of={body.best_of} must be at least n, and cannot be streamed")
            # The choice among them is by log-probability.
            params = replace(params, n=body.best_of, logprobs=params.logprobs or 0)
        if body.echo and body.logprobs is not None:
            if body.stream:
                raise ValueError("echo with logprobs cannot be streamed")
            params.prompt_logprobs = body.logprobs
        return params

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """Return the body of a whole answer."""
        usage, choices = Usage(), []
        for i, output in enumerate(outputs):
            for j, choice in enumerate(self._best(output)):
                text, logprobs = self._shown(choice, 0)
                if self._body.echo:
                    text, logprobs = self._echoed(output, choice)
                choices.append(self._choice(i * self._num_answers + j, text, logprobs, choice.finish_reason))
            usage.add(output if self._shows_output else replace(output, outputs=[]))
        return {**self._head, "choices": choices, "usage": usage.body()}

    async def events(self, streams: list[OutputStream]) -> AsyncIterator[bytes]:
        """Yield the answer's events."""
        options, usage = self._body.stream_options, Usage()
        lengths: dict[int, int] = {}
        async for i, output in self._service.read(streams):
            usage.add(output if self._shows_output else replace(output, outputs=[]))
            for choice in output.outputs:
                index = i * self._num_answers + choice.index
                text, logprobs = self._shown(choice, lengths.get(index, 0))
                if self._body.echo and index not in lengths:
                    text = self._prompt_text(output) + text
                lengths[index] = lengths.get(index, 0) + len(text)
                yield event({**self._head, "choices": [self._choice(index, text, logprobs, choice.finish_reason)]})
        if options is not None and options.include_usage:
            yield event({**self._head, "choices": [], "usage": usage.body()})
        yield DONE

    def _best(self, output: RequestOutput) -> list[CompletionOutput]:
        if len(output.outputs) <= self._num_answers:
            return output.outputs
        # By the mean log-probability of a token, as in OpenAI's API.
        key = [-(choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids)) for choice in output.outputs]
        return [choice for _, _, choice in sorted(zip(key, range(len(key)), output.outputs, strict=True))][
            : self._num_answers
        ]

    def _shown(self, choice: CompletionOutput, offset: int) -> tuple[str, dict[str, Any] | None]:
        """Return text and log-probabilities that are shown; `offset`: characters before the text."""
        if not self._shows_output:
            return "", None
        if choice.logprobs is None or self._body.logprobs is None:
            return choice.text, None
        return choice.text, text_logprobs(choice.logprobs, choice.token_ids, offset)

    def _echoed(self, output: RequestOutput, choice: CompletionOutput) -> tuple[str, dict[str, Any] | None]:
        """Return text and log-probabilities with those of the prompt before them."""
        prompt, text = self._prompt_text(output), choice.text if self._shows_output else ""
        if output.prompt_logprobs is None:
            return prompt + text, None
        positions: list[Mapping[int, Logprob] | None] = [*output.prompt_logprobs]
        token_ids = list(output.prompt_token_ids)
        if self._shows_output:
            positions += choice.logprobs or []
            token_ids += choice.token_ids
        first = self._service.llm.llm.output_processor.decode_token(token_ids[0]) or ""
        return prompt + text, text_logprobs(positions, token_ids, first_token=first)

    def _prompt_text(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._service.decode(output.prompt_token_ids)

    def _choice(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
