"""Keeps the state of the running sequences, one slot each, on the device, and a copy on the host.

Both are one int32 array of consecutive fields, each with an entry for every slot, so that one copy and one indexed
assignment bring any change to the device.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
import torch

from nanovllm.kernels.slot_tensors import SlotTensors
from nanovllm.runner.messages import NO_ROWS, NewRequest, ScheduledBatch

_MAX_TEMPERATURE = 1e30
"""Finite in float32 with any noise added; any higher temperature is uniform as well."""
_ALIGNMENT = 16
"""Slots are padded to a multiple of this: Triton recompiles a kernel for each other alignment of its arguments."""
ArrayT = TypeVar("ArrayT", np.ndarray, torch.Tensor)
_MAX_ELEMENTS = 2**31
"""Element offsets, also in a step's rows of the block tables, are int32 here and in `kernels/slot_tensors.py`."""


class SlotState:
    """The slots of running sequences, and one for the writes of padding; a ValueError if int32 cannot address them."""

    def __init__(
        self, num_slots: int, max_blocks: int, num_groups: int, device: torch.device, num_drafts: int = 0
    ) -> None:
        self.padding_slot, self._max_blocks = num_slots, max_blocks
        # Elements per slot of two-dimensional fields.
        self._wide = {"seed": 2, "drafts": num_drafts, "block_tables": num_groups * max_blocks}
        self._wide["num_blocks"] = num_groups if num_drafts else 0
        self._widths = {field.name: self._wide.get(field.name, 1) for field in fields(SlotTensors)}
        num_padded = -(-(num_slots + 1) // _ALIGNMENT) * _ALIGNMENT
        ends = np.cumsum([num_padded * width for width in self._widths.values()]).tolist()
        self._starts = dict(zip(self._widths, [0, *ends[:-1]], strict=True))
        self.size = ends[-1]
        if self.size > _MAX_ELEMENTS:
            raise ValueError(
                f"the state of {num_slots} running sequences, with block tables of {num_groups * max_blocks} entries, "
                f"has {self.size} elements, over the limit of {_MAX_ELEMENTS}: lower max_num_seqs or max_model_len, or "
                "raise kvcache_block_size"
            )
        self._flat = torch.zeros(self.size, dtype=torch.int32, device=device)
        self.tensors = SlotTensors(**{name: self._field(self._flat, name) for name in self._widths})
        self.tensors.temperature = self.tensors.temperature.view(torch.float32)
        by_group = num_slots + 1, num_groups, max_blocks
        self.tensors.block_tables = self.tensors.block_tables.view(by_group)
        self._host = np.zeros(self.size, dtype=np.int32)
        # The host's copies, [num_slots + 1] and [num_slots + 1, num_groups, max_blocks].
        self.num_computed = self._field(self._host, "num_computed")
        self.block_tables = self._field(self._host, "block_tables").reshape(by_group)
        self._num_blocks = self._field(self._host, "num_blocks")

    def update_host(self, batch: ScheduledBatch) -> tuple[np.ndarray, np.ndarray]:
        """Apply a batch to the host's copy; return the flat indices and values that changed, for `update_device`."""
        # Block tables of new requests, and new blocks of running ones.
        width = self._max_blocks
        entries = [
            (request.slot, i, block)
            for request in batch.new_requests
            for group, table in enumerate(request.block_tables)
            for i, block in enumerate(table, group * width)
        ]
        entries += [(new.slot, new.group * width + new.index, new.block_id) for new in batch.new_blocks]
        changed = [NO_ROWS.slots]
        if batch.new_requests:
            changed += self._add(batch.new_requests)
        if entries:
            slots, columns, blocks = np.array(entries, dtype=np.int32).T
            changed.append(self._write("block_tables", slots, columns, blocks))
            if self._wide["num_blocks"]:
                self._num_blocks[[request.slot for request in batch.new_requests]] = 0
                groups, indices = np.divmod(columns, width)
                np.maximum.at(self._num_blocks, (slots, groups), indices + 1)
                slots, groups = np.unique(slots)[:, None], np.arange(self._wide["num_blocks"])
                changed.append(self._write("num_blocks", slots, groups, self._num_blocks[slots, groups]).flatten())
        if batch.chunks:
            ends = np.array([chunk.start + len(chunk.token_ids) for chunk in batch.chunks])
            changed.append(self._write("num_computed", [chunk.slot for chunk in batch.chunks], 0, ends))
        index = np.concatenate(changed)
        return index, self._host[index]

    def update_device(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Write the changes from `update_host` into the device's state."""
        if len(index):
            self._flat[index] = values

    def _add(self, requests: list[NewRequest]) -> list[np.ndarray]:
        """Write the fields that do not change while a request runs."""
        slots = [request.slot for request in requests]
        low, high = ([request.seed >> shift & 0xFFFFFFFF for request in requests] for shift in (0, 32))
        temperatures = [min(request.temperature, _MAX_TEMPERATURE) for request in requests]
        return [
            self._write("num_prompt", slots, 0, np.array([request.num_prompt_tokens for request in requests])),
            self._write("temperature", slots, 0, np.array(temperatures, dtype=np.float32).view(np.int32)),
            self._write("seed", slots, 0, np.array(low, dtype=np.uint32).view(np.int32)),
            self._write("seed", slots, 1, np.array(high, dtype=np.uint32).view(np.int32)),
        ]

    def _field(self, flat: ArrayT, name: str) -> ArrayT:
        start, width, num_slots = self._starts[name], self._widths[name], self.padding_slot + 1
        values = flat[start : start + num_slots * width]
        return values.reshape(num_slots, width) if name in self._wide else values

    def _write(self, name: str, slots: Any, column: Any, values: np.ndarray) -> np.ndarray:
        """Write values into slots and columns of a field in the host's copy; return their flat indices."""
        index = self._starts[name] + np.asarray(slots, dtype=np.int32) * self._widths[name] + column
        self._host[index] = values
        return index
