"""Mixtures of experts: kernels against float64, and engines against transformers, however the experts are divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.cli.bench import WeightCounts, shape_folder
from nanovllm.configs.model import ExpertsConfig, ModelConfig
from nanovllm.kernels.moe import fused_experts as experts_op
from nanovllm.kernels.moe import grouped_gemm
from nanovllm.kernels.moe import route as route_op
from nanovllm.kernels.moe.fused_experts import fused_experts_ref
from nanovllm.kernels.moe.grouped_gemm import choose_tile
from nanovllm.kernels.moe.route import Routing, SharedExpert, SigmoidScores, route_ref
from nanovllm.kernels.policy import FASTEST
from nanovllm.kernels.rms_norm import Norm
from nanovllm.models import count_parameters
from nanovllm.weights.slices import WeightSlice
from tests.conftest import MakeCheckpoint
from tests.reference import complete, make_llm, prompts
from tests.test_kernels import DEVICE, DTYPES, GPU, by_triton, check_error, over_dtypes, randn
from tests.test_tokens import FAMILIES

# (Experts of a token, all experts); in features, and an expert's features: no multiples of a kernel's tile.
MIXTURES = [(2, 8), (1, 5), *([(8, 128)] if GPU else [])]
SIZES = (2048, 768) if GPU else (80, 48)
ROWS = (1, 2, *((16, 17, 100, 200, 500, 1500, 4096) if GPU else (17, 60)))


def make_experts(num_experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, size = SIZES
    gate_up = randn(num_experts, 2 * size, hidden, dtype=dtype) * hidden**-0.5
    return gate_up, randn(num_experts, hidden, size, dtype=dtype) * size**-0.5


def widened(value: Any) -> Any:
    """Weights, biases or a shared expert in float64; quantised matrices become it when they are multiplied."""
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, SharedExpert):
        return SharedExpert(*map(widened, vars(value).values()))
    return tuple(map(widened, value)) if type(value) is tuple else value


def check_experts(
    x: torch.Tensor, routing: Routing, up: Any, down: Any, first: int = 0,
    *, out: torch.Tensor | None = None, **options: Any,
) -> None:  # fmt: skip
    """Compare `fused_experts`, or `out`, with the reference."""
    if out is None:
        out = by_triton(experts_op.fused_experts)(x, routing, up, down, first, **options)
        out = out.float().sum(0) if out.dim() == 3 else out
    same = fused_experts_ref(x, routing, up, down, first, **options)
    options = {name: widened(option) for name, option in options.items()}
    exact = fused_experts_ref(x.double(), routing, widened(up), widened(down), first, **options)
    check_error(out, same, exact.float())


@pytest.mark.parametrize(("rows", "mixture", "dtype"), over_dtypes(ROWS, MIXTURES))
def test_kernels(rows: int, mixture: tuple[int, int], dtype: torch.dtype) -> None:
    top_k, num_experts = mixture
    gate_up, down = make_experts(num_experts, dtype)
    weight, x = randn(num_experts, SIZES[0], dtype=dtype) * SIZES[0] ** -0.5, randn(rows, SIZES[0], dtype=dtype)
    routing, _, _ = by_triton(route_op.route)(x, weight, top_k, True)
    check_experts(x, routing, gate_up, down, 0)
    # A rank's experts, with others' before and after.
    check_experts(x, routing, gate_up[1:4].contiguous(), down[1:4].contiguous(), 1)
    # Of some experts, without gates.
    check_experts(x, routing, gate_up[1:, : SIZES[1]].contiguous(), down[1:].contiguous(), 1, activation="relu2")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_a_shared_expert_is_one_more_of_one_token(dtype: torch.dtype, has_gate: bool, first: int) -> None:
    gate_up, down = (weight[first:] for weight in make_experts(6, dtype))
    x, gate = randn(1, SIZES[0], dtype=dtype), randn(1, SIZES[0], dtype=dtype) * SIZES[0] ** -0.5
    routing = Routing(torch.tensor([[4, 0, 2]], device=DEVICE).int(), torch.rand(1, 3, device=DEVICE), 6)
    shared = SharedExpert(gate_up[1], down[1], gate if has_gate else None)
    check_experts(x, routing, gate_up, down, first, shared=shared)
    with_it, without = (fused_experts_ref(x, routing, gate_up, down, first, shared=one) for one in (shared, None))
    assert (with_it - without).norm() > 0.1


@pytest.mark.parametrize("rows", [9, 17])
def test_all_rows_of_one_expert_and_experts_of_one_row(rows: int) -> None:
    dtype = DTYPES[-1]
    gate_up, down = make_experts(18, dtype)
    x, weights = randn(rows, SIZES[0], dtype=dtype), torch.rand(rows, 1, device=DEVICE)
    for chosen in (torch.full((rows, 1), 17), torch.arange(rows).flip(0).unsqueeze(1)):
        check_experts(x, Routing(chosen.int().to(DEVICE), weights, 18), gate_up, down, 0)


def test_a_router_normalises_what_it_takes() -> None:
    x, residual, weight = (randn(n, 80) for n in (1, 1, 24))
    norm = Norm(randn(80), 1e-6)
    got = by_triton(route_op.route)(x, weight, 4, True, norm, residual)
    want = route_ref(x, weight, 4, True, norm, residual)
    assert torch.equal(got[0].experts, want[0].experts)
    torch.testing.assert_close((got[0].weights, *got[1:]), (want[0].weights, *want[1:]))


def test_chosen_experts_are_distinct_where_all_logits_are_negative() -> None:
    weight, x = torch.arange(1.0, 25, device=DEVICE)[:, None].expand(24, 80).contiguous(), randn(3, 80).abs()
    routing, _, _ = by_triton(route_op.route)(-x, weight, 4, True)
    assert routing.experts.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("rows", [1, 19, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("sigmoid", [None, 0.25, 0.0])
def test_route(rows: int, dtype: torch.dtype, renormalize: bool, sigmoid: float | None) -> None:
    # Small whole numbers, whose logits are exact, and often equal.
    weight, x = (torch.randint(-1, 2, (n, 80), device=DEVICE).to(dtype) / 8 for n in (24, rows))
    bias = None if not sigmoid else torch.linspace(0, 1, 24, device=DEVICE).flip(0)
    scores = None if sigmoid is None else SigmoidScores(bias, sigmoid, 1.5)
    forms = by_triton(route_op.route), route_ref
    got, want = (route(x, weight, 4, renormalize, sigmoid=scores)[0] for route in forms)
    assert torch.equal(got.experts, want.experts)
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-5, atol=1e-6)
    logits = (x.double() @ weight.double().T).cpu()
    if scores is not None:
        shares = logits.sigmoid()
        best = (shares if bias is None else shares + bias.cpu()).sort(dim=1, descending=True, stable=True)[1][:, :4]
        assert torch.equal(got.experts.cpu(), best.int())
        chosen = shares.gather(1, best)
        expected = 1.5 * (chosen / (chosen.sum(1, keepdim=True) + scores.eps) if renormalize else chosen)
        torch.testing.assert_close(got.weights.cpu(), expected.float(), rtol=1e-3, atol=0)
        return
    for row, chosen, weights in zip(logits, got.experts.tolist(), got.weights.tolist(), strict=True):
        assert chosen == [expert for _, expert in sorted(zip((-row).tolist(), range(24), strict=True))[:4]]
        total = row[chosen].exp().sum() if renormalize else row.exp().sum()
        assert weights == pytest.approx((row[chosen].exp() / total).tolist(), rel=1e-3)


@pytest.mark.parametrize("rows", [1, 19])
def test_exact_logits(rows: int) -> None:
    """Sums in float32 of what is stored in 16 bits."""
    weight, x = (randn(n, 80, dtype=DTYPES[-1]) * 0.3 for n in (24, rows))
    scores = SigmoidScores(None, 0.0, 1.0, is_exact=True)
    for form in (by_triton(route_op.route), route_ref):
        got = form(x, weight, 4, False, sigmoid=scores)[0]
        best, experts = (x.double() @ weight.double().T).sigmoid().sort(dim=1, descending=True)
        assert torch.equal(got.experts.long(), experts[:, :4])
        torch.testing.assert_close(got.weights, best[:, :4].float(), rtol=1e-5, atol=0)


def test_slots_are_sorted_by_expert_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # More chunks than are added up at a time, and the last one not full.
    monkeypatch.setattr(grouped_gemm, "_CHUNK", 16)
    chosen = torch.randint(0, 20, (90, 3), dtype=torch.int32, device=DEVICE)
    for first, count in ((0, 20), (4, 9), (17, 3)):
        got = grouped_gemm.sort_slots(Routing(chosen, chosen.float(), 20), first, count)
        flat = chosen.flatten().cpu()
        want = [(flat == expert).nonzero().flatten().tolist() for expert in range(first, first + count)]
        assert got.starts.tolist() == [0, *np.cumsum([len(slots) for slots in want])]
        assert got.slots[: got.starts[-1]].tolist() == [slot for slots in want for slot in slots]


def test_rows_of_nan_disturb_no_other() -> None:
    gate_up, down = make_experts(5, torch.float32)
    x, weight = randn(19, SIZES[0]), randn(5, SIZES[0])
    x[3] = float("nan")
    chosen = by_triton(route_op.route)(x, weight, 2, True)[0].experts
    assert chosen.min() >= 0 and chosen.max() < 5
    # All of such a row's choices are one expert, which no other row has here.
    chosen = torch.tensor([[0, 1]] * 19, dtype=torch.int32, device=DEVICE)
    chosen[3] = 4
    for rows in (8, 19):
        routing = Routing(chosen[:rows], torch.full((rows, 2), 0.5, device=DEVICE), 5)
        out = by_triton(experts_op.fused_experts)(x[:rows], routing, gate_up, down).sum(0)
        want = fused_experts_ref(x[:rows], routing, gate_up, down)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert out.isfinite().all(1).sum() == rows - 1


@pytest.mark.parametrize("on_hopper", [False, True])
def test_kernels_change_where_they_say(on_hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_gemm, "is_hopper", lambda device: on_hopper)
    assert FASTEST.expert_rows(128, 8) == (1, 2, 17, 129, 385, 1025, 8193)
    changes: dict[tuple[torch.dtype, bool], set[int]] = {
        (torch.float16, False): {129, 385, 1025},
        (torch.float32, False): {129, 385},
        (torch.float8_e4m3fn, False): {129, 385, 8193} if on_hopper else {129, 385, 1025},
        (torch.float8_e4m3fn, True): {129, 385, 1025},
    }
    for (dtype, gated), numbers in changes.items():
        x = torch.empty(1, 8, dtype=dtype)

        def tile(rows: int, x: torch.Tensor = x, gated: bool = gated) -> Any:
            chosen = torch.empty(rows, 8, dtype=torch.int32, device="meta")
            return choose_tile(x, x, chosen.numel() / 128, gated, has_blocks=True)

        assert {number for number in range(17, 9000) if tile(number) != tile(number - 1)} == numbers


def folder_of(make_checkpoint: MakeCheckpoint, name: str, **changes: Any) -> Path:
    return make_checkpoint(name.removesuffix("ForCausalLM"), **(FAMILIES[name] | changes))


@pytest.mark.skipif(GPU, reason="has the interpreter run the kernels on the CPU's tensors")
def test_an_engine_on_the_kernels(make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of one row, of few and of many, and parts of sums on their way to the next norm."""
    for op in (route_op, experts_op):
        monkeypatch.setattr(op, "uses_triton", lambda device: True)
    folder = folder_of(make_checkpoint, "Qwen3MoeForCausalLM", num_experts_per_tok=3)
    batch = prompts((1, 30), seed=6)
    with make_llm(folder, device="cpu") as llm:
        for group in (batch[:1], batch):
            outputs = llm.generate(group, SamplingParams(0, max_tokens=4, ignore_eos=True), use_tqdm=False)
            for prompt, output in zip(group, outputs, strict=True):
                assert output["token_ids"] == complete(folder, tuple(prompt))[:4]


def test_an_expert_that_is_missing_is_named_before_weights_are_read(
    make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(make_checkpoint, "MixtralForCausalLM")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(weights, folder / "model.safetensors")
    monkeypatch.setattr(WeightSlice, "store", None)
    with pytest.raises(ValueError, match=r"missing \['model.layers.1.mlp.experts.3.down_proj.weight'\], left over"):
        make_llm(folder)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "tensor_parallel_size=2 is too large for moe_intermediate_size=16"),
    ({"num_local_experts": 1, "num_experts_per_tok": 1}, {"enable_expert_parallel": True}, "over the model's 1 exp"),
]


@pytest.mark.parametrize(("changes", "settings", "message"), BAD)
def test_what_cannot_be_divided_is_refused(
    make_checkpoint: MakeCheckpoint, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    folder = folder_of(make_checkpoint, "MixtralForCausalLM", intermediate_size=16, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        make_llm(folder, device="cpu", model_impl="native", tensor_parallel_size=2, **settings)


def test_the_published_shape() -> None:
    config = ModelConfig.from_folder(shape_folder("30B-A3B"))
    assert config.experts == ExpertsConfig(num_experts=128, top_k=8, intermediate_size=768, renormalize=True)
    assert all(layer.has_experts for layer in config.layers) and count_parameters(config) == 30_532_122_624
    weights = WeightCounts.of(config)
    # The embedding alone of its 3.3 billion active ones is looked up.
    assert 2 * (weights.of_row + weights.head) == weights.bytes_read_by(1) == 2 * 3_041_867_776
    assert weights.bytes_read_by(2) == pytest.approx(weights.bytes_read_by(1) + 15 * weights.expert)
    assert weights.bytes_read_by(10**4) == pytest.approx(2 * (weights.dense + weights.head + 128 * weights.expert))


def test_a_model_without_experts_has_none_to_divide(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel=True: the model has no mixtures of experts"):
        LLM(checkpoint, device="cpu", enable_expert_parallel=True)


GPU_SHAPE: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 512, "moe_intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 4,
    "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 128, "norm_topk_prob": True,
    "initializer_range": 0.05,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("float32", "fp8"), ("bfloat16", None), ("bfloat16", "fp8")]
)
def test_graphs_and_eager_steps_give_the_same_tokens(
    make_checkpoint: MakeCheckpoint, dtype: str, quantization: str | None
) -> None:
    folder = make_checkpoint("Qwen3Moe", **GPU_SHAPE)
    batches = [prompts((40,), 1), prompts((5, 300, 17, 1, 64, 9), 2), prompts((1, 3, 40) * 40, 3)]
    params, tokens = SamplingParams(0, max_tokens=24, ignore_eos=True), []
    for eager in (False, True):
        settings = {"max_num_batched_tokens": 1024, "num_kvcache_blocks": 2000, "quantization": quantization}
        with make_llm(folder, device="cuda", dtype=dtype, enforce_eager=eager, **settings) as llm:
            # Graphs are captured by the second step of a size, and then replayed.
            for _ in range(2):
                outputs = [llm.generate(batch, params, use_tqdm=False) for batch in batches]
        tokens.append([output["token_ids"] for group in outputs for output in group])
    assert tokens[0] == tokens[1]
    if dtype == "float32" and quantization is None:
        want = [complete(folder, tuple(prompt)) for batch in batches[:2] for prompt in batch]
        assert tokens[0][: len(want)] == want
