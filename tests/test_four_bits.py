"""Weights in four bits: each format loads as its documentation has it, on any number of ranks.

The checkpoints are written here, by packers of their own, beside one of what their numbers mean in float32.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from nanovllm import LLM
from nanovllm.configs.model import ModelConfig
from nanovllm.configs.quantization import FourBits, QuantizationConfig
from nanovllm.kernels._triton import is_hopper
from nanovllm.kernels.four_bits import (
    E2M1,
    FourBitMatrix,
    dequantize_four_bits,
    dequantize_four_bits_ref,
    quantize_four_bits,
)
from nanovllm.kernels.linear.four_bit_gemm import four_bit_gemm
from nanovllm.kernels.moe.grouped_gemm import sort_slots
from nanovllm.kernels.moe.route import Routing
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.four_bits import FourBitWeight
from nanovllm.quantization.weight import MatrixShard
from tests.conftest import MakeCheckpoint
from tests.test_fp8 import (
    GREEDY,
    PROMPTS,
    SETTINGS,
    Format,
    Tensors,
    change,
    check_logits,
    check_parts,
    check_transformers,
    tokens_of,
    write,
)
from tests.test_fp8 import compressed as compressed_of
from tests.test_kernels import (
    BATCHES,
    DEVICE,
    DTYPES,
    GPU,
    by_triton,
    check_norm_linear,
    check_product,
    over_dtypes,
    randn,
)  # fmt: skip
from tests.test_moe import check_experts

# Three ranks have a KV head each, whose group of query heads has 128 inputs of o_proj, and 128 columns.
SHAPE: dict[str, Any] = {
    "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 384,
    "initializer_range": 0.1,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True, "initializer_range": 0.1,
}  # fmt: skip
TABLE = torch.tensor([*E2M1, *(-value for value in E2M1)])


def integers(weight: torch.Tensor, group: int, has_zeros: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values of 0 to 15, and of each group, [outs, groups], a zero and a scale."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    # As in most checkpoints, scales have 16 bits.
    scales = ((high - low) / 15 if has_zeros else groups.abs().amax(2) / 7).half().float()
    zeros = (-low / scales).round().clamp(0, 15) if has_zeros else torch.full_like(scales, 8)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return codes.flatten(1).int(), zeros.int(), scales


def meant_by(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    each = codes.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(each, 1)) * scales.repeat_interleave(each, 1)


def words(codes: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight values in an int32: the one of `order[i]` at bit 4 * i."""
    codes = codes.movedim(dim, -1).unflatten(-1, (-1, 8)).long()
    total = sum(codes[..., value] << (4 * place) for place, value in enumerate(order))
    assert isinstance(total, torch.Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int().movedim(-1, dim).contiguous()


def gptq(weight: torch.Tensor, offset: int = 1, has_zeros: bool = True) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = integers(weight, 128, has_zeros)
    if has_zeros:
        # The first version stores it as 15.
        zeros[0, 0] = 0
    tensors = {
        "qweight": words(codes.T, 0), "qzeros": words((zeros.T - offset) & 15, 1),
        "scales": scales.T.half().contiguous(), "g_idx": (torch.arange(weight.shape[1]) // 128).int(),
    }  # fmt: skip
    return tensors, meant_by(codes, zeros, scales)


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = integers(weight, 64, True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(codes.T, 1, order), "qzeros": words(zeros.T, 1, order), "scales": scales.T.half().contiguous()
    }  # fmt: skip
    return tensors, meant_by(codes, zeros, scales)


def packed(weight: torch.Tensor, group: int | None, has_zeros: bool) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales = integers(weight, group or weight.shape[1], has_zeros)
    tensors = {
        "weight_packed": words(codes, 1), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)
    }  # fmt: skip
    if has_zeros:
        tensors["weight_zero_point"] = words(zeros, 0)
    return tensors, meant_by(codes, zeros, scales)


def e2m1(ratios: torch.Tensor) -> torch.Tensor:
    """The bits of the nearest values."""
    return (ratios[..., None] - TABLE).abs().argmin(-1)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def nvfp4(weight: torch.Tensor, is_modelopt: bool) -> tuple[Tensors, torch.Tensor]:
    # A power of two, so that both ways to store it mean the same.
    factor = 2.0 ** (weight.abs().max() / 6 / 448).log2().ceil()
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
    wide = scales.float() * factor
    codes = e2m1(groups / wide[..., None])
    names = ("weight", "weight_scale_2", "input_scale") if is_modelopt else (
        "weight_packed", "weight_global_scale", "input_global_scale")  # fmt: skip
    number = factor if is_modelopt else (1 / factor).view(1)
    tensors = {names[0]: pairs(codes.flatten(1)), "weight_scale": scales, names[1]: number, names[2]: number.clone()}
    return tensors, (TABLE[codes] * wide[..., None]).flatten(1)


def packed_mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = e2m1(groups / 2.0 ** exponents[..., None])
    tensors = {"weight_packed": pairs(codes.flatten(-2)), "weight_scale": (exponents + 127).to(torch.uint8)}
    return tensors, (TABLE[codes] * 2.0 ** exponents[..., None]).flatten(-2)


def compressed(form: str, inputs: object = None, **weights: Any) -> dict[str, Any]:
    config = compressed_of(inputs, **({"num_bits": 4, "type": "int"} | weights))
    return config | {"format": form, "ignore": ["lm_head", r"re:.*mlp\.gate$"]}


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
FORMATS = {
    "gptq": Format(GPTQ | {"method": "gptq", "format": "gptq", "pack_dtype": "int32"}, gptq),
    "gptq-symmetric": Format(
        GPTQ | {"sym": True, "desc_act": True, "provider": "auto-round", "autoround_version": "0.4.7", "iters": 200},
        lambda weight: gptq(weight, 1, False),
    ),
    "gptq-v2": Format(GPTQ | {"format": "gptq_v2"}, lambda weight: gptq(weight, 0)),
    "gptq-part": Format(
        GPTQ | {"dynamic": {"lm_head": {}, "+:.*mlp.*": {"bits": 4}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}}},
        gptq, "self_attn",
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": ["mlp.gate", "model.layers.1.self_attn."]}, awq, "layers.1.self_attn",
    ),
    "packed-group": Format(
        compressed("pack-quantized", strategy="group", group_size=128) | {"sparsity_config": {"format": "dense"}},
        lambda weight: packed(weight, 128, False),
    ),
    "packed-zeros": Format(
        compressed("pack-quantized", strategy="group", group_size=32, symmetric=False),
        lambda weight: packed(weight, 32, True),
    ),
    "packed-channel": Format(
        compressed("pack-quantized", strategy="channel"), lambda weight: packed(weight, None, False)
    ),
    "nvfp4": Format(
        compressed("nvfp4-pack-quantized", NVFP4 | {"dynamic": "local"}, **NVFP4), lambda weight: nvfp4(weight, False)
    ),
    "packed-mxfp4": Format(
        compressed("mxfp4-pack-quantized", MXFP4 | {"dynamic": True}, **MXFP4), packed_mxfp4
    ),
    "modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate"]},
        lambda weight: nvfp4(weight, True),
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def base(make_checkpoint: MakeCheckpoint) -> Path:
    # Qwen2's queries, keys and values have biases.
    return make_checkpoint("qwen2", **SHAPE)


@pytest.fixture(scope="session")
def mixture(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("Qwen3Moe", **MIXTURE)


WRITTEN = [*(("base", name) for name in FORMATS), ("mixture", "awq"), ("mixture", "packed-group")]


@pytest.fixture(scope="session", params=WRITTEN, ids="-".join)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    kind, name = request.param
    return write(request.getfixturevalue(kind), FORMATS[name], tmp_path_factory.mktemp(name))


def test_logits_are_those_of_the_dequantised_model(written: tuple[Path, Path]) -> None:
    check_logits(*written, rtol=1e-5)


@pytest.mark.parametrize(("size", "is_parallel"), [(2, True), (3, False)])
def test_the_ranks_parts_mean_what_the_whole_does(written: tuple[Path, Path], size: int, is_parallel: bool) -> None:
    config = ModelConfig.from_folder(str(written[0]))
    if config.experts is not None:
        config, size = (config.with_expert_parallel() if is_parallel else config), 2
    check_parts(*written, config, size, rtol=1e-6)


def test_ranks_and_updates(base: Path, tmp_path: Path) -> None:
    stored, _ = write(base, FORMATS["nvfp4"], tmp_path)
    tensors, want = load_file(stored / "model.safetensors"), tokens_of(stored)
    with LLM(stored, tensor_parallel_size=2, **SETTINGS) as llm:
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == want
        llm.load_weights(tensors, strict=True)
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == want


def test_a_bias_is_a_part_of_what_a_residual_is_added_to() -> None:
    shard, config = MatrixShard({None: Shard.whole(64)}, Shard.whole(128)), QuantizationConfig("channel")
    weight = FourBitWeight(shard, replace(config, four_bits=FourBits()), has_bias=True)
    for target, part in weight.weight_slices("o_proj.weight").items():
        part.store(str(target), torch.randn(part.shape))
    x, residual = torch.randn(3, 128), torch.randn(3, 64)
    out, left = weight.multiply_into(x, residual)
    assert weight.bias is not None and weight.bias.abs().min() > 0 and left is not None
    wide = dequantize_four_bits_ref(weight.matrix, torch.float32)
    torch.testing.assert_close(out + left, functional.linear(x, wide, weight.bias) + residual)


@pytest.mark.parametrize("name", ["gptq", "awq", "packed-zeros", "nvfp4"])
def test_merged_projections(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    """Outputs of several projections follow one another in one tensor, in either dimension."""
    base = make_checkpoint("Phi3", pad_token_id=0, hidden_size=256, intermediate_size=256)
    stored, meant = write(base, FORMATS[name], tmp_path)
    assert tokens_of(stored, tensor_parallel_size=2) == tokens_of(meant)


def test_modelopts_older_folders_have_a_file_of_their_own(base: Path, tmp_path: Path) -> None:
    stored, meant = write(base, FORMATS["modelopt"], tmp_path)
    kinds = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    change(stored, quantization_config=None)
    (stored / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": kinds}))
    scales = {
        f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": torch.tensor(scale)
        for layer in range(2) for name, scale in (("k", 0.5), ("v", 0.25))
    }  # fmt: skip
    save_file(load_file(stored / "model.safetensors") | scales, stored / "model.safetensors")
    assert tokens_of(stored) == tokens_of(meant)
    with LLM(stored, kv_cache_dtype="fp8", **SETTINGS) as llm:
        runner: Any = llm.llm_engine._runner
        scales = runner.model.model.layers[1].self_attn.attn.layer.pages.scales
        assert set(scales.keys.tolist()) == {0.5} and set(scales.values.tolist()) == {0.25}


@pytest.mark.parametrize("name", ["packed-group", "packed-zeros", "packed-channel", "packed-mxfp4", "nvfp4"])
def test_compressed_tensors_reads_the_same(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors")
    base = make_checkpoint("qwen2", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    check_transformers(*write(base, FORMATS[name], tmp_path))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
    "exl2": ({"quant_method": "exl2"}, "quant_method 'exl2'"),
    "three bits": (GPTQ | {"bits": 3}, "bits=3"),
    "mixed bits": (GPTQ | {"dynamic": {"-:.*attn.*": {}, "lm_head": {"bits": 8}}}, "dynamic={'lm_head': {'bits': 8}}"),
    "groups of 48": (GPTQ | {"group_size": 48}, "group_size=48"),
    "gemv": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version='gemv'"),
    "gemv in a format's name": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "checkpoint_format": "gemv"}, "version='gemv'"
    ),
    "rotated": (GPTQ | {"rotation": "hadamard"}, "rotation='hadamard'"),
    "rotated, AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "rotation": "hadamard"}, "rotation='hadamard'"
    ),
    "order": (compressed("pack-quantized", strategy="group", group_size=128, actorder="group"), "actorder='group'"),
    "W4A8": (compressed("pack-quantized", {"num_bits": 8}, strategy="channel"), "input_activations="),
    "W4A8_AWQ": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
    "words of 64 bits": (GPTQ | {"pack_dtype": "int64"}, "pack_dtype='int64'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_by_name(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"{re.escape(message)}.* is not supported"):
        QuantizationConfig.from_hf(SimpleNamespace(quantization_config=config))


def test_inputs_in_another_order_and_zeros_are_refused(base: Path, tmp_path: Path) -> None:
    stored, _ = write(base, FORMATS["gptq-symmetric"], tmp_path)
    tensors, name = load_file(stored / "model.safetensors"), "model.layers.1.mlp.up_proj.g_idx"
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, stored / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name}' has groups that are not in order"):
        LLM(stored, **SETTINGS)
    name = name.replace("g_idx", "qzeros")
    save_file(tensors | {name: tensors[name] + 1}, stored / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}' has zeros other than 8"):
        LLM(stored, **SETTINGS)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq", "packed"])
def test_no_rank_begins_within_a_word(form: Any) -> None:
    shard, config = MatrixShard({None: Shard(4, 16, 16)}, Shard.whole(128)), QuantizationConfig("channel")
    weight = FourBitWeight(shard, replace(config, four_bits=FourBits(stored=form)))
    with pytest.raises(ValueError, match="begin within a word of 8"):
        weight.weight_slices("o_proj.weight")


CASES = [("int4", 128), ("int4", 64), ("int4", 32), ("int4", 304), ("mxfp4", 32), ("nvfp4", 16)]


def skip_unless_hopper() -> None:
    if not is_hopper(torch.device(DEVICE)):
        pytest.skip("needs Hopper's matrix instructions")


def make_matrix(outs: int, ins: int, kind: Any, group: int, dtype: torch.dtype, has_zeros: bool) -> FourBitMatrix:
    spread = torch.linspace(0.5, 2, outs, device=DEVICE)[:, None] * torch.linspace(2, 0.5, ins, device=DEVICE)
    made = quantize_four_bits(randn(outs, ins) * ins**-0.5 * spread, group, kind, dtype)
    zeros = torch.randint(0, 16, made.scales.shape, dtype=torch.uint8, device=DEVICE) if has_zeros else None
    return made._replace(zeros=zeros)


@pytest.mark.parametrize(
    ("case", "rows", "dtype"),
    over_dtypes(CASES, sorted({1, 9, 17, 130, *BATCHES} if GPU else {1, 9, 17, 70}), dtypes=DTYPES[-1:]),
)
def test_products(case: tuple[str, int], rows: int, dtype: torch.dtype) -> None:
    """A part of a step, and outputs, end within tiles."""
    for has_zeros in (False, True)[: 1 + (case[0] == "int4")]:
        matrix = make_matrix(70, 304, *case, dtype, has_zeros)
        # Padding is never read.
        matrix.values[:, 304 // 2 :] = 0xFF
        check_product(lambda x, weight, bias, _: four_bit_gemm(x, weight, bias), rows, matrix, dtype, "bias")
        # An eighth of float16's least number may be lost.
        wide = dequantize_four_bits_ref(matrix, torch.float32)
        assert torch.equal(by_triton(dequantize_four_bits)(matrix, torch.float32), wide)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES[:3], ("int4", 256), ("int4", 1312), *CASES[4:]])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("tile", [None, (16, 4, 3), (32, 4, 2, 1)])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
def test_products_of_few_rows(rows: int, tile: Any, dtype: torch.dtype, case: tuple[str, int]) -> None:
    """Steps end within the inputs, and outputs within tiles; a program may have several tiles."""
    from nanovllm.kernels.linear.skinny_four_bit_gemm import SkinnyTile, skinny_four_bit_gemm  # noqa: PLC0415

    form = partial(skinny_four_bit_gemm, tile=None if tile is None else SkinnyTile(*tile))
    for has_zeros, has in ((False, "norm residual bias gated"), (case[0] == "int4", "bias")):
        matrix = make_matrix(1034 if tile is None else 4802, 1312, *case, dtype, has_zeros)
        check_norm_linear(form, rows, matrix, dtype, has)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES[:3], ("int4", 256), ("int4", 2048), *CASES[4:]])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        *((rows, None) for rows in (17, 63, 130, 256)), (63, (32, 128, 3)), (63, (32, 256, 3)), (130, (64,)),
        (130, (64, 256)), (130, (128, 128, 3)), (256, (256, 64)),
    ],
)  # fmt: skip
def test_products_of_more_rows_on_hopper(rows: int, tile: Any, dtype: torch.dtype, case: tuple[str, int]) -> None:
    """Outputs and rows end within tiles, and there are several tiles for a program; inputs end within a step."""
    from nanovllm.kernels.linear.hopper_four_bit_gemm import HopperTile, hopper_four_bit_gemm  # noqa: PLC0415

    skip_unless_hopper()
    chosen = None if tile is None else HopperTile(*tile)
    for has_zeros, has, ins, parts in ((False, "bias gated", 1312, 1), (case[0] == "int4", "", 2048, 2)):
        matrix = make_matrix(5002 if has else 1034, ins, *case, dtype, has_zeros)
        check_product(partial(hopper_four_bit_gemm, parts=parts, tile=chosen), rows, matrix, dtype, has)


def stacked(matrices: list[FourBitMatrix]) -> FourBitMatrix:
    factors = [matrix.factors for matrix in matrices if matrix.factors is not None]
    return matrices[0]._replace(
        values=torch.stack([matrix.values for matrix in matrices]),
        scales=torch.stack([matrix.scales for matrix in matrices]),
        factors=torch.stack(factors) if factors else None,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [None, (32, 128, 3), (64,), (128, 128, 3)])
@pytest.mark.parametrize("case", [("int4", 32), ("mxfp4", 32), ("nvfp4", 16)])
@pytest.mark.parametrize("activation", ["clamped", "silu", "relu2"])
def test_experts_of_more_rows_on_hopper(activation: Any, case: tuple[str, int], tile: Any) -> None:
    """One of five experts has no rows, one more than fit into a tile, and the last one is another rank's."""
    from nanovllm.kernels.linear.hopper_four_bit_gemm import HopperTile  # noqa: PLC0415
    from nanovllm.kernels.moe.four_bit_experts import hopper_four_bit_experts  # noqa: PLC0415

    skip_unless_hopper()
    dtype, chosen = torch.bfloat16, None if tile is None else HopperTile(*tile)
    experts = torch.tensor([[0, 1], [3, 0], [0, 4], [0, 1], [0, 3]], dtype=torch.int32, device=DEVICE).repeat(40, 1)
    routing = Routing(experts, torch.rand(200, 2, device=DEVICE), 5)
    order, size = sort_slots(routing, 0, 4), 416 * (1 if activation == "relu2" else 2)
    up, down = (
        stacked([make_matrix(*shape, *case, dtype, False) for _ in range(4)]) for shape in ((size, 608), (608, 416))
    )
    biases, x = (randn(4, size, dtype=dtype), randn(4, 608, dtype=dtype)), randn(200, 608, dtype=dtype)
    activated = torch.empty(400, 416, dtype=dtype, device=DEVICE)
    parts = torch.zeros(200, 2, 608, dtype=dtype, device=DEVICE)
    hopper_four_bit_experts(x, routing, order, up, activated, activation, bias=biases[0], tile=chosen)
    hopper_four_bit_experts(activated, routing, order, down, parts.flatten(0, 1), None, bias=biases[1], tile=chosen)
    check_experts(x, routing, up, down, out=parts.sum(1), activation=activation, biases=biases)


def test_a_group_has_the_scale_of_the_least_squared_error() -> None:
    """A group of multiples of a share of its furthest value, an eighth each, has that share, to which it is clipped."""
    shares = torch.tensor([1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7])[:, None]
    weight = torch.randint(-7, 8, (7, 128)) * (shares / 8)
    weight[:, 0] = -1
    made = quantize_four_bits(weight, 128, "int4", torch.float32)
    want = torch.cat((-shares, weight[:, 1:]), 1)
    torch.testing.assert_close(dequantize_four_bits_ref(made, torch.float32), want)
