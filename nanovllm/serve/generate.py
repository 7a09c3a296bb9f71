"""Endpoint `/inference/v1/generate` from token ids to token ids, vLLM's for trainers and routers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.serve.answers import Answer
from nanovllm.serve.openai_format import chat_logprobs, prompt_positions
from nanovllm.serve.protocol import GenerateBody, SamplingBody
from nanovllm.serve.routing import ERRORS, ServiceDep, make_router, within_limits
from nanovllm.serve.service import Service, StreamList

router = make_router()
_NAMES = {item.name for item in fields(SamplingParams)}


@router.post("/inference/v1/generate", response_model=None, responses=ERRORS)
async def generate(body: GenerateBody, request: Request, service: ServiceDep) -> Response:
    """Complete token ids with token ids."""
    return await within_limits(request, service, _answer(service, body))


async def _answer(service: Service, body: GenerateBody) -> Response:
    service.check_model(body.model)
    params = _sampling_params(body.sampling_params)
    sampling = SamplingBody.model_validate({"stream": body.stream, "priority": body.priority})
    streams = await service.submit([body.token_ids], params, sampling)
    return await GenerateAnswer(service, streams, body).respond(body.stream)


def _sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Return sampling parameters given by our names, which are vLLM's."""
    unknown = sorted(given.keys() - _NAMES)
    if unknown:
        raise ValueError(f"sampling_params has {unknown[0]!r:.80}, which is none of {', '.join(sorted(_NAMES))}")
    values = {name: value for name, value in given.items() if value is not None}
    if isinstance(values.get("structured_outputs"), dict):
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    return SamplingParams(**{"detokenize": False, **values})


class GenerateAnswer(Answer):
    """The answer to token ids, in the format of vLLM's API.

    Args:
        service: the service.
        streams: output stream of the single prompt.
        body: the request.
    """

    def __init__(self, service: Service, streams: StreamList, body: GenerateBody) -> None:
        super().__init__(service, streams, body.stream_options, {"request_id": body.request_id or uuid4().hex})
        self._num_logprobs = self.requests[0].params.logprobs

    def _whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,), (choices,) = outputs, self._new_chunks(0, outputs[0])
        return {**self._chunk(choices), "prompt_logprobs": prompt_positions(output), "usage": self.usage.body()}

    def _new_chunks(self, index: int, output: RequestOutput) -> Iterator[list[dict[str, Any]]]:
        """Yield new parts of all choices together."""
        yield [
            {
                "index": choice.index,
                "token_ids": choice.token_ids,
                "logprobs": chat_logprobs(choice, self._num_logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in output.outputs
        ]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # Without usage, which is sent once at the end.
        return {**self.head, "choices": choices}
