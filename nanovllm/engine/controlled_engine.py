"""What is done with an engine between two of its steps: new weights, pauses, memory that comes and goes.

The methods run where the engine is; `Engine.call` reaches them in another process as well.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.driven_engine import DrivenEngine
from nanovllm.engine.engine_state import SLEEP_TAGS, PauseMode
from nanovllm.engine.scheduler import Scheduler
from nanovllm.weights.report import LoadedWeights, LoadFailedError, WeightsRunner


class ControlledEngine(DrivenEngine):
    """The methods of `LLMEngine` that change it between two steps, from any thread; `LLM` says what they do.

    Args:
        weights: changes the model's weights, and its memory; None if nothing does.

    Raises:
        RuntimeError: the engine is closed; or requests are pending, and it is not paused.
    """

    scheduler: Scheduler
    block_manager: BlockManager

    def __init__(self, weights: WeightsRunner | None) -> None:
        super().__init__()
        self._weights_runner = weights

    @property
    @abstractmethod
    def request_ids(self) -> set[int]:
        """Ids of unfinished requests."""

    @abstractmethod
    def abort(self, request_ids: Iterable[int], *, keep_outputs: bool = False) -> None:
        """Drop requests."""

    @abstractmethod
    def is_drained(self) -> bool:
        """Whether a pause that waits has nothing to wait for."""

    @property
    def is_in_process(self) -> bool:
        """See `Engine`."""
        return True

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every engine, which are this one; see `Engine`."""
        return [getattr(self, method)(*args)]

    def load_weights(self, weights: Any, strict: bool) -> LoadedWeights:
        """Write weights, of a folder or pairs of names and tensors, into the model; see `LLM.load_weights`."""
        with self.between_steps(), self._changing_weights("load_weights"):
            loaded: LoadedWeights = self._weights.loader.load(weights, strict)
        return loaded

    def unload_adapter(self) -> bool:
        """Take out the adapter that `load_weights` has merged, and return whether there was one."""
        with self.between_steps(), self._changing_weights("unload_adapter"):
            return bool(self._weights.loader.unload_adapter().count)

    @contextmanager
    def _changing_weights(self, name: str) -> Iterator[None]:
        """Note which weights are missing after the `with` block, also if it fails; name: of the call."""
        self._require_weights(name)
        was_missing = self.state.missing
        try:
            yield
        except LoadFailedError as error:
            self.state.missing = error.missing
            raise
        self.state.missing = self._weights.loader.missing
        if was_missing.count and not self.state.missing.count:
            # Graphs could not be captured before.
            self._weights.wake_up([])

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache, and return whether no request holds blocks of it."""
        with self.between_steps():
            return self.block_manager.reset()

    def pause(self, mode: PauseMode) -> None:
        """Do no more steps, but those of requests that a "wait" waits for, which a later "keep" does not freeze."""
        with self.between_steps():
            if mode == "keep" and self.is_draining():
                return
            self.state.pause_mode = mode
            if mode == "wait":
                self.scheduler.waiting.hold_new()
            elif mode == "abort":
                self.abort(self.request_ids, keep_outputs=True)

    def is_draining(self) -> bool:
        """Whether a pause still waits for requests."""
        state = self.state
        return state.pause_mode == "wait" and state.cannot_run is None and not self.is_drained()

    def resume(self) -> None:
        """Go on after a pause."""
        with self.between_steps():
            self.scheduler.waiting.release_new()
            self.state.pause_mode = None

    def sleep(self, level: int) -> None:
        """Give back the memory of weights, cache and CUDA graphs."""
        with self.between_steps():
            self._require_rest("sleep")
            self.scheduler.preempt_all()
            self.block_manager.reset()
            self.state.asleep = set(SLEEP_TAGS)
            self.state.missing = self._weights.sleep(level == 1)

    def wake_up(self, tags: list[str]) -> None:
        """Take memory again for some of `SLEEP_TAGS`."""
        with self.between_steps():
            if woken := sorted(self.state.asleep.intersection(tags)):
                self._weights.wake_up(woken)
                self.state.asleep = self.state.asleep.difference(woken)

    @property
    def _weights(self) -> WeightsRunner:
        if self._weights_runner is None:
            raise RuntimeError("this engine's runner does not change weights")
        return self._weights_runner

    def _require_rest(self, name: str) -> None:
        self.state.require_no_requests(name, self.request_ids)
        if self.is_draining():
            raise RuntimeError(f"{name}: a pause still waits for requests to end")

    def _require_weights(self, name: str) -> None:
        self._require_rest(name)
        if "weights" in self.state.asleep:
            raise RuntimeError("the weights are asleep: call wake_up(['weights'])")
