"""Reads config.json's `quantization_config`: how a checkpoint stores the matrices of linear layers and experts.

The formats are `fp8` of transformers and vLLM, and `float-quantized` of compressed-tensors: e4m3 values with multiplied
scales. Unsupported values are rejected by name, before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

BLOCK = 128
"""Outputs and inputs of a block with one scale."""
Granularity = Literal["tensor", "channel", "block"]
KVGranularity = Literal["tensor", "head"]
_FP8_KEYS = {
    "quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers",
    "scale_fmt", "kv_cache_scheme", "dequantize",
}  # fmt: skip
_COMPRESSED_KEYS = {
    "quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status",
    "global_compression_ratio", "version",
}  # fmt: skip
_OTHER_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Modules with other names in Mixtral's checkpoints, as `DecoderForCausalLM` reads them: name here -> name there."""
_DELTA_NET_PARTS: dict[str, dict[str, str]] = {
    "in_proj_qkvz": {"q": "in_proj_qkv", "k": "in_proj_qkv", "v": "in_proj_qkv", "z": "in_proj_z"},
    "in_proj_ba": {"b": "in_proj_b", "a": "in_proj_a"},
}
"""Projections of gated delta nets: module here -> part of its weight -> name there, if it is another."""


@dataclass(frozen=True)
class QuantizationConfig:
    """Linear layers and experts have e4m3 values and float32 scales; embedding, norms and routers keep their dtype.

    Attributes:
        granularity: extent of one scale: a matrix ("tensor"), each of its outputs ("channel"), or `BLOCK` outputs by
            `BLOCK` inputs ("block").
        is_stored: whether the checkpoint is quantised; otherwise it is quantised during loading, by channels.
        has_input_scale: whether inputs have a scale as well, which weight-only products do not need.
        ignored: modules that are stored unquantised: names or parts of them between dots, or "re:" and a pattern.
        kv_scales: extent of a scale of a layer's keys, and of its values, for a cache in e4m3: all heads ("tensor"), or
            each ("head"); None if the checkpoint has no such scales.
        has_head: whether the LM head is one of the layers, which is rare; known from the checkpoint's tensors.
    """

    granularity: Granularity
    is_stored: bool = False
    has_input_scale: bool = False
    ignored: tuple[str, ...] = ()
    kv_scales: KVGranularity | None = None
    has_head: bool = False

    @classmethod
    def from_hf(cls, hf: Any) -> QuantizationConfig | None:
        """Convert the `quantization_config` of a transformers config; None if it has none.

        Raises:
            ValueError: a method, format or value that is not supported.
        """
        values = getattr(hf, "quantization_config", None)
        if values is None:
            return None
        method = values.get("quant_method")
        if method == "fp8":
            return _read_fp8(values)
        if method == "compressed-tensors":
            return _read_compressed_tensors(values)
        raise ValueError(
            f"quantization_config={dict(values)!r:.400}: quant_method {method!r} is not supported: only 'fp8' and "
            "'compressed-tensors'"
        )

    def unstored(self) -> QuantizationConfig:
        """Return the config of a checkpoint whose same layers are to be quantised during loading."""
        return QuantizationConfig("channel", ignored=self.ignored)

    def ignores(self, name: str, parts: Iterable[str | None]) -> bool:
        """Return whether a layer is stored unquantised.

        Args:
            name: of the layer, such as "model.layers.0.self_attn.qkv_proj".
            parts: of its weight, such as "q", which is `q_proj` in the checkpoint; None if there is only one.

        Raises:
            ValueError: this differs between the parts.
        """
        parent, _, module = name.rpartition(".")
        known = _DELTA_NET_PARTS.get(module)
        stored = (f"{part}_proj" if known is None else known.get(part, module) for part in parts if part is not None)
        names = [f"{parent}.{one}" for one in stored] or [name]
        ignored = [one for one in names if self._is_named(one)]
        if self._is_named(name) or len(ignored) == len(names):
            return True
        if ignored:
            raise ValueError(f"quantization_config ignores {ignored}, but not all of {names}, which are one product")
        return False

    def _is_named(self, name: str) -> bool:
        """Return whether an entry names a layer as here, or as in checkpoints of Mixtral or of a model with towers."""
        other = ".".join(_OTHER_NAMES.get(module, module) for module in name.split("."))
        wrapped = name.replace("model.", "model.language_model.", 1)
        return any(_has_name(entry, one) for entry in self.ignored for one in (name, other, wrapped))


def _has_name(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return f".{entry}." in f".{name}."


def _refuse(values: Mapping[str, Any], what: str) -> None:
    """Reject each value that is set."""
    for name, value in values.items():
        if value:
            raise ValueError(f"quantization_config: {what}{name}={value!r} is not supported")


def _others(values: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in known}


def _read_fp8(values: Mapping[str, Any]) -> QuantizationConfig:
    scheme, size, scale_fmt = (values.get(name) for name in ("activation_scheme", "weight_block_size", "scale_fmt"))
    _refuse(_others(values, _FP8_KEYS), "")
    kv_scales = _read_kv_cache_scheme(values.get("kv_cache_scheme"))
    if (fmt := values.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"quantization_config: fmt={fmt!r} is not supported: only 'e4m3'")
    if scale_fmt not in (None, "float"):
        raise ValueError(f"quantization_config: scale_fmt={scale_fmt!r} is not supported: only 'float'")
    if scheme not in ("dynamic", "static"):
        raise ValueError(f"quantization_config: activation_scheme must be 'dynamic' or 'static', not {scheme!r}")
    ignored = _module_names(values, "modules_to_not_convert") or _module_names(values, "ignored_layers")
    if size is None:
        return QuantizationConfig("tensor", True, scheme == "static", ignored, kv_scales)
    _check_block(size)
    if scheme == "static":
        raise ValueError("quantization_config: activation_scheme='static' is not supported with a weight_block_size")
    return QuantizationConfig("block", True, ignored=ignored, kv_scales=kv_scales)


def _module_names(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return names of modules; names that begin with "re:" are patterns."""
    names = values.get(key) or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"quantization_config: {key}={names!r:.400} must be a list of names")
    for name in names:
        try:
            if name.startswith("re:"):
                re.compile(name[3:])
        except re.error as error:
            raise ValueError(f"quantization_config: {key} has {name!r}, which is no pattern: {error}") from error
    return tuple(names)


def _read_kv_cache_scheme(scheme: Any) -> KVGranularity | None:
    if scheme is None:
        return None
    # Written by AutoFP8.
    if scheme == "static":
        return "tensor"
    strategy = scheme.get("strategy") if isinstance(scheme, Mapping) else None
    if strategy not in ("tensor", "attn_head") or scheme.get("dynamic"):
        raise ValueError(
            f"quantization_config: kv_cache_scheme={scheme!r:.400} is not supported: only static scales of "
            "strategy='tensor' or 'attn_head'"
        )
    _check_e4m3("kv_cache_scheme", scheme)
    return "tensor" if strategy == "tensor" else "head"


def _check_block(size: Any) -> None:
    if size not in ([BLOCK, BLOCK], (BLOCK, BLOCK), f"{BLOCK}x{BLOCK}"):
        raise ValueError(f"quantization_config: blocks of {size!r} are not supported: only [{BLOCK}, {BLOCK}]")


def _read_compressed_tensors(values: Mapping[str, Any]) -> QuantizationConfig:
    _refuse(_others(values, _COMPRESSED_KEYS), "")
    if (stored := values.get("format")) != "float-quantized":
        raise ValueError(f"quantization_config: format={stored!r} is not supported: only 'float-quantized'")
    if (status := values.get("quantization_status", "compressed")) != "compressed":
        raise ValueError(f"quantization_config: quantization_status={status!r} is not supported: only 'compressed'")
    groups = values.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise ValueError(f"quantization_config: config_groups={groups!r:.400} must be one, of targets ['Linear']")
    if group.get("format") not in (None, stored):
        raise ValueError(f"quantization_config: format={group['format']!r} is not supported: only {stored!r}")
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    _refuse({"output_activations": group.get("output_activations")}, "")
    for what, args in (("weights", weights), ("input_activations", inputs)):
        if args or what == "weights":
            _check_e4m3(what, args)
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise ValueError(f"quantization_config: weights of strategy={strategy!r} are not supported")
    if strategy == "block":
        _check_block(weights.get("block_structure"))
    has_input_scale = bool(inputs) and not inputs.get("dynamic")
    if has_input_scale and inputs.get("strategy") != "tensor":
        raise ValueError(f"quantization_config: static inputs of strategy={inputs.get('strategy')!r} are not supported")
    kv_scales = _read_kv_cache_scheme(values.get("kv_cache_scheme"))
    return QuantizationConfig(strategy, True, has_input_scale, _module_names(values, "ignore"), kv_scales)


def _check_e4m3(what: str, args: Any) -> None:
    if not isinstance(args, Mapping):
        raise ValueError(f"quantization_config: {what}={args!r:.400} must be an object with type and num_bits")
    kind, num_bits, symmetric = args.get("type"), args.get("num_bits"), args.get("symmetric", True)
    if (kind, num_bits, symmetric) != ("float", 8, True):
        found = f"type={kind!r}, num_bits={num_bits!r}, symmetric={symmetric!r}"
        raise ValueError(f"quantization_config: {what} of {found} are not supported: only symmetric floats of 8 bits")
