"""Reads config.json's `quantization_config`: how a checkpoint stores the matrices of linear layers and experts.

The formats are e4m3 values with multiplied scales (`fp8` of transformers and vLLM, `float-quantized` of
compressed-tensors), and four bits: GPTQ, AWQ, compressed-tensors (integers, NVFP4, MXFP4), modelopt's
NVFP4, and gpt-oss's MXFP4. Unsupported values are rejected by name, before any weight is read.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    "global_compression_ratio", "version", "sparsity_config",
}  # fmt: skip
_MODELOPT_KEYS = {"quant_method", "quant_algo", "ignore", "config_groups", "producer", "kv_cache_scheme", "group_size"}
_FOUR_BIT_GROUPS = (32, 64, 128, 256)
_NVFP4_GROUP, _MXFP4_GROUP, _INT4_GROUP = 16, 32, 128
_RUN = 32
"""Inputs that lie together in memory; see `kernels.four_bits`."""
_OTHER_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Modules with other names in Mixtral's checkpoints, as `DecoderForCausalLM` reads them: name here -> name there."""
_DELTA_NET_PARTS: dict[str, dict[str, str]] = {
    "in_proj_qkvz": {"q": "in_proj_qkv", "k": "in_proj_qkv", "v": "in_proj_qkv", "z": "in_proj_z"},
    "in_proj_ba": {"b": "in_proj_b", "a": "in_proj_a"},
}
"""Projections of gated delta nets: module here -> part of its weight -> name there, if it is another."""


@dataclass(frozen=True)
class FourBits:
    """Storage of linear layers and experts in four bits.

    Attributes:
        format: of values and scales; see `kernels.four_bits`.
        group: inputs that have one scale; None for all.
        has_zeros: whether integers of a group have a zero of their own.
        stored: how the checkpoint has them; None if they are rounded during loading.
    """

    format: Literal["int4", "mxfp4", "nvfp4"] = "int4"
    group: int | None = _INT4_GROUP
    has_zeros: bool = False
    stored: Literal["gptq", "gptq_v2", "awq", "packed", "packed_mxfp4", "nvfp4", "modelopt", "mxfp4"] | None = None


@dataclass(frozen=True)
class QuantizationConfig:
    """Linear layers and experts have e4m3 values and float32 scales, or four bits; others keep their dtype.

    Attributes:
        granularity: extent of one scale: a matrix ("tensor"), each of its outputs ("channel"), or `BLOCK` outputs by
            `BLOCK` inputs ("block").
        is_stored: whether the checkpoint is quantised; otherwise it is quantised during loading, by channels.
        ignored: modules that are stored unquantised: names or parts of them between dots, or "re:" and a pattern.
        kv_scales: extent of a scale of a layer's keys, and of its values, for a cache in e4m3: all heads ("tensor"), or
            each ("head"); None if the checkpoint has no such scales.
        has_head: whether the LM head is one of the layers, which is rare; known from the checkpoint's tensors.
        four_bits: None for e4m3.
    """

    granularity: Granularity
    is_stored: bool = False
    ignored: tuple[str, ...] = ()
    kv_scales: KVGranularity | None = None
    has_head: bool = False
    four_bits: FourBits | None = None

    @property
    def input_unit(self) -> int:
        """Inputs that must stay together on one rank."""
        if self.four_bits is not None:
            return max(_RUN, self.four_bits.group or 0)
        return BLOCK if self.granularity == "block" else 1

    @classmethod
    def from_hf(cls, hf: Any) -> QuantizationConfig | None:
        """Convert a transformers config's `quantization_config`, if any; ValueError if it is not supported."""
        values = getattr(hf, "quantization_config", None)
        if values is None:
            return None
        method = values.get("quant_method")
        if (read := _READERS.get(method)) is not None:
            return read(values)
        raise ValueError(
            f"quantization_config={dict(values)!r:.400}: quant_method {method!r} is not supported: only "
            f"{', '.join(map(repr, _READERS))}"
        )

    def unstored(self) -> QuantizationConfig:
        """Return the config of a checkpoint whose same layers are to be quantised during loading."""
        four_bits = None if self.four_bits is None else replace(self.four_bits, has_zeros=False, stored=None)
        if four_bits is not None and four_bits.format == "int4" and four_bits.group is None:
            four_bits = FourBits()
        return QuantizationConfig("channel", ignored=self.ignored, four_bits=four_bits)

    def ignores(self, name: str, parts: Iterable[str | None]) -> bool:
        """Return whether a layer is stored unquantised; ValueError if this differs between its parts.

        `name` is such as "model.layers.0.self_attn.qkv_proj", and `parts` are its weight's, such as "q", which is
        `q_proj` in the checkpoint; None if there is only one.
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
        """Return whether an entry names a layer as here, or as in checkpoints of Mixtral, Nemotron-H or with towers."""
        other = ".".join(_OTHER_NAMES.get(module, module) for module in name.split("."))
        wrapped = name.replace("model.", "model.language_model.", 1)
        backbone = name.replace("model.", "backbone.", 1).replace(".shared_expert.", ".shared_experts.")
        return any(_has_name(entry, one) for entry in self.ignored for one in (name, other, wrapped, backbone))


def _has_name(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    # Names of whole layers may end with a dot.
    return f".{entry.removesuffix('.')}." in f".{name}."


def _refuse(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if value:
            raise ValueError(f"quantization_config: {name}={value!r} is not supported")


def _refuse_others(values: Mapping[str, Any], known: set[str]) -> None:
    _refuse({name: value for name, value in values.items() if name not in known})


def _require(is_supported: bool, found: str, only: str = "") -> None:
    """Reject an unsupported setting; `only` names the supported ones."""
    if not is_supported:
        raise ValueError(f"quantization_config: {found} not supported" + (f": only {only}" if only else ""))


def _read_fp8(values: Mapping[str, Any]) -> QuantizationConfig:
    scheme, size, scale_fmt = (values.get(name) for name in ("activation_scheme", "weight_block_size", "scale_fmt"))
    _refuse_others(values, _FP8_KEYS)
    kv_scales = _read_kv_cache_scheme(values.get("kv_cache_scheme"))
    fmt = values.get("fmt", "e4m3")
    _require(fmt in ("e4m3", "float8_e4m3fn"), f"fmt={fmt!r} is", "'e4m3'")
    _require(scale_fmt in (None, "float"), f"scale_fmt={scale_fmt!r} is", "'float'")
    if scheme not in ("dynamic", "static"):
        raise ValueError(f"quantization_config: activation_scheme must be 'dynamic' or 'static', not {scheme!r}")
    ignored = _module_names(values, "modules_to_not_convert") or _module_names(values, "ignored_layers")
    if size is None:
        return QuantizationConfig("tensor", True, ignored, kv_scales)
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
    # modelopt's has no strategy.
    strategy = scheme.get("strategy", "tensor") if isinstance(scheme, Mapping) else None
    is_static = strategy in ("tensor", "attn_head") and not scheme.get("dynamic")
    only = "static scales of strategy='tensor' or 'attn_head'"
    _require(is_static, f"kv_cache_scheme={scheme!r:.400} is", only)
    _check_e4m3("kv_cache_scheme", scheme)
    return "tensor" if strategy == "tensor" else "head"


def _check_block(size: Any) -> None:
    is_known = size in ([BLOCK, BLOCK], (BLOCK, BLOCK), f"{BLOCK}x{BLOCK}")
    _require(is_known, f"blocks of {size!r} are", f"[{BLOCK}, {BLOCK}]")


def _read_compressed_tensors(values: Mapping[str, Any]) -> QuantizationConfig:
    _refuse_others(values, _COMPRESSED_KEYS)
    if not (isinstance(sparsity := values.get("sparsity_config"), Mapping) and sparsity.get("format") == "dense"):
        _refuse({"sparsity_config": sparsity})
    known = "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
    stored: Any = values.get("format")
    _require(stored in known, f"format={stored!r} is", f"{known}")
    # Early versions wrote "frozen" beside the same tensors.
    status = values.get("quantization_status", "compressed")
    _require(status in ("compressed", "frozen"), f"quantization_status={status!r} is", "'compressed'")
    groups = values.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, Mapping) and len(groups) == 1 else None
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise ValueError(f"quantization_config: config_groups={groups!r:.400} must be one, of targets ['Linear']")
    _require(group.get("format") in (None, stored), f"format={group.get('format')!r} is", f"{stored!r}")
    weights, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    _refuse({"output_activations": group.get("output_activations")})
    kv_scales, ignored = _read_kv_cache_scheme(values.get("kv_cache_scheme")), _module_names(values, "ignore")
    if stored.endswith("pack-quantized"):
        four_bits = _read_packed(stored, weights, inputs)
        return QuantizationConfig("channel", True, ignored, kv_scales, four_bits=four_bits)
    _check_e4m3("weights", weights)
    if inputs:
        _check_e4m3("input_activations", inputs)
    strategy: Any = weights.get("strategy")
    _require(strategy in ("tensor", "channel", "block"), f"weights of strategy={strategy!r} are")
    if strategy == "block":
        _check_block(weights.get("block_structure"))
    if inputs and not inputs.get("dynamic"):
        _require(inputs.get("strategy") == "tensor", f"static inputs of strategy={inputs.get('strategy')!r} are")
    return QuantizationConfig(strategy, True, ignored, kv_scales)


def _check_e4m3(what: str, args: Any) -> None:
    if not isinstance(args, Mapping):
        raise ValueError(f"quantization_config: {what}={args!r:.400} must be an object with type and num_bits")
    kind, num_bits, symmetric = args.get("type"), args.get("num_bits"), args.get("symmetric", True)
    found = f"{what} of type={kind!r}, num_bits={num_bits!r}, symmetric={symmetric!r} are"
    _require((kind, num_bits, symmetric) == ("float", 8, True), found, "symmetric floats of 8 bits")


_PACKED_FLOATS = {
    "nvfp4-pack-quantized": ("tensor_group", FourBits("nvfp4", _NVFP4_GROUP, stored="nvfp4")),
    "mxfp4-pack-quantized": ("group", FourBits("mxfp4", _MXFP4_GROUP, stored="packed_mxfp4")),
}


def _read_packed(stored: str, weights: Mapping[str, Any], inputs: Any) -> FourBits:
    strategy, group, symmetric = weights.get("strategy"), weights.get("group_size"), weights.get("symmetric", True)
    kind = weights.get("type"), weights.get("num_bits")
    if stored in _PACKED_FLOATS:
        wanted, four_bits = _PACKED_FLOATS[stored]
        if kind != ("float", 4) or strategy != wanted or group != four_bits.group or not symmetric:
            raise ValueError(f"quantization_config: weights={dict(weights)!r:.400} are not {four_bits.format.upper()}")
        return four_bits
    found = f"weights of type={kind[0]!r}, num_bits={kind[1]!r}, strategy={strategy!r} are"
    _require(kind == ("int", 4) and strategy in ("group", "channel"), found, "4-bit groups and channels")
    # Inputs of these were sorted by the groups, or by importance; the former has an index of groups.
    order = weights.get("actorder")
    _require(order in (None, False, "weight", "static"), f"actorder={order!r} is")
    _refuse({"input_activations": inputs})
    return FourBits("int4", _group_size(group) if strategy == "group" else None, not symmetric, "packed")


def _group_size(size: Any) -> int | None:
    """Return a config's `group_size`, None for -1."""
    _require(size in (-1, *_FOUR_BIT_GROUPS), f"group_size={size!r} is", f"-1, {_FOUR_BIT_GROUPS}")
    return None if size == -1 else int(size)


def _check_bits(values: Mapping[str, Any]) -> None:
    bits = values.get("bits", values.get("w_bit"))
    _require(bits == 4, f"bits={bits!r} is", "4")


_TRANSFORMS = (
    "is_marlin_format", "extra_config", "rotation", "rotation_config", "hadamard_config", "transform_config",
)  # fmt: skip
"""Values of GPTQ and AWQ that change what the stored weights mean. Most others say how they were made."""


def _read_gptq(values: Mapping[str, Any]) -> QuantizationConfig:
    # `desc_act` alone says little: an index of groups that is not sorted is refused where it is read.
    _refuse({name: values.get(name) for name in _TRANSFORMS})
    _check_bits(values)
    # gptqmodel has both names, and packs words of other sizes if asked to.
    method, dtype = values.get("method", "gptq"), values.get("pack_dtype", "int32")
    found = f"method={method!r}, pack_dtype={dtype!r} is"
    _require(method == "gptq" and dtype == "int32", found, "'gptq' in 'int32'")
    stored: Any = values.get("checkpoint_format") or values.get("format") or "gptq"
    _require(stored in ("gptq", "gptq_v2"), f"checkpoint_format={stored!r} is", "'gptq', 'gptq_v2'")
    four_bits = FourBits("int4", _group_size(values.get("group_size")), not values.get("sym", True), stored)
    return QuantizationConfig("channel", True, ignored=_unquantized(values), four_bits=four_bits)


def _unquantized(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the layers that GPTQ or AWQ leaves out, with gptqmodel's `dynamic`; a layer's own settings are refused."""
    dynamic = dict(values.get("dynamic") or {})
    excluded = [pattern for pattern in dynamic if pattern.startswith("-:")]
    for pattern in dynamic.keys() - excluded:
        if any(values.get(name) != value for name, value in (dynamic[pattern] or {}).items()):
            raise ValueError(f"quantization_config: dynamic={{{pattern!r}: {dynamic[pattern]!r}}} is not supported")
    return (*_module_names(values, "modules_to_not_convert"), *(f"re:{pattern[2:]}" for pattern in excluded))


def _read_awq(values: Mapping[str, Any]) -> QuantizationConfig:
    _refuse({name: values.get(name) for name in _TRANSFORMS})
    _check_bits(values)
    stored = values.get("checkpoint_format") or values.get("format") or values.get("version") or "gemm"
    version, has_zeros = str(stored).lower(), values.get("zero_point", True)
    found = f"version={version!r}, zero_point={has_zeros!r} is"
    _require(version == "gemm" and bool(has_zeros), found, "'gemm' with zeros")
    four_bits = FourBits("int4", _group_size(values.get("group_size")), True, "awq")
    return QuantizationConfig("channel", True, ignored=_unquantized(values), four_bits=four_bits)


def _read_mxfp4(values: Mapping[str, Any]) -> QuantizationConfig:
    """Read gpt-oss's: experts alone are in four bits."""
    _refuse_others(values, {"quant_method", "modules_to_not_convert", "dequantize"})
    four_bits = FourBits("mxfp4", _MXFP4_GROUP, stored="mxfp4")
    return QuantizationConfig("channel", True, ignored=(r"re:(?!.*\.experts\.)",), four_bits=four_bits)


def modelopt_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `quantization_config` that `hf_quant_config.json` stands for, the older form of modelopt's."""
    own = dict(values.get("quantization") or {})
    cache, ignored = own.pop("kv_cache_quant_algo", None), own.pop("exclude_modules", None)
    scheme = {"type": "float", "num_bits": 8} if cache == "FP8" else cache
    return {"quant_method": "modelopt", "ignore": ignored, "kv_cache_scheme": scheme} | own


def _read_modelopt(values: Mapping[str, Any]) -> QuantizationConfig:
    _refuse_others(values, _MODELOPT_KEYS)
    algorithm, group = values.get("quant_algo"), values.get("group_size", _NVFP4_GROUP)
    _require(algorithm in ("NVFP4", "FP8"), f"quant_algo={algorithm!r} is", "'NVFP4' and 'FP8'")
    _require(algorithm == "FP8" or group == _NVFP4_GROUP, f"group_size={group!r} is", str(_NVFP4_GROUP))
    # Names may have wildcards.
    ignored = tuple(
        f"re:{fnmatch.translate(name)}" if "*" in name else name for name in _module_names(values, "ignore")
    )
    kv_scales = _read_kv_cache_scheme(values.get("kv_cache_scheme"))
    if algorithm == "FP8":
        return QuantizationConfig("tensor", True, ignored, kv_scales)
    four_bits = FourBits("nvfp4", _NVFP4_GROUP, stored="modelopt")
    return QuantizationConfig("channel", True, ignored, kv_scales, four_bits=four_bits)


_READERS = {
    "fp8": _read_fp8, "compressed-tensors": _read_compressed_tensors, "gptq": _read_gptq, "awq": _read_awq,
    "mxfp4": _read_mxfp4, "modelopt": _read_modelopt,
}  # fmt: skip
