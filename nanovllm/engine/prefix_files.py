"""Blocks of the prefix cache in a folder of files, which outlive the engine.

A block is known by a chain of 128-bit hashes: of the model, of the salt, and of the tokens of each block up to its end.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence

from xxhash import xxh3_128_digest

from nanovllm.engine.sequence import Sequence as EngineSequence
from nanovllm.runner.messages import BlockFileRunner


class PrefixFiles:
    """What a folder has of prefixes; a `BlockSource`.

    Args:
        runner: reads and writes the files.
        folder: an absolute path.
        model: 128 bits that tell models apart whose blocks of equal tokens differ.
        block_size: tokens of a block.

    Raises:
        ValueError: a sequence of this model does not keep all its blocks.
    """

    def __init__(self, runner: BlockFileRunner, folder: str, model: bytes, block_size: int) -> None:
        windows = [window for window in runner.kv_windows if window is not None]
        if len(windows) < len(runner.kv_windows) > 1:
            raise ValueError(
                f"prefix cache {folder!r}: some layers of this model have sliding windows (of {max(windows)} tokens), "
                "and its blocks are kept in files only by an engine that is started with prefix_cache="
            )
        if windows:
            raise ValueError(
                f"prefix cache {folder!r}: all layers of this model have sliding windows (of {max(windows)} "
                "tokens), and such a model's blocks are not kept in files"
            )
        self._runner = runner
        self._folder = folder
        self._model = model
        self._block_size = block_size
        # The first ones are those of evicted blocks.
        self._next_slot = 0 if runner.host_memory is None else runner.host_memory.num_slots
        self._warned: set[str] = set()

    def fetch(self, seq: EngineSequence, first: int, end: int) -> Sequence[int]:
        """Read blocks of a sequence from files; see `BlockSource`. Warns once of each file that is refused."""
        digests = self.digests(seq.token_ids, seq.request.cache_salt, end)
        read = self._runner.read_blocks(self._folder, digests[first:], self._next_slot)
        for refused in set(read.refused) - self._warned:
            self._warned.add(refused)
            warnings.warn(f"a file of the prefix cache is not used: {refused}", stacklevel=2)
        slots = range(self._next_slot, self._next_slot + read.count)
        self._next_slot = slots.stop
        return slots

    def write(self, digests: list[bytes], block_ids: list[int]) -> None:
        """Write blocks of the device; see `BlockFileRunner.write_blocks`."""
        self._runner.write_blocks(self._folder, digests, block_ids)

    def digests(self, token_ids: array[int], salt: str | None, num_blocks: int) -> list[bytes]:
        """Return what tells each of the first blocks of a prefix from all others."""
        digest = xxh3_128_digest(self._model + (b"" if salt is None else b"salt " + salt.encode()))
        digests = []
        for start in range(0, num_blocks * self._block_size, self._block_size):
            digest = xxh3_128_digest(digest + token_ids[start : start + self._block_size].tobytes())
            digests.append(digest)
        return digests
