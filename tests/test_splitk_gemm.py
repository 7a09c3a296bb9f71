"""Products that leave something to the norm that follows, and Hopper's kernel for a batch's rows."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch

from nanovllm.kernels import policy
from nanovllm.kernels._triton import is_hopper
from nanovllm.kernels.linear import norm_linear
from nanovllm.kernels.policy import MAX_SKINNY_ROWS
from nanovllm.kernels.rms_norm import Norm
from nanovllm.runner.batch import StepShape
from tests.test_capture_sizes import make_capture_sizes
from tests.test_kernels import DTYPES, GPU, check_error, check_product, needs_hopper, randn


@needs_hopper
@pytest.mark.parametrize("rows", [1, 17, 63, 64, 65, 128, 200, 256])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("size", "gated", "parts"),
    [((1024, 4096), False, 1), ((128, 64), False, 1), ((896, 1152), False, 1), ((2048, 1024), False, 4),
     ((3072, 1024), False, 4), ((512, 32), False, 4), ((640, 5120), False, 1), ((1024, 3072), True, 1),
     ((64, 32), True, 1)],
)  # fmt: skip
def test_splitk_gemm(rows: int, dtype: torch.dtype, size: tuple[int, int], gated: bool, parts: int) -> None:
    from nanovllm.kernels.linear.splitk_gemm import splitk_gemm  # noqa: PLC0415

    def multiply(x: torch.Tensor, weight: torch.Tensor, _bias: None, gated: bool) -> torch.Tensor:
        out = splitk_gemm(x, weight, gated, parts)
        assert out.shape == ((rows, size[1]) if parts == 1 else (parts, rows, size[1]))
        return out

    check_product(multiply, rows, size, dtype, "gated" if gated else "")


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "gated", "parts", "pays"),
    [
        (256, 1024, 4096, False, 1, True), (257, 1024, 1024, False, 1, False), (256, 1024, 3072, True, 1, True),
        (256, 3072, 1024, False, 4, True),
        # Wider layers: two programs a multiprocessor, and one where a plain product has a single tile of rows.
        (64, 1024, 132 * 64, False, 1, True), (64, 1024, 133 * 64, False, 1, False),
        (65, 1024, 132 * 64, False, 1, True), (65, 1024, 133 * 64, False, 1, False),
        (64, 1024, 264 * 64, True, 1, True), (64, 1024, 265 * 64, True, 1, False),
        (65, 2048, 33 * 64, False, 4, True), (65, 2048, 34 * 64, False, 4, False),
        # Deeper ones.
        (32, 2048, 4096, True, 1, True), (32, 2112, 4096, True, 1, False), (32, 2176, 4096, False, 1, False),
        (33, 2176, 4096, False, 1, True), (32, 4 * 2176, 4096, False, 4, False), (64, 4096, 4096, False, 1, True),
        (64, 4224, 4096, False, 1, False), (65, 2560, 4096, False, 1, True), (65, 2688, 4096, False, 1, False),
        (64, 2560, 4096, True, 1, True), (64, 2624, 4096, True, 1, False), (64, 4 * 4096, 4096, False, 4, True),
        (65, 4 * 2560, 2048, False, 4, True), (65, 4 * 2688, 2048, False, 4, False),
        # Sizes that are no multiple of what a program takes.
        (64, 896, 896, False, 4, False), (64, 1024, 1040, False, 1, False), (64, 1000, 1024, True, 1, False),
    ],
)  # fmt: skip
def test_the_kernel_pays_with_small_weights(
    rows: int, in_features: int, out_features: int, gated: bool, parts: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "device_limits", lambda device: (132, 232448))
    weight = torch.empty(out_features * (1 + gated), in_features, dtype=torch.bfloat16)
    assert policy.FASTEST.uses_splitk(rows, weight, gated, parts) == pays
    assert not policy.FASTEST.uses_splitk(rows, weight.float(), gated, parts)


def linears(ranks: int) -> list[tuple[int, int, bool, int]]:
    """Inputs, outputs, gate and parts of the products of Qwen3's layers, 0.6B to 8B."""
    parts, found = 4 if ranks == 1 else 1, []
    for hidden, intermediate, heads in ((1024, 3072, 16), (2048, 6144, 16), (2560, 9728, 32), (4096, 12288, 32)):
        found += [(hidden, (heads + 16) * 128 // ranks, False, 1), (heads * 128 // ranks, hidden, False, parts)]
        found += [(hidden, intermediate // ranks, True, 1), (intermediate // ranks, hidden, False, parts)]
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(("ranks", "max_num_seqs"), [(1, 8), (1, 256), (2, 64), (2, 512), (4, 130)])
def test_a_ladders_samples_take_every_tile(ranks: int, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "device_limits", lambda device: (132, 232448))
    capture_sizes = make_capture_sizes(max_num_seqs, 16384, uses_cascade=True, single_split=True)

    def taken(shapes: list[StepShape]) -> set[Any]:
        found = set()
        # Most products have all rows, and the last layer's those that are sampled from.
        rows = {
            n
            for shape in shapes
            for n in (shape.num_decodes + shape.num_prompt_tokens, shape.num_decodes + shape.num_chunks)
        }
        for num_rows, size in product(rows - set(range(MAX_SKINNY_ROWS + 1)), linears(ranks)):
            in_features, out_features, gated, parts = size
            weight = torch.empty(out_features * (1 + gated), in_features, dtype=torch.bfloat16, device="meta")
            if policy.FASTEST.uses_splitk(num_rows, weight, gated, parts):
                found.add((size, policy.FASTEST.splitk_tile(num_rows, weight, gated, parts)))
        return found

    assert taken(capture_sizes.representatives()) == taken(capture_sizes.shapes) != set()


@pytest.mark.parametrize("rows", [1, 16, 17, 128, 256, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1024, 1024), (2048, 520)] if GPU else [(48, 80)])
def test_a_branch_and_the_norm_after_it(rows: int, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """`linear_into` leaves to `norm_linear` what it did not do, and some product of the sum comes out of both."""
    in_features, out_features = size
    weight = randn(out_features, in_features, dtype=dtype) * in_features**-0.5
    after = randn(64, out_features, dtype=dtype) * out_features**-0.5
    norm = Norm(randn(out_features, dtype=dtype), 0.1)
    residual = randn(rows, out_features, dtype=dtype)
    x = randn(rows, in_features, dtype=dtype)
    kept = residual.clone()
    branch, left = norm_linear.linear_into(x, weight, residual)
    if GPU and dtype != torch.float32 and rows > 16:
        in_parts = is_hopper(x.device) and policy.FASTEST.uses_splitk(rows, weight, parts=policy.SPLITK_PARTS)
        assert (branch.dim() == 3, left is None) == (in_parts, not in_parts)
    else:
        assert branch.dim() == 2 and left is residual
    out, total = norm_linear.norm_linear(branch, after, norm=norm, residual=left)
    exact_total = x.float() @ weight.float().T + kept.float()
    same_total = x @ weight.T + kept
    check_error(total, same_total, exact_total)
    same, _ = norm_linear.norm_linear_ref(same_total, after, norm=norm)
    exact, _ = norm_linear.norm_linear_ref(exact_total, after.float(), norm=Norm(norm.weight.float(), 0.1))
    check_error(out, same, exact)
