"""The seeds of requests that name none."""

from __future__ import annotations

import secrets
from threading import Lock

from nanovllm.engine.sequence import GOLDEN_RATIO_64


class RequestSeeds:
    """Numbers the outputs that users ask for; the noise of an output follows from the engine's seed and its number.

    A request carries its seed, so that its tokens do not depend on when it runs, nor on which engine. Any thread may
    take numbers.

    Args:
        seed: the engine's; None draws one.
        first: the first number.
    """

    def __init__(self, seed: int | None, first: int = 0) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed
        self._num_taken = first
        self._lock = Lock()

    def reserve(self, num_outputs: int) -> int:
        """Return the first of so many consecutive numbers that nobody else gets."""
        with self._lock:
            first, self._num_taken = self._num_taken, self._num_taken + num_outputs
        return first

    def of(self, number: int) -> int:
        """Return the seed of a request whose first output has this number; see `make_sequences`."""
        return (self._seed + (number + 1) * GOLDEN_RATIO_64) % 2**64
