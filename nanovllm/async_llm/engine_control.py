"""What a training loop does with an engine behind asyncio, between two of its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from nanovllm.async_llm.engine_thread import EngineThread
from nanovllm.engine.engine_state import PauseMode
from nanovllm.llm import LLM
from nanovllm.text.engine_control import Weights, load_weights, warn_of_nans
from nanovllm.weights.report import LoadedWeights

Result = TypeVar("Result")
_WAKE_SECONDS = 0.02


class AsyncEngineControl:
    """The methods of `AsyncLLM` that change the engine between two steps; each is that of `LLM`."""

    llm: LLM
    _thread: EngineThread

    async def load_weights(self, weights: Weights, *, strict: bool = False) -> int:
        """Write weights into the model that runs; see `LLM.load_weights`."""
        loaded = await self.load_and_report(weights, strict=strict)
        warn_of_nans(loaded.nan_names)
        return loaded.count

    async def load_and_report(self, weights: Weights, *, strict: bool = False) -> LoadedWeights:
        """Do the same, and return, instead of a warning, which tensors have NaN."""
        return await self._between_steps(partial(load_weights, self.llm.engine_client.engine, weights, strict))

    async def unload_adapter(self) -> bool:
        """Take an adapter out; see `LLM.unload_adapter`."""
        return await self._between_steps(self.llm.unload_adapter)

    async def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache; see `LLM.reset_prefix_cache`."""
        return await self._between_steps(self.llm.reset_prefix_cache)

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Do no more steps until `resume`; see `LLM.pause`."""
        await self._between_steps(partial(self.llm.pause, mode))

    async def resume(self) -> None:
        """Go on after a `pause`."""
        await self._between_steps(self.llm.resume)

    async def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`; see `LLM.sleep`."""
        await self._between_steps(partial(self.llm.sleep, level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again; see `LLM.wake_up`."""
        await self._between_steps(partial(self.llm.wake_up, tags))

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep."""
        return self.llm.is_sleeping

    @property
    def is_paused(self) -> bool:
        """Whether a `pause` has not ended."""
        return self.llm.is_paused

    async def _between_steps(self, change: Callable[[], Result]) -> Result:
        """Call a function, in a thread of its own, that the engine's thread lets in between two steps."""
        self._thread.require_running()
        changed = asyncio.get_running_loop().run_in_executor(None, change)
        while True:
            # It may have slept when the function began to wait for it.
            self._thread.wake()
            done, _ = await asyncio.wait([changed], timeout=_WAKE_SECONDS)
            if done:
                return await changed
