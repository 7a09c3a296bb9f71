"""Every family that runs natively is transformers', token for token: alone, batched, in chunks and out of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from nanovllm import LLM, SamplingParams
from nanovllm.configs.model import MODELS
from tests.conftest import MakeCheckpoint
from tests.test_greedy import PARAMS, Reference, check, make_llm, prompts

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
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 40},
}  # fmt: skip
LENGTHS = (1, 16, 33, 150, 257)


def test_every_family_is_here() -> None:
    assert set(FAMILIES) == set(MODELS)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_transformers(name: str, make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(name.removesuffix("ForCausalLM"), seed=3, **FAMILIES[name])
    reference, batch = Reference(folder), prompts(LENGTHS, seed=5)
    with make_llm(folder, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        assert llm.model_config.architecture.name == name
        check(llm, reference, batch)
        # The same ones again, in whole blocks out of the cache.
        assert sum(check(llm, reference, batch)) > 300
    # A model that repeats one token would be right by chance.
    assert len({token for prompt in batch for token in reference.complete(tuple(prompt))}) > 20


def test_a_window_alone_is_held(make_checkpoint: MakeCheckpoint) -> None:
    """Six blocks are a window and a chunk of one sequence; a prompt has up to 17."""
    folder = make_checkpoint("Mistral", seed=3, **FAMILIES["MistralForCausalLM"])
    reference, batch = Reference(folder), prompts(LENGTHS, seed=5)
    with make_llm(folder, max_num_batched_tokens=48, max_num_seqs=4, num_kvcache_blocks=6) as llm:
        check(llm, reference, batch)
        assert llm.stats()["num_preemptions"] > 0
        # Of the longest prompt, which came last, the window alone is left.
        assert check(llm, reference, batch[-1:]) == [256]
    with make_llm(folder, num_kvcache_blocks=2) as small, pytest.raises(ValueError, match="need 42 KV slots"):
        small.generate([batch[2]], SamplingParams(max_tokens=10))


@pytest.mark.parametrize(
    ("name", "size"),
    # Projections that the checkpoint stacks; norms that span the ranks, whose heads are uneven.
    [("Phi3", 2), ("Olmo2", 2), ("Olmo3", 3)],
)
def test_ranks_say_what_one_does(name: str, size: int, make_checkpoint: MakeCheckpoint) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "pad_token_id": 0, "head_dim": 16}
    folder, batch = make_checkpoint(name, **(FAMILIES[f"{name}ForCausalLM"] | sizes)), prompts(LENGTHS)
    with make_llm(folder) as one, make_llm(folder, device="cpu", tensor_parallel_size=size) as several:
        expected, outputs = (llm.generate(batch, PARAMS, use_tqdm=False) for llm in (one, several))
        assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def test_stacked_projections_of_another_size_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("Phi3", pad_token_id=0)
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file(weights | {name: weights[name][:-1].clone()}, file)
    with pytest.raises(ValueError, match=rf"tensor '{name}' has shape \[127, 64\]; the config asks for \[128, 64\]"):
        make_llm(folder)


def test_a_trunk_without_its_head_embeds(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Embedding models are published as the decoder alone, whose tensors have no `model.` before their names."""
    whole = make_checkpoint("Qwen3", tie_word_embeddings=True)
    AutoModel.from_pretrained(whole).save_pretrained(tmp_path)
    assert "layers.0.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    config = (whole / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    embeddings = []
    for folder in (whole, tmp_path):
        with LLM(folder, device="cpu", max_model_len=128, kvcache_block_size=16, num_kvcache_blocks=40) as llm:
            embeddings.append(llm.embed([[1, 2, 3], [4, 5]], use_tqdm=False))
    assert torch.equal(*embeddings)
