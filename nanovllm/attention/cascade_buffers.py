"""The plan of cascade attention on the device, sent when the decoding sequences change."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm.attention.cascade_plan import CascadeWork, plan_cascade_groups
from nanovllm.kernels.attention.cascade_attention import CascadeGroups


class CascadeBuffers:
    """Plans cascade attention, and keeps what the device has of the plan.

    Args:
        num_slots: most decode rows.
        block_size: tokens of a block.
        max_items: most items, see `CascadeGroups`; 0 if the attention backend has no use for them.
        rows_per_item: most decode rows of an item.
        device: where the attention is.

    Attributes:
        size: elements of a plan.
        groups: the plan, on the device.
    """

    def __init__(
        self, num_slots: int, block_size: int, max_items: int, rows_per_item: int, device: torch.device
    ) -> None:
        self.num_slots, self.block_size = num_slots, block_size
        self.max_items, self.rows_per_item = max_items, rows_per_item
        self._lengths = [4 * max_items, num_slots, 3 * num_slots]
        self.size = sum(self._lengths)
        self._none = np.zeros(self.size, dtype=np.int32)
        self._planned = self._sent = self._none
        self._planned_lens: np.ndarray | None = None
        self._planned_slots = self._none[:0]
        self._buffer = torch.zeros(self.size, dtype=torch.int32, device=device)
        items, members, rows = self._buffer.split(self._lengths)
        self.groups = CascadeGroups(items.view(-1, 4), members, rows.view(3, num_slots))

    def plan(self, decode_slots: np.ndarray, num_computed: np.ndarray, block_tables: np.ndarray) -> np.ndarray | None:
        """Plan the step of these rows; returns the length of each row's shared prefix, [num_rows], or None.

        num_computed and block_tables are all slots', on the host.
        """
        if self.max_items and not np.array_equal(decode_slots, self._planned_slots):
            self._planned_slots = decode_slots
            full, tables = num_computed[decode_slots] // self.block_size, block_tables[decode_slots]
            work = plan_cascade_groups(tables, full, self.block_size, self.max_items, self.rows_per_item)
            self._planned = self._none if work is None else self._pack(work)
            self._planned_lens = None if work is None else work.rows[0]
        return self._planned_lens

    def to_send(self) -> np.ndarray:
        """Return the packed plan, [n] int32; empty if the device has it already."""
        return self._none[:0] if self._planned is self._sent else self._planned

    def receive(self, sent: torch.Tensor) -> None:
        """Take in what `to_send` gave, once it is on the device."""
        if len(sent):
            self._buffer.copy_(sent)
            self._sent = self._planned

    def _pack(self, work: CascadeWork) -> np.ndarray:
        padding = self.num_slots - len(work.members)
        members, rows = np.pad(work.members, (0, padding)), np.pad(work.rows, ((0, 0), (0, padding)))
        return np.concatenate([array.reshape(-1) for array in (work.items, members, rows)])
