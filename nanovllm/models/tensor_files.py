"""Tensors on their way to other processes of this host: in files, which each of them reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanovllm.models.live_weights import weight_pair

_FILE_BYTES = 2**30
"""Tensors that are gathered for a file: so much memory is taken beside them."""


@dataclass(frozen=True)
class TensorFiles:
    """Pairs of a name and a tensor, in files, in their order; it pickles without them."""

    files: list[str]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file in self.files:
            with safe_open(file, "pt") as opened:
                for key in sorted(opened.keys()):
                    yield key.partition(" ")[2], opened.get_tensor(key)


def write_tensors(folder: str, weights: Iterable[Any]) -> TensorFiles:
    """Write pairs of a name and a tensor to files.

    Raises:
        ValueError: what comes is no such pair.
    """
    files: list[str] = []
    gathered: dict[str, torch.Tensor] = {}

    def write() -> None:
        files.append(str(Path(folder, f"{len(files)}.safetensors")))
        save_file(gathered, files[-1])
        gathered.clear()

    num_bytes = 0
    for item in weights:
        name, tensor = weight_pair(item)
        # Of its own, also where tensors share memory; numbered, since names may come twice.
        gathered[f"{len(gathered):06d} {name}"] = tensor.to("cpu", copy=True).contiguous()
        num_bytes += tensor.nbytes
        if num_bytes >= _FILE_BYTES:
            write()
            num_bytes = 0
    write()
    return TensorFiles(files)
