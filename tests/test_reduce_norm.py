"""The all-reduce kernel where no second GPU is needed, and who uses it. `tests/test_gpu_parallel.py` has the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from nanovllm.kernels.reduce_norm import Mailboxes, fits, reduce_norm, reduce_norm_ref
from nanovllm.utils import symmetric
from nanovllm.utils.symmetric import connect
from tests.test_kernels import DEVICE, DTYPES, GPU, check_error, randn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_what_the_others_sent_is_summed_in_the_order_of_the_ranks(dtype: torch.dtype, with_residual: bool) -> None:
    num_ranks, rows, size = 3, 5, 48
    capacity, step, calls = rows * size, 3, 10
    parts = [randn(rows, size, dtype=dtype) for _ in range(num_ranks)]
    residual = randn(rows, size, dtype=dtype) if with_residual else None
    weight = randn(size, dtype=dtype)
    boxes = torch.zeros(num_ranks, 2, num_ranks + 1, capacity, dtype=torch.int64, device=DEVICE)
    abort = torch.zeros(1, dtype=torch.int32, pin_memory=GPU)
    outs = []
    for rank in range(num_ranks):
        addresses = torch.tensor([box.data_ptr() for box in boxes], device=DEVICE)
        steps = torch.tensor([step], dtype=torch.int32, device=DEVICE)
        boxes_of_rank = Mailboxes(rank, num_ranks, capacity, addresses, steps, calls, abort)
        # What the ranks after this one are still to send is there already.
        call = step * calls + 4
        for other, part in enumerate(parts):
            words = part.view(torch.int32).flatten().long() & 0xFFFFFFFF
            boxes[rank, call % 2, other, : len(words)] = (call << 32) | words
        outs.append(reduce_norm(parts[rank], weight, 1e-6, residual, boxes_of_rank, 4, two_shot=False))
    wide = None if residual is None else residual.float()
    exact = reduce_norm_ref([part.float() for part in parts], weight.float(), 1e-6, wide)
    same = reduce_norm_ref(parts, weight, 1e-6, residual)
    for out in outs:
        for i in range(2):
            assert torch.equal(out[i], outs[0][i])
            check_error(out[i], same[i], exact[i])


def test_what_fits_into_a_mailbox() -> None:
    none = torch.zeros(1)
    boxes = Mailboxes(0, 2, 64, none, none, 1, none)
    assert fits(torch.zeros(8, 16, dtype=torch.bfloat16), boxes) and fits(torch.zeros(4, 16), boxes)
    assert not fits(torch.zeros(9, 16, dtype=torch.bfloat16), boxes)
    assert not fits(torch.zeros(1, 15, dtype=torch.bfloat16), boxes)


@pytest.mark.parametrize(
    ("device", "reachable", "used", "want"),
    [
        ("cuda:1", True, False, "mailboxes"),
        ("cuda:1", True, True, "plain"),
        ("cuda:1", False, False, "plain"),
        ("cpu", True, False, "plain"),
    ],
)
def test_all_ranks_take_what_rank_0_chooses(
    device: str, reachable: bool, used: bool, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Mailboxed:
        used_in_this_process = used

        def __init__(self, *args: Any) -> None:
            self.kind, self.args = "mailboxes", args

    class Plain:
        def __init__(self, *args: Any) -> None:
            self.kind, self.args = "plain", args

    def can_reach(a: int, b: int) -> bool:
        asked.append((a, b))
        return reachable

    monkeypatch.setattr(symmetric, "SymmetricCommunicator", Mailboxed)
    monkeypatch.setattr(symmetric, "DistributedCommunicator", Plain)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can_reach)
    store: Any = HashStore()
    first: Any = connect(0, 2, torch.device(device), store)
    # A rank's own process is fresh, and might choose otherwise.
    Mailboxed.used_in_this_process = False
    second: Any = connect(1, 2, torch.device(device), store)
    assert first.kind == second.kind == want
    assert second.args[:2] == (1, 2)
    if device != "cpu" and not used:
        assert set(asked) <= {(1, 2), (2, 1)} and asked
