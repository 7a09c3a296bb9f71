"""Reads the scaling of a model's rotary embedding from its config."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any

from nanovllm.utils.checks import UnsupportedError


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of slow dimensions (arXiv:2407.21783), by the names of config.json."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """Parameters of YaRN (Peng et al. 2023, arXiv:2309.00071), by the names of config.json."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


_SCALINGS: dict[str, type[LinearScaling | Llama3Scaling | YarnScaling]] = {
    "linear": LinearScaling, "llama3": Llama3Scaling, "yarn": YarnScaling,
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding: its base, its scaling for longer contexts, and the share of a head that it rotates."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None
    share: float = 1.0

    def size(self, head_dim: int) -> int:
        """Return how many of a head's elements are rotated, the first ones."""
        return int(head_dim * self.share)


def read_rope(hf: Any, layer_type: str | None = None, may_be_partial: bool = False) -> RopeConfig:
    """Convert the rotary embedding of a transformers config; UnsupportedError for a type, ValueError for a parameter.

    `layer_type` is given for a model that scales only its full-attention layers; `may_be_partial`: a part of each head
    may be rotated.
    """
    values: dict[str, Any] = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    own = values.get(layer_type or "")
    if isinstance(own, dict):
        values = dict(own)
    elif layer_type == "sliding_attention":
        # In transformers 4.x there is a single scaling, which does not apply to these layers.
        values = {"rope_theta": values.get("rope_theta")}
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedError(f"rope_parameters={values!r} that differ between layers are not supported")
    theta = values.pop("rope_theta", None) or getattr(hf, "rope_theta", 10000.0)
    share = values.pop("partial_rotary_factor", None) or getattr(hf, "partial_rotary_factor", None) or 1.0
    if share != 1.0 and not may_be_partial:
        raise UnsupportedError(f"partial_rotary_factor={share} is not supported: whole heads are rotated")
    if may_be_partial:
        # Positions of text are the same in all sections.
        values = {key: value for key, value in values.items() if key not in ("mrope_section", "mrope_interleaved")}
    kind = values.pop("rope_type", None) or values.get("type", "default")
    values.pop("type", None)
    if kind == "default":
        return RopeConfig(theta, share=share)
    if kind not in _SCALINGS:
        raise UnsupportedError(f"rope_type {kind!r} is not supported: only default, {', '.join(_SCALINGS)}")
    values = {key: value for key, value in values.items() if value is not None}
    known = {item.name: item for item in fields(_SCALINGS[kind])}
    if unknown := set(values) - set(known):
        raise UnsupportedError(f"{kind} parameters {sorted(unknown)} are not supported")
    if "original_max_position_embeddings" in known:
        values.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
    missing = [name for name, item in known.items() if item.default is MISSING and name not in values]
    if missing:
        raise ValueError(f"{kind} needs a {', '.join(missing)}; rope parameters are {values}")
    return RopeConfig(theta, _SCALINGS[kind](**values), share)


def yarn_length(hf: Any, max_position: int) -> int:
    """Return the number of positions of a model, which YaRN may extend beyond `max_position`."""
    values = getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {}
    values = values.get("full_attention") or values
    if "yarn" not in (values.get("rope_type"), values.get("type")):
        return max_position
    original = values.get("original_max_position_embeddings") or max_position
    return max(max_position, int(values.get("factor", 1) * original))
