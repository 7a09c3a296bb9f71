"""Steps of an engine, and what is done with it between two of them: new weights, pauses, memory that comes and goes."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any, get_args

from nanovllm.engine.call_guard import Call
from nanovllm.engine.engine_state import SLEEP_TAGS, PauseMode
from nanovllm.engine.protocol import Engine
from nanovllm.outputs import StepResult
from nanovllm.text.engine_client import EngineClient
from nanovllm.utils.checks import check_bool
from nanovllm.utils.remote import absolute_folder
from nanovllm.weights.files import write_tensors
from nanovllm.weights.model_weights import counted
from nanovllm.weights.report import LoadedWeights, LoadFailedError

_POLL_SECONDS = 0.005
Weights = Iterable[tuple[str, Any]] | Mapping[str, Any] | str | os.PathLike[str]


class EngineControl:
    """The methods of `LLM` that do a step, and change the engine between two; the latter from any thread."""

    engine_client: EngineClient

    def step(self) -> StepResult:
        """Do one step of the engine; see `LLMEngine.step`."""
        return self.engine_client.step()

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests; see `LLMEngine.abort`.

        Example:
            >>> request_id = llm.add_request("Hello")
            >>> llm.abort([request_id])
        """
        self.engine_client.abort(request_ids)

    def is_finished(self) -> bool:
        """Whether no request is left, and every result has been returned."""
        return self.engine_client.is_finished()

    def load_weights(self, weights: Weights, *, strict: bool = False) -> int:
        """Write weights into the model that runs, in place, on every rank and replica.

        Replicas get tensors through files of a temporary folder. What was computed with the old ones stays in the
        prefix cache until `reset_prefix_cache`.

        Args:
            weights: tensors by their names in the checkpoint, as pairs that come one by one, or as a dict; or a folder
                with safetensors, which fsspec may open (`s3://`).
                They may be on any device, and of any plain float dtype. A tied head is ignored.
                A folder of a PEFT adapter (LoRA) is merged into the weights, in the place of the one before it; it is
                taken out again by `unload_adapter`, and by other weights.
            strict: refuse to leave a tensor of the model as it was.

        Returns:
            The number of tensors written. A warning names one that has NaN.

        Raises:
            ValueError: a name, shape or dtype does not fit: nothing of that tensor is written, and the message says
                how many were before. Of a folder nothing is written. Or see `strict`.
            RuntimeError: requests are pending, and the engine is not paused; its weights are asleep; a folder or a
                tensor was written in part, and nothing is generated until all of it has come; or an adapter was not
                merged, and if it cannot be taken out again, nothing is generated until `unload_adapter` has done it.
                Or the pairs' iterator raised, which is the error's cause; the message says how many were before.

        Example:
            >>> llm.load_weights([("model.norm.weight", torch.ones(192))])
            1
        """
        loaded = load_weights(self.engine_client.engine, weights, strict)
        warn_of_nans(loaded.nan_names)
        return loaded.count

    def unload_adapter(self) -> bool:
        """Take the adapter out that `load_weights` has merged; the weights are what they were, to the bit.

        Returns:
            Whether there was one.

        Raises:
            RuntimeError: see `load_weights`; or a part of the adapter stays, and nothing is generated until a later
                call has taken it out.

        Example:
            >>> llm.unload_adapter()
            False
        """
        engine = self.engine_client.engine
        engine.state.require_no_requests("unload_adapter", engine.request_ids)
        # Of replicas some may have restored theirs in a call before, which failed in another.
        return any(engine.call("unload_adapter"))

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache.

        Returns:
            Whether no request holds blocks of it; those of a paused engine keep theirs, which no other request finds.

        Example:
            >>> llm.reset_prefix_cache()
            True
        """
        return all(self.engine_client.engine.call("reset_prefix_cache"))

    def pause(self, mode: PauseMode = "keep") -> None:
        """Do no more steps until `resume`; requests are taken, and wait.

        Args:
            mode: "keep" freezes requests with their keys and values, between two steps; "wait" first lets those end
                that are there, for which a "keep" that comes meanwhile waits, too; "abort" ends them with what they
                have, `finish_reason` "abort".

        Raises:
            ValueError: an unknown mode.

        Example:
            >>> llm.pause()
            >>> llm.resume()
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(PauseMode))}, not {mode!r}")
        engine = self.engine_client.engine
        engine.call("pause", mode)
        if mode == "abort":
            # Those too that no replica has yet.
            engine.abort(engine.request_ids, keep_outputs=True)
        else:
            self._drain()

    def _drain(self) -> None:
        """Let requests end; their results are kept for their callers."""
        engine = self.engine_client.engine
        while any(engine.call("is_draining")):
            call = Call()
            try:
                if engine.begin(call):
                    self.engine_client.run_step()
                else:
                    time.sleep(_POLL_SECONDS)
            finally:
                engine.end(call)

    def resume(self) -> None:
        """Go on after a `pause`.

        Example:
            >>> llm.resume()
        """
        self.engine_client.engine.call("resume")

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of the weights, the KV cache and the CUDA graphs, until `wake_up`.

        Requests of a paused engine are computed again afterwards.

        Args:
            level: 1 keeps the weights in the host's memory; 2 drops them, and `load_weights` must bring all of them.

        Raises:
            ValueError: another level.
            RuntimeError: requests are pending, and the engine is not paused.

        Example:
            >>> llm.sleep()
            >>> llm.wake_up()
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, not {level!r}")
        engine = self.engine_client.engine
        engine.state.require_no_requests("sleep", engine.request_ids)
        engine.call("sleep", level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again, and with it the weights that `sleep(1)` has kept. What is awake stays as it is.

        Args:
            tags: "weights", "kv_cache", or both; None for both.

        Raises:
            ValueError: another tag.

        Example:
            >>> llm.sleep(level=2)
            >>> llm.wake_up(["weights"])
            >>> num_tensors = llm.load_weights(llm.config.model)
            >>> llm.wake_up(["kv_cache"])
        """
        chosen = list(SLEEP_TAGS) if tags is None else tags
        if isinstance(chosen, str) or not set(chosen) <= set(SLEEP_TAGS):
            raise ValueError(f"tags must be a list of some of {', '.join(SLEEP_TAGS)}, not {tags!r}")
        self.engine_client.engine.call("wake_up", list(chosen))

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep.

        Example:
            >>> llm.is_sleeping
            False
        """
        return bool(self.engine_client.engine.state.asleep)

    @property
    def is_paused(self) -> bool:
        """Whether a `pause` has not ended.

        Example:
            >>> llm.is_paused
            False
        """
        return self.engine_client.engine.state.pause_mode is not None

    def require_awake(self) -> None:
        """Raise a RuntimeError if the engine is closed, or lacks what a step needs."""
        self.engine_client.engine.require_open()
        if (lack := self.engine_client.engine.state.cannot_run) is not None:
            raise RuntimeError(lack)

    def require_ready(self) -> None:
        """Do the same, and raise one if the engine is paused: a call that waits for its own thread would not end."""
        self.require_awake()
        if self.is_paused:
            raise RuntimeError("the engine is paused: call resume()")


def load_weights(engine: Engine, weights: Weights, strict: bool) -> LoadedWeights:
    """Write weights into the model of every engine; see `LLM.load_weights`."""
    check_bool("strict", strict)
    given: Any = absolute_folder(os.fspath(weights)) if isinstance(weights, str | os.PathLike) else weights
    engine.state.require_no_requests("load_weights", engine.request_ids)
    with ExitStack() as stack:
        if not (isinstance(given, str) or engine.is_in_process):
            folder = stack.enter_context(TemporaryDirectory(prefix="nanovllm-weights-"))
            with counted([]):
                given = write_tensors(folder, given.items() if isinstance(given, Mapping) else given)
        try:
            loaded: list[LoadedWeights] = engine.call("load_weights", given, strict)
        except LoadFailedError:
            if not engine.is_in_process:
                # Replicas that have merged an adapter would go on with it beside those that have taken it out.
                engine.call("unload_adapter")
            raise
    nan_names = dict.fromkeys(name for replica in loaded for name in replica.nan_names)
    return LoadedWeights(loaded[0].count, loaded[0].missing, list(nan_names))


def warn_of_nans(names: list[str]) -> None:
    """Warn the caller of the function that calls this of tensors that have NaN."""
    if names:
        warnings.warn(f"{len(names)} tensors that were loaded have NaN, such as {names[0]!r}", stacklevel=3)
