"""gpt-oss: bf16 experts as transformers saves them, and MXFP4 ones as they are published, against transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.cli.bench import WeightCounts, shape_folder
from nanovllm.configs.model import ModelConfig
from nanovllm.kernels.four_bits import quantize_four_bits
from nanovllm.kernels.moe import route as route_op
from nanovllm.kernels.moe.route import route_ref
from nanovllm.models import count_parameters, make_model
from nanovllm.parallel.communicator import Communicator
from tests.conftest import MakeCheckpoint
from tests.test_four_bits import packed_mxfp4
from tests.test_fp8 import GREEDY, PROMPTS, SETTINGS, Format, Tensors, check_logits, tokens_of, write
from tests.test_fp8_experts import make_routing
from tests.test_kernels import DEVICE, DTYPES, GPU, by_triton, randn
from tests.test_moe import check_experts

# A rank has two groups of inputs of `down`; windows are shorter than prompts, and gates are beyond the limit.
SHAPE: dict[str, Any] = {
    "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
    "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8, "num_hidden_layers": 3,
    "max_position_embeddings": 256, "rope_theta": 150000.0, "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64, "rope_theta": 150000.0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def wide(make_checkpoint: MakeCheckpoint) -> Path:
    folder = make_checkpoint("gptOss", **SHAPE)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    for name, tensor in tensors.items():
        if "sinks" in name or "experts" in name:
            # transformers' own values of these are all alike, or missing.
            tensors[name] = torch.randn_like(tensor) * (1.0 if "sinks" in name else 0.3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks, [experts, outs, groups, 16], scales, and what both mean, of [experts, ins, outs]."""
    made, meant = packed_mxfp4(weight.transpose(1, 2))
    blocks = made["weight_packed"].unflatten(-1, (-1, 16))
    return {"_blocks": blocks, "_scales": made["weight_scale"]}, meant.transpose(1, 2)


KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
PUBLISHED = Format(
    {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}, mxfp4, layers=r"experts\.(gate_up|down)_proj$"
)


@pytest.fixture(scope="module", params=["bf16", "mxfp4"])
def folders(request: pytest.FixtureRequest, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return (wide, wide) if request.param == "bf16" else write(wide, PUBLISHED, tmp_path_factory.mktemp("mxfp4"))


def test_logits_are_transformers(folders: tuple[Path, Path]) -> None:
    stored, meant = folders
    assert ModelConfig.from_folder(str(stored), model_impl="auto").hf is None
    check_logits(stored, meant, rtol=1e-5)


@pytest.mark.parametrize("is_parallel", [False, True])
def test_ranks_and_updates(folders: tuple[Path, Path], is_parallel: bool) -> None:
    want, tensors = tokens_of(folders[0]), load_file(folders[0] / "model.safetensors")
    with LLM(folders[0], tensor_parallel_size=2, enable_expert_parallel=is_parallel, **SETTINGS) as llm:
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == want
        llm.load_weights(tensors, strict=True)
        assert [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == want


def test_scales_that_are_no_numbers_and_dummy_weights(wide: Path, tmp_path: Path) -> None:
    stored, _ = write(wide, PUBLISHED, tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    with LLM(stored, load_format="dummy", **SETTINGS) as llm:
        assert llm.generate([[1]], GREEDY, use_tqdm=False)
    with LLM(stored, **SETTINGS) as llm:
        bad = load_file(stored / "model.safetensors")[name].fill_(255)
        with pytest.raises(ValueError, match=f"scales '{name}' must be numbers"):
            llm.load_weights({name: bad})
        # The bits of 1, which would be no number in e4m3.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm.load_weights({name: bad.fill_(127)})


@pytest.mark.parametrize("rows", [1, 2, 9, 17] if GPU else [1, 2, 17])
@pytest.mark.parametrize("ins", [80, 352] if GPU else [80])
@pytest.mark.parametrize("kind", [None, "mxfp4", "nvfp4", "int4"])
def test_experts(rows: int, ins: int, kind: Any) -> None:
    """Experts of one rank, with biases and clamped activations; of weights in four bits, and of others."""
    dtype, size = DTYPES[-1], 96
    # All experts are of this rank, or some.
    first, total = (0, 3) if ins % 32 == 0 else (1, 5)
    x, routing = randn(rows, ins, dtype=dtype), make_routing(rows, total, 3)
    biases = randn(3, 2 * size, dtype=dtype), randn(3, ins, dtype=dtype)

    def stack(outs: int, ins: int) -> Any:
        wide = torch.stack([randn(outs, ins) * ins**-0.5 * 4 for _ in range(3)])
        if kind is None:
            return wide.to(dtype)
        made = [quantize_four_bits(weight, {"mxfp4": 32, "nvfp4": 16}.get(kind, 64), kind, dtype) for weight in wide]
        factors = torch.stack([one.factors for one in made if one.factors is not None]) if kind == "nvfp4" else None
        values, scales = (torch.stack(tensors) for tensors in list(zip(*made, strict=True))[:2])
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=DEVICE) if kind == "int4" else None
        return made[0]._replace(values=values, scales=scales, zeros=zeros, factors=factors)

    check_experts(x, routing, stack(2 * size, ins), stack(ins, size), first, activation="clamped", biases=biases)


@pytest.mark.parametrize("rows", [1, 17])
def test_routing_with_biases(rows: int) -> None:
    x, weight, bias = randn(rows, 80), randn(32, 80) * 0.1, randn(32)
    routing = by_triton(route_op.route)(x, weight, 4, True, bias=bias)[0]
    want = route_ref(x, weight, 4, True, bias=bias)[0]
    assert torch.equal(routing.experts, want.experts) and torch.allclose(routing.weights, want.weights, atol=1e-5)


@pytest.mark.parametrize(("shape", "billions", "gigabytes"), [("20b", 20.9, 12.6), ("120b", 116.8, 64.1)])
def test_shapes_of_the_benchmark(shape: str, billions: float, gigabytes: float) -> None:
    config = ModelConfig.from_folder(shape_folder(f"gpt-oss-{shape}"))
    weights = WeightCounts.of(config)
    assert round(count_parameters(config) / 1e9, 1) == billions
    # All experts are read by very many rows; the embedding is not.
    assert round(weights.bytes_read_by(10**6) / 1e9, 1) == gigabytes
    with torch.device("meta"):
        # Kernels for nine rows are compiled at the start, too.
        assert make_model(config, Communicator()).kernel_rows >= {1, 2, 9, 17}
