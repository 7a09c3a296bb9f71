"""vLLM's names for the engine behind asyncio."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from nanovllm.async_llm import AsyncLLM, OutputStream
from nanovllm.outputs import CompletionOutput, Prompt, RequestOutput
from nanovllm.sampling_params import SamplingParams


class AsyncLLMEngine:
    """`AsyncLLM` with the method names of vLLM's engine; its outputs hold everything so far.

    Args:
        model, kwargs: see `AsyncLLM`.
    """

    def __init__(self, model: str | os.PathLike[str], **kwargs: Any) -> None:
        self.async_llm = AsyncLLM(model, **kwargs)

    async def add_request(
        self, request_id: str, prompt: Prompt | list[int], params: SamplingParams, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a request and return its outputs, as `generate` yields them; raises as `AsyncLLM.generate` does."""
        return _cumulative(await self.async_llm.begin_stream(prompt, params, priority=priority, request_id=request_id))

    async def generate(
        self, prompt: Prompt | list[int], sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt and yield the whole output so far, whenever there are new tokens; see `AsyncLLM.stream`."""
        outputs = await self.add_request(request_id, prompt, sampling_params, priority=priority)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """See `AsyncLLM.abort`."""
        await self.async_llm.abort(request_id)

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self.async_llm.is_running

    @property
    def errored(self) -> bool:
        """Whether an error has closed the engine."""
        return self.async_llm.errored

    def shutdown(self) -> None:
        """Close the engine and free the device."""
        self.async_llm.exit()


async def _cumulative(outputs: OutputStream) -> AsyncGenerator[RequestOutput, None]:
    """Yield outputs that hold everything so far, from those that hold what is new."""
    whole: dict[int, CompletionOutput] = {}
    async with aclosing(outputs):
        async for output in outputs:
            for new in output.outputs:
                before = whole.get(new.index)
                whole[new.index] = new if before is None else _joined(before, new)
            yield replace(output, outputs=[whole[index] for index in sorted(whole)])


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None if new.logprobs is None else [*(before.logprobs or []), *new.logprobs]
    return replace(new, text=before.text + new.text, token_ids=before.token_ids + new.token_ids, logprobs=logprobs)
