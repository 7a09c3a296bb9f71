"""The model's configuration, read from `config.json` and `generation_config.json`.

Only this module handles the differences between versions of transformers: 4.x has `rope_theta` and `rope_scaling`, 5.x
has `rope_parameters`; `torch_dtype` became `dtype`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import check_int, read_json, refuse_remote_code


@dataclass(frozen=True)
class Architecture:
    """A supported architecture.

    Attributes:
        name: in config.json's `architectures`.
        model: the class that implements it, as "file.Class" in `models/`: a name, since the host needs no torch.
        qkv_bias, qk_norm: how its attention differs.
    """

    name: str
    model: str
    qkv_bias: bool = False
    qk_norm: bool = False


_ROWS = (
    Architecture("Qwen3ForCausalLM", "qwen3.Qwen3ForCausalLM", qk_norm=True),
    Architecture("Qwen2ForCausalLM", "qwen3.Qwen3ForCausalLM", qkv_bias=True),
)
MODELS = {row.name: row for row in _ROWS}
_HEAD_DIMS = (16, 32, 64, 128)
_DTYPES = ("float32", "bfloat16", "float16")
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip
_YARN_KEYS = {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}


@dataclass(frozen=True)
class YarnConfig:
    """Parameters of YaRN (Peng et al. 2023, arXiv:2309.00071), by the names of config.json."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """The hyperparameters of a decoder; `max_position` is in tokens."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnConfig | None
    tie_word_embeddings: bool
    max_position: int
    initializer_range: float
    dtype: str
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, path: str, trust_remote_code: bool = False) -> ModelConfig:
        """Read `config.json` and `generation_config.json`.

        Args:
            path: the model's folder.
            trust_remote_code: whether transformers may run the code that the config names.

        Raises:
            ValueError: the config is missing, unreadable, or has a value that is not supported.
        """
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ValueError(f"no config.json in {path!r}")
        if not trust_remote_code:
            refuse_remote_code(path, "config.json", "AutoConfig")
        # Imported here because it takes seconds, and ranks other than 0 do not need it.
        from transformers import AutoConfig  # noqa: PLC0415

        try:
            hf = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:  # each version of transformers has its own ways to refuse a config
            raise ValueError(f"config.json in {path!r} is not supported: {error}") from error
        return cls.from_hf(hf, eos_token_ids=_generation_eos(path))

    @classmethod
    def from_hf(cls, hf: Any, eos_token_ids: Iterable[int] = ()) -> ModelConfig:
        """Convert a transformers config; `eos_token_ids` are added to its own."""
        architecture = _architecture(hf)
        _check_supported(hf, architecture)
        theta, yarn = _rope(hf)
        max_position = hf.max_position_embeddings
        if yarn is not None:
            max_position = max(max_position, int(yarn.factor * yarn.original_max_position_embeddings))
        return cls(
            architecture=architecture,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=_head_dim(hf),
            rms_norm_eps=hf.rms_norm_eps,
            rope_theta=theta,
            yarn=yarn,
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            max_position=max_position,
            initializer_range=hf.initializer_range,
            dtype=_dtype(hf),
            eos_token_ids=frozenset(eos_token_ids) | frozenset(_as_ids(getattr(hf, "eos_token_id", None))),
        )


def _architecture(hf: Any) -> Architecture:
    name = (getattr(hf, "architectures", None) or [type(hf).__name__.replace("Config", "ForCausalLM")])[0]
    if name not in MODELS:
        raise ValueError(f"architecture {name!r} is not supported: only {' and '.join(MODELS)}")
    return MODELS[name]


def _check_supported(hf: Any, architecture: Architecture) -> None:
    for name in _SIZES:
        check_int(name, getattr(hf, name, None), 1)
    if hf.num_attention_heads % hf.num_key_value_heads:
        heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
        raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    unsupported = {
        "hidden_act": hf.hidden_act != "silu" and hf.hidden_act,
        "use_sliding_window": getattr(hf, "use_sliding_window", False),
        "attention_bias": not architecture.qkv_bias and getattr(hf, "attention_bias", False),
        "quantization_config": getattr(hf, "quantization_config", None),
        "layer_types": set(getattr(hf, "layer_types", None) or []) - {"full_attention"},
    }
    for name, value in unsupported.items():
        if value:
            raise ValueError(f"{name}={value!r} is not supported")


def _head_dim(hf: Any) -> int:
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if head_dim not in _HEAD_DIMS:
        raise ValueError(f"head_dim={head_dim} is not supported: only {_HEAD_DIMS}")
    return int(head_dim)


def _dtype(hf: Any) -> str:
    name = str(getattr(hf, "dtype", None) or getattr(hf, "torch_dtype", None) or "float32").rsplit(".", maxsplit=1)[-1]
    if name not in _DTYPES:
        raise ValueError(f"the checkpoint's dtype {name!r} is not supported: only {_DTYPES}")
    return name


def _rope(hf: Any) -> tuple[float, YarnConfig | None]:
    scaling: dict[str, Any] = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    if any(isinstance(value, dict) for value in scaling.values()):
        raise ValueError(f"rope_parameters={scaling!r} that differ between layers are not supported")
    theta = scaling.pop("rope_theta", None) or getattr(hf, "rope_theta", 10000.0)
    rope_type = scaling.pop("rope_type", None) or scaling.get("type", "default")
    scaling.pop("type", None)
    if rope_type == "default":
        return theta, None
    if rope_type != "yarn":
        raise ValueError(f"rope_type {rope_type!r} is not supported: only default and yarn")
    scaling = {key: value for key, value in scaling.items() if value is not None}
    unknown = set(scaling) - _YARN_KEYS
    if unknown:
        raise ValueError(f"yarn parameters {sorted(unknown)} are not supported")
    if "factor" not in scaling:
        raise ValueError(f"yarn needs a factor; rope parameters are {scaling}")
    scaling.setdefault("original_max_position_embeddings", hf.max_position_embeddings)
    return theta, YarnConfig(**scaling)


def _generation_eos(path: str) -> list[int]:
    """Return the EOS ids of `generation_config.json`, because chat models have more than their tokenizer's one."""
    file = os.path.join(path, "generation_config.json")
    if not os.path.isfile(file):
        return []
    return _as_ids(read_json(file).get("eos_token_id"))


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    return [check_int("eos_token_id", token, 0) for token in values]
