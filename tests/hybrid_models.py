"""Small random models of each family with states, and what transformers computes with them.

Shapes differ in whatever can go wrong. Decays are near 1, so that a state remembers: transformers' initial ones forget
within a token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB = 320
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MOE = _EXPERTS | {"shared_expert_intermediate_size": 48}
_L, _F = "linear_attention", "full_attention"
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
_MROPE = _ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_LFM2: dict[str, Any] = {key: value for key, value in _BASE.items() if not key.startswith("linear")} | {
    "norm_eps": 0.01, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "conv_L_cache": 3,
}  # fmt: skip
_MAMBA: dict[str, Any] = {key: value for key, value in _BASE.items() if key != "head_dim"} | {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_chunk_size": 32, "rms_norm_eps": 0.01,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 6.0, "residual_multiplier": 0.25, "attention_multiplier": 0.125, "logits_scaling": 3.0,
    "shared_intermediate_size": 80, "intermediate_size": 32,
}  # fmt: skip
_NEMOTRON: dict[str, Any] = {key: value for key, value in _BASE.items() if not key.startswith("linear")} | {
    "mamba_num_heads": 4, "mamba_head_dim": 80, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32,
    "layer_norm_epsilon": 0.01, "time_step_min": 1e-8,
}  # fmt: skip
_FALCON: dict[str, Any] = {
    "mamba_d_ssm": 128, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8, "mlp_multipliers": [0.9, 0.5], "ssm_multipliers": [1.4, 0.75, 1.25, 0.5, 0.9],
}  # fmt: skip
_NEMOTRON_MOE: dict[str, Any] = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "routed_scaling_factor": 2.5,
    "moe_shared_expert_intermediate_size": 80,
}  # fmt: skip
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "next": ("Qwen3Next", _BASE | _MOE | {
        "num_hidden_layers": 4, "layer_types": [_L, _L, _L, _F], "rope_parameters": _ROPE,
    }),
    # An MLP among mixtures; keys and values of unequal sizes; one key head for three; a filter of 3; linear last.
    "next-odd": ("Qwen3Next", _BASE | _MOE | {
        "num_hidden_layers": 5, "layer_types": [_L, _F, _L, _L, _L], "mlp_only_layers": [2], "linear_key_head_dim": 32,
        "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3, "norm_topk_prob": False,
        "num_experts_per_tok": 3, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    }),
    "dense": ("Qwen3_5Text", _BASE | {
        "num_hidden_layers": 4, "layer_types": [_L, _L, _L, _F], "rope_parameters": _MROPE,
    }),
    # One value head for each key head; tied; attention first; whole heads rotated; a filter of 2.
    "dense-odd": ("Qwen3_5Text", _BASE | {
        "num_hidden_layers": 6, "layer_types": [_F, _L, _F, _L, _L, _F], "tie_word_embeddings": True,
        "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 2, "num_attention_heads": 6, "num_key_value_heads": 1, "rms_norm_eps": 0.05,
        "rope_parameters": _MROPE | {"partial_rotary_factor": 1.0, "mrope_section": [6, 5, 5]},
    }),
    "moe": ("Qwen3_5MoeText", _BASE | _MOE | {
        "num_hidden_layers": 3, "layer_types": [_L, _F, _L], "linear_num_value_heads": 8, "num_experts_per_tok": 1,
        "shared_expert_intermediate_size": 16, "head_dim": 64, "rope_parameters": _MROPE,
    }),
    "lfm2": ("Lfm2", _LFM2 | {
        "num_hidden_layers": 4, "layer_types": ["conv", "conv", _F, "conv"], "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.4, "tie_word_embeddings": True,
    }),
    "lfm2-moe": ("Lfm2Moe", _LFM2 | _EXPERTS | {
        "num_hidden_layers": 4, "layer_types": ["conv", _F, "conv", _F], "num_dense_layers": 1, "conv_L_cache": 4,
        "routed_scaling_factor": 1.5, "num_experts_per_tok": 3,
    }),
    "bamba": ("Bamba", _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1], "num_attention_heads": 2}),
    # Without experts; a group for each head, whose size is no power of two.
    "granite": ("GraniteMoeHybrid", _MAMBA | _GRANITE | {
        "num_hidden_layers": 4, "layer_types": [_L, _L, _F, _L], "num_local_experts": 0, "mamba_d_head": 48,
        "mamba_n_heads": 4, "mamba_n_groups": 4, "mamba_conv_bias": False, "hidden_size": 96,
        "num_attention_heads": 3, "num_key_value_heads": 1, "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    }),
    "granite-moe": ("GraniteMoeHybrid", _MAMBA | _GRANITE | {
        "num_hidden_layers": 3, "layer_types": [_L, _F, _L], "num_local_experts": 6, "num_experts_per_tok": 3,
        "mamba_n_groups": 1,
    }),
    "nemotron": ("NemotronH", _NEMOTRON | {"layers_block_type": [_L, "mlp", _F, "mlp"]}),
    "falcon": ("FalconH1", _MAMBA | _FALCON | {"num_hidden_layers": 3}),
    # With a norm after the gate.
    "falcon-odd": ("FalconH1", _MAMBA | _FALCON | {
        "num_hidden_layers": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_conv_bias": False,
        "num_key_value_heads": 1, "tie_word_embeddings": True,
    }),
    "nemotron-moe": ("NemotronH", _NEMOTRON | _NEMOTRON_MOE | {"layers_block_type": [_L, "moe", _F, "moe"]}),
    # Two mixers after one another; an MLP first, and attention last; experts of projections.
    "nemotron-odd": ("NemotronH", _NEMOTRON | _NEMOTRON_MOE | {
        "layers_block_type": ["mlp", _L, _L, "moe", _F], "use_conv_bias": False, "head_dim": 48,
        "moe_latent_size": 32,
    }),
}  # fmt: skip
NAMES = list(_SHAPES)


def make_model(name: str, **changes: Any) -> Any:
    """Return transformers' model of random weights."""
    family, values = _SHAPES[name]
    if family == "Qwen3_5MoeText":
        values = {key: value for key, value in values.items() if key != "intermediate_size"}
    config = getattr(transformers, f"{family}Config")(**values | changes)
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()  # fmt: skip
    randomize(model)
    return model


def wrap(folder: Path, **changes: Any) -> None:
    """Make a model the text half of one with a tower and layers that predict more tokens."""
    text, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    family, kind = text["architectures"][0].removesuffix("ForCausalLM"), text["model_type"].removesuffix("_text")
    config = {"architectures": [f"{family}ForConditionalGeneration"], "model_type": kind, "text_config": text}
    config |= {"quantization_config": text.pop("quantization_config", None)} | changes
    (folder / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    others = "model.visual.merger.linear_fc1.weight", "mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight"
    save_file(renamed | {name: torch.ones(3) for name in others}, folder / "model.safetensors")


def randomize(model: torch.nn.Module) -> None:
    """Draw weights whose outputs vary and whose states remember."""
    for key, buffer in model.named_buffers():
        if key.endswith(("expert_bias", "e_score_correction_bias")):
            torch.nn.init.normal_(buffer, std=0.3)
    for key, param in model.named_parameters():
        if key.endswith("A_log"):
            torch.nn.init.uniform_(param, -4.0, -1.0)
        elif key.endswith(("dt_bias", ".D", "conv1d.bias")):
            torch.nn.init.normal_(param)
        elif "norm" in key:
            own = any(mixer in key for mixer in ("linear_attn.norm", "mamba.norm", "mixer.norm"))
            torch.nn.init.normal_(param, mean=float(own), std=0.2)
        elif "conv1d" in key or "conv.conv" in key:
            torch.nn.init.normal_(param, std=0.7)
        else:
            torch.nn.init.normal_(param, std=0.3 if "embed" in key else 1.2 / param.shape[-1] ** 0.5)


@torch.inference_mode()
def complete(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Return the `count` likeliest tokens, and their log-probabilities [count, vocabulary], from one forward pass."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    logits = model(out, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return out[0, len(prompt) :].tolist(), logits.log_softmax(-1)
