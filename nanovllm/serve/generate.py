"""`POST /inference/v1/generate`: token ids in, token ids out, as vLLM has it for trainers and routers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any
from uuid import uuid4

from starlette.responses import Response

from nanovllm.client.request_stream import RequestStream
from nanovllm.openai_format import chat_logprobs, prompt_positions
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.serve.event_stream import DONE, event
from nanovllm.serve.protocol import GenerateBody
from nanovllm.serve.service import Service
from nanovllm.serve.usage import Usage

_NAMES = {item.name for item in fields(SamplingParams)}


async def answer_generate(service: Service, body: GenerateBody) -> Response:
    """Complete token ids, whole or as they come."""
    service.check_model(body.model)
    params = service.limited(_sampling_params(body.sampling_params))
    answer = _GenerateAnswer(service, body, params)
    prompts = [body.token_ids]
    if not body.stream:
        outputs = await service.complete(prompts, params, body.priority)
        return await service.json_answer(lambda: answer.whole(outputs[0]), outputs, params)
    streams = await service.begin(prompts, params, body.priority)
    return service.event_stream(answer.events(streams), streams)


def _sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Return the parameters that a client gives by our names, which are vLLM's."""
    unknown = sorted(given.keys() - _NAMES)
    if unknown:
        raise ValueError(f"sampling_params has {unknown[0]!r:.80}, which is none of {', '.join(sorted(_NAMES))}")
    values = {name: value for name, value in given.items() if value is not None}
    if isinstance(values.get("structured_outputs"), dict):
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    return SamplingParams(**values, detokenize=False) if "detokenize" not in values else SamplingParams(**values)


class _GenerateAnswer:
    """The answer to one request, in the form of vLLM's API."""

    def __init__(self, service: Service, body: GenerateBody, params: SamplingParams) -> None:
        self._service = service
        self._usage = Usage(len(body.token_ids), body.stream_options)
        self._params = params
        self._head = {"request_id": body.request_id or uuid4().hex}

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the body of a whole answer."""
        self._usage.add(output)
        prompt_logprobs = prompt_positions(output)
        return {
            **self._head,
            "choices": self._choices(output),
            "prompt_logprobs": prompt_logprobs,
            "usage": self._usage.body(),
        }

    async def events(self, streams: list[RequestStream]) -> AsyncIterator[bytes]:
        """Yield the answer's events."""
        async for _, output in self._service.read(streams):
            self._usage.add(output)
            yield event({**self._head, "choices": self._choices(output)})
        if self._usage.is_shown:
            yield event({**self._head, "choices": [], "usage": self._usage.body()})
        yield DONE

    def _choices(self, output: RequestOutput) -> list[dict[str, Any]]:
        return [
            {
                "index": choice.index,
                "token_ids": choice.token_ids,
                "logprobs": chat_logprobs(choice, self._params.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ]
