"""Changes that requests make to their logits, against transformers' processors and plain definitions."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import SamplingParams
from nanovllm.kernels import logits as ops
from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.logits import (
    CutoffParams,
    EditedRows,
    LogitsEdits,
    cutoffs,
    edit_logits,
    token_logprobs,
    top_values,
)
from nanovllm.sampling.state import SamplingState
from nanovllm.sampling_params import SamplingExtra

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
VOCAB = 5003
EMPTY = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)


@pytest.fixture(params=["torch", "triton"], autouse=True)
def form(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of each op: on the CPU, Triton's kernels run in its interpreter."""
    if request.param == "torch" or not GPU:
        monkeypatch.setattr(ops, "uses_triton", lambda device: request.param == "triton")
    return str(request.param)


def random_logits(rows: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * scale).to(DEVICE)


def padded(x: torch.Tensor) -> EditedRows:
    return edit_logits(x, torch.arange(len(x), device=DEVICE), VOCAB, LogitsEdits())


def params(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> CutoffParams:
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=DEVICE)

    return CutoffParams(
        full(temperature), full(top_k, torch.int32), full(top_p), full(min_p), top_k, top_p < 1 and not top_k
    )


@pytest.mark.parametrize(
    ("given", "processors"),
    [
        ({"top_k": 1}, [TopKLogitsWarper(1)]),
        ({"top_k": 50}, [TopKLogitsWarper(50)]),
        ({"top_k": 4000}, [TopKLogitsWarper(4000)]),
        ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"top_p": 0.9}, [TopPLogitsWarper(0.9)]),
        ({"min_p": 0.05}, [MinPLogitsWarper(0.05)]),
        (
            {"min_p": 0.01, "top_k": 30, "top_p": 0.8},
            [MinPLogitsWarper(0.01), TopKLogitsWarper(30), TopPLogitsWarper(0.8)],
        ),
        ({"min_p": 0.001, "top_p": 0.95}, [MinPLogitsWarper(0.001), TopPLogitsWarper(0.95)]),
    ],
)
# Peaked, like a trained model's, and nearly flat, where a nucleus is most of the vocabulary.
@pytest.mark.parametrize(("temperature", "scale"), [(0.7, 4.0), (1.5, 0.3)])
def test_cutoffs_keep_what_transformers_keeps(
    given: dict[str, Any], processors: list[LogitsProcessor], temperature: float, scale: float
) -> None:
    x = random_logits(3, scale)
    want = x / temperature
    for processor in processors:
        want = processor(EMPTY, want)
    found = padded(x)
    kept = found.x >= cutoffs(found, params(3, temperature, **given)).unsqueeze(1)
    differing = (kept[:, :VOCAB] != (want > -math.inf)).sum(1)
    # Where probabilities add up to top_p within rounding, one token more or less is right.
    assert differing.max() <= (1 if "top_p" in given else 0)
    assert not kept[:, VOCAB:].any()


def test_a_nucleus_with_a_top_k_of_minus_one() -> None:
    asked = SamplingExtra(SamplingParams(top_k=-1, top_p=0.9), array("i"), 1)
    state = SamplingState(VOCAB, DEVICE, "raw_logprobs")
    state.add(0, asked)
    rows = state.rows_of([0], np.array([1]))
    assert rows is not None and rows.cutoffs is not None
    # Nearly flat: the nucleus is far more than the few logits that are looked at without one.
    x = padded(random_logits(1, 0.3))
    num_kept = int((x.x >= cutoffs(x, rows.cutoffs).unsqueeze(1)).sum())
    want = int((TopPLogitsWarper(0.9)(EMPTY, x.x) > -math.inf).sum())
    assert abs(num_kept - want) <= 1 and want > VOCAB / 2


def test_greedy_rows_keep_all_and_rows_keep_their_own() -> None:
    x = padded(random_logits(4, 3.0))
    mixed = params(4)
    mixed.temperatures[0], mixed.top_k[0] = 0, 3
    mixed.top_k[1], mixed.max_top_k = 7, 7
    mixed.top_p[2], mixed.any_nucleus = 0.5, True
    mixed.min_p[3] = 0.1
    kept = (x.x >= cutoffs(x, mixed).unsqueeze(1))[:, :VOCAB]
    assert kept[0].all() and kept[1].sum() == 7
    probs = x.x.softmax(1)
    assert probs[2][:VOCAB][kept[2]].sum() >= 0.5 > probs[2][:VOCAB][kept[2]].sum() - probs[2][:VOCAB][kept[2]].min()
    assert torch.equal(kept[3], (probs[3] >= 0.1 * probs[3].max())[:VOCAB])


def test_edits_against_their_definitions() -> None:
    x = random_logits(5, 3.0)
    x[3, 7] = math.nan
    rows = torch.tensor([4, 0, 3], device=DEVICE)
    bias = random_logits(2, 2.0, seed=1)
    bias[1, 5] = -math.inf
    counts = torch.randint(0, 4, (2, VOCAB), device=DEVICE, dtype=torch.int32)
    words = torch.randint(-(2**31), 2**31, (1, -(-VOCAB // 32)), device=DEVICE, dtype=torch.int64).int()
    penalties = torch.tensor([[0.5, 0.25, 1.3], [0, 0, 1.0], [-1.0, 2.0, 0.8]], device=DEVICE)

    def index(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    forbidden = torch.tensor([[0, 2], [11, 12]], device=DEVICE)
    edits = LogitsEdits(bias, index(1, -1, 0), counts, index(0, -1, 1), penalties, words, index(-1, 0, -1), forbidden)
    edited = edit_logits(x.half(), rows, VOCAB, edits)
    got = edited.x
    assert got.shape == (3, 5120) and (got[:, VOCAB:] == -math.inf).all()
    want = x.half()[rows].float()
    want[2, 7] = -math.inf
    want[0] += bias[1]
    want[2] += bias[0]
    bits = torch.tensor([int(words[0, i // 32]) >> (i % 32) & 1 for i in range(VOCAB)], device=DEVICE)
    want[1][bits == 0] = -math.inf
    for row, number in ((0, 0), (2, 1)):
        presence, frequency, repetition = penalties[row].tolist()
        seen = (counts[number] > 0).nonzero().flatten().unsqueeze(0)
        want[row] = RepetitionPenaltyLogitsProcessor(repetition)(seen, want[row : row + 1])[0]
        in_output = counts[number] // 2
        want[row] -= frequency * in_output + presence * (in_output > 0)
    want[0, 11] = want[2, 12] = -math.inf
    torch.testing.assert_close(got[:, :VOCAB], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_log_probabilities(k: int) -> None:
    x, temperatures = random_logits(4, 3.0), torch.tensor([1.0, 0.5, 0.0, 2.0], device=DEVICE)
    tokens = torch.tensor([3, 5002, 17, 0], device=DEVICE)
    values, ids, ranks = token_logprobs(padded(x), tokens, k, temperatures)
    want = (x / torch.where(temperatures > 0, temperatures, 1.0).unsqueeze(1)).double().log_softmax(1)
    assert torch.equal(ids[:, 0], tokens) and values.shape == (4, 1 + k)
    torch.testing.assert_close(values.double(), want.gather(1, ids), rtol=1e-5, atol=1e-5)
    assert torch.equal(ranks, (want > want.gather(1, tokens.unsqueeze(1))).sum(1) + 1)
    assert torch.equal(ids[:, 1:], want.topk(k).indices)


@pytest.mark.parametrize("k", [1, 3, 100, 1000, 5120])
def test_the_largest_logits_of_each_row(k: int) -> None:
    x = padded(random_logits(3, 1.0))
    values, ids = top_values(x, k)
    want = x.x.topk(k)
    assert torch.equal(values, want.values) and torch.equal(x.x.gather(1, ids), values)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [1, 3]])
def test_rows_without_edits_need_no_copy(form: str, rows: list[int]) -> None:
    logits = random_logits(4, 3.0)[:, :4992].bfloat16().contiguous()
    logits[1, 7], logits[3, :64] = math.nan, math.nan
    index = torch.tensor(rows, device=DEVICE)
    found = edit_logits(logits, index, 4992, LogitsEdits())
    if form == "triton":
        assert found.x.dtype == torch.bfloat16 and (found.x.data_ptr() == logits.data_ptr()) == (len(rows) == 4)
    x = logits[index].float().nan_to_num(-math.inf)
    limits = params(len(rows), 0.8, top_k=40, top_p=0.9)
    want = TopPLogitsWarper(0.9)(EMPTY, TopKLogitsWarper(40)(EMPTY, x / 0.8)) > -math.inf
    least = cutoffs(found, limits)
    assert ((x >= least.unsqueeze(1)) != want).sum(1).max() <= 1
    tokens = torch.full((len(rows),), 100, device=DEVICE)
    for kept, exact in ((found, x), (found.above(least), x.masked_fill(x < least.unsqueeze(1), -math.inf))):
        values, ids, ranks = token_logprobs(kept, tokens, 5)
        torch.testing.assert_close(values, exact.log_softmax(1).gather(1, ids), rtol=1e-5, atol=1e-5)
        assert torch.equal(ranks, (exact > exact[:, 100:101]).sum(1) + 1)
        assert torch.equal(exact.gather(1, ids[:, 1:]), exact.topk(5).values)


def test_kernels_run_where_they_can() -> None:
    assert uses_triton(DEVICE) == GPU
