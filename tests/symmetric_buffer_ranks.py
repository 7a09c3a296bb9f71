"""One rank in the tests of messages through symmetric buffers, in a process or on a stream of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.all_reduce import SymmetricBuffer, all_reduce_argmax, all_reduce_rms_norm
from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize_ref
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding
from nanovllm.kernels.rms_norm import Norm
from tests import quick_interpreter

NUM_RANKS = 3
NUM_STEPS = 3
SIZE, MAX_ROWS, MAX_CANDIDATES = 102, 16, 40
"""Rows of two-byte elements have an odd number of words."""
STEP_ROWS = (16, 3, 1)
"""Rows of each step's calls."""


@dataclass
class Case:
    """One call: every rank's part, and what all of them add to it."""

    one_shot: bool
    parts: list[torch.Tensor]
    residual: torch.Tensor | None
    weight: torch.Tensor
    rounding: Rounding | None = None


@dataclass
class Step:
    """An odd number of calls, then scores and tokens to agree on, of all ranks, [NUM_RANKS, MAX_CANDIDATES] each."""

    calls: list[Case]
    scores: torch.Tensor
    tokens: torch.Tensor


def make_buffer(rank: int, memory: torch.Tensor, abort: torch.Tensor) -> SymmetricBuffer:
    """A rank's view of `memory`, [NUM_RANKS, bytes] uint8, which is enough."""
    device = memory.device
    buffer = SymmetricBuffer(
        rank=rank,
        num_ranks=NUM_RANKS,
        word_bytes=4 * SIZE * MAX_ROWS,
        row_bytes=16 * (SIZE * (MAX_ROWS + NUM_RANKS) // 4 + 1),
        max_rows=MAX_ROWS,
        max_candidates=MAX_CANDIDATES,
        addresses=torch.tensor([part.data_ptr() for part in memory], device=device),
        step=torch.zeros(1, dtype=torch.int32, device=device),
        calls_per_step=5,
        abort=abort,
    )
    assert buffer.num_bytes <= memory.shape[1]
    return buffer


def make_steps(dtype: torch.dtype, device: str) -> list[Step]:
    """Calls in both forms, in mixed order, and tokens with ties; the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    steps = []
    for step in range(NUM_STEPS):
        calls = []
        for i, one_shot in enumerate((False, True, False)):
            rows = STEP_ROWS[(step + i) % 3]
            residual = randn(rows, SIZE) if (step + i) % 2 else None
            parts = [randn(rows, SIZE) for _ in range(NUM_RANKS)]
            # Norms of some families keep their weights in float32.
            weight = torch.randn(SIZE, generator=generator).to(device, torch.float32 if step else dtype)
            # Of 16 bits some rows are rounded, in groups or as a whole.
            rounding = (None, Rounding(32), Rounding(SIZE, for_scaled_mm=True))[
                i if step and dtype.itemsize == 2 else 0
            ]
            calls.append(Case(one_shot or rows < NUM_RANKS, parts, residual, weight, rounding))
        scores = torch.randint(-2, 3, (NUM_RANKS, MAX_CANDIDATES), generator=generator).float()
        scores[:, 0] = torch.tensor([-0.0, 0.0, -1e-40])
        scores[:, 1] = -torch.inf
        tokens = torch.randint(2**31 - 1, (NUM_RANKS, MAX_CANDIDATES), generator=generator)
        steps.append(Step(calls, scores.to(device), tokens.to(device)))
    return steps


def reduce(case: Case, part: torch.Tensor, buffer: SymmetricBuffer, call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's part of a call; of rows that were rounded what they mean, in float32."""
    total, normed = torch.empty_like(part), torch.empty_like(part)
    out = normed if case.rounding is None else case.rounding.empty_rows(len(part), SIZE, part.dtype, part.device)
    all_reduce_rms_norm(part, Norm(case.weight, 1e-6), case.residual, buffer, call, case.one_shot, (out, total))
    return (out if isinstance(out, torch.Tensor) else meant(out)[: len(part)]), total


def meant(rows: Fp8Rows) -> torch.Tensor:
    """Return rows in float32."""
    return dequantize_ref(Fp8Matrix(rows.values, rows.scales.contiguous(), 1, rows.group), torch.float32)


def run_step(buffer: SymmetricBuffer, step: Step) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's part of one step, without a wait of the host for the device; the tokens agreed on are the last."""
    buffer.step.add_(1)
    results = [reduce(case, case.parts[buffer.rank], buffer, call) for call, case in enumerate(step.calls)]
    drawn = all_reduce_argmax(step.scores[buffer.rank], step.tokens[buffer.rank], buffer, 0)
    return [*results, (drawn, drawn)]


def run_process(rank: int, memory: torch.Tensor, abort: torch.Tensor, dtypes: list[torch.dtype], file: str) -> None:
    """Be a rank, and write down all its results; `memory` is shared, one [NUM_RANKS, bytes] for each dtype."""
    quick_interpreter.install()
    results = []
    for dtype, part in zip(dtypes, memory, strict=True):
        buffer = make_buffer(rank, part, abort)
        results += [run_step(buffer, step) for step in make_steps(dtype, "cpu")]
    torch.save(results, file)
