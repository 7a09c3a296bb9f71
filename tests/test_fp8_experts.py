"""Mixtures of experts in e4m3: each format loads, however the experts are divided, and kernels against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.configs.model import ModelConfig
from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize_ref, quantize
from nanovllm.kernels.linear.quantize_rows import Rounding, quantize_rows_ref
from nanovllm.kernels.moe import fused_experts as experts_op
from nanovllm.kernels.moe import grouped_gemm as grouped_op
from nanovllm.kernels.moe import route as route_op
from nanovllm.kernels.moe.fused_experts import fused_experts_ref
from nanovllm.kernels.moe.grouped_gemm import Tile, sort_slots
from nanovllm.kernels.moe.route import Routing
from nanovllm.kernels.policy import FP8_INS, KernelPolicy
from nanovllm.models.base import CausalLM
from nanovllm.quantization.experts import DenseExpertsWeight, ExpertsWeight, Fp8ExpertsWeight
from nanovllm.weights.model_weights import ModelWeights
from nanovllm.weights.slices import WeightSlice
from tests.conftest import MakeCheckpoint
from tests.reference import reference_logits
from tests.test_fp8 import (
    FORMATS,
    FP8,
    NUM_TOKENS,
    PROMPTS,
    SETTINGS,
    Format,
    change,
    compressed,
    tokens_and_logits,
    write,
)  # fmt: skip
from tests.test_kernels import DEVICE, DTYPES, GPU, by_triton, check_error, over_dtypes, randn
from tests.test_live_weights import save_adapter
from tests.test_sharding import shards

# The blocks of inputs end within the hidden size; each of three ranks has a block of an expert's columns.
SHAPE: dict[str, Any] = {
    "hidden_size": 320, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 384, "norm_topk_prob": True,
}  # fmt: skip
NAMES = ("fp8-block", "fp8-static", "compressed-channel")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def mixture(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("Qwen3Moe", **SHAPE)


@pytest.fixture(scope="session", params=NAMES)
def written(
    request: pytest.FixtureRequest, mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    return write(mixture, FORMATS[request.param], tmp_path_factory.mktemp(request.param))


def check_logits(stored: Path, meant: Path) -> None:
    tokens, logits = tokens_and_logits(stored)
    for prompt, output, mine in zip(PROMPTS, tokens, torch.stack(logits[-NUM_TOKENS:], 1), strict=True):
        theirs = reference_logits(meant, prompt + output[:-1])[len(prompt) - 1 :]
        assert (mine - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_logits_are_those_of_the_dequantised_model(written: tuple[Path, Path]) -> None:
    check_logits(*written)


def test_mixtral_has_other_names(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    # Neither the experts' columns nor the hidden size are whole blocks.
    shape = {"hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 80, "num_local_experts": 3}
    folder = make_checkpoint("Mixtral", **shape)
    kind = replace(FORMATS["fp8-block"], config=FP8 | {"weight_block_size": [128, 128]}, ignored="nothing")
    check_logits(*write(folder, kind, tmp_path))
    lists = {
        "re:.*w2$": "w2",
        "re:.*block_sparse_moe.*": "block_sparse_moe",
        "model.layers.0.block_sparse_moe.experts": r"layers\.0\.block_sparse_moe",
        "mlp.experts": "block_sparse_moe",
    }
    for number, (entry, ignored) in enumerate(lists.items()):
        kind = replace(kind, config=kind.config | {"modules_to_not_convert": [entry]}, ignored=ignored)
        check_parts(*write(folder, kind, tmp_path / str(number)), size=1)


def experts_of(model: CausalLM) -> dict[str, tuple[torch.Tensor, tuple[slice, slice]]]:
    """What a rank's experts mean, and which part of each of the checkpoint's tensors that is."""
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, ExpertsWeight):
            continue
        parent = name.removesuffix(".weight").rpartition(".")[0]
        sizes = [shard.size for shard in module.shard.outputs.values()]
        for local in range(module.experts.size):
            matrices = module.matrices
            if isinstance(matrices, Fp8Matrix):
                whole = dequantize_ref(matrices.expert(local), torch.float32)
            else:
                whole = matrices[local]
            for (part, outputs), region in zip(module.shard.outputs.items(), whole.split(sizes), strict=True):
                key = f"{parent}.{module.experts.start + local}.{part or 'down'}_proj.weight"
                found[key] = region, (outputs.present, module.shard.inputs.present)
    return found


def check_parts(stored: Path, meant: Path, size: int, is_parallel: bool = False) -> None:
    """What the ranks' experts mean is what the checkpoint does, and nothing of it is missing."""
    config, wide = ModelConfig.from_folder(str(stored)), load_file(meant / "model.safetensors")
    for theirs, ours in (("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        wide = {name.replace(f".{theirs}.", f".{ours}."): tensor for name, tensor in wide.items()}
    found = set()
    for model in shards(config.with_expert_parallel() if is_parallel else config, size):
        ModelWeights(model, torch.device("cpu")).load_folder(str(stored))
        for name, (region, index) in experts_of(model).items():
            assert torch.equal(region, wide[name][index]), name
            found.add(name)
    assert len(found) == sum("experts." in name for name in wide)


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_parts_mean_what_the_whole_does(written: tuple[Path, Path], size: int, is_parallel: bool) -> None:
    check_parts(*written, size, is_parallel)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_a_checkpoint_is_quantised_while_it_loads(mixture: Path, tmp_path: Path, is_parallel: bool) -> None:
    kind = Format(compressed(None, strategy="channel") | {"ignore": ["lm_head"]}, (1, None), ignored="nothing")
    stored, meant = write(mixture, kind, tmp_path)
    wide = load_file(meant / "model.safetensors")
    config = ModelConfig.from_folder(str(mixture)).with_quantization("fp8")
    for model in shards(config.with_expert_parallel() if is_parallel else config, 2):
        ModelWeights(model, torch.device("cpu")).load_folder(str(mixture))
        for name, (region, index) in experts_of(model).items():
            assert torch.equal(region, wide[name][index]), name
        ModelWeights(model, torch.device("cpu")).draw(5)
        assert all(region.std() > 0.1 for region, _ in experts_of(model).values())
    assert tokens_and_logits(mixture, quantization="fp8")[0] == tokens_and_logits(stored)[0]


def test_several_ranks_say_the_same(mixture: Path, tmp_path: Path) -> None:
    stored, meant = write(mixture, FORMATS["fp8-block"], tmp_path)
    assert tokens_and_logits(stored, tensor_parallel_size=3)[0] == tokens_and_logits(meant)[0]


def test_experts_can_be_dropped_and_loaded_again(mixture: Path, tmp_path: Path) -> None:
    stored, meant = write(mixture, FORMATS["fp8-block"], tmp_path)
    save_adapter(tmp_path / "adapter", load_file(meant / "model.safetensors"), 1)
    params, tensors = SamplingParams(0, 6, ignore_eos=True), load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"
    with LLM(stored, **SETTINGS) as llm:
        want = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"]
        with pytest.raises(ValueError, match=r"the model's 'model.layers.0.self_attn.q_proj.weight' is quantised"):
            llm.load_weights(tmp_path / "adapter")
        llm.sleep(level=2)
        llm.wake_up()
        with pytest.raises(ValueError, match="tensors are missing"):
            llm.load_weights({key: tensor for key, tensor in tensors.items() if key != name}, strict=True)
        llm.load_weights(tensors, strict=True)
        assert llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"] == want


def test_what_does_not_fit_is_refused_by_name(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = write(mixture, FORMATS["fp8-block"], tmp_path)
    tensors = load_file(stored / "model.safetensors")
    monkeypatch.setattr(WeightSlice, "store", None)
    del tensors["model.layers.0.mlp.experts.3.up_proj.weight_scale_inv"]
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['model.layers.0.mlp.experts.gate_up_proj.weight_scale\[up, 3\]'"):
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
    change(stored, quantization_config=FP8 | {"weight_block_size": [64, 64]})
    with pytest.raises(ValueError, match=r"blocks of \[64, 64\] are not supported"):
        LLM(stored, **SETTINGS)


# What has one scale: outputs and inputs, 0 for all.
BLOCKS = [(1, 0), (128, 128), (1, 128)]


def make_stack(num_experts: int, outs: int, ins: int, block: tuple[int, int]) -> Fp8Matrix:
    """Experts, rows and columns of blocks of different sizes."""
    spread = torch.linspace(0.5, 2, outs, device=DEVICE)[:, None] * torch.linspace(2, 0.5, ins, device=DEVICE)
    wide = [randn(outs, ins) * ins**-0.5 * spread * (1 + expert) / num_experts for expert in range(num_experts)]
    made = [quantize(weight, block[0], block[1] or ins) for weight in wide]
    values, scales = (torch.stack(tensors) for tensors in list(zip(*made, strict=True))[:2])
    return made[0]._replace(values=values, scales=scales)


def make_routing(rows: int, num_experts: int, top_k: int) -> Routing:
    chosen = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(rows)]).int()
    return Routing(chosen.to(DEVICE), torch.rand(rows, top_k, device=DEVICE) + 0.1, num_experts)


@pytest.mark.parametrize(("rows", "block", "dtype"), over_dtypes([1, 2, 17], BLOCKS))
def test_kernels(rows: int, block: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not rounded, of a rank's experts with others' before and after."""
    monkeypatch.setattr(KernelPolicy, "rounds_rows", lambda *args: False)
    gate_up, down = make_stack(3, 512, 300, block), make_stack(3, 300, 256, block)
    routing, x = make_routing(rows, 5, 3), randn(rows, 300, dtype=dtype)
    out = by_triton(experts_op.fused_experts)(x, routing, gate_up, down, 1)
    same = fused_experts_ref(x, routing, gate_up, down, 1)
    exact = fused_experts_ref(x.double(), routing, gate_up, down, 1)
    check_error(out.float().sum(0) if out.dim() == 3 else out, same, exact.float())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("tile", [Tile(32, 256, FP8_INS, 8), Tile(128, 128, FP8_INS, 8)], ids=["32", "128"])
@pytest.mark.parametrize("gated", [False, True])
def test_products_of_rows_in_e4m3(
    block: tuple[int, int], tile: Tile, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64 of the same values and scales; experts have rows of several tiles, of one, and none."""
    monkeypatch.setattr(grouped_op, "choose_tile", lambda *args, **kwargs: tile)
    num_experts, num_rows, ins, dtype = 4, 150, 300, DTYPES[-1]
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
    grouped_op.grouped_gemm(given, routing, order, weight, out, gated)
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


def test_many_rows_are_rounded_before_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a rank that has experts 1 to 3 of 5."""
    monkeypatch.setattr(KernelPolicy, "rounds_rows", lambda *args: True)
    gate_up, down = make_stack(3, 512, 300, (128, 128)), make_stack(3, 300, 256, (128, 128))
    routing, x = make_routing(17, 5, 2), randn(17, 300, dtype=DTYPES[-1])
    out = by_triton(experts_op.fused_experts)(x, routing, gate_up, down, 1).float().sum(0)
    # By how much it is off the rule, where a value beside a tie is rounded otherwise, and off the plain products.
    rounded, plain = (
        (out - fused_experts_ref(x, routing, gate_up, down, 1, rounds)).norm() / out.norm() for rounds in (True, False)
    )
    assert 5 * rounded < plain


@pytest.mark.skipif(GPU, reason="has the interpreter run the kernels on the CPU's tensors")
def test_an_engine_on_the_kernels_says_what_the_dequantised_model_says(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of many rows, and of one."""
    stored, meant = write(mixture, FORMATS["fp8-block"], tmp_path)
    texts = []
    for folder in (meant, stored):
        with LLM(folder, **SETTINGS) as llm:
            output = llm.generate([list(range(17))], SamplingParams(0, 2, ignore_eos=True), use_tqdm=False)
            texts.append(output[0]["token_ids"])
            runner: Any = llm.llm_engine._runner
            kinds = [type(module) for module in runner.model.modules() if isinstance(module, ExpertsWeight)]
        for op in (route_op, experts_op):
            monkeypatch.setattr(op, "uses_triton", lambda device: True)
    # Those of the last layer are ignored.
    assert texts[0] == texts[1] and kinds == [Fp8ExpertsWeight] * 2 + [DenseExpertsWeight] * 2
