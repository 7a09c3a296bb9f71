"""The asyncio engine with vLLM's names."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.client.async_llm import AsyncLLM
from nanovllm.client.engine_thread import RequestStream
from nanovllm.client.model_client import EngineSettings
from nanovllm.engine.engine import Unpicklable
from nanovllm.outputs import CompletionOutput, Logprobs, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.input_processor import Prompt, TokenIds

if TYPE_CHECKING:
    # Part of `typing` since Python 3.11.
    from typing_extensions import Unpack


class AsyncLLMEngine(Unpicklable):
    """`AsyncLLM` with the method names of vLLM's engine and cumulative outputs.

    Args:
        model, max_pending_requests, kwargs: see `AsyncLLM`.

    Example:
        >>> async def main() -> None:
        ...     engine = AsyncLLMEngine(BUNDLED_MODEL)
        ...     params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        ...     async for output in engine.generate("count to 5", params, "request 1"):
        ...         num_tokens = len(output.outputs[0].token_ids)
        ...     print(num_tokens)
        ...     engine.shutdown()
        >>> asyncio.run(main())
        4
    """

    def __init__(
        self, model: str | os.PathLike[str], *, max_pending_requests: int = 4096, **kwargs: Unpack[EngineSettings]
    ) -> None:
        self.async_llm = AsyncLLM(model, max_pending_requests=max_pending_requests, **kwargs)

    async def add_request(
        self, request_id: str, prompt: Prompt | TokenIds, params: SamplingParams, *, priority: int = 0
    ) -> CumulativeStream:
        """Queue a request and return its outputs, as `generate` yields them; raises like `AsyncLLM.generate`."""
        outputs = await self.async_llm.begin_stream(prompt, params, priority=priority, request_id=request_id)
        return CumulativeStream(outputs)

    async def generate(
        self, prompt: Prompt | TokenIds, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt and yield the cumulative output whenever there are new tokens; see `AsyncLLM.stream`."""
        outputs = await self.add_request(request_id, prompt, sampling_params, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a pending request with its output so far; other ids are ignored."""
        await self.async_llm.abort(request_id)

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self.async_llm.is_running

    @property
    def errored(self) -> bool:
        """Whether an error has closed the engine."""
        return self.async_llm.errored

    def shutdown(self) -> None:
        """Close the engine and free the device."""
        self.async_llm.exit()


class CumulativeStream:
    """An asynchronous iterator over one request's cumulative outputs."""

    def __init__(self, outputs: RequestStream) -> None:
        self._outputs = outputs
        self._whole: dict[int, CompletionOutput] = {}

    def __aiter__(self) -> CumulativeStream:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await anext(self._outputs)
        for new in output.outputs:
            before = self._whole.get(new.index)
            self._whole[new.index] = new if before is None else _joined(before, new)
        return replace(output, outputs=[self._whole[index] for index in sorted(self._whole)])

    async def aclose(self) -> None:
        """Abort the request unless it is finished."""
        await self._outputs.aclose()


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = new.logprobs
    if isinstance(before.logprobs, Logprobs) and isinstance(new.logprobs, Logprobs):
        logprobs = before.logprobs + new.logprobs
    return replace(new, text=before.text + new.text, token_ids=before.token_ids + new.token_ids, logprobs=logprobs)
