"""Blocks of the KV cache in files: one safetensors file for each block and rank.

A file's name is a hash of all that its bytes depend on, so writers that race write the same. It is written under
another name and renamed, and what is read is trusted only if its checksum, of name and bytes, is right. What a killed
writer has left half written is removed by a later one, which knows it by its age.
"""

from __future__ import annotations

import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from xxhash import xxh3_128

from nanovllm.distributed.communicator import Communicator
from nanovllm.runner.kv_cache import KVCache
from nanovllm.runner.messages import BlocksRead

_CHECKSUM = "checksum"
_TEMPORARY = ".block-"
_ABANDONED_SECONDS = 3600.0
"""A block takes seconds to write."""


class RefusedFileError(Exception):
    """A file is not what its name says."""


class BlockFiles:
    """The blocks of one rank in one folder.

    Args:
        folder: has the files.
        kv_cache: whose blocks they are.
        rank, size: this rank, and the number of ranks.
    """

    def __init__(self, folder: str, kv_cache: KVCache, rank: int, size: int) -> None:
        self._folder = Path(folder)
        self._kv_cache = kv_cache
        self._layout = [(page.shape, page.dtype) for page in kv_cache.block(0)]
        self._rank = f"rank {rank} of {size}, {self._layout}".encode()

    def path(self, digest: bytes) -> Path:
        """Return the file of the block that a digest stands for."""
        return self._folder / f"{xxh3_128(digest + self._rank).hexdigest()}.safetensors"

    def read(self, digests: Sequence[bytes], slot: int) -> BlocksRead:
        """Read blocks into host slots from `slot` on; see `BlockFileRunner.read_blocks`."""
        for count, digest in enumerate(digests):
            try:
                self._kv_cache.host_blocks[slot + count] = self._read(self.path(digest))
            except FileNotFoundError:
                return BlocksRead(count)
            except (RefusedFileError, OSError) as error:
                return BlocksRead(count, [f"{self.path(digest)}: {error}"])
        return BlocksRead(len(digests))

    def write(self, digests: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Write blocks whose files are not there, or not right; see `BlockFileRunner.write_blocks`."""
        for digest, block_id in zip(digests, block_ids, strict=True):
            path = self.path(digest)
            try:
                self._read(path)
            except (FileNotFoundError, RefusedFileError):
                self._write(path, self._kv_cache.block(block_id))

    def _read(self, path: Path) -> list[torch.Tensor]:
        """Return a block's pages.

        Raises:
            FileNotFoundError: the file is not there.
            RefusedFileError: it is not whole, or another block's.
        """
        data = path.read_bytes()
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise RefusedFileError(f"it is truncated or damaged ({error})") from error
        except KeyError as error:
            # Of dtypes that safetensors writes, and does not read from memory.
            raise RefusedFileError(f"it is foreign: it has a tensor of dtype {error}") from error
        checksum = tensors.pop(_CHECKSUM, None)
        pages = [tensors[name] for name in sorted(tensors)]
        if checksum is None or [(page.shape, page.dtype) for page in pages] != self._layout:
            raise RefusedFileError("it is foreign: its tensors are not those of this model's cache")
        if checksum.tolist() != _checksum(path, pages):
            raise RefusedFileError("it is damaged, or another block's: its checksum does not fit")
        return pages

    def _write(self, path: Path, block: list[torch.Tensor]) -> None:
        pages = [page.to("cpu", copy=True) for page in block]
        tensors = {f"{number:05}": page for number, page in enumerate(pages)}
        data = save(tensors | {_CHECKSUM: torch.tensor(_checksum(path, pages), dtype=torch.uint8)})
        temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError as error:
            # A file system that cannot be written to cannot be asked to remove it, either.
            with suppress(OSError):
                temporary.unlink()
            cause = f"a block of the prefix cache was not saved: {error.strerror}"
            raise OSError(error.errno, cause, str(path)) from error


def _checksum(path: Path, pages: Sequence[torch.Tensor]) -> list[int]:
    digest = xxh3_128(path.name.encode())
    for page in pages:
        digest.update(page.contiguous().view(torch.uint8).numpy().data)
    return list(digest.digest())


def remove_abandoned(folder: str) -> None:
    """Remove the temporary files of writers that have been killed, as far as this process may."""
    for temporary in Path(folder).glob(f"{_TEMPORARY}*"):
        # Another writer may have removed it, it may be another user's, or the file system read-only. Times of files are
        # on the system's clock.
        with suppress(OSError):
            if time.time() - temporary.stat().st_mtime > _ABANDONED_SECONDS:
                temporary.unlink()


class RunnerBlockFiles(ABC):
    """The methods of a runner that keep blocks of its cache in files; see `BlockFileRunner`."""

    kv_cache: KVCache
    communicator: Communicator

    @abstractmethod
    def _device_guard(self) -> AbstractContextManager[Any]:
        """Make the device current."""

    def has_block(self, folder: str, digest: bytes) -> bool:
        """Whether a folder has this rank's file of a block."""
        return self._block_files(folder).path(digest).exists()

    def read_blocks(self, folder: str, digests: list[bytes], slot: int) -> BlocksRead:
        """Read blocks from a folder into the host's memory; see `BlockFileRunner`."""
        return self._block_files(folder).read(digests, slot)

    def write_blocks(self, folder: str, digests: list[bytes], block_ids: list[int]) -> None:
        """Write blocks to a folder; see `BlockFileRunner`."""
        with self._device_guard():
            self._block_files(folder).write(digests, block_ids)

    def _block_files(self, folder: str) -> BlockFiles:
        return BlockFiles(folder, self.kv_cache, self.communicator.rank, self.communicator.size)
