"""A runner that computes nothing, for what the host does with many requests."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from nanovllm.runner.messages import CacheKind, DraftCosts, PagedCache, ScheduledBatch, StepOutput


class NullHandle:
    """A step that is done."""

    def __init__(self, count: int) -> None:
        self._count = count

    def result(self) -> StepOutput:
        return StepOutput(np.full(self._count, 70, dtype=np.int64))


class NullRunner:
    """A device that is infinitely fast."""

    pipeline_depth = 1
    num_kvcache_blocks = 4096
    num_drafts, draft_costs = 0, DraftCosts()
    cache_kinds: ClassVar[list[CacheKind]] = [PagedCache()]
    host_memory = None

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def forward(self, batch: ScheduledBatch) -> NullHandle:
        return NullHandle(len(batch.sampled_seq_ids))

    def sample(self, step: NullHandle, masks: np.ndarray | None = None) -> NullHandle:
        return step

    def synchronize(self) -> None: ...

    def weights_loader(self) -> None: ...

    def exit(self) -> None: ...
