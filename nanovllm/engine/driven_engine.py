"""What an engine knows of the calls that drive it: one at a time does steps, and others come in between two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from nanovllm.engine.call_guard import Call, CallGuard
from nanovllm.engine.engine_state import EngineState


class DrivenEngine(ABC):
    """An engine that one call at a time drives.

    Attributes:
        state: what holds steps up.
    """

    def __init__(self) -> None:
        self.state = EngineState()
        self._holds_steps = False
        self._guard = CallGuard()

    def begin(self, call: Call) -> bool:
        """Let a call drive the engine, until `end`; returns False if another call does."""
        return self._guard.begin(call)

    def end(self, call: Call) -> None:
        """End a call, which may never have begun; closes the engine if somebody has asked for it meanwhile."""
        self._guard.end(call, self._close)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold the engine between two steps inside the `with` block, whoever drives it; waits for the end of a step.

        Raises:
            RuntimeError: the engine is closed, or this thread is within a call that drives it.
        """
        call = Call()
        try:
            with self._guard.borrow(call):
                self.require_open()
                self._empty_inbox()
                try:
                    yield
                finally:
                    self._holds_steps = self.state.holds_steps
                    self._empty_inbox()
        finally:
            self.end(call)

    def exit(self) -> None:
        """Free the device; a second call, or one in a forked copy of the process, does nothing.

        Waits up to ten seconds for a step in another thread; one that takes longer frees the device when it ends.
        """
        self._guard.close(self._close)

    @abstractmethod
    def require_open(self) -> object:
        """Raise a RuntimeError if the engine is closed."""

    @abstractmethod
    def _empty_inbox(self) -> None:
        """Take in what other threads have sent."""

    @abstractmethod
    def _close(self) -> None:
        """Free the device."""
