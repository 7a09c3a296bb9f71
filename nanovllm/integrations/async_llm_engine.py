"""The asyncio engine with vLLM's names."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.client.async_llm import AsyncLLM
from nanovllm.client.engine_thread import RequestStream
from nanovllm.config import EngineSettings
from nanovllm.engine.engine import Unpicklable
from nanovllm.outputs import CompletionOutput, Logprobs, Prompt, RequestOutput, TokenIds
from nanovllm.sampling_params import SamplingParams

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
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a request and return its outputs, as `generate` yields them; raises like `AsyncLLM.generate`."""
        return _cumulative(await self.async_llm.begin_stream(prompt, params, priority=priority, request_id=request_id))

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


async def _cumulative(stream: RequestStream) -> AsyncGenerator[RequestOutput, None]:
    """Yield a request's outputs so far, whenever there are new parts."""
    whole: dict[int, CompletionOutput] = {}
    async with aclosing(stream):
        async for output in stream:
            for new in output.outputs:
                whole[new.index] = _joined(whole[new.index], new) if new.index in whole else new
            yield replace(output, outputs=[whole[index] for index in sorted(whole)])


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = new.logprobs
    if isinstance(before.logprobs, Logprobs) and isinstance(new.logprobs, Logprobs):
        logprobs = before.logprobs + new.logprobs
    return replace(new, text=before.text + new.text, token_ids=before.token_ids + new.token_ids, logprobs=logprobs)
