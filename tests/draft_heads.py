"""Drafting heads of random weights, as checkpoints store them, and what they draft, in plain torch over whole texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from nanovllm.runner.model_runner import ModelRunner

Tensors = dict[str, torch.Tensor]


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    """Draw matrices whose outputs vary, and weights of norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    draw = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: 1 + 0.3 * values if values.dim() == 1 else 1.5 * values / values.shape[1] ** 0.5
        for name, values in draw.items()
    }


def attention_shapes(config: Any, in_features: int) -> dict[str, tuple[int, ...]]:
    size, dim = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads * dim, config.num_key_value_heads * dim
    return {
        "self_attn.q_proj.weight": (heads, in_features), "self_attn.k_proj.weight": (kv_heads, in_features),
        "self_attn.v_proj.weight": (kv_heads, in_features), "self_attn.o_proj.weight": (size, heads),
        "post_attention_layernorm.weight": (size,), "input_layernorm.weight": (size,),
    }  # fmt: skip


def mlp_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    size, wide = config.hidden_size, config.intermediate_size
    return {
        "mlp.gate_proj.weight": (wide, size),
        "mlp.up_proj.weight": (wide, size),
        "mlp.down_proj.weight": (size, wide),
    }


def eagle3_tensors(config: Any, draft_vocab_size: int, num_states: int = 3, seed: int = 0) -> Tensors:
    """Return the tensors of an EAGLE-3 head for a model of this config of transformers."""
    size, rest = config.hidden_size, attention_shapes(config, 2 * config.hidden_size) | mlp_shapes(config)
    layer = {f"midlayer.{name}": shape for name, shape in (rest | {"hidden_norm.weight": (size,)}).items()}
    tensors = random_tensors(
        {
            "fc.weight": (size, num_states * size),
            **layer,
            "norm.weight": (size,),
            "lm_head.weight": (draft_vocab_size, size),
        },
        seed,
    )
    kept = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size].sort()[0]
    tensors["d2t"] = kept - torch.arange(draft_vocab_size)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def write_eagle3(folder: Path, config: Any, tensors: Tensors, **changes: Any) -> Path:
    """Write a head's folder as the Hub has them."""
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"
    values = {name: getattr(config, name) for name in (*names, "rms_norm_eps", "max_position_embeddings")}
    values["rope_theta"] = config.rope_parameters["rope_theta"]
    values |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    values |= {"hidden_act": "silu", "draft_vocab_size": len(tensors["lm_head.weight"])} | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def slots_of(runner: ModelRunner) -> list[Any]:
    """Return what a rank keeps of its sequences: their newest tokens, counts and drafts."""
    state = runner.batch_builder.slots.tensors
    return [tensor[:-1].tolist() for tensor in (state.last_token, state.num_computed, state.drafts)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def attend(x: torch.Tensor, weights: Tensors, config: Any) -> torch.Tensor:
    """Causal attention of Llama over a whole text, or of Qwen3.5, whose heads have norms and gates.

    x: [num_tokens, in_features].
    """
    dim, rope = config.head_dim, config.rope_parameters
    q, k, v = ((x @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, dim)) for name in "qkv")
    gates = None
    if "self_attn.q_norm.weight" in weights:
        (q, gates), eps = q.unflatten(1, (-1, 2)).unbind(2), config.rms_norm_eps
        q, k = (rms_norm(t, 1 + weights[f"self_attn.{n}_norm.weight"], eps) for t, n in ((q, "q"), (k, "k")))
    rotated = int(dim * rope.get("partial_rotary_factor", 1.0))
    angles = torch.arange(len(x))[:, None] * rope["rope_theta"] ** (-torch.arange(0, rotated, 2) / rotated)
    q, k = (rotate(t.transpose(0, 1), angles) for t in (q, k))
    k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v.transpose(0, 1)))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    out = out if gates is None else out * gates.sigmoid()
    return out.flatten(1) @ weights["self_attn.o_proj.weight"].T


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate the first elements of heads, [num_heads, num_tokens, head_dim]."""
    half = angles.shape[1]
    first, second, rest = x.split([half, half, x.shape[2] - 2 * half], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def mlp(x: torch.Tensor, weights: Tensors) -> torch.Tensor:
    gate, up = (x @ weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return (functional.silu(gate) * up) @ weights["mlp.down_proj.weight"].T


def of_layer(tensors: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@torch.inference_mode()
def eagle3_drafts(
    model: Any, tensors: Tensors, text: list[int], num_drafts: int, numbers: list[int], embed: Any = None
) -> list[tuple[int, float]]:
    """Return the chain that follows a text, each token with the sum of the state that it follows from.

    text: the model has not computed its last token; embed: None for the model's own.
    """
    embed = embed or model.get_input_embeddings()
    config, eps, layer = model.config, model.config.rms_norm_eps, of_layer(tensors, "midlayer.")
    states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    hidden = torch.cat([states[number][0] for number in numbers], 1) @ tensors["fc.weight"].T
    drafts: list[tuple[int, float]] = []
    for _ in range(num_drafts):
        embeds = embed(torch.tensor([*text[1:], *(token for token, _ in drafts)]))
        normed = rms_norm(embeds, layer["input_layernorm.weight"], eps)
        x = torch.cat((normed, rms_norm(hidden, layer["hidden_norm.weight"], eps)), 1)
        x = hidden + attend(x, layer, config)
        x = x + mlp(rms_norm(x, layer["post_attention_layernorm.weight"], eps), layer)
        last = rms_norm(x[-1], tensors["norm.weight"], eps)
        drafted = (last @ tensors["lm_head.weight"].T).argmax()
        drafts.append((int(drafted + tensors["d2t"][drafted]), float(last.sum())))
        hidden = torch.cat((hidden, x[-1:]))
    return drafts


def mtp_tensors(config: Any, seed: int = 0) -> Tensors:
    """Return the `mtp.*` tensors for a Qwen3.5 without experts of this config of transformers."""
    size, dim = config.hidden_size, config.head_dim
    layer = attention_shapes(config, size) | mlp_shapes(config) | {
        "self_attn.q_proj.weight": (2 * config.num_attention_heads * dim, size),
        "self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,),
    }  # fmt: skip
    shapes = {"mtp.fc.weight": (size, 2 * size)} | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{name}.weight"] = (size,)
    # The family stores norms less 1.
    return {name: t - 1 if t.dim() == 1 else t for name, t in random_tensors(shapes, seed).items()}


@torch.inference_mode()
def mtp_drafts(model: Any, tensors: Tensors, text: list[int], num_drafts: int) -> list[tuple[int, float]]:
    """Return the chain that follows a text, as `eagle3_drafts` does."""
    config, eps, layer = model.config, model.config.rms_norm_eps, of_layer(tensors, "mtp.layers.0.")

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, 1 + weight, eps)

    hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1][0]
    drafts: list[tuple[int, float]] = []
    for _ in range(num_drafts):
        embeds = model.get_input_embeddings()(torch.tensor([*text[1:], *(token for token, _ in drafts)]))
        normed = norm(hidden, tensors["mtp.pre_fc_norm_hidden.weight"])
        x = torch.cat((norm(embeds, tensors["mtp.pre_fc_norm_embedding.weight"]), normed), 1)
        x = x @ tensors["mtp.fc.weight"].T
        x = x + attend(norm(x, layer["input_layernorm.weight"]), layer, config)
        x = x + mlp(norm(x, layer["post_attention_layernorm.weight"]), layer)
        last = norm(x[-1:], tensors["mtp.norm.weight"])
        drafts.append((int(model.lm_head(last).argmax()), float(last.sum())))
        hidden = torch.cat((hidden, last))
    return drafts
