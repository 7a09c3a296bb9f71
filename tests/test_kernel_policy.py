"""All that is chosen by the number of rows is asked of one object, which a second class can replace."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.kernels import ops, policy
from nanovllm.kernels.four_bits import FourBitMatrix
from nanovllm.kernels.gates import silu_and_mul_ref
from nanovllm.kernels.linear import norm_linear
from nanovllm.kernels.moe.fused_experts import fused_experts
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import FASTEST, KernelPolicy, LinearKernel, SplitKTile
from nanovllm.kernels.rms_norm import Norm, rms_norm_ref
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.mixers import GatedDeltaNet
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.fp8 import Fp8Weight
from nanovllm.quantization.weight import DenseWeight, MatrixShard, Weight
from nanovllm.weights.slices import LoadableModule
from tests.test_kernels import by_triton
from tests.test_sharding import MODEL

SHARD = MatrixShard({None: Shard.whole(8)}, Shard.whole(8))


class AskedError(Exception):
    """Says that a policy was asked."""


class Refusing(KernelPolicy):
    """Raises what it was asked for."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        raise AskedError(name)


def test_every_op_is_in_the_file_that_the_table_names() -> None:
    assert sorted(name for names in ops._FILES.values() for name in names) == sorted(ops.__all__)
    for name in ops.__all__:
        assert getattr(ops, name) is getattr(ops, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ops.nothing  # type: ignore[attr-defined]  # noqa: B018


class Tiles(KernelPolicy):
    """Raises if it is asked for a tile."""

    def linear(self, *args: Any, **_: Any) -> LinearKernel:
        return LinearKernel.SPLITK_GEMM

    branch_end = linear

    def splitk_tile(self, *args: Any) -> SplitKTile | None:
        raise AskedError


@pytest.mark.parametrize(
    ("weight", "policy"),
    [
        (DenseWeight(SHARD), Refusing()), (Fp8Weight(SHARD, QuantizationConfig("channel")), Refusing()),
        (DenseWeight(SHARD), Tiles()),
    ],
)  # fmt: skip
def test_weights_ask_their_policy(weight: Weight, policy: KernelPolicy) -> None:
    weight.policy = policy
    x = torch.randn(3, 8)
    for multiply in (lambda: weight.multiply(x), lambda: weight.multiply_into(x, x)):
        with pytest.raises(AskedError):
            multiply()
    weight.policy = Refusing()
    with pytest.raises(AskedError):
        weight.kernel_sizes  # noqa: B018


def test_a_delta_net_asks_which_rows_its_products_normalise() -> None:
    layer = GatedDeltaNet.__new__(GatedDeltaNet)
    LoadableModule.__init__(layer)
    layer.policy = Refusing()
    norm, x = AllReduceRMSNorm(8, 1e-6, Communicator()), torch.randn(3, 8)
    with pytest.raises(AskedError, match="fuses_norm"):
        layer(x, norm, None, torch.arange(3), None)
    assert FASTEST.fuses_norm(16) and not FASTEST.fuses_norm(17)


def test_experts_ask_the_policy() -> None:
    x, chosen = torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int32)
    weights = torch.randn(2, 16, 8), torch.randn(2, 8, 8)
    with pytest.raises(AskedError, match="experts"):
        by_triton(fused_experts)(x, Routing(chosen, chosen.float(), 2), *weights, policy=Refusing())


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(
    ("rows", "size", "has", "kernel"),
    [
        (1, (1024, 3072), "gated", "GEMV"), (16, (1024, 3072), "gated", "RESIDENT_GEMM"),
        (16, (2048, 2048), "gated", "SKINNY_GEMM"),
        (17, (1024, 2048), "", "SPLITK_GEMM"), (256, (1024, 1024), "gated", "SPLITK_GEMM"),
        (257, (1024, 1024), "gated", "CUBLAS"), (64, (1024, 2048), "biased", "CUBLAS"),
        # The tiles of 1500 rows fill two rounds of programs, and a fifth of the third.
        (4096, (1024, 3072), "gated", "PERSISTENT_GATED_GEMM"), (1500, (1024, 3072), "gated", "CUBLAS"),
        (4096, (1024, 3072), "biased gated", "CUBLAS"),
    ],
)  # fmt: skip
def test_kernels_of_dense_layers_on_hopper(
    rows: int, size: tuple[int, int], has: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("uses_triton", "is_hopper"):
        monkeypatch.setattr(policy, name, lambda device: True)
    monkeypatch.setattr(policy, "device_limits", lambda device: (132, 232448))
    weight = torch.empty(size[1] * (1 + ("gated" in has)), size[0], dtype=torch.bfloat16, device="meta")
    chosen = FASTEST.linear(rows, weight, biased="biased" in has, normed=True, gated="gated" in has)
    assert chosen.name == kernel


def test_a_policy_reaches_every_weight_of_a_model() -> None:
    with torch.device("meta"):
        model = DecoderForCausalLM(MODEL, Communicator())
    policy = KernelPolicy()
    model.set_kernel_policy(policy)
    modules = [module for module in model.modules() if isinstance(module, LoadableModule)]
    assert len(modules) > 8 and all(module.policy is policy for module in modules)


def test_one_class_makes_the_choice_the_same_for_every_batch() -> None:
    class Constant(KernelPolicy):
        def linear(self, num_rows: int, weight: torch.Tensor, **_: Any) -> LinearKernel:
            return LinearKernel.CUBLAS

        def branch_end(self, num_rows: int, weight: torch.Tensor) -> LinearKernel | None:
            return None

    weight, x = DenseWeight(SHARD), torch.randn(300, 8)
    weight.values.data.normal_()
    weight.policy = Constant()
    torch.testing.assert_close(weight.multiply(x[:1])[0], weight.multiply(x)[0][:1])
    assert FASTEST.experts(1) is not FASTEST.experts(2)


OWN_KERNELS = [kernel for kernel in LinearKernel if kernel.name not in ("CUBLAS", "SCALED_MM")]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("kernel", OWN_KERNELS)
def test_every_kernel_of_a_linear_layer_is_in_the_file_that_it_names(kernel: LinearKernel) -> None:
    assert norm_linear._function(kernel).__name__ == kernel.name.lower()


@pytest.mark.parametrize("kernel", [kernel for kernel in OWN_KERNELS if kernel is not LinearKernel.SCALED_GEMM])
def test_norm_linear_calls_the_kernel_that_is_chosen(kernel: LinearKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the norm, or after it; what no kernel activates is activated afterwards."""
    policy, out = KernelPolicy(), torch.randn(3, 8)
    monkeypatch.setattr(policy, "linear", lambda *args, **_: kernel)
    can_normalise = kernel in (LinearKernel.GEMV, LinearKernel.RESIDENT_GEMM, LinearKernel.SKINNY_FOUR_BIT_GEMM)
    called = Mock(return_value=(out, out) if can_normalise else out)
    monkeypatch.setattr(norm_linear, "_function", {kernel: called}.__getitem__)
    x, residual, weight, norm = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8, 8), Norm(torch.randn(8), 0.1)
    found, _ = norm_linear.norm_linear(x, weight, None, norm, residual, True, policy=policy)
    rows, given, *others = called.call_args.args
    normed = x if can_normalise else rms_norm_ref(x, norm.weight, norm.eps, residual)[0]
    assert torch.equal(rows, normed) and given is weight
    assert any(other is norm for other in others) == can_normalise
    assert torch.equal(found, silu_and_mul_ref(out) if kernel is LinearKernel.FOUR_BIT_GEMM else out)


MATRIX = FourBitMatrix(torch.empty(4096, 512, dtype=torch.uint8), torch.empty(4096, 8), None, None, 128, "int4", 1024)
LARGE = MATRIX._replace(values=MATRIX.values.expand(3, -1, -1).flatten(0, 1))
ODD = MATRIX._replace(in_features=1040)
SKINNY, HOPPER, TILED, WIDENED = (
    LinearKernel.SKINNY_FOUR_BIT_GEMM, LinearKernel.HOPPER_FOUR_BIT_GEMM, LinearKernel.FOUR_BIT_GEMM,
    LinearKernel.CUBLAS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("on_hopper", "matrix", "choices"),
    [
        # More outputs are widened later.
        (False, MATRIX, {1: (SKINNY, 1), 2: (SKINNY, 4), 16: (SKINNY, 4), 17: (TILED, 1), 64: (TILED, 1),
                         65: (WIDENED, 1)}),
        (False, LARGE, {2: (SKINNY, 1), 128: (TILED, 1), 129: (WIDENED, 1)}),
        (False, ODD, {1: (TILED, 1), 2: (TILED, 1), 65: (WIDENED, 1)}),
        # Its parts would end within groups.
        (False, MATRIX._replace(group=512), {2: (SKINNY, 1)}),
        (True, MATRIX, {16: (SKINNY, 4), 17: (HOPPER, 4), 128: (HOPPER, 4), 129: (HOPPER, 2), 256: (HOPPER, 2),
                        257: (HOPPER, 1), 512: (HOPPER, 1), 513: (WIDENED, 1)}),
        (True, ODD, {64: (TILED, 1)}),
    ],
)  # fmt: skip
def test_kernels_and_parts_beside_four_bits(
    on_hopper: bool, matrix: FourBitMatrix, choices: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "uses_triton", lambda device: True)
    monkeypatch.setattr(policy, "is_hopper", lambda device: on_hopper)
    monkeypatch.setattr(policy, "device_limits", lambda device: (132, 232448))
    for rows, (kernel, parts) in choices.items():
        assert FASTEST.four_bit_linear(rows, torch.bfloat16, matrix) is kernel, rows
        assert FASTEST.four_bit_parts(rows, torch.bfloat16, matrix) == parts, rows
    assert FASTEST.four_bit_linear(2, torch.float32, matrix) is WIDENED


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(("num_experts", "top_k", "outs"), [(32, 4, 5760), (128, 4, 2880), (128, 8, 1536)])
def test_tiles_of_experts_change_where_kernels_are_compiled(num_experts: int, top_k: int, outs: int) -> None:
    """Otherwise a step of a running server waits for a compiler."""
    from nanovllm.kernels.moe.four_bit_experts import choose_expert_tile  # noqa: PLC0415

    tiles = [choose_expert_tile(rows * top_k / num_experts, outs, num_experts, 132) for rows in range(5000)]
    changes = {rows for rows in range(17, 5000) if tiles[rows] != tiles[rows - 1]}
    assert changes <= set(FASTEST.expert_rows(num_experts, top_k)), changes
    assert changes


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize(("outs", "parts"), [(24576, 1), (6144, 1), (4096, 4), (2560, 2), (151936, 1)])
def test_tiles_of_linear_layers_change_where_kernels_are_compiled(outs: int, parts: int) -> None:
    from nanovllm.kernels.linear.hopper_four_bit_gemm import choose_linear_tile  # noqa: PLC0415

    tiles = [choose_linear_tile(rows, outs, parts, 132) for rows in range(513)]
    changes = {rows for rows in range(18, 513) if tiles[rows] != tiles[rows - 1]}
    assert changes and changes <= set(FASTEST.four_bit_rows), changes
