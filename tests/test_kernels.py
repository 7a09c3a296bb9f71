"""Every Triton kernel against its torch reference: on the GPU where there is one, else in Triton's interpreter.

A kernel passes if its error against float32 is at most twice the error of the same op by torch in the kernel's dtype
(plus float32's own rounding). Outputs are filled with NaN first wherever the kernel is handed them. What a kernel reads
before it waits must not come from the kernel ahead (see `pdl_options`); so tests make last what stands for an earlier
kernel's result, x or logits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product, starmap
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nanovllm.attention import cascade as shared_prefix
from nanovllm.attention.cascade import plan_cascade_groups
from nanovllm.kernels import gates, policy, qkv_rope_store, rms_norm, sampling, slot_tensors
from nanovllm.kernels._triton import device_limits, is_hopper, jit, tl
from nanovllm.kernels.attention.cascade_attention import CascadeGroups, rows_per_item
from nanovllm.kernels.attention.decode_attention import DecodePlan, decode_attention, plan_decode
from nanovllm.kernels.attention.options import PLAIN, AttentionOptions
from nanovllm.kernels.attention.prefill_attention import QUERY_TILE, ChunkRows, prefill_attention
from nanovllm.kernels.fast_math import pack_pair, round_to
from nanovllm.kernels.four_bits import FourBitMatrix, dequantize_four_bits_ref
from nanovllm.kernels.linear import norm_linear, skinny_gemm
from nanovllm.kernels.linear.gemv import gemv
from nanovllm.kernels.qkv_rope_store import KVPages, KVScales, NormRope
from nanovllm.kernels.rms_norm import Norm

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BATCHES = (1, 19, 99, 989) if GPU else (1, 19)
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if GPU else (torch.float32, torch.float16)
FLOAT32_ROUNDING = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


E4M3 = torch.float8_e4m3fn
CACHED = (*((dtype, dtype) for dtype in DTYPES), *((dtype, E4M3) for dtype in (DTYPES if GPU else DTYPES[-1:])))
"""Dtypes of queries, and of keys and values."""


def over_dtypes(*axes: Sequence[Any], dtypes: Sequence[Any] = DTYPES) -> list[tuple[Any, ...]]:
    """Each combination with each dtype; in the interpreter, where a dtype changes little else, with one in turn.

    There each value of one of several axes still meets every dtype, if another axis has enough values.
    """
    cases = []
    for places in product(*map(range, map(len, axes))):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        cases += [(*values, dtype) for dtype in (dtypes if GPU else (dtypes[sum(places) % len(dtypes)],))]
    return cases


def by_triton(op: Any) -> Callable[..., Any]:
    """The op by its kernels, which run in Triton's interpreter where there is no GPU."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with patch(f"{op.__module__}.uses_triton", lambda device: True):
            return op(*args, **kwargs)

    return run


def check_error(out: torch.Tensor, same_dtype: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that `out` is about as near to the float32 result as torch gets in the same dtype."""
    assert out.isfinite().all()
    error = (out.float() - exact).abs().max().item()
    allowed = 2 * (same_dtype.float() - exact).abs().max().item() + FLOAT32_ROUNDING * exact.abs().max().item()
    assert error <= allowed, f"error {error} over {allowed}"


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("parts", [None, 2, 4])
def test_rms_norm(rows: int, dtype: torch.dtype, with_residual: bool, parts: int | None) -> None:
    """Rows, and sums in parts."""
    size = 1024 if GPU else 80
    weight = randn(size, dtype=dtype)
    residual = randn(rows, size, dtype=dtype) if with_residual else None
    x = randn(rows, 2 * size, dtype=dtype)[:, :size] if parts is None else randn(parts, rows, size)
    wide = x.float() if parts is None else x.sum(0)
    wide, same = (x if residual is None else x + residual.to(x.dtype) for x in (wide, wide.to(dtype)))
    for form in (by_triton(rms_norm.rms_norm), rms_norm.rms_norm_ref):
        out, total = form(x, weight, 1e-6, residual)
        assert out.dtype == total.dtype == dtype and out.shape == total.shape == (rows, size)
        check_error(total, same, wide)
        assert parts is not None or torch.equal(total, same)
        exact = torch.nn.functional.rms_norm(total.float(), (size,), weight.float(), 1e-6)
        check_error(out, torch.nn.functional.rms_norm(total, (size,), weight, 1e-6), exact)


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm(rows: int, dtype: torch.dtype) -> None:
    """On one rank, and on two with unequal shares, which add up their squares."""
    q, k, size = (2048, 512, 3072) if GPU else (80, 48, 144)
    weights = randn(q, dtype=dtype), randn(k, dtype=dtype)
    x = randn(rows, 2 * size, dtype=dtype)[:, :size]
    same, exact = x.clone(), x.clone().float()
    for result in (same, exact):
        for weight, part in zip(weights, result.split([q, k, size - q - k], dim=1), strict=False):
            part.copy_(torch.nn.functional.rms_norm(part, weight.shape, weight.to(part.dtype), 0.1))
    shares = [(slice(q // 5), slice(k // 3)), (slice(q // 5, q), slice(k // 3, k))]
    norms = [rms_norm.QKNorms(weights[0][own_q], weights[1][own_k], q, k, 0.1) for own_q, own_k in shares]

    def ranks_of(qkv: torch.Tensor) -> list[torch.Tensor]:
        query, key, value = qkv[:, :q], qkv[:, q : q + k], qkv[:, q + k :]
        return [torch.cat((query[:, own_q], key[:, own_k], value), dim=1) for own_q, own_k in shares]

    for normalize, sum_squares in (
        (by_triton(rms_norm.normalize_qk), by_triton(rms_norm.sum_squares)),
        (rms_norm.normalize_qk_ref, rms_norm.sum_squares_ref),
    ):
        parts = ranks_of(x)
        first, second = starmap(sum_squares, zip(parts, norms, strict=True))
        for out, norm, *expected in zip(parts, norms, ranks_of(same), ranks_of(exact), strict=True):
            normalize(out, norm, first + second)
            check_error(out, *expected)
        out = torch.cat((x, x), dim=1)[:, :size]
        normalize(out, rms_norm.QKNorms(*weights, q, k, 0.1))
        check_error(out, same, exact)


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(rows: int, dtype: torch.dtype) -> None:
    gate_up = randn(rows, 2 * (3072 if GPU else 112), dtype=dtype)
    exact = gates.silu_and_mul_ref(gate_up.float())
    gate, up = gate_up.chunk(2, dim=-1)
    check_error(by_triton(gates.silu_and_mul)(gate_up), torch.nn.functional.silu(gate) * up, exact)
    check_error(gates.silu_and_mul_ref(gate_up), torch.nn.functional.silu(gate) * up, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_heads", [False, True])
def test_store_kv(dtype: torch.dtype, by_heads: bool) -> None:
    tokens, heads, num_slots = 19, 3, 64
    slots = torch.randperm(num_slots, device=DEVICE)[:tokens].int()
    slots[::5] = -1
    before = [randn(4, 16, heads, size, dtype=dtype) for size in (24, 16)]
    out, same = ([pages.clone() for pages in before] for _ in range(2))
    sizes = [(heads, tokens, size) if by_heads else (tokens, heads, size) for size in (24, 16)]
    key, value = (randn(*size, dtype=dtype) for size in sizes)
    if by_heads:
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    by_triton(qkv_rope_store.store_kv)(key, value, KVPages(out[0], out[1]), slots)
    qkv_rope_store.store_kv_ref(key, value, KVPages(same[0], same[1]), slots)
    for new, pages, theirs, old in zip((key, value), out, same, before, strict=True):
        expected = old.flatten(0, 1).clone()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = new[token]
        assert torch.equal(pages.flatten(0, 1), expected) and torch.equal(theirs.flatten(0, 1), expected)


def check_rope_store(
    op: Callable[..., torch.Tensor], qkv: torch.Tensor, exact_qkv: torch.Tensor, rope: NormRope, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare queries and pages with the reference's; what no slot names stays as it was.

    op: is given NormRope, positions, pages and slots. Returns positions, slots, exact queries, and the pages before and
    after it.
    """
    tokens, block_size, head_dim = len(qkv), 16, qkv.shape[2]
    num_blocks, weights = tokens // block_size + 3, rope.norm_weights
    positions = torch.randint(len(rope.cos_sin), (tokens,), device=DEVICE, dtype=torch.int32)
    slots = torch.randperm(num_blocks * block_size, device=DEVICE)[:tokens].int()
    slots[4::5] = -1
    before = randn(2, num_blocks, block_size, kv_heads, head_dim, dtype=qkv.dtype)
    out, same, exact = before.clone(), before.clone(), before.float()
    wide = replace(rope, norm_weights=None if weights is None else (weights[0].float(), weights[1].float()))
    query = op(rope, positions, KVPages(out[0], out[1]), slots)
    same_query = qkv_rope_store.qkv_rope_store_ref(qkv, rope, positions, KVPages(same[0], same[1]), slots)
    exact_query = qkv_rope_store.qkv_rope_store_ref(exact_qkv, wide, positions, KVPages(exact[0], exact[1]), slots)
    check_error(query, same_query, exact_query)
    for part in range(2):
        check_error(out[part], same[part], exact[part])
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=DEVICE)
    untouched[slots[slots >= 0].long()] = False
    for cache in (out, same):
        assert torch.equal(cache.flatten(1, 2)[:, untouched], before.flatten(1, 2)[:, untouched])
    return positions, slots, exact_query, before, out


@pytest.mark.parametrize(
    ("tokens", "head_dim", "with_norm", "dtype"),
    over_dtypes(BATCHES, [16, 48, 64, 128, *([32, 96, 256] if GPU else [])], [False, True]),
)
def test_qkv_rope_store(tokens: int, head_dim: int, with_norm: bool, dtype: torch.dtype) -> None:
    num_heads, kv_heads, kernel = 6, 3, by_triton(qkv_rope_store.qkv_rope_store)
    qkv = randn(tokens, 2 * (num_heads + 2 * kv_heads), head_dim, dtype=dtype)[:, : num_heads + 2 * kv_heads]
    weights = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)) if with_norm else None
    rope = NormRope(weights, 1e-6, torch.rand(64, head_dim, device=DEVICE))
    positions, slots, _, before, out = check_rope_store(partial(kernel, qkv), qkv, qkv.float(), rope, kv_heads)
    values = out[1].flatten(0, 1)[slots[slots >= 0].long()]
    assert torch.equal(values, qkv[slots >= 0, num_heads + kv_heads :])
    # Keys and values alone.
    query = kernel(qkv[:, num_heads:], rope, positions, KVPages(before[0], before[1]), slots)
    assert query.shape == (tokens, 0, head_dim) and torch.equal(before, out)


LINEARS = ["", "norm bias", "norm residual bias", "norm residual gated"]
"""What a layer has beside its product; "parts": its input is in parts of a sum."""
PRODUCTS = ["", "bias", "gated"]


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """Have torch fill new tensors, so that what a kernel leaves out does not look right by chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_norm_linear(
    function: Any, rows: int, size: tuple[int, int] | FourBitMatrix, dtype: torch.dtype, has: str
) -> None:
    """Compare a form of `norm_linear` with the reference; its epsilon is large enough to be missed.

    size: inputs and outputs of weights in `dtype`, or other weights, with outputs of gate and up if it is gated.
    """
    weight: Any = size
    if isinstance(size, FourBitMatrix):
        in_features, wide = size.in_features, dequantize_four_bits_ref(size, torch.float32)
    else:
        in_features, out_features = size
        weight = randn(out_features * (1 + ("gated" in has)), in_features, dtype=dtype) * in_features**-0.5
        wide = weight.float()
    bias = randn(len(wide), dtype=dtype) if "bias" in has else None
    norm = Norm(randn(in_features, dtype=dtype), 0.1) if "norm" in has else None
    wide_bias = None if bias is None else bias.float()
    wide_norm = None if norm is None else Norm(norm.weight.float(), norm.eps)
    residual = randn(rows, in_features, dtype=dtype) if "residual" in has else None
    x = randn(3, rows, in_features) if "parts" in has else randn(rows, in_features, dtype=dtype)
    out, total = function(x, weight, bias, norm, residual, "gated" in has)
    same, same_total = norm_linear.norm_linear_ref(x, weight, bias, norm, residual, "gated" in has)
    # Sums of parts in float32 may be added up in another order.
    torch.testing.assert_close(total, same_total, rtol=1e-5 * ("parts" in has), atol=1e-5 * ("parts" in has))
    exact, _ = norm_linear.norm_linear_ref(total.float(), wide, wide_bias, wide_norm, None, "gated" in has)
    check_error(out, same, exact)


def check_product(
    multiply: Any, rows: int, size: tuple[int, int] | FourBitMatrix, dtype: torch.dtype, has: str
) -> None:
    """Compare a kernel that takes rows, weight, bias and gate; the parts of a sum are added up."""

    def form(x: torch.Tensor, weight: Any, bias: Any, _norm: None, _residual: None, gated: bool) -> Any:
        with empty_is_nan():
            out = multiply(x, weight, bias, gated)
        return out.sum(0) if out.dim() == 3 else out, x

    check_norm_linear(form, rows, size, dtype, has)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has", [*LINEARS, "norm parts", "norm residual parts"])
@pytest.mark.parametrize("size", [(48, 80), (1024, 3072), (3072, 1024), (12288, 520)] if GPU else [(48, 80), (80, 34)])
def test_gemv(dtype: torch.dtype, has: str, size: tuple[int, int]) -> None:
    check_norm_linear(gemv, 1, size, dtype, has)


# Its tiles are sized for elements of two bytes; the dispatcher gives it no others.
@pytest.mark.parametrize(
    ("rows", "size", "has", "dtype"),
    over_dtypes(
        (1, 2, 7, 16),
        [(48, 80), (1024, 6144), (2048, 1024), (4096, 520), (512, 33000)] if GPU else [(48, 80), (300, 34)],
        PRODUCTS,
        dtypes=DTYPES[1:],
    ),
)
def test_skinny_gemm(rows: int, size: tuple[int, int], has: str, dtype: torch.dtype) -> None:
    check_product(skinny_gemm.skinny_gemm, rows, size, dtype, has)


# What the largest of the sizes takes. An H100 or later has it; elsewhere the dispatcher leaves the kernel alone.
RESIDENT_BYTES = 192 * 1024


@pytest.mark.gpu
@pytest.mark.skipif(GPU and device_limits(torch.device("cuda"))[1] < RESIDENT_BYTES, reason="needs more shared memory")
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("has", LINEARS)
@pytest.mark.parametrize("size", [(48, 66), (896, 1152), (1024, 3072), (1024, 4096), (2048, 4096), (3072, 1024)])
def test_resident_gemm(rows: int, dtype: torch.dtype, has: str, size: tuple[int, int]) -> None:
    from nanovllm.kernels.linear.resident_gemm import resident_gemm  # noqa: PLC0415

    in_features, out_features = size
    if "norm" in has:
        in_features = min(in_features, 1000)
    check_norm_linear(resident_gemm, rows, (in_features, out_features), dtype, has)


@pytest.mark.parametrize(
    ("normed", "gated", "in_features", "out_features", "pays"),
    [
        (True, False, 1024, 4096, True), (True, True, 1024, 3072, True), (True, False, 1032, 1024, False),
        (False, True, 1032, 1024, False), (False, False, 1020, 1024, False), (False, False, 1024, 132 * 32, True),
        (False, False, 1024, 132 * 32 + 1, False), (False, False, 3072, 132 * 16, True),
        # With these inputs and outputs, a program's tiles take 288 KiB.
        (False, False, 3072, 132 * 16 + 1, False), (False, False, 2048, 132 * 32, True),
        (False, False, 3080, 1024, False),
    ],
)  # fmt: skip
def test_resident_gemm_pays_where_its_programs_fit_at_once(
    normed: bool, gated: bool, in_features: int, out_features: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.empty(out_features * (1 + gated), in_features, dtype=torch.bfloat16)
    monkeypatch.setattr(policy, "device_limits", lambda device: (132, 232448))
    assert policy.FASTEST.uses_resident(16, weight, normed, gated) == pays
    assert not policy.FASTEST.uses_resident(17, weight, normed, gated)
    monkeypatch.setattr(policy, "device_limits", lambda device: (0, 0))
    assert not policy.FASTEST.uses_resident(16, weight, normed, gated)


needs_hopper = pytest.mark.skipif(not is_hopper(torch.device(DEVICE)), reason="needs a Hopper GPU")


@needs_hopper
@pytest.mark.parametrize("rows", [1, 129, 2000, 4500])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("size", [(64, 128), (1024, 3072), (320, 1664)])
@pytest.mark.parametrize("num_programs", [132, 7])
def test_persistent_gated_gemm(rows: int, dtype: torch.dtype, size: tuple[int, int], num_programs: int) -> None:
    from nanovllm.kernels.linear.persistent_gemm import persistent_gated_gemm  # noqa: PLC0415

    check_product(lambda x, weight, *_: persistent_gated_gemm(x, weight, num_programs), rows, size, dtype, "gated")


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 130, 3000])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(16, 8), (4, 1), (2, 2)])
@pytest.mark.parametrize("num_programs", [5, 132])
def test_hopper_qkv_rope_store(
    tokens: int, dtype: torch.dtype, num_heads: int, kv_heads: int, num_programs: int
) -> None:
    from nanovllm.kernels.linear.persistent_gemm import persistent_qkv_rope_store  # noqa: PLC0415

    head_dim, hidden_size = 128, 320
    weight = randn((num_heads + 2 * kv_heads) * head_dim, hidden_size, dtype=dtype) * hidden_size**-0.5
    norms = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype))
    rope = NormRope(norms, 0.1, torch.rand(64, head_dim, device=DEVICE))
    x = randn(tokens, hidden_size, dtype=dtype)

    kernel: Any = persistent_qkv_rope_store

    def op(*args: Any) -> Any:
        with empty_is_nan():
            return kernel(x, weight, *args, num_programs)

    qkv, exact_qkv = (y.view(tokens, -1, head_dim) for y in (x @ weight.T, x.float() @ weight.float().T))
    check_rope_store(op, qkv, exact_qkv, rope, kv_heads)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 99])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has", ["norm residual gated", "norm residual parts", "norm residual gated parts"])
def test_norm_linear_takes_each_road(rows: int, dtype: torch.dtype, has: str) -> None:
    """The dispatcher's result is the reference's, whether the rows are one, few or many."""
    check_norm_linear(norm_linear.norm_linear, rows, (64, 48), dtype, has)


@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 257, 5003])
def test_sampling(rows: int, dtype: torch.dtype, vocab_size: int) -> None:
    temperatures = torch.rand(rows, device=DEVICE) * (torch.arange(rows, device=DEVICE) % 3 > 0)
    seeds = torch.randint(-(2**31), 2**31 - 1, (rows, 2), dtype=torch.int32, device=DEVICE)
    output_index = torch.randint(4096, (rows,), dtype=torch.int32, device=DEVICE)
    logits = (3 * randn(rows, vocab_size + 3, dtype=dtype))[:, :vocab_size]
    out_scores, out = by_triton(sampling.sample)(logits, temperatures, seeds, output_index)
    _, want = sampling.sample_ref(logits, temperatures, seeds, output_index)
    greedy = temperatures == 0
    assert torch.equal(out[greedy], want[greedy])
    # exp and log differ in the last bit from one implementation to the other, which may decide a draw.
    num_groups = -(-vocab_size // sampling.GROUP)
    padding = (0, num_groups * sampling.GROUP - vocab_size)
    groups = torch.nn.functional.pad(logits.double(), padding, value=float("-inf")).view(rows, num_groups, -1)
    heat = temperatures[:, None].double()
    scores = heat * (groups / heat[:, None]).logsumexp(2) + heat * sampling.group_noise(num_groups, seeds, output_index)
    scores = torch.where(heat > 0, scores, groups.amax(2))
    group = out // sampling.GROUP
    drawn = scores.gather(1, group[:, None]).squeeze(1)
    torch.testing.assert_close(out_scores.double(), drawn, rtol=0, atol=2e-5)
    assert (scores.amax(1) - drawn).max() < 2e-5
    keys = groups[torch.arange(rows, device=DEVICE), group] + heat * sampling.token_noise(group, seeds, output_index)
    assert (keys.amax(1) - keys.gather(1, out[:, None] % sampling.GROUP).squeeze(1)).max() < 2e-5
    assert (out == want).float().mean() > 0.99


def test_sampling_takes_the_lowest_id_of_a_tie() -> None:
    zeros = torch.zeros(3, device=DEVICE)
    seeds = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    logits = torch.zeros(3, 9001, device=DEVICE)
    logits[0, [5000, 7000, 8999]] = 1
    logits[1, [10, 11]] = 1
    for form in (by_triton(sampling.sample), sampling.sample_ref):
        assert form(logits, zeros, seeds, seeds[:, 0])[1].tolist() == [5000, 10, 0]


def test_sampling_gives_a_token_whatever_the_logits() -> None:
    vocab_size = 319
    seeds = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    logits = torch.randn(4, vocab_size, device=DEVICE)
    logits[0] = float("nan")
    logits[1, 5] = float("nan")
    logits[2] = float("-inf")
    logits[3, 70] = float("inf")
    for temperature in (0.0, 1e-38, 1.0, 1e30):
        temperatures = torch.full((4,), temperature, device=DEVICE)
        for form in (by_triton(sampling.sample), sampling.sample_ref):
            tokens = form(logits, temperatures, seeds, seeds[:, 0])[1].tolist()
            assert tokens[0] == tokens[2] == 0 and tokens[3] == 70
            assert tokens[1] != 5 and 0 <= tokens[1] < vocab_size
            assert temperature > 1e-38 or tokens[1] == logits[1].nan_to_num(-1e9).argmax()


@pytest.mark.parametrize("rows", [1, 5, 300 if GPU else 40])
@pytest.mark.parametrize("max_blocks", [7, 150])
def test_decode_rows_come_from_slots_and_tokens_go_back(rows: int, max_blocks: int) -> None:
    num_slots, block_size = 300, 16

    def numbers(most: int, *width: int) -> torch.Tensor:
        return torch.randint(0, most, (num_slots + 1, *width), dtype=torch.int32, device=DEVICE)

    state = slot_tensors.SlotTensors(
        last_token=numbers(1000), num_computed=numbers(max_blocks * block_size), num_prompt=numbers(1000),
        temperature=torch.rand(num_slots + 1, device=DEVICE), seed=numbers(2**31 - 1, 2),
        drafts=numbers(1000, 0), num_blocks=numbers(9, 0), block_tables=numbers(1000, 3, max_blocks),
    )  # fmt: skip
    slots = torch.randperm(num_slots, device=DEVICE)[:rows].int()
    if rows > 1:
        slots[-2:] = num_slots
    got = by_triton(slot_tensors.gather_decode_rows)(state, slots, block_size)
    want = slot_tensors.gather_decode_rows_ref(state, slots, block_size)
    for name, tensor in vars(want).items():
        assert torch.equal(getattr(got, name), tensor), name
    index = slots.long()
    assert torch.equal(want.temperatures, state.temperature[index]) and torch.equal(want.seeds, state.seed[index])
    assert torch.equal(want.output_index, state.num_computed[index] + 1 - state.num_prompt[index])
    live = slots < num_slots
    for group in range(3):
        tables, slot_mapping = state.block_tables[index, group], want.slot_mapping[group]
        assert torch.equal(want.block_tables[group], tables)
        blocks = tables[torch.arange(rows), want.positions // block_size]
        assert torch.equal(slot_mapping[live], (blocks * 16 + want.positions % 16)[live])
        assert ((slot_mapping < 0) == ~live).all()
    token_ids = torch.randint(0, 1000, (rows,), device=DEVICE)
    states = [deepcopy(state), deepcopy(state)]
    sampled = [torch.full((2 * rows,), -1, device=DEVICE) for _ in states]
    num_decodes = rows - rows // 2
    by_triton(slot_tensors.scatter_tokens)(states[0], slots, token_ids, num_decodes, sampled[0])
    slot_tensors.scatter_tokens_ref(states[1], slots, token_ids, num_decodes, sampled[1])
    for name, tensor in vars(states[0]).items():
        assert torch.equal(tensor[:-1], getattr(states[1], name)[:-1]), name
    for out in sampled:
        assert torch.equal(out[:rows], token_ids) and (out[rows:] == -1).all()
    assert torch.equal(states[0].last_token[index[live]], token_ids[live].int())
    counted = states[0].num_computed - state.num_computed
    assert counted.sum() == live[:num_decodes].sum() and counted[-1] == 0


@pytest.mark.parametrize("form", [by_triton(sampling.sample), sampling.sample_ref] if GPU else [sampling.sample_ref])
@pytest.mark.parametrize("temperature", [0.5, 1e30])
def test_equal_tokens_are_equally_likely(form: Any, temperature: float) -> None:
    """All tokens of three groups, by chi-squared over 20,000 draws."""
    count, vocab_size = 20000, 3 * sampling.GROUP
    seeds = torch.arange(2 * count, dtype=torch.int32, device=DEVICE).view(count, 2)
    temperatures = torch.full((count,), temperature, device=DEVICE)
    _, drawn = form(torch.zeros(count, vocab_size, device=DEVICE), temperatures, seeds, seeds[:, 1].contiguous())
    expected = count / vocab_size
    chi_squared = ((torch.bincount(drawn, minlength=vocab_size) - expected) ** 2 / expected).sum().item()
    # The 0.05th and the 99.95th percentile of chi-squared with 191 degrees of freedom.
    assert 132 < chi_squared < 262


def paged(lens: list[int], block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple:
    """A cache with contexts of these lengths in shuffled blocks; every other place holds NaN."""
    needed = [-(-n // block_size) for n in lens]
    num_blocks = sum(needed) + 2
    cache = randn(2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype)
    order = torch.randperm(num_blocks, device=DEVICE).int()
    tables = torch.zeros(len(lens), max(needed) + 1, dtype=torch.int32, device=DEVICE)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool, device=DEVICE)
    start = 0
    for i, n in enumerate(lens):
        blocks = order[start : start + needed[i]]
        tables[i, : needed[i]] = blocks
        positions = torch.arange(n, device=DEVICE)
        used[blocks[positions // block_size].long(), positions % block_size] = True
        start += needed[i]
    cache[:, ~used] = float("nan")
    return cache, tables, torch.tensor(lens, dtype=torch.int32, device=DEVICE)


def dense_attention(
    query: torch.Tensor, cache: Any, table: torch.Tensor, length: int, options: AttentionOptions = PLAIN
) -> torch.Tensor:
    """Causal attention of the last queries of one sequence, in the query's dtype. query: [n, heads, head_dim]."""
    key, value = (part[table.long()].flatten(0, 1)[:length].to(query.dtype) for part in cache)
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    first = length - len(query)
    distance = first + torch.arange(len(query), device=DEVICE)[:, None] - torch.arange(length, device=DEVICE)
    scores = scores.masked_fill((distance < 0) | (distance >= (options.window or length)), float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(query.dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], value)


def make_scales(kv_heads: int, size: float = 1.0) -> KVScales:
    # No powers of two, and one for each head, so that a wrong one shows.
    keys, values = size * torch.linspace(0.3, 0.9, kv_heads), size * torch.linspace(1.7, 0.6, kv_heads)
    return KVScales(keys.to(DEVICE), values.to(DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE))


def in_e4m3(caches: Any) -> tuple[KVPages, tuple[torch.Tensor, torch.Tensor]]:
    """Pages of e4m3 whose values are ten times a cache's, and what they mean."""
    scales = make_scales(caches[0].shape[2])
    stored = [(cache.float() / 0.1).to(E4M3) for cache in caches]
    meant = [cache.float() * scale[:, None] for cache, scale in zip(stored, (scales.keys, scales.values), strict=True)]
    return KVPages(stored[0], stored[1], scales), (meant[0], meant[1])


def pages_of(caches: Any, dtype: torch.dtype | None) -> tuple[KVPages, Any, float]:
    """Pages in a dtype, what they mean, and the share of a query by which they are attended to."""
    if dtype == E4M3:
        return *in_e4m3(caches), 0.1
    return KVPages(caches[0], caches[1]), caches, 1.0


def check_attention(
    out: torch.Tensor, query: torch.Tensor, cache: Any, tables: torch.Tensor, query_lens: list[int], lens: list[int],
    options: AttentionOptions = PLAIN, share: float = 1.0,
) -> None:  # fmt: skip
    """Compare with dense attention by a share of the query; `cache` is what its pages mean."""
    rows = [(q * share, tables[i], lens[i]) for i, q in enumerate(query.split(query_lens))]
    exact, same = (
        torch.cat([dense_attention(q.to(dtype), cache, table, n, options) for q, table, n in rows])
        for dtype in (torch.float32, query.dtype)
    )
    check_error(out, same, exact)


def unfilled(query: torch.Tensor, value_size: int | None = None) -> torch.Tensor:
    """An output of attention that holds NaN."""
    size = query.shape[2] if value_size is None else value_size
    return torch.full((*query.shape[:2], size), float("nan"), dtype=query.dtype, device=DEVICE)


def chunk_rows(tables: torch.Tensor, seq_lens: torch.Tensor, query_lens: list[int], num_padding: int = 0) -> ChunkRows:
    """Chunks, whose tiles are in any order, with tiles of padding among them."""
    work = [(i, n) for i, q in enumerate(query_lens) for n in range(-(-q // QUERY_TILE))] + [(-1, 0)] * num_padding
    tiles = torch.tensor([work[i] for i in torch.randperm(len(work)).tolist()], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int()
    return ChunkRows(tables, seq_lens, starts, tiles.T.flatten())


def new_slots(tables: torch.Tensor, lens: list[int], block_size: int) -> torch.Tensor:
    """Return the slot of each context's last token."""
    last = torch.tensor(lens, device=DEVICE) - 1
    return (tables[torch.arange(len(lens), device=DEVICE), last // block_size] * block_size + last % block_size).int()


SHAPES = [(16, 1, 16), (32, 2, 16), (64, 7, 48), (128, 8, 256)]
if GPU:
    SHAPES += [(64, 4, 32), (128, 2, 256), (64, 3, 16)]


Sizes = tuple[int, int, int, int]
"""Elements of a key and of a value, query heads per KV head, block size."""
SMALL, WIDE, LARGE = (48, 80, 2, 48), (192, 128, 3, 16), (512, 512, 2, 64)
UNEVEN = [(SMALL, 1, False), (SMALL, 50, True), (WIDE, None, True), (WIDE, 129, False), (LARGE, 60, True)]
PLAIN_CASES = [((size, size, group, block_size), None, False) for size, group, block_size in SHAPES]
Case = tuple[Sizes, int | None, bool]
"""Sizes, window, and whether there are a softcap and sinks."""


def case_of(
    lens: list[int], case: Case, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[KVPages, Any, float, torch.Tensor, torch.Tensor, AttentionOptions]:
    """Pages, what they mean, and the share of a query; tables and lengths as `paged`; and options."""
    (key_dim, value_dim, group, block_size), window, capped = case
    cache, tables, seq_lens = paged(lens, block_size, 2, max(key_dim, value_dim), dtypes[0])
    caches = cache[0, ..., :key_dim].contiguous(), cache[1, ..., :value_dim].contiguous()
    sinks = randn(2 * group, dtype=dtypes[0]) if capped else None
    return *pages_of(caches, dtypes[1]), tables, seq_lens, AttentionOptions(window, 0.7 if capped else None, sinks)


def planned(*args: Any, **options: Any) -> DecodePlan:
    """`plan_decode`, whose buffers hold NaN."""
    plan = plan_decode(*args, **options)
    for part in (*(plan.partial or ()), *((plan.prefix.partial, plan.prefix.lse) if plan.prefix is not None else ())):
        part.fill_(float("nan"))
    return plan


@pytest.mark.parametrize(
    ("case", "way", "dtypes"),
    over_dtypes(
        [*PLAIN_CASES, (SMALL, None, False), *UNEVEN],
        [(1, 1, 32), (1, 100, 16), (2, 1, 32), (5, 20, 16), *([(1, 7, 64), (3, 20, 16)] if GPU else [])],
        dtypes=CACHED,
    ),
)
def test_decode_attention(case: Case, way: tuple[int, int, int], dtypes: Any) -> None:
    """The last tokens of some rows do not exist."""
    (key_dim, value_dim, group, _), window, _ = case
    num_queries, shares, tile = way
    lens = [1, num_queries, 49, 50 + num_queries, 16, 150, *([15, 129, 1000, 2047, 4100] * 3 if GPU else [])]
    pages, meant, share, tables, seq_lens, options = case_of(lens, case, dtypes)
    query = randn(len(lens) * num_queries, 4 * group, key_dim, dtype=dtypes[0])[:, : 2 * group]
    out = unfilled(query, value_dim)
    query_lens = [min(length, 1 + (num_queries + i) % num_queries) for i, length in enumerate(lens)]
    exists = torch.cat([torch.arange(num_queries, device=DEVICE) < count for count in query_lens])
    starts, ends = (
        torch.tensor(x, device=DEVICE) for x in ([n - q for n, q in zip(lens, query_lens, strict=True)], lens)
    )
    positions = (starts.unsqueeze(1) + torch.arange(num_queries, device=DEVICE)).minimum(ends.unsqueeze(1) - 1)
    plan = planned(
        seq_lens, 2 * group, 2, value_dim, tile, shares, window=window,
        positions=positions.flatten().int() if num_queries > 1 else None,
    )  # fmt: skip
    assert (plan.partial is None) == (shares == 1)
    decode_attention(query, pages, out, tables, plan, share * key_dim**-0.5, options)
    assert out.isfinite().all()
    check_attention(out[exists], query[exists], meant, tables, query_lens, lens, options, share)


def with_shared_prefixes(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, group: int, block_size: int, dtype: torch.dtype, max_items: int
) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor, CascadeGroups]:
    """Two groups of rows with common blocks, among rows of their own: lengths, then as `paged`, and the work."""
    monkeypatch.setattr(shared_prefix, "_MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(shared_prefix, "_MIN_SPLIT_KEYS", 32)
    shared_blocks = max(1, (448 if GPU else 96) // block_size)
    own_lens = [1, 300, 64, 70, 700, 65, 1200, 90] * 4 if GPU else [1, 2, 40, 70, 33, 5, 17, 90]
    lens = [shared_blocks * block_size + n for n in own_lens]
    cache, tables, seq_lens = paged(lens, block_size, 2, head_dim, dtype)
    for members in (range(0, len(lens), 2), range(1, len(lens), 4)):
        tables[list(members), :shared_blocks] = tables[members[0], :shared_blocks].clone()
    full = (seq_lens.cpu().numpy() - 1) // block_size
    work = plan_cascade_groups(tables.cpu().numpy(), full, block_size, max_items, rows_per_item(group))
    assert work is not None
    shared = CascadeGroups(*(torch.from_numpy(array).to(DEVICE) for array in work))
    assert (shared.rows[0] > 0).sum() >= (len(lens) // 2 if max_items > 3 else 1)
    return lens, cache, tables, seq_lens, shared


@pytest.mark.parametrize(
    ("shape", "split", "dtypes"),
    over_dtypes(SHAPES, [(1, 32, 3), (100, 16, 64)], dtypes=CACHED)
    if GPU
    else [
        ((16, 1, 16), (1, 32, 3), CACHED[0]),
        ((16, 1, 16), (100, 16, 64), CACHED[2]),
        ((64, 7, 48), (1, 32, 3), CACHED[1]),
    ],
)
def test_decode_attention_over_shared_prefixes(
    shape: tuple[int, int, int], split: tuple[int, int, int], dtypes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result equals attention over the whole contexts."""
    (head_dim, group, block_size), (shares, tile, max_items), (dtype, cached) = shape, split, dtypes
    case = with_shared_prefixes(monkeypatch, head_dim, group, block_size, dtype, max_items)
    lens, cache, tables, seq_lens, shared = case
    pages, meant, share = pages_of(cache, cached)
    query = randn(len(lens), group * 2, head_dim, dtype=dtype)
    out = unfilled(query)
    plan = planned(seq_lens, group * 2, 2, head_dim, tile, shares, shared=shared)
    assert plan.prefix is not None
    decode_attention(query, pages, out, tables, plan, share * head_dim**-0.5)
    check_attention(out, query, meant, tables, [1] * len(lens), lens, share=share)


def hopper_prefill_attention(
    num_programs: int, query: torch.Tensor, pages: KVPages, out: torch.Tensor, chunks: ChunkRows, scale: float,
    options: AttentionOptions,
) -> None:  # fmt: skip
    """Hopper's kernel; with few programs each goes through many tiles."""
    if not is_hopper(query.device):
        pytest.skip("needs a Hopper GPU")
    from nanovllm.kernels.attention import hopper_prefill  # noqa: PLC0415

    is_usual = pages.scales is None and options.is_plain and query.shape[2] == out.shape[2]
    if not is_usual or not hopper_prefill.supports(query.dtype, query.shape[2], pages.k_cache.shape[1]):
        pytest.skip("not one of its shapes or dtypes")
    hopper_prefill.hopper_prefill_attention(query, pages, out, chunks, scale, num_programs)


HOPPER_SHAPES = [(64, 3, 128), (256, 4, 256), (256, 3, 64)] if GPU else []


@pytest.mark.parametrize(
    ("case", "dtypes"),
    over_dtypes(
        [*PLAIN_CASES, *(((size, size, *sizes), None, False) for size, *sizes in HOPPER_SHAPES), *UNEVEN],
        dtypes=CACHED,
    ),
)
@pytest.mark.parametrize(
    "function", [prefill_attention, *(partial(hopper_prefill_attention, n) for n in ((3, 132) if GPU else ()))]
)
def test_prefill_attention(case: Case, dtypes: Any, function: Any) -> None:
    key_dim, value_dim, group, _ = case[0]
    pairs = [(1, 1), (17, 17), (5, 140), (1, 33), *([(300, 300), (128, 1000), (999, 2999)] if GPU else [(129, 131)])]
    query_lens, lens = [q for q, _ in pairs], [n for _, n in pairs]
    pages, meant, share, tables, seq_lens, options = case_of(lens, case, dtypes)
    query = randn(sum(query_lens), 4 * group, key_dim, dtype=dtypes[0])[:, : 2 * group]
    out, chunks = unfilled(query, value_dim), chunk_rows(tables, seq_lens, query_lens, num_padding=3)
    function(query, pages, out, chunks, share * key_dim**-0.5, options)
    check_attention(out, query, meant, tables, query_lens, lens, options, share)


ONES = 0xFFFFFFFF
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 in Python's integers, which takes a fourth word of the counter; ours has 0 there."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high >> 32 ^ c1 ^ k0, high & ONES, low >> 32 ^ c3 ^ k1, low & ONES
        k0, k1 = k0 + 0x9E3779B9 & ONES, k1 + 0xBB67AE85 & ONES
    return [c0, c1, c2, c3]


def words(*counter_and_key: int) -> list[int]:
    c0, c1, c2, *key = counter_and_key
    words: list[int] = sampling.philox(torch.tensor(c0), torch.tensor(c1), torch.tensor(key), c2).tolist()
    return words


def test_published_answers() -> None:
    """The three vectors of Random123's `kat_vectors`; all of ours that has a 0 in the right place is the first."""
    assert philox([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8] == words(0, 0, 0, 0, 0)
    assert philox([ONES] * 4, [ONES] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox(PI[:4], PI[4:]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("key", [[ONES, ONES], PI[4:], [0, ONES], [5, 0]])
@pytest.mark.parametrize("counter", [[0, 0, 0], [ONES] * 3, PI[:3]])
def test_every_key_and_counter(counter: list[int], key: list[int]) -> None:
    assert words(*counter, *key) == philox([*counter, 0], key)


def test_noise_by_seed_group_and_token() -> None:
    """Seeds are words with a sign; group 3 has the tokens 192 ... 255, whose counters are 48 ... 63."""
    seeds = torch.tensor([[-1, -1], [-(2**31), 7]], dtype=torch.int32)
    keys = [[ONES, ONES], [2**31, 7]]
    index = torch.tensor([9, 2**31 - 1], dtype=torch.int32)
    groups = sampling.group_noise(4, seeds, index)
    tokens = sampling.token_noise(torch.tensor([3, 3]), seeds, index)
    for row, (key, count) in enumerate(zip(keys, index.tolist(), strict=True)):
        of_groups = [philox([group, count, 1, 0], key)[0] for group in range(4)]
        of_tokens = [word for counter in range(48, 64) for word in philox([counter, count, 0, 0], key)]
        for noise, drawn in ((groups[row], of_groups), (tokens[row], of_tokens)):
            uniform = (torch.tensor(drawn, dtype=torch.float64) + 0.5) / 2**32
            torch.testing.assert_close(noise.double(), -(-(-uniform).log1p()).log(), rtol=1e-5, atol=1e-5)


@jit
def _round_kernel(x_ptr, rounded_ptr, packed_ptr, like_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    dtype: tl.constexpr = like_ptr.dtype.element_ty
    offsets = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets)
    tl.store(rounded_ptr + offsets, round_to(x, dtype))
    tl.store(packed_ptr + offsets, pack_pair(x, -x, dtype))


@pytest.mark.parametrize("size", [1, 16, 1024])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounding(dtype: torch.dtype, size: int) -> None:
    largest, spacing = torch.finfo(dtype).max, torch.finfo(dtype).eps
    # Halfway to the next of an even and of an odd value, and beyond what is finite, for float16.
    awkward = [1 + spacing / 2, 1 + 1.5 * spacing, -(1 + spacing / 2), torch.finfo(dtype).tiny / 3, 70_000.0]
    awkward += [float("nan"), float("inf"), -float("inf"), largest, -largest, -0.0, 3e38, 1e-40, 1e-7, 0.1, -2.5]
    x = torch.cat((torch.tensor(awkward), torch.randn(1008)))[:size].to(DEVICE)
    rounded, packed = torch.empty_like(x), torch.empty(size, dtype=torch.int32, device=DEVICE)
    _round_kernel[(1,)](x, rounded, packed, torch.empty(1, dtype=dtype, device=DEVICE), SIZE=size)
    wanted = x.to(dtype)
    assert torch.equal(rounded.nan_to_num(7.0), wanted.float().nan_to_num(7.0))
    assert torch.equal(rounded.isnan(), x.isnan()) and torch.equal(rounded.signbit(), wanted.float().signbit())
    pairs = packed.view(torch.int16).view(dtype).view(size, 2)
    assert torch.equal(pairs.nan_to_num(7.0), torch.stack((wanted, -wanted), 1).nan_to_num(7.0))


@pytest.mark.compat
def test_one_element_compiles_too() -> None:
    # Compiling needs no GPU, and the interpreter sees nothing of it.
    program = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tests.test_kernels import _round_kernel
for kind in ("bf16", "fp16"):
    signature = {"x_ptr": "*fp32", "rounded_ptr": "*fp32", "packed_ptr": "*i32", "like_ptr": f"*{kind}"}
    source = ASTSource(_round_kernel, {**signature, "SIZE": "constexpr"}, {(4,): 1})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
