"""Weights in e4m3: each format loads as its documentation has it, on any number of ranks, and multiplies as floats do.

The checkpoints are written here, by a quantiser of their own, beside one of what their numbers mean in float32.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from nanovllm import LLM, SamplingParams
from nanovllm.configs.model import ModelConfig
from nanovllm.configs.quantization import Granularity, QuantizationConfig
from nanovllm.kernels import policy
from nanovllm.kernels._triton import converts_e4m3
from nanovllm.kernels.e4m3 import Fp8Matrix, dequantize, dequantize_ref, quantize
from nanovllm.kernels.four_bits import FourBitMatrix, dequantize_four_bits_ref
from nanovllm.kernels.linear import norm_linear
from nanovllm.kernels.linear import scaled_gemm as scaled_gemm_op
from nanovllm.kernels.linear.gemv import gemv
from nanovllm.kernels.linear.quantize_rows import Rounding, quantize_rows, quantize_rows_ref
from nanovllm.kernels.linear.scaled_gemm import _tile as scaled_tile
from nanovllm.kernels.linear.scaled_gemm import scaled_gemm, scaled_gemm_ref
from nanovllm.kernels.linear.skinny_gemm import _fp8_tile as skinny_tile
from nanovllm.kernels.linear.skinny_gemm import skinny_gemm
from nanovllm.kernels.policy import FASTEST, FP8_INS, KernelPolicy
from nanovllm.kernels.rms_norm import Norm, rms_norm_ref
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.models import with_stored_head
from nanovllm.models.base import CausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard
from nanovllm.quantization.fp8 import Fp8Weight
from nanovllm.quantization.weight import Weight
from nanovllm.weights.model_weights import ModelWeights
from tests.conftest import MakeCheckpoint
from tests.reference import reference_logits
from tests.test_kernels import DEVICE, DTYPES, GPU, by_triton, randn
from tests.test_sharding import TwoRanks, shards

# Blocks end within heads, keys and values; a rank's keys begin within one. A KV head's group has 128 inputs of o_proj.
SHAPE: dict[str, Any] = {
    "hidden_size": 640, "num_attention_heads": 10, "num_key_value_heads": 5, "intermediate_size": 384,
}  # fmt: skip
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "kvcache_block_size": 16, "num_kvcache_blocks": 20}
PROMPTS = [[1, 2, 3], list(range(40)), [7]]
Tensors = dict[str, torch.Tensor]
# The blocks of inputs end within the hidden size; each of three ranks has a block of an expert's columns.
MIXTURE: dict[str, Any] = {
    "hidden_size": 320, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 64, "num_experts": 5,
    "num_experts_per_tok": 2, "moe_intermediate_size": 384, "norm_topk_prob": True,
}  # fmt: skip


def weights_of(**args: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False} | args


def compressed(inputs: object, **weights: Any) -> dict[str, Any]:
    """A quantization_config as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": weights_of(**weights), "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}}, "kv_cache_scheme": None,
        "ignore": ["lm_head", r"re:model\.layers\.0\.self_attn\.o_proj$"],
    }  # fmt: skip


def with_group_format(name: str) -> dict[str, Any]:
    """A config in the form that allows groups of several formats."""
    config = compressed(None, strategy="channel")
    config["config_groups"]["group_0"]["format"] = name
    return config


@dataclass(frozen=True)
class Format:
    """A format of quantised checkpoints.

    Attributes:
        config: its quantization_config.
        store: returns the tensors of a matrix, by what they have instead of "weight" in their names, and what it means.
        ignored: layers that stay as they are.
        layers: all of them.
    """

    config: dict[str, Any]
    store: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    ignored: str = "nothing"
    layers: str = r"(_proj|\.w[123])\.weight$"


def e4m3(
    block: tuple[int | None, int | None], scale: str = "weight_scale", shape: tuple[int, ...] | None = None,
    *, dtype: torch.dtype = torch.float32, input_scale: str | None = None,
) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:  # fmt: skip
    """Return what stores a matrix in e4m3.

    Args:
        block: outputs and inputs that share a scale; None for all.
        scale: name of the scales.
        shape: of them, if not [blocks of outputs, blocks of inputs].
        dtype: of them.
        input_scale: name of the inputs' scale, if there is one.
    """

    def store(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        stored, scales, meant = rounded(weight, block, dtype)
        tensors = {"weight": stored, scale: scales.view(scales.shape if shape is None else shape).to(dtype)}
        if input_scale is not None:
            tensors[input_scale] = torch.full_like(tensors[scale], 0.5)
        return tensors, meant

    return store


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
IGNORED = r"layers\.0\.self_attn\.o_proj"
STATIC = weights_of(strategy="tensor")
FORMATS = {
    "fp8-block": Format(
        FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]},
        e4m3((128, 128), "weight_scale_inv"), r"layers\.1\.mlp",
    ),
    "fp8-tensor": Format(
        FP8 | {"modules_to_not_convert": ["model.layers.0.self_attn.o_proj"]}, e4m3((None, None), shape=()), IGNORED
    ),
    "fp8-static": Format(
        FP8 | {"activation_scheme": "static", "weight_block_size": None, "ignored_layers": ["self_attn.o_proj"]},
        e4m3((None, None), "weight_scale_inv", (), input_scale="activation_scale"), r"self_attn\.o_proj",
    ),
    "compressed-channel": Format(
        compressed(weights_of(strategy="token", dynamic=True), strategy="channel"), e4m3((1, None)), IGNORED
    ),
    "compressed-tensor": Format(
        compressed(STATIC, strategy="tensor") | {"format": "naive-quantized", "quantization_status": "frozen"},
        e4m3((None, None), shape=(1,), input_scale="input_scale"), IGNORED,
    ),
    "modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        e4m3((None, None), shape=(), input_scale="input_scale"),
    ),
    "compressed-block": Format(
        compressed(None, strategy="block", block_structure=[128, 128]), e4m3((128, 128)), IGNORED
    ),
}  # fmt: skip


def rounded(
    weight: torch.Tensor, shared: tuple[int | None, int | None], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values in e4m3, scales, [blocks of outputs, blocks of inputs], and what both mean."""
    block = [size or total for size, total in zip(shared, weight.shape, strict=True)]
    numbers = [-(-total // size) for size, total in zip(block, weight.shape, strict=True)]
    scales, spread, values = torch.zeros(numbers), torch.zeros_like(weight), torch.empty_like(weight)
    for i in range(numbers[0]):
        for j in range(numbers[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scale = (weight[part].abs().max() / 448).to(dtype).float()
            scales[i, j] = spread[part] = scale
            values[part] = (weight[part] / scale).clamp(-448, 448)
    stored = values.to(torch.float8_e4m3fn)
    return stored, scales, stored.float() * spread


def write(folder: Path, kind: Format, to: Path) -> tuple[Path, Path]:
    """Write a checkpoint in a format, and what it means in float32."""
    stored, meant = (Path(shutil.copytree(folder, to / name)) for name in ("stored", "meant"))
    tensors = load_file(folder / "model.safetensors")
    quantised, wide = dict(tensors), dict(tensors)
    for name in [name for name in tensors if re.search(kind.layers, name) and not re.search(kind.ignored, name)]:
        made, wide[name] = kind.store(quantised.pop(name))
        quantised |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in made.items()}
    assert len(quantised) > len(tensors)
    for made_in, held in ((stored, quantised), (meant, wide)):
        whole = {name: tensor.contiguous() for name, tensor in held.items()}
        save_file(whole, made_in / "model.safetensors", metadata={"format": "pt"})
    change(stored, quantization_config=kind.config)
    return stored, meant


def change(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture(scope="session")
def base(make_checkpoint: MakeCheckpoint) -> Path:
    # Qwen2's queries, keys and values have biases.
    return make_checkpoint("qwen2", **SHAPE)


@pytest.fixture(scope="session")
def mixture(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("Qwen3Moe", **MIXTURE)


WRITTEN = [*(("base", name) for name in FORMATS)]
WRITTEN += [("mixture", name) for name in ("fp8-block", "fp8-static", "compressed-channel")]
some_written = pytest.mark.parametrize("written", [WRITTEN[0], WRITTEN[4], WRITTEN[6]], indirect=True, ids="-".join)


@pytest.fixture(scope="session", params=WRITTEN, ids="-".join)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model without experts, or with them, in a format, and what it means."""
    kind, name = request.param
    return write(request.getfixturevalue(kind), FORMATS[name], tmp_path_factory.mktemp(name))


def run_engine(
    folder: Path, prompts: list[list[int]] = PROMPTS, **settings: Any
) -> tuple[list[list[int]], list[torch.Tensor], dict[str, int]]:
    """Greedy tokens of each prompt; on one rank the logits of every step, too; and counts."""
    logits: list[torch.Tensor] = []
    with LLM(folder, **SETTINGS, **settings) as llm:
        runner: Any = llm.llm_engine._runner
        if "tensor_parallel_size" not in settings:
            compute = runner.model.compute_logits

            def recorded(*states: Any) -> torch.Tensor:
                logits.append(compute(*states))
                return logits[-1]

            runner.model.compute_logits = recorded
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, schedule="arrival")
        return [output["token_ids"] for output in outputs], logits, llm.stats()


def tokens_of(folder: Path, **settings: Any) -> list[list[int]]:
    """Greedy tokens of the prompts."""
    return run_engine(folder, **settings)[0]


def check_logits(stored: Path, meant: Path, rtol: float = 1e-4) -> None:
    tokens, logits, _ = run_engine(stored)
    for prompt, output, mine in zip(PROMPTS, tokens, torch.stack(logits[-NUM_TOKENS:], 1), strict=True):
        theirs = reference_logits(meant, prompt + output[:-1])[len(prompt) - 1 :]
        assert output == theirs.argmax(1).tolist() and (mine - theirs).abs().max() < rtol * theirs.abs().max()


def test_logits_are_those_of_the_dequantised_model(written: tuple[Path, Path]) -> None:
    check_logits(*written)


# transformers does not know the scales' name of "fp8-tensor", nor modelopt's form.
@pytest.mark.compat
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("fp8-tensor", "modelopt")])
def test_transformers_reads_the_same_from_the_format(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("accelerate" if name.startswith("fp8") else "compressed_tensors")
    # transformers takes no part of a block.
    base = make_checkpoint("qwen2", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    check_transformers(*write(base, FORMATS[name], tmp_path))


def check_transformers(stored: Path, meant: Path) -> None:
    """Check that transformers reads from a checkpoint what it is to mean."""
    method = json.loads((stored / "config.json").read_text())["quantization_config"]["quant_method"]
    kind: Any = FineGrainedFP8Config if method == "fp8" else CompressedTensorsConfig
    model: Any = AutoModelForCausalLM.from_pretrained(
        stored, dtype=torch.float32, quantization_config=kind(dequantize=True)
    )
    wide, theirs = load_file(meant / "model.safetensors"), model.state_dict()
    for layer in (name for name in wide if name.endswith("_proj.weight")):
        assert torch.allclose(theirs[layer], wide[layer], rtol=1e-5), layer


@some_written
def test_what_is_quantised_can_be_dropped_and_loaded_again(written: tuple[Path, Path]) -> None:
    params, tensors = SamplingParams(0, 6, ignore_eos=True), load_file(written[0] / "model.safetensors")
    with LLM(written[0], **SETTINGS) as llm:
        want = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"]
        runner: Any = llm.llm_engine._runner
        held = {name: tensor for name, tensor in runner.model.state_dict().items() if "weight" in name}
        assert sum(name.endswith(".scales") for name in held) >= 6
        llm.sleep(level=2)
        assert [name for name, tensor in held.items() if tensor.untyped_storage().nbytes()] == []
        llm.wake_up()
        scales = max(name for name in tensors if "weight_scale" in name)
        with pytest.raises(ValueError, match="tensors are missing"):
            llm.load_weights({name: tensor for name, tensor in tensors.items() if name != scales}, strict=True)
        llm.load_weights(tensors, strict=True)
        assert llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"] == want


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.compat)])
def test_scales_that_are_no_numbers(base: Path, tmp_path: Path, size: int) -> None:
    stored, _ = write(base, FORMATS["compressed-channel"], tmp_path)
    tensors = load_file(stored / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scale"))
    bad = {"model.norm.weight": tensors["model.norm.weight"], name: torch.full_like(tensors[name], torch.nan)}
    save_file(bad, tmp_path / "model.safetensors")
    refused = f"^scales '{name}' must be finite and not negative"
    with LLM(stored, tensor_parallel_size=size, **SETTINGS) as llm:
        with pytest.raises(ValueError, match=f"{refused}; 1 tensors were written before"):
            llm.load_weights(bad)
        with pytest.raises(ValueError, match=f"{refused}$"):
            llm.load_weights(tmp_path)
        assert llm.generate([[1]], GREEDY, use_tqdm=False)
        # Of values that were not written nothing is said later.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.load_weights(tensors)
        weight = name.removesuffix("_scale")
        tensors[weight].view(torch.uint8)[3, 5] = 0xFF
        with pytest.warns(UserWarning, match=f"^1 tensors that were loaded have NaN, such as '{weight}'"):
            llm.load_weights(tensors)


Regions = dict[str, tuple[torch.Tensor, tuple[slice, slice]]]


def dequantised(model: CausalLM) -> Regions:
    """Return the values of a rank's linear layers and experts, and their parts of the checkpoint's tensors."""
    found: Regions = {}
    for name, module in model.named_modules():
        layer, wholes = name.removesuffix(".weight"), dict[str, torch.Tensor]()
        parent = layer.rpartition(".")[0]
        if not isinstance(module, Weight) or "_proj" not in name:
            continue
        held: Any = module.matrix
        if (experts := module.shard.experts) is not None:
            for local in range(experts.size):
                number = experts.start + local
                matrix = held[local] if isinstance(held, torch.Tensor) else held.expert(local)
                wholes[f"{parent}.{number}."] = wide_values(matrix)
        else:
            wholes[f"{parent}."] = wide_values(held)
        last = "down" if experts is not None else layer.rpartition(".")[2].removesuffix("_proj")
        sizes = [shard.size for shard in module.shard.outputs.values()]
        for path, whole in wholes.items():
            for (part, outputs), region in zip(module.shard.outputs.items(), whole.split(sizes), strict=True):
                index = outputs.present, module.shard.inputs.present
                found[f"{path}{part or last}_proj.weight"] = region, index
    return found


def wide_values(matrix: Fp8Matrix | FourBitMatrix | torch.Tensor) -> torch.Tensor:
    if isinstance(matrix, FourBitMatrix):
        return dequantize_four_bits_ref(matrix, torch.float32)
    return dequantize_ref(matrix, torch.float32) if isinstance(matrix, Fp8Matrix) else matrix


def check_parts(folder: Path, meant: Path, config: ModelConfig, size: int, rtol: float = 0) -> None:
    """Check that what the ranks' parts of a folder mean is what `meant` has, and that nothing of it is missing."""
    wide, found = load_file(meant / "model.safetensors"), set[str]()
    for theirs, ours in (("block_sparse_moe", "mlp"), ("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        wide = {name.replace(f".{theirs}.", f".{ours}."): tensor for name, tensor in wide.items()}
    for model in shards(config, size):
        ModelWeights(model, torch.device("cpu")).load_folder(str(folder))
        for name, (region, index) in dequantised(model).items():
            assert torch.allclose(region, wide[name][index], rtol=rtol, atol=0), name
            found.add(name)
    assert found == {name for name in wide if name.endswith("_proj.weight")}


@pytest.mark.parametrize(("size", "is_parallel"), [(2, True), (3, False)])
def test_the_ranks_parts_mean_what_the_whole_does(written: tuple[Path, Path], size: int, is_parallel: bool) -> None:
    config = ModelConfig.from_folder(str(written[0]))
    if is_parallel and config.experts is not None:
        config = config.with_expert_parallel()
    check_parts(*written, config, size)


def write_with_head(make_checkpoint: MakeCheckpoint, name: str, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint whose LM head is in e4m3, too."""
    kind = FORMATS[name]
    lists = {key: list[str]() for key in ("ignore", "modules_to_not_convert") if key in kind.config}
    kind = replace(kind, config=kind.config | lists, layers=r"(_proj|lm_head)\.weight$", ignored="nothing")
    return write(make_checkpoint("qwen2", **SHAPE, vocab_size=310), kind, folder)


@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel", "compressed-tensor"])
def test_a_head_that_is_stored_in_e4m3_stays_so(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    """Ranks have whole blocks of it and parts of them, and some of them padding."""
    stored, meant = write_with_head(make_checkpoint, name, tmp_path)
    tokens = tokens_of(stored)
    assert tokens == tokens_of(meant)
    assert name != "fp8-block" or tokens == tokens_of(stored, tensor_parallel_size=2)
    config, wide = ModelConfig.from_folder(str(stored)), load_file(meant / "model.safetensors")["lm_head.weight"]
    for size in (1, 2, 3):
        for model in shards(with_stored_head(config, str(stored)), size):
            ModelWeights(model, torch.device("cpu")).load_folder(str(stored))
            weight = model.lm_head.weight
            assert isinstance(weight, Fp8Weight)
            part = wide[weight.shard.outputs[None].present]
            assert torch.equal(dequantize_ref(weight.matrix, torch.float32)[: len(part)], part)


def log_probs(folder: Path, num_rows: int, **settings: Any) -> torch.Tensor:
    """Log-probabilities of eight rows after a prompt and two given tokens, [rows, steps, vocabulary].

    `num_rows` sequences run at a time.
    """
    rng = random.Random(num_rows)
    prompts = [[rng.randrange(1000) for _ in range(24)] for _ in range(max(8, num_rows))]
    params = [
        SamplingParams(0, 3, allowed_token_ids=[7], logprobs=1000 if i < 8 else None) for i in range(len(prompts))
    ]
    sizes: dict[str, Any] = {"max_num_seqs": num_rows, "max_model_len": 64, "num_kvcache_blocks": 256}
    with LLM(folder, kv_cache_dtype="fp8", max_logprobs=-1, **sizes, **settings) as llm:
        outputs: Any = llm.generate(prompts, params, use_tqdm=False)
    steps = [[[step[i].logprob for i in range(1000)] for step in output.outputs[0].logprobs] for output in outputs[:8]]
    return torch.tensor(steps, dtype=torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel"])
@pytest.mark.parametrize("num_rows", [1, 8, 40, 200])
def test_an_engine_on_the_gpu_rounds_what_the_rule_says(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_rows: int
) -> None:
    """Steps of prompts, and of rows that decode: as near to the rule in float32 as the rule in bfloat16 is."""
    sizes = {"hidden_size": 512, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    base = make_checkpoint(vocab_size=1000, intermediate_size=1024, initializer_range=0.05, **sizes)
    stored, _ = write(base, FORMATS[name], tmp_path)
    found = log_probs(stored, num_rows, device="cuda", dtype="bfloat16")
    monkeypatch.setattr(KernelPolicy, "rounds_rows", quantizes)
    # torch's product on a CPU may have no scales of rows.
    monkeypatch.setattr(policy, "supports_scaled_mm", lambda weight: False)
    exact, wide = (log_probs(stored, num_rows, device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16"))
    for step, kind in enumerate(("prompts", "first", "second")):
        error, allowed = (
            (exact[:, step].exp() * (exact[:, step] - other[:, step])).sum(-1).mean() for other in (found, wide)
        )
        assert error <= 2 * allowed, (kind, error, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel"])
def test_a_head_in_e4m3_on_the_gpu(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    stored, meant = write_with_head(make_checkpoint, name, tmp_path)
    wide = load_file(meant / "model.safetensors")["lm_head.weight"].to(DEVICE)
    with LLM(stored, max_model_len=64, num_kvcache_blocks=20) as llm:
        assert all(output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        runner: Any = llm.llm_engine._runner
        # From 17 rows on these are rounded, too.
        for rows, most in ((1, 0.01), (9, 0.01), (40, 0.06), (300, 0.06)):
            x = randn(rows, wide.shape[1], dtype=torch.bfloat16)
            want, got = x.float() @ wide.T, runner.model.project_logits(x)[:, : len(wide)].float()
            assert (got - want).norm() < most * want.norm(), rows


def test_stacked_projections_may_have_one_scale(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint("Phi3", pad_token_id=0)
    stored, meant = write(folder, Format(FP8, e4m3((None, None), shape=())), tmp_path)
    assert "model.layers.0.self_attn.qkv_proj.weight_scale" in load_file(stored / "model.safetensors")
    assert tokens_of(stored) == tokens_of(meant)


def in_int4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Round groups of 128 inputs to integers from -8 to 7, with the best of seven scales by the squared error."""
    groups = functional.pad(weight, (0, -weight.shape[1] % 128)).unflatten(1, (-1, 128))
    most, least = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    # The value furthest from zero becomes -8, or beyond it.
    furthest = torch.where(most > -least, most, least)
    scales = torch.stack([furthest * (clip / -8) for clip in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)])
    tried = (groups / scales).round().clamp(-8, 7) * scales
    best = (tried - groups).square().sum(3, keepdim=True).argmin(0, keepdim=True)
    return {"weight": weight, "scales": scales}, tried.take_along_dim(best, 0)[0].flatten(1)[:, : weight.shape[1]]


@pytest.mark.parametrize(
    ("quantization", "kind", "size", "is_parallel"),
    [
        ("fp8", "base", 1, False), ("fp8", "base", 3, False), ("fp8", "mixture", 2, False), ("fp8", "mixture", 2, True),
        ("int4", "base", 1, False), ("int4", "mixture", 2, True),
    ],
)  # fmt: skip
def test_a_checkpoint_is_quantised_while_it_loads(
    quantization: Any, kind: str, size: int, is_parallel: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder: Path = request.getfixturevalue(kind)
    config = ModelConfig.from_folder(str(folder)).with_quantization(quantization)
    _, meant = write(folder, Format({}, e4m3((1, None)) if quantization == "fp8" else in_int4), tmp_path)
    check_parts(folder, meant, config.with_expert_parallel() if is_parallel else config, size)


def test_products_of_rows_that_no_norm_precedes(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    stored, meant = write(make_checkpoint("Olmo2", pad_token_id=0, **SHAPE), FORMATS["compressed-channel"], tmp_path)
    want = tokens_of(meant)
    assert tokens_of(stored) == want == tokens_of(stored, tensor_parallel_size=2)


@pytest.mark.parametrize("kind", ["base", "mixture"])
def test_dummy_weights_on_one_rank_and_two(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder: Path = request.getfixturevalue(kind)
    config = ModelConfig.from_folder(str(folder)).with_quantization("fp8")
    (whole,), halves = shards(config, 1), shards(config, 2)
    for model in (whole, *halves):
        ModelWeights(model, torch.device("cpu")).draw(5)
    wide = dequantised(whole)
    for half in halves:
        for name, (region, index) in dequantised(half).items():
            assert torch.equal(region, wide[name][0][index]) and region.std() > 0.1, name
    stored, _ = write(folder, FORMATS["fp8-block"], tmp_path)
    assert len(set(tokens_of(stored, load_format="dummy")[0])) > 1


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
        stored, meant = write(folder, kind, tmp_path / str(number))
        check_parts(stored, meant, ModelConfig.from_folder(str(stored)), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("fp8", "quantization_config='fp8' in '.*config.json' must be an object"),
        ({"quant_method": "bitsandbytes", "bits": 4}, "quant_method 'bitsandbytes' is not supported"),
        ({"quant_method": "gptq", "bits": 8}, "bits=8 is not supported"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0' is not supported"),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2' is not supported"),
        (FP8 | {"weight_block_size": [64, 128]}, r"blocks of \[64, 128\] are not supported: only \[128, 128\]"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype='fp4' is not supported"),
        (FP8 | {"activation_scheme": None}, "activation_scheme must be 'dynamic' or 'static', not None"),
        (
            FP8 | {"modules_to_not_convert": ["q_proj"]},
            r"ignores \['model.layers.0.self_attn.q_proj'\], but not all of",
        ),
        (compressed(None, strategy="channel") | {"format": "marlin-24"}, "format='marlin-24' is not"),
        (compressed(None, strategy="channel") | {"kv_cache_scheme": STATIC | {"type": "int"}}, "scheme of type='int'"),
        (with_group_format("pack-quantized"), "format='pack-quantized' is not supported: only 'float-quantized'"),
        (compressed(None, strategy="channel") | {"ignore": "lm_head"}, "ignore='lm_head' must be a list of names"),
        (FP8 | {"modules_to_not_convert": ["re:("]}, r"modules_to_not_convert has 're:\(', which is no pattern"),
        (compressed(None, strategy="channel") | {"config_groups": [{}]}, r"config_groups=\[{}\] must be one"),
        (compressed(None, strategy="channel", type="int", num_bits=4), "weights of type='int', num_bits=4"),
        (compressed(weights_of(type="int"), strategy="channel"), "input_activations of type='int'"),
        (compressed(["dynamic"], strategy="channel"), r"input_activations=\['dynamic'\] must be an object"),
        (compressed(None, strategy="group"), "weights of strategy='group' are not supported"),
        (compressed(None, strategy="block", block_structure=[64, 64]), r"blocks of \[64, 64\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(base: Path, tmp_path: Path, changes: object, message: str) -> None:
    shutil.copy(base / "config.json", tmp_path / "config.json")
    change(tmp_path, quantization_config=changes)
    # Before weights are read: there are none. Models cannot be made without them.
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, **SETTINGS)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_has_no_scale_is_refused_by_name(base: Path, tmp_path: Path, value: float) -> None:
    folder, name = shutil.copytree(base, tmp_path / "model"), "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for quantization in ("fp8", "int4"):
        with pytest.raises(ValueError, match=f"'{name}' has values that are not finite, and cannot be quantised"):
            LLM(folder, quantization=quantization, **SETTINGS)


def test_values_too_small_for_a_scale_become_0() -> None:
    matrix = quantize(torch.tensor([[1e-44, -1e-44], [2.0, 0.0], [0.0, 0.0]]), 1, 2)
    assert dequantize_ref(matrix, torch.float32).tolist() == [[0, 0], [2, 0], [0, 0]]


def test_checkpoints_that_do_not_fit_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    stored, _ = write(base, FORMATS["fp8-block"], tmp_path)
    tensors = load_file(stored / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    for part, tensor, message in (
        ("weight", torch.zeros(384, 640), f"'{name}.weight' is stored as torch.float32"),
        ("weight_scale_inv", torch.ones(3, 4), rf"'{name}.weight_scale_inv' has shape \[3, 4\]; .* \[3, 5\]"),
        ("weight_scale_inv", torch.ones(3, 5).to(torch.float8_e8m0fnu), "is stored as F8_E8M0"),
        ("weight_scale_inv", torch.full((3, 5), torch.nan), "must be finite and not negative"),
    ):
        save_file(tensors | {f"{name}.{part}": tensor}, stored / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            LLM(stored, **SETTINGS)
    change(stored, intermediate_size=192)
    with pytest.raises(ValueError, match="intermediate_size=192: each rank takes at least 128 columns"):
        LLM(stored, tensor_parallel_size=2, **SETTINGS)
    change(stored, num_key_value_heads=10)
    with pytest.raises(ValueError, match="64 inputs of a KV head's group are no multiple of the 128"):
        LLM(stored, tensor_parallel_size=2, **SETTINGS)
    with pytest.raises(ValueError, match="quantization must be None, 'fp8' or 'int4', not 'awq'"):
        LLM(base, quantization="awq", **SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'fp8' is not supported for models that transformers' code runs"):
        LLM(base, quantization="fp8", model_impl="transformers", **SETTINGS)


@dataclass
class Product:
    """Operands of a product; what comes out of it in float64 and, each op rounded, in their dtype; and how near.

    `allowed` is the most by which each result may miss `exact` for the roundings of every step.
    """

    x: torch.Tensor
    weight: Fp8Matrix
    bias: torch.Tensor | None
    norm: Norm | None
    residual: torch.Tensor | None
    gated: bool
    exact: torch.Tensor
    same: torch.Tensor
    allowed: torch.Tensor


def rounding_of(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half of the last place of each result, which rounding it adds."""
    return torch.finfo(dtype).eps / 2 * out.abs() + torch.finfo(dtype).smallest_normal


def gated_error(out: torch.Tensor, lost: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the most by which SiLU(gate) * up may be wrong, if the sums, `out`, were by `lost` before rounding."""
    (gate, up), (of_gate, of_up) = out.chunk(2, -1), (lost + rounding_of(out.abs() + lost, dtype)).chunk(2, -1)
    silu = functional.silu(gate)
    # SiLU's slope is below 1.1. Where the GPU approximates exp and the quotient, 2^-20 is more than these lose.
    error = 1.1 * of_gate * (up.abs() + of_up) + silu.abs() * of_up + 2**-20 * (silu * up).abs()
    return error + rounding_of((silu * up).abs() + error, dtype)


def make_product(
    rows: int, size: tuple[int, int], block: tuple[int, int], dtype: torch.dtype, gated: bool, positive: bool = False
) -> Product:
    (num_ins, num_outs), wide = size, randn(size[1] * (1 + gated), size[0]) * size[0] ** -0.5
    # Rows and columns of blocks of different sizes.
    wide *= torch.linspace(0.5, 2, len(wide), device=DEVICE)[:, None] * torch.linspace(2, 0.5, num_ins, device=DEVICE)
    weight = quantize(wide.abs() if positive else wide, block[0], block[1] or num_ins)
    x, residual = randn(rows, num_ins, dtype=dtype), randn(rows, num_ins, dtype=dtype)
    x = x.abs() if positive else x
    bias = None if gated or positive else randn(num_outs, dtype=dtype)
    norm = None if positive else Norm(randn(num_ins, dtype=dtype), 0.1)
    normed = x if norm is None else rms_norm_ref(x, norm.weight, norm.eps, residual)[0]
    meant = dequantize_ref(weight, torch.float64)
    out = normed.double() @ meant.T
    # Of a sum in float32 each addition may lose half a last place. A normalised input beside a tie may be rounded the
    # other way, and a weight that is dequantised before is rounded to the dtype.
    lost = (num_ins * 2**-24 + max(torch.finfo(dtype).eps, 2**-20)) * (normed.double().abs() @ meant.abs().T)
    out = out if bias is None else out + bias
    same = out.to(dtype)
    allowed = gated_error(out, lost, dtype) if gated else lost + rounding_of(out.abs() + lost, dtype)
    if gated:
        (gate, up), (exact_gate, exact_up) = same.chunk(2, -1), out.chunk(2, -1)
        out, same = functional.silu(exact_gate) * exact_up, functional.silu(gate) * up
    return Product(x, weight, bias, norm, None if norm is None else residual, gated, out, same, allowed)


def check_product(out: torch.Tensor, made: Product, rows: slice = slice(None)) -> None:
    """Assert that no result misses by more than its roundings, and all together by no more than torch's twice."""
    exact = made.exact[rows]
    missed = (out.double() - exact).abs()
    assert (missed <= made.allowed[rows]).all(), (missed / made.allowed[rows]).max()
    error, same = ((y.double() - exact).square().mean().sqrt().item() for y in (out, made.same[rows]))
    assert error <= 2 * same + 1e-6 * exact.abs().max().item(), (error, same)


BLOCKS = [(1, 0), (128, 128), (1, 128)]
"""Outputs and inputs that share a scale, 0 for all."""


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_gemv(block: tuple[int, int], dtype: torch.dtype, gated: bool) -> None:
    made = make_product(1, (300, 256), block, dtype, gated)
    out, total = gemv(made.x, made.weight, made.bias, made.norm, made.residual, gated)
    check_product(out, made)
    assert made.residual is not None and torch.equal(total, made.x + made.residual)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [8, 9, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_skinny_gemm(block: tuple[int, int], rows: int, gated: bool) -> None:
    for dtype in DTYPES[1:]:
        made = make_product(rows, (300, 256) if GPU else (160, 256), block, dtype, gated)
        x = rms_norm_ref(made.x, made.norm.weight, 0.1, made.residual)[0] if made.norm is not None else made.x
        check_product(skinny_gemm(x, made.weight, made.bias, gated), made)


@pytest.mark.parametrize("block", BLOCKS)
def test_long_sums_of_positive_numbers(block: tuple[int, int]) -> None:
    made = make_product(2, (12288, 20), block, torch.float16, gated=False, positive=True)
    check_product(skinny_gemm(made.x, made.weight), made)
    check_product(norm_linear.norm_linear_ref(made.x, made.weight)[0], made)
    check_product(gemv(made.x[:1], made.weight)[0], made, slice(1))


@pytest.mark.parametrize("block", BLOCKS)
def test_dequantize(block: tuple[int, int]) -> None:
    weight = quantize(randn(200, 300), block[0], block[1] or 300)
    for dtype in DTYPES:
        want, found = dequantize_ref(weight, dtype), by_triton(dequantize)(weight, dtype)
        torch.testing.assert_close(found, want, rtol=2e-3 if dtype != torch.float32 else 0, atol=1e-6)


@pytest.mark.parametrize("group", [128, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_alike_in_one_kernel_or_two(group: int, dtype: torch.dtype) -> None:
    x, residual, norm = randn(5, 300, dtype=dtype), randn(5, 300, dtype=dtype), Norm(randn(300, dtype=dtype), 0.1)
    x[2] = 0
    parts = torch.stack((x.float() - 1, torch.ones_like(x).float()))
    cases: list[tuple[torch.Tensor, Norm | None, torch.Tensor | None, bool]] = [
        (x, None, None, False), (x, norm, None, False), (x, norm, residual, False), (parts, norm, residual, False),
        (torch.cat((x, residual), 1), None, None, True),
    ]  # fmt: skip
    for rows, before, added, gated in cases:
        found, total = by_triton(quantize_rows)(rows, Rounding(group), before, added, gated)
        want, same = quantize_rows_ref(rows, Rounding(group), before, added, gated)
        torch.testing.assert_close(total, same, rtol=2e-3 if dtype != torch.float32 else 1e-5, atol=1e-3)
        torch.testing.assert_close(found.scales, want.scales, rtol=4e-3 if dtype != torch.float32 else 1e-5, atol=1e-6)
        # Norms round a little otherwise.
        assert (found.values.float() != want.values.float()).float().mean() < 0.02
        assert found.values.float().abs().amax(1).max() == 448
        padded = by_triton(quantize_rows)(rows, Rounding(group, for_scaled_mm=True), before, added, gated)[0]
        assert padded.values.shape == (8, 300) and torch.equal(padded.values[:5].float(), found.values.float())
        assert padded.scales.T.is_contiguous() and torch.equal(padded.scales[:5], found.scales)


TENSOR_CORE_LOSS = (FP8_INS + FP8_INS // 32) * 2**-13
"""What sums in e4m3 may lose of the sum of their products' sizes. An instruction adds 32 products to the sum so far and
cuts all of them 13 bits after the largest one's first; after FP8_INS products the sum is added up in float32."""


@pytest.mark.parametrize(
    ("block", "rows", "gated", "parts", "positive"),
    [
        (block, *shape, positive)
        for i, block in enumerate(BLOCKS)
        for j, shape in enumerate(
            [(17, True, 1), (41, False, 2), (300, False, 1), *([(2100, False, 1)] if GPU else [])]
        )
        for positive in (False, True)
        if GPU or ((i + j) % 2 == positive and (shape[0] < 300 or i == 1))
    ],
)
def test_scaled_gemm(block: tuple[int, int], rows: int, gated: bool, parts: int, positive: bool) -> None:
    """Against float64 of the same values and scales."""
    num_ins, dtype = (12288 if positive else 256 if parts > 1 else 300), DTYPES[-1]
    if positive and not GPU:
        num_ins = 2048
    made = make_product(rows, (num_ins, 150), block, dtype, gated, positive)
    # A product in parts may take the place of torch's, for which rows have been rounded.
    x = quantize_rows_ref(made.x, Rounding(made.weight.block_ins, for_scaled_mm=parts > 1))[0].part(slice(rows))
    wide = dequantize_ref(Fp8Matrix(x.values, x.scales, 1, x.group), torch.float64)
    bias = None if gated or parts > 1 or made.bias is None else made.bias
    meant = dequantize_ref(made.weight, torch.float64)
    exact = wide @ meant.T
    exact = exact if bias is None else exact + bias.double()
    # The interpreter's products are exact.
    lost = (TENSOR_CORE_LOSS if GPU else num_ins * 2**-24) * (wide.abs() @ meant.abs().T)
    rounded_to = torch.float32 if parts > 1 else dtype
    allowed = gated_error(exact, lost, dtype) if gated else lost + rounding_of(exact.abs() + lost, rounded_to)
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = functional.silu(gate) * up
    for form in (by_triton(scaled_gemm), scaled_gemm_ref):
        out = form(x, made.weight, dtype, bias, gated, parts)
        assert out.dtype == rounded_to
        missed = ((out.sum(0) if parts > 1 else out).double() - exact).abs()
        assert (missed <= allowed).all(), (form, (missed / allowed).max())


@pytest.mark.gpu
@pytest.mark.skipif(not (GPU and converts_e4m3(torch.device(DEVICE))), reason="needs products in e4m3")
@pytest.mark.parametrize("rows", [17, 64, 65, 255, 1000])
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("block", [(1, 0), (128, 128)])
def test_torchs_products_in_e4m3_on_the_gpu(rows: int, positive: bool, block: tuple[int, int]) -> None:
    """Sums of 12,288 positive products lose little."""
    made = make_product(rows, (12288, 512), block, torch.bfloat16, False, positive)
    x, padded = (
        quantize_rows(made.x, Rounding(block[1] or 12288, for_scaled_mm=is_padded))[0] for is_padded in (False, True)
    )
    wide = dequantize_ref(Fp8Matrix(x.values, x.scales, 1, x.group), torch.float64)
    exact = wide @ dequantize_ref(made.weight, torch.float64).T
    out = norm_linear._scaled_mm(padded, made.weight, torch.bfloat16, None)[:rows]
    same = scaled_gemm_ref(x, made.weight, torch.bfloat16)
    error, allowed = ((y.double() - exact).abs().max().item() for y in (out, same))
    assert error <= 1.5 * allowed, (error, allowed)


def quantizes(policy_: KernelPolicy, num_rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Round rows as on a GPU that multiplies in e4m3, whatever the dtype."""
    return num_rows > policy.MAX_SKINNY_ROWS


@pytest.mark.parametrize("name", ["fp8-block", "compressed-channel"])
def test_prompts_of_many_tokens_are_rounded_too(base: Path, tmp_path: Path, name: str) -> None:
    """An engine's logits against transformers' model with the same rule in its linear layers; several ranks agree."""
    stored, meant = write(base, FORMATS[name], tmp_path)
    # Enough tokens in a step that gate and up are activated where they are rounded.
    prompts = [*PROMPTS, list(range(20, 70))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelPolicy, "rounds_rows", quantizes)
        tokens, logits, _ = run_engine(stored, prompts)
    _, plain, _ = run_engine(stored, prompts)
    assert not torch.allclose(logits[0], plain[0], rtol=1e-3)
    shape = (-1, 128) if name == "fp8-block" else (1, -1)
    # In the last layer few rows are left after attention, those to sample from, which are not rounded.
    ignored = FORMATS[name].ignored + r"|layers\.1\.(mlp|self_attn\.o_proj)"

    def rounded_rows(layer: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        groups = args[0].unflatten(-1, shape)
        scales = groups.abs().amax(-1, keepdim=True) / 448
        return (((groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales).flatten(-2),)

    model = AutoModelForCausalLM.from_pretrained(meant, dtype=torch.float32).eval()
    for path, layer in model.named_modules():
        if path.endswith("_proj") and not re.search(ignored, path):
            layer.register_forward_pre_hook(rounded_rows)
    with torch.inference_mode():
        theirs = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    for mine, want in zip(logits[0], theirs, strict=True):
        assert (mine - want).abs().max() < 1e-3 * want.abs().max()
    assert all(len(token_ids) == NUM_TOKENS for token_ids in tokens)


@pytest.mark.parametrize(("num_rows", "kernel"), [(1, "GEMV"), (16, "SKINNY_GEMM"), (17, "CUBLAS")])
def test_each_number_of_rows_has_its_kernel(num_rows: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("policy", "e4m3", "rms_norm", "gates"):
        monkeypatch.setattr(f"nanovllm.kernels.{module}.uses_triton", lambda device: True)
    # Rows stay as they are on this GPU, too.
    monkeypatch.setattr(policy, "converts_e4m3", lambda device: False)
    # As if these were large: in several chunks, the last of them smaller.
    monkeypatch.setattr(norm_linear, "_CHUNK_WEIGHTS", 300 * 128)
    for gated in (False, True):
        made = make_product(num_rows, (300, 200), (1, 0), DTYPES[-1], gated)
        out, total = norm_linear.norm_linear(made.x, made.weight, made.bias, made.norm, made.residual, gated)
        check_product(out, made)
        assert FASTEST.fp8_linear(num_rows, DTYPES[-1], made.weight).name == kernel
        # The parts of a sum.
        parts = torch.stack((made.x.float() - 1, torch.ones_like(made.x).float()))
        again, same = norm_linear.norm_linear(parts, made.weight, made.bias, made.norm, made.residual, gated)
        assert torch.equal(total, same) or (total - same).abs().max() < 0.01
        assert again.shape == out.shape and (again - out).abs().max() < 0.05 * out.abs().max()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uses_triton", "converts_e4m3", "is_hopper", "_scales_blocks"):
        monkeypatch.setattr(policy, name, lambda device: True)


@pytest.mark.usefixtures("on_hopper")
def test_torchs_product_has_what_it_supports(monkeypatch: pytest.MonkeyPatch) -> None:

    def kernel(rows: int, size: tuple[int, int], block: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> str:
        weight = quantize(torch.ones(size), block[0], block[1] or size[1])
        return FASTEST.fp8_linear(rows, dtype, weight).name

    assert kernel(65, (256, 1024), (128, 128)) == kernel(65, (256, 1024), (1, 0)) == "SCALED_MM"
    # Few rows, an output with scales of its own for each block, three blocks of inputs, another dtype.
    assert kernel(64, (256, 1024), (128, 128)) == kernel(65, (256, 1024), (1, 128)) == "SCALED_GEMM"
    assert kernel(65, (256, 384), (128, 128)) == kernel(65, (256, 1024), (1, 0), torch.float16) == "SCALED_GEMM"
    weight = quantize(torch.ones(256, 1024), 128, 128)
    cases = [(128, torch.bfloat16), (129, torch.bfloat16), (256, torch.float16), (257, torch.float16)]
    assert [FASTEST.fp8_parts(rows, dtype, weight) for rows, dtype in cases] == [4, 1, 4, 1]
    monkeypatch.setattr(policy, "_scales_blocks", lambda device: False)
    assert kernel(65, (256, 1024), (128, 128)) == "SCALED_GEMM"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("block", [(1, 0), (128, 128)])
def test_parts_take_rows_that_were_rounded_for_torchs_product(block: tuple[int, int]) -> None:
    # 66 rows become 68 for torch's product.
    made = make_product(66, (512, 144), block, torch.bfloat16, gated=False, positive=True)
    assert FASTEST.fp8_linear(66, torch.bfloat16, made.weight) is policy.LinearKernel.SCALED_MM
    parts, _ = norm_linear.linear_into(made.x, made.weight, torch.zeros(66, 144, dtype=torch.bfloat16))
    rows = quantize_rows_ref(made.x, Rounding(made.weight.block_ins))[0]
    want = scaled_gemm_ref(rows, made.weight, torch.float32)
    assert parts.shape == (4, 66, 144)
    torch.testing.assert_close(parts.sum(0), want, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("dtype", "last"), [(torch.bfloat16, 129), (torch.float16, 257)])
def test_choices_change_at_the_numbers_of_rows_that_captures_know(dtype: torch.dtype, last: int) -> None:
    weight = quantize(torch.ones(256, 512), 1, 512)

    def choice(rows: int) -> tuple[Any, ...]:
        kernel, parts = FASTEST.fp8_linear(rows, dtype, weight), FASTEST.fp8_parts(rows, dtype, weight)
        if kernel is policy.LinearKernel.SKINNY_GEMM:
            return kernel, skinny_tile(rows, 512, 256, False)
        return kernel, parts, scaled_tile(rows) if kernel is policy.LinearKernel.SCALED_GEMM or parts > 1 else None

    changes = {rows for rows in range(2, 300) if choice(rows) != choice(rows - 1)}
    assert changes == {2, 9, 17, 33, 65, last} and changes < set(FASTEST.fp8_rows)


@pytest.mark.parametrize("rows", [65, 68])
def test_rows_that_torchs_product_is_padded_with_are_dropped(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_product(rows, (512, 64), (128, 128), torch.float32, gated=True)
    results = []
    for kind in (policy.LinearKernel.SCALED_GEMM, policy.LinearKernel.SCALED_MM):
        monkeypatch.setattr(KernelPolicy, "fp8_linear", lambda *_, kind=kind: kind)
        # Both multiply alike: torch has no such product everywhere, and a GPU's sums in e4m3 lose places.
        for product in ("_scaled_mm", "scaled_gemm"):
            monkeypatch.setattr(norm_linear if product == "_scaled_mm" else scaled_gemm_op, product, scaled_gemm_ref)
        results.append(norm_linear.norm_linear(made.x, made.weight, None, made.norm, made.residual, gated=True))
    for found, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("granularity", ["channel", "block"])
@pytest.mark.parametrize("rows", [20, 80])
def test_rows_are_rounded_after_the_sum_of_the_ranks(
    rows: int, granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MLP on one rank, and on one of two ranks whose other adds nothing."""
    monkeypatch.setattr(KernelPolicy, "rounds_rows", quantizes)
    config, inner = QuantizationConfig(granularity), Shard.whole(384)
    gate_up = MergedColumnParallelLinear(256, {"gate": inner, "up": inner}, quant_config=config, prefix="gate_up")
    down = RowParallelLinear(inner, 256, quant_config=config, prefix="down")
    for layer in (gate_up, down):
        assert isinstance(layer.weight, Fp8Weight)
        block = layer.weight.block_outs, layer.weight.block_ins
        made = quantize(torch.randn(layer.weight.values.shape), *block)
        layer.weight.values.data.copy_(made.values)
        layer.weight.scales.copy_(made.scales)
    x, results = torch.randn(rows, 256), []
    for communicator in (Communicator(), TwoRanks()):
        norm = AllReduceRMSNorm(256, 1e-6, communicator)
        norm.weight.data.copy_(torch.linspace(0.5, 2, 256))
        normalise = Mock(wraps=communicator.all_reduce_rms_norm)
        monkeypatch.setattr(communicator, "all_reduce_rms_norm", normalise)
        gated = not down.weight.takes_gate_up(rows, x.dtype)
        inner_rows, residual = gate_up(x.clone(), norm, gated=gated)
        results.append(torch.cat(down(inner_rows, residual)))
    # Rows are rounded where they are normalised, not after it.
    assert [isinstance(call.args[3], Rounding) for call in normalise.call_args_list] == [True]
    assert torch.equal(*results)
