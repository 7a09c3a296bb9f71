"""The tokens are transformers', in float32 on the CPU: every family, and one model however the engine gets there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention import sdpa
from nanovllm.configs.model import MODELS, TRANSFORMERS
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling.sampler import Sampled
from tests.conftest import MakeCheckpoint
from tests.reference import check, check_position, make_llm, prompts, reference_logits, reference_model, set_depth
from tests.test_kernels import check_error
from tests.tools.sweep_models import run

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rope_scaling": LLAMA3, "head_dim": 16, "tie_word_embeddings": True},
    "MistralForCausalLM": {"sliding_window": 24, "head_dim": 32},
    "MinistralForCausalLM": {
        "head_dim": 16, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]
    },
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "Phi3ForCausalLM": {"sliding_window": 100, "pad_token_id": 0, "num_attention_heads": 4},
    "SeedOssForCausalLM": {"attention_bias": True, "head_dim": 48},
    "CwmForCausalLM": {
        "sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"], "rope_scaling": None,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16,
    },
    "Olmo2ForCausalLM": {"head_dim": 32, "rms_norm_eps": 0.05, "pad_token_id": 0, "eos_token_id": 2},
    "Olmo3ForCausalLM": {
        "head_dim": 16, "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "Qwen3MoeForCausalLM": {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "num_experts": 5,
        "num_experts_per_tok": 1, "norm_topk_prob": False, "moe_intermediate_size": 48, "head_dim": 16,
        "use_sliding_window": True, "sliding_window": 36, "max_window_layers": 2,
    },
    "GptOssForCausalLM": {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40, "rope_parameters": None,
    },
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 40},
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # An epsilon so large changes the tokens wherever another is taken.
    "a head a group": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 0.05}),
    "one group": ("Qwen3", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}),
    "a tied head": ("Qwen2", {"tie_word_embeddings": True}),
    # Some versions of transformers take the factor from the ratio of the two lengths: here they agree.
    "YaRN": ("Qwen3", {
        "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    }),
}  # fmt: skip
BY_TRANSFORMERS = (
    "apertus", "arcee", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2",
    "gemma3_text", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite", "nemotron", "opt", "phi", "phimoe", "qwen3_vl",
)  # fmt: skip
"""Model types that transformers' code alone runs."""
UNLIKE = {"deepseek_v3", "gemma3_text", "gpt2", "qwen3_vl"}
"""The least alike of them."""
LENGTHS = (1, 16, 33, 150, 257)
BORDERS = (1, 15, 16, 17, 31, 33, 64, 255, 256, 257)
CHUNKED = {"max_num_batched_tokens": 48, "max_num_seqs": 4}


def checkpoint_of(make_checkpoint: MakeCheckpoint, name: str, **changes: Any) -> Path:
    family, given = VARIANTS[name] if name in VARIANTS else (name.removesuffix("ForCausalLM"), FAMILIES[name])
    return make_checkpoint(family, seed=3, **(given | changes))


def check_logprobs_and_states(llm: LLM, folder: Path, batch: list[list[int]]) -> None:
    """Compare log-probabilities of prompts and answers, and embeddings, with transformers'."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    for output, vector in zip(
        llm.generate(batch, params, use_tqdm=False), llm.embed(batch, use_tqdm=False), strict=True
    ):
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        found = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())][1:]
        logits = reference_logits(folder, text)
        for token, at, row in zip(text[1:], found, logits[:-1].log_softmax(1), strict=True):
            check_position(at, token, row, 0)
        with torch.inference_mode():
            state = reference_model(folder).model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0, -1]
        torch.testing.assert_close(vector, state / state.norm(), rtol=0, atol=1e-5)


def test_every_family_is_here() -> None:
    """But those with a state, which are in `test_hybrid.py`."""
    assert set(FAMILIES) == {name for name, row in MODELS.items() if row.mixer is None}


@pytest.mark.parametrize(("depth", "name"), [(i % 2, name) for i, name in enumerate([*FAMILIES, *VARIANTS])])
def test_families_in_chunks_and_out_of_the_cache(name: str, depth: int, make_checkpoint: MakeCheckpoint) -> None:
    folder, batch = checkpoint_of(make_checkpoint, name), prompts(LENGTHS, seed=5)
    with make_llm(folder, **CHUNKED) as llm:
        assert llm.model_config.architecture.name == name or name in VARIANTS
        set_depth(llm, depth)
        check(llm, folder, batch)
        # The same ones again, in whole blocks out of the cache.
        assert sum(check(llm, folder, batch)) > 300
        check_logprobs_and_states(llm, folder, batch[2:4])


@pytest.mark.parametrize("name", FAMILIES)
def test_families_by_transformers_code(name: str, make_checkpoint: MakeCheckpoint) -> None:
    folder, batch = checkpoint_of(make_checkpoint, name), prompts(LENGTHS, seed=5)[2:4]
    with make_llm(folder, model_impl="transformers", **CHUNKED) as llm:
        assert llm.model_config.architecture is TRANSFORMERS
        check(llm, folder, batch)
        check_logprobs_and_states(llm, folder, batch)


@pytest.mark.parametrize(
    "model_type", [name if name in UNLIKE else pytest.param(name, marks=pytest.mark.compat) for name in BY_TRANSFORMERS]
)
def test_other_models_by_transformers_code(model_type: str) -> None:
    result = run(model_type)
    assert result.verdict == "equal", result
    # Some tied random models say little else than their prompt's last tokens.
    assert result.num_distinct > 5 and result.num_preemptions and result.num_cached_tokens > 100, result


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)


def run_whole(folder: Path, block_size: int, depth: int) -> None:
    with make_llm(folder, kvcache_block_size=block_size, num_kvcache_blocks=6400 // block_size) as llm:
        set_depth(llm, depth)
        for prompt in prompts(BORDERS):
            assert check(llm, folder, [prompt]) == [0]
        # The same ones again, all in one batch, out of the cache as far as whole blocks go.
        cached = check(llm, folder, prompts(BORDERS))
        assert cached == [min(n // block_size * block_size, n - 1) for n in BORDERS]
        assert llm.reset_prefix_cache() and not any(check(llm, folder, prompts(BORDERS)))


def run_preempted(folder: Path, block_size: int, depth: int) -> None:
    batch = prompts((31, 33, 64, 100, 15, 16, 17, 2, 1, 31, 33, 64), seed=1)
    if block_size == 256:
        batch = prompts((250, 240, 255, 300), seed=1)
    sizes = {"kvcache_block_size": block_size, "num_kvcache_blocks": max(256 // block_size, 3)}
    with make_llm(folder, max_num_seqs=8, **sizes) as llm:
        set_depth(llm, depth)
        check(llm, folder, batch)
        assert llm.stats()["num_preemptions"] > 0


# Each way meets both depths, and a small block and a large one.
@pytest.mark.parametrize(
    ("way", "block_size", "depth"),
    [(run_whole, 16, 0), (run_whole, 32, 1), (run_preempted, 16, 1), (run_preempted, 256, 0)],
)
def test_one_model_however_it_is_scheduled(
    way: Any, block_size: int, depth: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Most chunks are then of more queries than are computed at once.
    monkeypatch.setattr(sdpa, "_MAX_QUERIES", 8)
    way(folder, block_size, depth)


@pytest.mark.parametrize(
    ("name", "size", "is_parallel"),
    [
        # Projections that the checkpoint stacks; norms that span the ranks, whose heads are uneven.
        pytest.param("Phi3", 2, False, marks=pytest.mark.compat), ("Olmo3", 3, False),
        # Whole experts for each rank, and a part of all.
        ("Qwen3Moe", 2, True), pytest.param("Mixtral", 2, False, marks=pytest.mark.compat),
    ],
)  # fmt: skip
def test_families_on_several_ranks(name: str, size: int, is_parallel: bool, make_checkpoint: MakeCheckpoint) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "head_dim": 16, "pad_token_id": 0}
    folder, batch = checkpoint_of(make_checkpoint, f"{name}ForCausalLM", **sizes), prompts((16, 33, 90), seed=5)
    settings = {"device": "cpu", "tensor_parallel_size": size, "enable_expert_parallel": is_parallel}
    with make_llm(folder, **CHUNKED, **settings) as llm:
        runner: Any = llm.llm_engine._runner
        experts = [shard.experts for shard in runner.call(ModelRunner.__getattribute__, "shard")]
        if llm.model_config.experts is not None:
            total, held = experts[0].experts.total, [part.experts.size for part in experts]
            assert sum(held) == total if is_parallel else held == [total] * size
        assert sum(check(llm, folder, batch)) == 0
        assert sum(check(llm, folder, batch)) > 100


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", torch.bfloat16), ("qwen2", torch.float16), ("Olmo2", torch.bfloat16), ("Olmo2", torch.float16)],
)
def test_logits_in_16_bits(family: str, dtype: torch.dtype, make_checkpoint: MakeCheckpoint) -> None:
    # An epsilon so large changes the logits wherever another is taken.
    folder, batch, num_tokens = make_checkpoint(family, rms_norm_eps=0.05, pad_token_id=0), prompts((1, 17, 40)), 6
    logits: list[torch.Tensor] = []
    name: Any = str(dtype).removeprefix("torch.")
    with LLM(folder, device="cpu", dtype=name, max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=20) as llm:
        runner: Any = llm.llm_engine._runner
        held = {param.dtype for param in runner.model.parameters()}
        assert held == {spec.dtype for spec in runner.kv_cache.tensors} == {dtype}
        sample = runner.sampler.sample

        def recorder(x: torch.Tensor, *args: Any) -> Sampled:
            logits.append(x.clone())
            return sample(x, *args)

        runner.sampler.sample = recorder
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate(batch, params, use_tqdm=False, schedule="arrival")
    # A step each token, all three in each: [sequence, token, vocab_size].
    got = torch.stack(logits, 1)
    # Its table of rotary frequencies stays in float32.
    model = reference_model(folder)
    for param in model.parameters():
        param.data = param.data.to(dtype)
    texts = [torch.tensor([prompt + output["token_ids"][:-1]]) for prompt, output in zip(batch, outputs, strict=True)]
    with torch.inference_mode():
        same = torch.stack([model(text).logits[0, -num_tokens:] for text in texts])
        model.float()
        exact = torch.stack([model(text).logits[0, -num_tokens:] for text in texts])
    check_error(got, same, exact)
    assert [output["token_ids"] for output in outputs] == got.argmax(-1).tolist()
