"""All that is chosen by the number of rows is asked of one object, which a second class can replace."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.kernels import ops, policy
from nanovllm.kernels.four_bits import FourBitMatrix
from nanovllm.kernels.moe.fused_experts import fused_experts
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import FASTEST, KernelPolicy, LinearKernel, SplitKTile
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


@pytest.mark.parametrize("weight", [DenseWeight(SHARD), Fp8Weight(SHARD, QuantizationConfig("channel"))])
def test_weights_ask_their_policy(weight: Weight) -> None:
    weight.policy = Refusing()
    x = torch.randn(3, 8)
    for ask in (lambda: weight.multiply(x), lambda: weight.multiply_into(x, x), lambda: weight.kernel_sizes):
        with pytest.raises(AskedError):
            ask()


def test_the_tile_of_a_splitk_gemm_is_the_policys() -> None:
    class Tiles(KernelPolicy):
        def linear(self, *args: Any, **_: Any) -> LinearKernel:
            return LinearKernel.SPLITK_GEMM

        branch_end = linear

        def splitk_tile(self, *args: Any) -> SplitKTile | None:
            raise AskedError

    weight, x = DenseWeight(SHARD), torch.randn(3, 8)
    weight.policy = Tiles()
    for multiply in (lambda: weight.multiply(x), lambda: weight.multiply_into(x, x)):
        with pytest.raises(AskedError):
            multiply()


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


def test_four_bits_are_widened_for_many_rows_later_with_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "uses_triton", lambda device: True)
    own = []
    for num_outs in (4096, 24576):
        values, scales = torch.empty(num_outs, 64, dtype=torch.uint8), torch.empty(num_outs, 1)
        matrix = FourBitMatrix(values, scales, None, None, 128, "int4", 128)
        for rows in (1, 64, 65, 128, 129):
            kernel = FASTEST.four_bit_linear(rows, torch.bfloat16, matrix)
            own.append(kernel is LinearKernel.FOUR_BIT_GEMM)
    assert own == [True, True, False, False, False, True, True, True, True, False]


def test_more_rows_beside_four_bits_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uses_triton", "is_hopper"):
        monkeypatch.setattr(policy, name, lambda device: True)
    monkeypatch.setattr(policy, "device_limits", lambda device: (132, 232448))
    matrix = FourBitMatrix(
        torch.empty(4096, 512, dtype=torch.uint8), torch.empty(4096, 8), None, None, 128, "int4", 1024
    )
    kernels = [FASTEST.four_bit_linear(rows, torch.bfloat16, matrix) for rows in (16, 17, 512, 513)]
    assert kernels == [
        LinearKernel.SKINNY_FOUR_BIT_GEMM, LinearKernel.HOPPER_FOUR_BIT_GEMM, LinearKernel.HOPPER_FOUR_BIT_GEMM,
        LinearKernel.CUBLAS,
    ]  # fmt: skip
    parts = [FASTEST.four_bit_parts(rows, torch.bfloat16, matrix) for rows in (17, 128, 129, 256, 257, 513)]
    assert parts == [4, 4, 2, 2, 1, 1]
    odd = matrix._replace(in_features=1040)
    assert FASTEST.four_bit_linear(64, torch.bfloat16, odd) is LinearKernel.FOUR_BIT_GEMM


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


def test_few_rows_beside_four_bits_leave_parts_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "uses_triton", lambda device: True)
    monkeypatch.setattr(policy, "device_limits", lambda device: (132, 232448))
    values = torch.empty(4096, 512, dtype=torch.uint8)
    matrix = FourBitMatrix(values, torch.empty(4096, 8), None, None, 128, "int4", 1024)
    wide, odd = matrix._replace(values=values.expand(3, -1, -1).flatten(0, 1)), matrix._replace(in_features=1040)
    cases = [(1, matrix), (2, matrix), (16, matrix), (17, matrix), (2, wide), (2, odd), (2, matrix._replace(group=512))]
    kernels = [FASTEST.four_bit_linear(rows, torch.bfloat16, weight) for rows, weight in cases]
    is_skinny = [kernel is LinearKernel.SKINNY_FOUR_BIT_GEMM for kernel in kernels]
    assert is_skinny == [True, True, True, False, True, False, True]
    parts = [FASTEST.four_bit_parts(rows, torch.bfloat16, weight) for rows, weight in cases]
    assert parts == [1, 4, 4, 1, 1, 1, 1]
    assert FASTEST.four_bit_linear(2, torch.float32, matrix) is LinearKernel.CUBLAS
