"""The configuration of a drafting head: a small model that drafts tokens from the hidden states of the target model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.configs.model import Architecture, ModelConfig
from nanovllm.utils.checks import check_int
from nanovllm.utils.folder_faults import read_json

_EAGLE3 = Architecture("LlamaForCausalLMEagle3", windows="none", model="draft_head.Eagle3Head")
_EAGLE3_NAMES = (_EAGLE3.name, "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""Names of the architecture in the config.json of published heads."""
_LEAST_LAYERS = 6
"""Of a model whose hidden states EAGLE-3 reads at its usual layers, which are then three."""


@dataclass(frozen=True)
class DraftHeadConfig:
    """A head of one layer for one model.

    Attributes:
        model: hyperparameters of its layer.
        hidden_states: the model's hidden states that it reads, numbered as in transformers: what layer i takes, or with
            the number of layers, the last norm's output.
        draft_vocab_size: tokens that it drafts; others than EAGLE-3 draft all.
        norms_residual: whether the residual stream begins with the norm of the hidden states.
    """

    model: ModelConfig
    hidden_states: tuple[int, ...]
    draft_vocab_size: int
    norms_residual: bool = False

    @classmethod
    def eagle3(cls, folder: str, target: ModelConfig) -> DraftHeadConfig:
        """Read the config.json of an EAGLE-3 head (Li et al. 2025, arXiv:2503.01840) for a model, or a ValueError."""
        stored = read_json(os.path.join(folder, "config.json"))
        name = (stored.get("architectures") or [""])[0]
        if name not in _EAGLE3_NAMES or stored.get("model_type") != "llama":
            raise ValueError(
                f"the head in {folder!r} has architecture {name!r} and model_type {stored.get('model_type')!r}, which "
                f"is not supported: only 'llama' and {', '.join(_EAGLE3_NAMES)}"
            )
        from transformers import LlamaConfig  # noqa: PLC0415

        model = ModelConfig.from_hf(LlamaConfig(**(stored | {"architectures": ["LlamaForCausalLM"]})))
        _check_fits(folder, model, target)
        if model.quantization is not None:
            raise ValueError(f"the head in {folder!r} is quantised, which is not supported: use one of 16 bits")
        draft_vocab_size = stored.get("draft_vocab_size") or model.vocab_size
        return cls(
            replace(model, architecture=_EAGLE3, tie_word_embeddings=False),
            _tapped(stored, target.num_layers),
            check_int("draft_vocab_size", draft_vocab_size, 1, model.vocab_size),
            bool(stored.get("norm_before_residual")),
        )

    @classmethod
    def mtp(cls, target: ModelConfig) -> DraftHeadConfig:
        """Return the config of a model's own head, `mtp.*` in its checkpoint; without such a family a ValueError."""
        if target.delta_net is None:
            raise ValueError(
                "method 'mtp' of speculative_config needs a model of a family with mtp.* tensors, Qwen3.5, Qwen3.6 or "
                f"Qwen3-Next, not {target.architecture.name}: use 'ngram', or 'eagle3' with a head for this model"
            )
        # What is quantised here is in 16 bits there.
        is_stored = target.quantization is not None and target.quantization.is_stored
        attending = [layer for layer in target.layers if not layer.is_linear]
        architecture = replace(target.architecture, model="draft_head.MTPHead")
        model = replace(target, architecture=architecture, layers=(attending[-1],))
        model = model if is_stored else replace(model, quantization=None)
        return cls(model, (target.num_layers,), target.vocab_size)


def _check_fits(folder: str, head: ModelConfig, target: ModelConfig) -> None:
    for name in ("hidden_size", "vocab_size", "num_heads"):
        own, wanted = getattr(head, name), getattr(target, name)
        if own != wanted:
            raise ValueError(
                f"the head in {folder!r} has {name}={own}, the model {wanted}: a head drafts only for the model that "
                "it was trained for"
            )
    if head.num_layers != 1:
        raise ValueError(f"the head in {folder!r} has num_hidden_layers={head.num_layers}: only 1 is supported")


def _tapped(stored: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the numbers of the hidden states that an EAGLE-3 head reads in a model of `num_layers`."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested = (stored.get("eagle_config") or {}).get(name)
    # The nested ones name layers whose outputs are read, the next layer's inputs.
    numbers = stored.get(name) or [number + 1 for number in nested or ()]
    if not numbers:
        if num_layers < _LEAST_LAYERS:
            raise ValueError(f"an EAGLE-3 head without {name} needs a model of {_LEAST_LAYERS} layers or more")
        numbers = [2, num_layers // 2, num_layers - 3]
    return tuple(check_int(f"{name} of the head", number, 0, num_layers - 1) for number in numbers)
