"""Mixtures of experts in e4m3: each format loads, however the experts are divided, and kernels against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize_ref, quantize
from nanovllm.kernels.linear.quantize_rows import Rounding, quantize_rows_ref
from nanovllm.kernels.linear.scaled_gemm import scaled_gemm_ref
from nanovllm.kernels.moe import fused_experts as experts_op
from nanovllm.kernels.moe import grouped_gemm as grouped_op
from nanovllm.kernels.moe import route as route_op
from nanovllm.kernels.moe.activation import Activation
from nanovllm.kernels.moe.fused_experts import fused_experts_ref
from nanovllm.kernels.moe.grouped_gemm import Tile, sort_slots
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import FP8_INS, KernelPolicy
from nanovllm.quantization.fp8 import Fp8Weight
from nanovllm.quantization.weight import DenseWeight, Weight
from nanovllm.weights.slices import WeightSlice
from tests.conftest import MakeCheckpoint
from tests.test_fp8 import BLOCKS, FORMATS, FP8, MIXTURE, SETTINGS, change, write
from tests.test_kernels import DEVICE, DTYPES, GPU, by_triton, over_dtypes, randn
from tests.test_live_weights import save_adapter
from tests.test_moe import check_experts


@pytest.fixture(scope="session")
def mixture(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("Qwen3Moe", **MIXTURE)


def test_an_adapter_is_not_merged_into_what_is_quantised(mixture: Path, tmp_path: Path) -> None:
    stored, meant = write(mixture, FORMATS["fp8-block"], tmp_path)
    save_adapter(tmp_path / "adapter", load_file(meant / "model.safetensors"), 1)
    refused = pytest.raises(ValueError, match=r"the model's 'model.layers.0.self_attn.q_proj.weight' is quantised")
    with LLM(stored, **SETTINGS) as llm, refused:
        llm.load_weights(tmp_path / "adapter")


def test_what_does_not_fit_is_refused_by_name(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = write(mixture, FORMATS["fp8-block"], tmp_path)
    tensors = load_file(stored / "model.safetensors")
    monkeypatch.setattr(WeightSlice, "store", None)
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['model.layers.0.mlp.experts.3.up_proj.weight_scale'"):
        LLM(stored, **SETTINGS)
    save_file({name: tensor for name, tensor in tensors.items() if "scale" not in name}, stored / "model.safetensors")
    with pytest.raises(ValueError, match=r"'\] and \d+ more, left over \[\]$") as refused:
        LLM(stored, **SETTINGS)
    assert len(str(refused.value)) < 1000
    change(stored, moe_intermediate_size=192)
    with pytest.raises(ValueError, match="moe_intermediate_size=192: each rank takes at least 128 columns"):
        LLM(stored, tensor_parallel_size=2, **SETTINGS)
    with pytest.raises(ValueError, match="is not supported where transformers' code runs"):
        LLM(stored, model_impl="transformers", **SETTINGS)
    change(stored, quantization_config=FP8 | {"modules_to_not_convert": ["up_proj"]})
    with pytest.raises(ValueError, match=r"ignores \['model.layers.0.mlp.experts.0.up_proj'\], but not all of"):
        LLM(stored, **SETTINGS)


def make_stack(num_experts: int, outs: int, ins: int, block: tuple[int, int]) -> Fp8Matrix:
    """Experts, rows and columns of blocks of different sizes."""
    spread = torch.linspace(0.5, 2, outs, device=DEVICE)[:, None] * torch.linspace(2, 0.5, ins, device=DEVICE)
    wide = [randn(outs, ins) * ins**-0.5 * spread * (1 + expert) / num_experts for expert in range(num_experts)]
    made = [quantize(weight, block[0], block[1] or ins) for weight in wide]
    values, scales = (torch.stack(tensors) for tensors in list(zip(*made, strict=True))[:2])
    return made[0]._replace(values=values, scales=scales)


WIDTHS: dict[Activation, int] = {"silu": 512, "relu2": 256}
"""Activations -> outputs of the product before them."""


def make_routing(rows: int, num_experts: int, top_k: int) -> Routing:
    chosen = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(rows)]).int()
    return Routing(chosen.to(DEVICE), torch.rand(rows, top_k, device=DEVICE) + 0.1, num_experts)


@pytest.mark.parametrize(
    ("rows", "block", "dtype"),
    [case for i, case in enumerate(over_dtypes([1, 2, 17], BLOCKS)) if GPU or i // 3 == 2 or i in (0, 4)],
)
def test_kernels(rows: int, block: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not rounded, of a rank's experts with others' before and after."""
    monkeypatch.setattr(KernelPolicy, "rounds_rows", lambda *args: False)
    down, routing, x = make_stack(3, 140, 256, block), make_routing(rows, 5, 3), randn(rows, 140, dtype=dtype)
    for activation, outs in WIDTHS.items():
        up = make_stack(3, outs, 140, block)
        check_experts(x, routing, up, down, 1, activation=activation)


TILES = Tile(32, 256, FP8_INS, 8), Tile(128, 128, FP8_INS, 8)


@pytest.mark.parametrize(
    ("block", "tile", "gated"),
    [
        (block, tile, gated)
        for i, block in enumerate(BLOCKS)
        for j, tile in enumerate(TILES)
        for gated in (False, True)
        if GPU or (i + j) % 2 == gated
    ],
)
def test_products_of_rows_in_e4m3(
    block: tuple[int, int], tile: Tile, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 of the same values and scales; experts have rows of several tiles, of one, and none."""
    monkeypatch.setattr(grouped_op, "choose_tile", lambda *args, **kwargs: tile)
    num_experts, num_rows, ins, dtype = 4, 150, 140, DTYPES[-1]
    # A tile is cut where gate and up need not be whole blocks.
    outs = 200 if gated and block[0] == 1 else 256
    weight = make_stack(num_experts, outs * (1 + gated), ins, block)
    chosen = torch.where(torch.arange(num_rows, device=DEVICE)[:, None] < 140, 2, 0).int()
    chosen[-1] = 3
    routing = Routing(chosen, torch.rand(num_rows, 1, device=DEVICE) + 0.1, num_experts)
    x = quantize_rows_ref(randn(num_rows, ins, dtype=dtype), Rounding(block[1] or ins))[0]
    order = sort_slots(routing, 0, num_experts)
    buffer = torch.full((num_rows + 1, outs), torch.nan, dtype=dtype, device=DEVICE)
    out = buffer[:-1]
    given = x if gated else x._replace(values=x.values[order.slots.long()], scales=x.scales[order.slots.long()])
    grouped_op.grouped_gemm(given, routing, order, weight, out, "silu" if gated else None)
    out = out[order.slots.long().argsort()] if gated else out
    wide = dequantize_ref(Fp8Matrix(x.values, x.scales, 1, x.group), torch.float64)
    exact = torch.empty(num_rows, outs, dtype=torch.float64, device=DEVICE)
    for row, expert in enumerate(chosen.flatten().tolist()):
        sums = dequantize_ref(weight.expert(expert), torch.float64) @ wide[row]
        gate, up = sums.chunk(2) if gated else (sums, sums)
        exact[row] = torch.nn.functional.silu(gate) * up if gated else sums * routing.weights[row].double()
    assert out.isfinite().all() and buffer[-1].isnan().all()
    # Sums in the tensor cores keep 13 bits of a step.
    limit = 2 * torch.finfo(dtype).eps + (2**-11 if GPU else 0)
    assert (out.double() - exact).abs().max() <= limit * exact.abs().max()


def rounded_linear(x: torch.Tensor, weight: Fp8Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_linear_ref` of rows that are rounded before."""
    return scaled_gemm_ref(quantize_rows_ref(x, Rounding(weight.block_ins))[0], weight, x.dtype), x


def test_many_rows_are_rounded_before_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has experts 1 to 3 of 5."""
    monkeypatch.setattr(KernelPolicy, "rounds_rows", lambda *args: True)
    down, routing, x = make_stack(3, 140, 256, (128, 128)), make_routing(17, 5, 2), randn(17, 140, dtype=DTYPES[-1])
    for activation, outs in WIDTHS.items():
        up = make_stack(3, outs, 140, (128, 128))
        out = by_triton(experts_op.fused_experts)(x, routing, up, down, 1, activation=activation).float().sum(0)
        plain = fused_experts_ref(x, routing, up, down, 1, activation)
        with monkeypatch.context() as patch:
            patch.setattr(experts_op, "norm_linear_ref", rounded_linear)
            rounded = fused_experts_ref(x, routing, up, down, 1, activation)
        # By how much it is off the rule, where a value beside a tie is rounded otherwise, and off the plain products.
        assert 5 * (out - rounded).norm() < (out - plain).norm()


@pytest.mark.skipif(GPU, reason="has the interpreter run the kernels on the CPU's tensors")
def test_an_engine_on_the_kernels(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of many rows, and of one."""
    small = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 128}
    folder = make_checkpoint("Qwen3Moe", **(MIXTURE | small | {"num_experts": 3, "num_experts_per_tok": 2}))
    stored, meant = write(folder, FORMATS["fp8-block"], tmp_path)
    texts = []
    for folder in (meant, stored):
        with LLM(folder, **SETTINGS) as llm:
            output = llm.generate([list(range(17))], SamplingParams(0, 2, ignore_eos=True), use_tqdm=False)
            texts.append(output[0]["token_ids"])
            runner: Any = llm.llm_engine._runner
            weights = [module for module in runner.model.modules() if isinstance(module, Weight)]
            kinds = [type(weight) for weight in weights if weight.shard.experts is not None]
        for op in (route_op, experts_op):
            monkeypatch.setattr(op, "uses_triton", lambda device: True)
    # The last layer's experts are ignored, and stay as they are.
    assert texts[0] == texts[1] and kinds == [Fp8Weight] * 2 + [DenseWeight] * 2
