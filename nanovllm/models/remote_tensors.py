"""Safetensors that fsspec opens, read range by range: no file is copied, and no more than one range is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from nanovllm.utils.folder_faults import refuse_pointer
from nanovllm.utils.remote import filesystem, storage_errors

_RANGE_BYTES = 32 * 2**20
"""Neighbouring tensors are read together up to this: an object store takes tens of milliseconds for each request."""

_MOST_HEADER_BYTES = 100 * 10**6
"""As safetensors has it: a damaged length must not be taken as memory."""

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    """A tensor in a file's header, and its first byte and the one after its last in the file."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    stop: int


class SafetensorsFile:
    """One file of tensors.

    Raises:
        ValueError: it is missing or damaged, or nothing here opens such a URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._filesystem, self._path = filesystem(url)
        with storage_errors(url, ValueError):
            self.size: int = self._filesystem.size(self._path)
        length = int.from_bytes(self.read(0, 8), "little")
        if length > _MOST_HEADER_BYTES:
            refuse_pointer(url, self.read(0, min(self.size, 64)))
            raise ValueError(f"{url!r} is damaged: its header cannot have {length} bytes")
        self._header = self.read(0, 8 + length)
        try:
            self.entries = sorted(self._entries(json.loads(self._header[8:])), key=lambda entry: entry.start)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{url!r} is damaged: its header is none of safetensors: {error!r}") from error
        if (end := max((entry.stop for entry in self.entries), default=len(self._header))) > self.size:
            raise ValueError(f"{url!r} is damaged: it ends after {self.size} of {end} bytes")
        self._range = (0, b"")

    def _entries(self, header: dict[str, Any]) -> Iterator[_Entry]:
        for name, about in header.items():
            if name == "__metadata__":
                continue
            dtype, shape, (start, stop) = _DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
            if start < 0 or min(shape, default=0) < 0 or stop - start != prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor {name!r} has shape {shape} in {stop - start} bytes")
            yield _Entry(name, dtype, shape, len(self._header) + start, len(self._header) + stop)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes `start ... stop - 1`."""
        with storage_errors(self.url, ValueError):
            # By name: what follows the path differs among file systems.
            data: bytes = self._filesystem.cat_file(self._path, start=start, end=stop) if stop > start else b""
        if len(data) != stop - start:
            raise ValueError(f"{self.url!r} is damaged: it ends after {self.size} bytes, {stop} are needed")
        return data

    def tensors(self) -> Iterator[tuple[str, RemoteTensor]]:
        """Yield the tensors in the file's order; none is read before it is indexed."""
        for number, entry in enumerate(self.entries):
            yield entry.name, RemoteTensor(self, number)

    def rows(self, number: int, start: int, stop: int) -> memoryview:
        """Return bytes `start ... stop - 1` of the file, of tensor `number`; small ones come with their neighbours."""
        first, data = self._range
        if not first <= start <= stop <= first + len(data):
            # The last range goes before the next comes.
            self._range, data, first = (0, b""), b"", start
            last = stop
            if self.entries[number].stop - self.entries[number].start < _RANGE_BYTES:
                first = self.entries[number].start
                for entry in self.entries[number:]:
                    if entry.stop - first > _RANGE_BYTES:
                        break
                    last = entry.stop
            data = self.read(first, last)
            if last > stop:
                self._range = (first, data)
        return memoryview(data)[start - first : stop - first]


@dataclass(frozen=True)
class RemoteTensor:
    """A tensor of a remote file, as `WeightSlice.fill` takes it: of a large one, the rows asked for are read."""

    file: SafetensorsFile
    number: int

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self.file.entries[self.number].shape)

    def get_dtype(self) -> torch.dtype:
        """Return its dtype."""
        return self.file.entries[self.number].dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        entry = self.file.entries[self.number]
        index = index if isinstance(index, tuple) else (index,)
        shape, start, stop = list(entry.shape), entry.start, entry.stop
        if shape and index and isinstance(index[0], slice) and prod(shape):
            first, last, _ = index[0].indices(shape[0])
            row_bytes = (stop - start) // shape[0]
            shape[0] = max(last - first, 0)
            start, stop = start + first * row_bytes, start + (first + shape[0]) * row_bytes
            index = (slice(None), *index[1:])
        if start == stop:
            return torch.empty(shape, dtype=entry.dtype)[index]
        # A copy: a file's offsets need not suit the dtype, and the range must not outlive its turn.
        data = bytearray(self.file.rows(self.number, start, stop))
        return torch.frombuffer(data, dtype=entry.dtype).view(shape)[index]
