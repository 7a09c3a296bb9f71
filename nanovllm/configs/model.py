"""The model's configuration, read from `config.json` and `generation_config.json`.

Only this module handles the differences between versions of transformers: 4.x has `rope_theta` and `rope_scaling`, 5.x
has `rope_parameters`; `torch_dtype` became `dtype`.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanovllm.config import ModelImpl, Pooling, Quantization
from nanovllm.configs.quantization import FourBits, QuantizationConfig, modelopt_config
from nanovllm.configs.rope import RopeConfig, read_rope, yarn_length
from nanovllm.utils.checks import UnsupportedError, check_int
from nanovllm.utils.folder_faults import not_in, read_json, read_json_list, refuse_remote_code


@dataclass(frozen=True)
class Architecture:
    """A supported architecture.

    Attributes:
        name: in config.json's `architectures`.
        qkv_bias: whether queries, keys and values have biases.
        out_bias: whether attention's outputs have biases.
        has_sinks: whether each head has a sink; see `AttentionOptions`.
        qk_norm: span of the norm of queries and keys: each head, or all heads of a token at once; None: no norm.
        norms: where attention and MLP are normalised: their input ("before"), or their output ("after").
        has_experts: whether MLPs are mixtures of experts, except in layers that the config names.
        windows: layers that `sliding_window` applies to, if the config has it: all, none, or as `layer_types` says, or
            without it from `max_window_layers` on.
        ropes: layers that rotate: all, none, or the layers in `no_rope_layers`.
        scaled_ropes: layers whose rotary embedding the config's scaling stretches: all, or only those without a window.
        gates_attention: whether queries come with a gate of attention's output.
        norm_offset: added to stored weights of norms, which are then kept in float32.
        mixer: what layers with a state have instead of attention; None: all attend.
        delta_net: order in which projections of gated delta nets are stored: one after the other ("parts"), or key head
            by key head ("heads").
        partial_ropes: whether a part of each head may be rotated.
        has_single_blocks: whether a layer is attention, a mixer, an MLP or a mixture with one norm; such MLPs and
            experts are `down(relu(up(x))**2)`, without a gate.
        model: the class that implements it, as "file.Class" in `models/`: a name, since the host needs no torch.
    """

    name: str
    qkv_bias: bool = False
    out_bias: bool = False
    has_sinks: bool = False
    qk_norm: Literal["heads", "projections"] | None = None
    norms: Literal["before", "after"] = "before"
    has_experts: bool = False
    windows: Literal["all", "none", "some"] = "some"
    ropes: Literal["all", "some", "none"] = "all"
    scaled_ropes: Literal["all", "full_attention"] = "all"
    gates_attention: bool = False
    norm_offset: float = 0.0
    mixer: Literal["delta_net", "short_conv", "mamba"] | None = None
    delta_net: Literal["parts", "heads"] | None = None
    partial_ropes: bool = False
    has_single_blocks: bool = False
    model: str = "decoder.DecoderForCausalLM"


def _hybrid(name: str, has_experts: bool, delta_net: Literal["parts", "heads"]) -> Architecture:
    """Return a family with gated delta nets, and gated attention in every fourth layer."""
    return Architecture(
        name, qk_norm="heads", has_experts=has_experts, gates_attention=True, norm_offset=1.0, mixer="delta_net",
        delta_net=delta_net, partial_ropes=True, model="hybrid.DeltaNetForCausalLM",
    )  # fmt: skip


_ROWS = (
    Architecture("Qwen3ForCausalLM", qk_norm="heads"),
    Architecture("Qwen2ForCausalLM", qkv_bias=True),
    # Llama 2 and 3.x, SmolLM2, and many others with the same shape.
    Architecture("LlamaForCausalLM", windows="none"),
    Architecture("MistralForCausalLM", windows="all"),
    Architecture("MinistralForCausalLM"),
    Architecture("SmolLM3ForCausalLM", ropes="some"),
    Architecture("Phi3ForCausalLM", windows="all"),
    Architecture("SeedOssForCausalLM", qkv_bias=True, windows="none"),
    Architecture("CwmForCausalLM"),
    Architecture("Olmo2ForCausalLM", qk_norm="projections", norms="after", windows="none"),
    Architecture("Olmo3ForCausalLM", qk_norm="projections", norms="after", scaled_ropes="full_attention"),
    Architecture("Qwen3MoeForCausalLM", qk_norm="heads", has_experts=True, windows="all"),
    Architecture("MixtralForCausalLM", has_experts=True, windows="all"),
    Architecture("GptOssForCausalLM", qkv_bias=True, out_bias=True, has_sinks=True, has_experts=True),
    _hybrid("Qwen3NextForCausalLM", has_experts=True, delta_net="heads"),
    _hybrid("Qwen3_5ForCausalLM", has_experts=False, delta_net="parts"),
    # Of these, the text half is all that is loaded.
    _hybrid("Qwen3_5ForConditionalGeneration", has_experts=False, delta_net="parts"),
    _hybrid("Qwen3_5MoeForCausalLM", has_experts=True, delta_net="parts"),
    _hybrid("Qwen3_5MoeForConditionalGeneration", has_experts=True, delta_net="parts"),
    Architecture("Lfm2ForCausalLM", qk_norm="heads", mixer="short_conv", model="hybrid.Lfm2ForCausalLM"),
    Architecture(
        "Lfm2MoeForCausalLM", qk_norm="heads", has_experts=True, mixer="short_conv", model="hybrid.Lfm2ForCausalLM"
    ),
    Architecture("BambaForCausalLM", mixer="mamba", partial_ropes=True, model="hybrid.MambaForCausalLM"),
    Architecture(
        "GraniteMoeHybridForCausalLM", has_experts=True, mixer="mamba", partial_ropes=True,
        model="hybrid.MambaForCausalLM",
    ),
    Architecture(
        "NemotronHForCausalLM", has_experts=True, ropes="none", mixer="mamba", has_single_blocks=True,
        model="hybrid.NemotronHForCausalLM",
    ),
    Architecture("FalconH1ForCausalLM", mixer="mamba", model="hybrid.FalconH1ForCausalLM"),
)  # fmt: skip
MODELS = {row.name: row for row in _ROWS}
TRANSFORMERS = Architecture("transformers", model="transformers.TransformersForCausalLM")
"""Any architecture that transformers implements; see `models/transformers.py`."""
_LEAST_TRANSFORMERS = (4, 56)
"""Oldest transformers version whose code can run models."""
_MAX_POSITION = 2**20
"""Default for configs without a limit."""
_MAX_HEAD_DIM = 512
SWIGLU_LIMIT, SWIGLU_ALPHA = 7.0, 1.702
"""Of gpt-oss: the largest gate and up, and the slope of the gate's sigmoid."""
_STATE_SIZES = (16, 32, 64, 128, 256)
_LINEAR = {
    "delta_net": {"linear_attention"}, "short_conv": {"conv"}, "mamba": {"linear_attention", "hybrid"},
}  # fmt: skip
"""Mixers -> types of layers with them, by transformers' names; a hybrid one attends, too."""
_ATTENDING = {"full_attention", "sliding_attention", "hybrid"}
_DTYPES = ("float32", "bfloat16", "float16")
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class LayerConfig:
    """Differences of one layer from others.

    Attributes:
        window: tokens that a query sees, its own included; None for all.
        rope: the rotation of queries and keys; None for no rotation.
        has_experts: whether the MLP is a mixture of experts.
        is_linear: whether it has the architecture's `mixer`, and so a state.
        attends: whether it has attention; next to a mixer both take the same input, and their outputs are added up. A
            layer with neither is an MLP alone, in a model of single blocks.
    """

    window: int | None = None
    rope: RopeConfig | None = None
    has_experts: bool = False
    is_linear: bool = False
    attends: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """The hyperparameters of a decoder.

    Attributes:
        intermediate_size: of MLPs; 0 for a model of mixtures alone whose config has none.
        experts: None for a model without experts.
        delta_net: None for a model without gated delta nets.
        short_conv_width: tokens that a filter sees; None for a model without short convolutions.
        mamba: None for a model without Mamba-2.
        quantization: None if all weights are stored in the dtype of the activations.
        multipliers: of models that have some.
        max_position: in tokens.
        has_head: whether logits can be computed; a model without an LM head only makes embeddings.
        hf: the config of a model that transformers' code runs; None for a native model.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position: int
    initializer_range: float
    dtype: str
    eos_token_ids: frozenset[int]
    experts: ExpertsConfig | None = None
    delta_net: DeltaNetConfig | None = None
    short_conv_width: int | None = None
    mamba: MambaConfig | None = None
    multipliers: Multipliers | None = None
    quantization: QuantizationConfig | None = None
    has_head: bool = True
    hf: Any = None

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @classmethod
    def from_folder(cls, path: str, trust_remote_code: bool = False, model_impl: ModelImpl = "native") -> ModelConfig:
        """Read `config.json` and `generation_config.json`; `model_impl`: see `Config`.

        ValueError if the config is missing, unreadable, or has a value that is not supported.
        """
        if not os.path.isfile(file := os.path.join(path, "config.json")):
            raise ValueError(not_in(path, "config.json", os.listdir(path)))
        # transformers rejects a value that is not an object without naming it.
        if not isinstance(stored := read_json(file).get("quantization_config"), dict | None):
            raise ValueError(f"quantization_config={stored!r:.400} in {file!r} must be an object")
        # Imported here because it takes seconds, and ranks other than 0 do not need it.
        from transformers import AutoConfig  # noqa: PLC0415

        try:
            hf = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:  # each version of transformers has its own ways to refuse a config
            if not trust_remote_code:
                refuse_remote_code(path, "config.json", "AutoConfig")
            raise ValueError(f"config.json in {path!r} is not supported: {error}") from error
        older = os.path.join(path, "hf_quant_config.json")
        if stored is None and os.path.isfile(older):
            hf.quantization_config = modelopt_config(read_json(older))
        # Chat models have more EOS ids in this file than the tokenizer's one.
        generation = os.path.join(path, "generation_config.json")
        eos_token_ids = _as_ids(read_json(generation).get("eos_token_id")) if os.path.isfile(generation) else []
        # Reject unsupported values here, since "auto" leaves non-native models to transformers.
        _quantization(hf)
        if model_impl == "native" or (model_impl == "auto" and _is_native(hf)):
            return cls.from_hf(hf, eos_token_ids)
        if not trust_remote_code and transformers_class(hf) is None:
            refuse_remote_code(path, "config.json", "AutoModelForCausalLM")
        return cls.for_transformers(hf, eos_token_ids)

    @classmethod
    def from_hf(cls, hf: Any, eos_token_ids: Iterable[int] = ()) -> ModelConfig:
        """Convert a transformers config; `eos_token_ids` are added to its own."""
        architecture, whole, hf = _architecture(hf), hf, hf.get_text_config()
        _check_supported(hf, architecture)
        layers = _layers(hf, architecture)
        short_conv, mamba = architecture.mixer == "short_conv", architecture.mixer == "mamba"
        multipliers = Multipliers.from_hf(hf) if mamba and hasattr(hf, "embedding_multiplier") else None
        return cls(
            architecture=architecture,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            intermediate_size=_intermediate_size(hf, has_mlp=not all(layer.has_experts for layer in layers)),
            layers=layers,
            num_heads=hf.num_attention_heads,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=_head_dim(hf),
            rms_norm_eps=_norm_eps(hf) / (1.0 if multipliers is None else multipliers.residual**2),
            tie_word_embeddings=bool(whole.tie_word_embeddings),
            max_position=yarn_length(hf, hf.max_position_embeddings),
            initializer_range=hf.initializer_range,
            dtype=_dtype(hf, whole),
            eos_token_ids=frozenset(eos_token_ids).union(
                *(_as_ids(getattr(config, "eos_token_id", None)) for config in (hf, whole))
            ),
            experts=ExpertsConfig.from_hf(hf) if _has_experts(hf, architecture) else None,
            delta_net=DeltaNetConfig.from_hf(hf) if architecture.delta_net is not None else None,
            short_conv_width=check_int("conv_L_cache", hf.conv_L_cache, 1) if short_conv else None,
            mamba=MambaConfig.from_hf(hf) if mamba and any(layer.is_linear for layer in layers) else None,
            multipliers=multipliers,
            quantization=_quantization(whole),
        )

    def with_expert_parallel(self) -> ModelConfig:
        """Return the config with whole experts on each rank; without experts a ValueError."""
        if self.experts is None:
            raise ValueError("enable_expert_parallel=True: the model has no mixtures of experts that run natively")
        return replace(self, experts=replace(self.experts, is_parallel=True))

    @property
    def has_tied_head(self) -> bool:
        """Whether the LM head is the embedding."""
        if self.hf is None:
            return self.tie_word_embeddings
        return bool(getattr(self.hf.get_text_config(), "tie_word_embeddings", False))

    def without_head(self) -> ModelConfig:
        """Return the config of the same model without an LM head, whose place the embedding takes."""
        hf = copy.deepcopy(self.hf)
        if hf is not None:
            hf.tie_word_embeddings = hf.get_text_config().tie_word_embeddings = True
        return replace(self, has_head=False, tie_word_embeddings=True, hf=hf)

    def with_quantization(self, quantization: Quantization) -> ModelConfig:
        """Return the config of the same model with its linear layers and experts stored in `quantization`.

        ValueError if they are already stored in another format, or cannot be converted.
        """
        if self.hf is not None:
            raise ValueError(f"quantization={quantization!r} is not supported for models that transformers' code runs")
        if self.quantization is not None:
            stored = "fp8" if self.quantization.four_bits is None else "int4"
            if stored != quantization:
                raise ValueError(f"quantization={quantization!r}: the checkpoint is quantised already, otherwise")
            # The checkpoint's own format.
            return self
        four_bits = FourBits() if quantization == "int4" else None
        return replace(self, quantization=QuantizationConfig("channel", four_bits=four_bits))

    @classmethod
    def for_transformers(cls, hf: Any, eos_token_ids: Iterable[int] = ()) -> ModelConfig:
        """Extract the sizes that the engine needs from the config of a model that transformers' code runs.

        The layers' types are found at loading. `eos_token_ids` are added to the config's own.
        """
        import transformers  # noqa: PLC0415

        if tuple(map(int, transformers.__version__.split(".")[:2])) < _LEAST_TRANSFORMERS:
            least = ".".join(map(str, _LEAST_TRANSFORMERS))
            found = transformers.__version__
            raise ValueError(f"a model that transformers' code runs needs transformers {least} or newer, not {found}")
        if (quantization := getattr(hf, "quantization_config", None)) is not None:
            raise ValueError(f"quantization_config={quantization!r} is not supported where transformers' code runs")
        text = hf.get_text_config()
        # By the names that most configs use.
        values = text.to_dict()
        values |= {usual: values[name] for usual, name in text.attribute_map.items() if name in values}
        if values.get("num_hidden_layers") is None:
            values["num_hidden_layers"] = getattr(text, "num_hidden_layers", None)
        values.setdefault("max_position_embeddings", _MAX_POSITION)
        names = "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"
        num_layers, hidden_size, vocab_size, max_position = (check_int(name, values.get(name), 1) for name in names)
        num_heads = values.get("num_attention_heads")
        num_heads = num_heads if isinstance(num_heads, int) and num_heads > 0 else 1
        num_kv_heads = values.get("num_key_value_heads")
        return cls(
            architecture=TRANSFORMERS,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=hidden_size,
            layers=(LayerConfig(),) * num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads if isinstance(num_kv_heads, int) and 0 < num_kv_heads < num_heads else num_heads,
            head_dim=hidden_size // num_heads,
            rms_norm_eps=0.0,
            tie_word_embeddings=False,
            max_position=yarn_length(text, max_position),
            initializer_range=0.0,
            dtype=_dtype(text, hf),
            eos_token_ids=frozenset(eos_token_ids) | frozenset(_as_ids(values.get("eos_token_id"))),
            hf=hf,
        )


def transformers_class(hf: Any) -> str | None:
    """Return the name of transformers' own class for a config's architecture, if it has one."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    name = (getattr(hf, "architectures", None) or [""])[0]
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # Decoders without a head are published under the name of the trunk.
    if not name or name == modeling_auto.MODEL_MAPPING_NAMES.get(hf.model_type):
        name = causal.get(hf.model_type, name)
    known = {*causal.values(), *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    return name if name in known else None


def _is_native(hf: Any) -> bool:
    """Whether an architecture in the table matches a config; a value wrong for either is a ValueError."""
    try:
        ModelConfig.from_hf(hf)
    except UnsupportedError:
        return False
    return True


def _quantization(hf: Any) -> QuantizationConfig | None:
    return QuantizationConfig.from_hf(hf) or QuantizationConfig.from_hf(hf.get_text_config())


def _architecture(hf: Any) -> Architecture:
    name = (getattr(hf, "architectures", None) or [type(hf).__name__.replace("Config", "ForCausalLM")])[0]
    # Decoders without a head are published under the name of the trunk; early Llamas have another spelling.
    other = f"{name.removesuffix('Model')}ForCausalLM".replace("ForCausalLMForCausalLM", "ForCausalLM")
    other = other.replace("LLaMA", "Llama")
    if name not in MODELS and other not in MODELS:
        raise UnsupportedError(f"architecture {name!r} is not supported: only {', '.join(MODELS)}")
    return MODELS.get(name) or MODELS[other]


def _check_supported(hf: Any, architecture: Architecture) -> None:
    for name in _SIZES:
        check_int(name, getattr(hf, name, None), 1)
    if hf.num_attention_heads % hf.num_key_value_heads:
        heads, kv_heads = hf.num_attention_heads, hf.num_key_value_heads
        raise ValueError(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    kinds = {"full_attention"} | ({"sliding_attention"} if architecture.mixer is None else _LINEAR[architecture.mixer])
    name, act = ("mlp_hidden_act", "relu2") if architecture.has_single_blocks else ("hidden_act", "silu")
    kinds |= {"mlp", "moe"} if architecture.has_single_blocks else set()
    hidden_act = getattr(hf, name, act)
    unsupported = {
        name: hidden_act != act and hidden_act,
        "conv_bias": architecture.mixer == "short_conv" and hf.conv_bias,
        "mamba_proj_bias": getattr(hf, "mamba_proj_bias", False),
        "projectors_bias": getattr(hf, "projectors_bias", False),
        "mamba_norm_before_gate": getattr(hf, "mamba_rms_norm", False) and hf.mamba_norm_before_gate,
        "use_bias": architecture.has_single_blocks and hf.use_bias,
        # Experts are chosen among all, not first among groups.
        "n_group": getattr(hf, "n_group", 1) != 1 and hf.n_group,
        "attention_bias": not architecture.qkv_bias and getattr(hf, "attention_bias", False),
        "attention_out_bias": getattr(hf, "attention_out_bias", False),
        "mlp_bias": getattr(hf, "mlp_bias", False),
        "layer_types": set(getattr(hf, "layer_types", None) or []) - kinds,
    }
    for name, value in unsupported.items():
        if value:
            raise UnsupportedError(f"{name}={value!r} is not supported")


def _head_dim(hf: Any) -> int:
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if head_dim % 16 or not 0 < head_dim <= _MAX_HEAD_DIM:
        raise UnsupportedError(f"head_dim={head_dim} is not supported: only multiples of 16 up to {_MAX_HEAD_DIM}")
    return int(head_dim)


def _dtype(*configs: Any) -> str:
    """Return the dtype in the first config that has one."""
    # Newer versions warn of the old name, which is looked at only if there is no other.
    given = (getattr(config, key, None) for config in configs for key in ("dtype", "torch_dtype"))
    name = str(next(filter(None, given), "float32")).rsplit(".", maxsplit=1)[-1]
    if name not in _DTYPES:
        raise ValueError(f"the checkpoint's dtype {name!r} is not supported: only {_DTYPES}")
    return name


def _kinds(hf: Any, architecture: Architecture, count: int) -> list[str]:
    if architecture.windows != "some":
        has_window = architecture.windows == "all" and getattr(hf, "sliding_window", None) is not None
        return ["sliding_attention" if has_window else "full_attention"] * count
    first = getattr(hf, "max_window_layers", 0) if getattr(hf, "use_sliding_window", False) else count
    made = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    return list(getattr(hf, "layer_types", None) or made)


def _layers(hf: Any, architecture: Architecture) -> tuple[LayerConfig, ...]:
    count, window = hf.num_hidden_layers, getattr(hf, "sliding_window", None)
    kinds = _kinds(hf, architecture, count)
    rotating = (getattr(hf, "no_rope_layers", None) if architecture.ropes == "some" else None) or [1] * count
    if len(kinds) != count or len(rotating) != count:
        raise ValueError(f"layer_types={kinds!r:.80} or no_rope_layers={rotating!r:.80} do not have {count} entries")
    if "sliding_attention" in kinds:
        check_int("sliding_window", window, 1)
    ropes = {
        kind: read_rope(hf, kind if architecture.scaled_ropes != "all" else None, architecture.partial_ropes)
        for kind in set(kinds) & _ATTENDING
    }
    # Granite's may have no rotary embedding.
    has_rope = not (architecture.mixer == "mamba" and getattr(hf, "position_embedding_type", "rope") != "rope")
    if not has_rope or architecture.ropes == "none":
        rotating = [0] * count
    experts = [_has_experts(hf, architecture) and is_sparse(hf, i) for i in range(count)]
    if architecture.has_single_blocks:
        experts = [kind == "moe" for kind in kinds]
    return tuple(
        LayerConfig(
            window if kind == "sliding_attention" else None,
            ropes.get(kind) if rotates else None,
            has_experts,
            any(kind in linear for linear in _LINEAR.values()),
            kind in _ATTENDING,
        )
        for kind, rotates, has_experts in zip(kinds, rotating, experts, strict=True)
    )


def _intermediate_size(hf: Any, has_mlp: bool) -> int:
    name = "shared_intermediate_size" if hasattr(hf, "shared_intermediate_size") else "intermediate_size"
    size = check_int(name, getattr(hf, name, None if has_mlp else 0), int(has_mlp))
    if not getattr(hf, "block_auto_adjust_ff_dim", False):
        return size
    # LFM2's are about two thirds of what its config has.
    size = int((hf.block_ffn_dim_multiplier or 1) * int(2 * size / 3))
    return -(-size // hf.block_multiple_of) * int(hf.block_multiple_of)


def _norm_eps(hf: Any) -> float:
    names = {"lfm2": "norm_eps", "lfm2_moe": "norm_eps", "nemotron_h": "layer_norm_epsilon"}
    return float(getattr(hf, names.get(hf.model_type, "rms_norm_eps")))


def _has_experts(hf: Any, architecture: Architecture) -> bool:
    """Return whether a model has mixtures; Granite's smallest ones have none, nor have most of Nemotron-H's."""
    if architecture.has_single_blocks:
        return "moe" in hf.layer_types
    return architecture.has_experts and not (architecture.mixer == "mamba" and hf.num_local_experts == 0)


def _as_ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    # -1 means no token.
    return [token for token in (check_int("eos_token_id", token, -1) for token in values) if token >= 0]


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
        num_experts: in each layer that has experts.
        top_k: experts that compute a token.
        intermediate_size: of one expert.
        renormalize: whether the probabilities of a token's experts are divided by their sum.
        is_parallel: whether ranks hold whole experts, instead of a slice of every one.
        shared_size: of the expert that computes every token; 0: there is none.
        gates_shared: whether that expert is scaled by a gate of its own.
        sigmoid: how sigmoids of logits become a token's weights; None: a softmax does.
        has_biases: whether the router and the experts have biases.
        alternates: whether a checkpoint's gates and ups are stacked alternately, and transposed but in four bits.
        activation: see `kernels.moe.activation`.
        latent_size: of what experts take and return, projections of hidden states; None: hidden states.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    is_parallel: bool = False
    shared_size: int = 0
    gates_shared: bool = True
    sigmoid: SigmoidRouting | None = None
    has_biases: bool = False
    alternates: bool = False
    activation: Literal["silu", "relu2", "clamped"] = "silu"
    latent_size: int | None = None

    @classmethod
    def from_hf(cls, hf: Any) -> ExpertsConfig:
        """Convert a transformers config; ValueError for a size, an `UnsupportedError` if there are no experts."""
        num_experts = check_int("num_experts", getattr(hf, "num_local_experts", getattr(hf, "num_experts", None)), 0)
        if num_experts == 0:
            # transformers' code of some families treats that as a model without mixtures.
            raise UnsupportedError("num_experts=0 is not supported")
        size = getattr(hf, "moe_intermediate_size", None) or getattr(hf, "intermediate_size", None)
        is_oss = hf.model_type == "gpt_oss"
        for name, value in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
            if (found := getattr(hf, name, value)) != value:
                raise UnsupportedError(f"{name}={found!r} is not supported: only {value}")
        names = "shared_intermediate_size", "moe_shared_expert_intermediate_size"
        plain = next(filter(None, (getattr(hf, name, None) for name in names)), None)
        shared = plain or getattr(hf, "shared_expert_intermediate_size", None) or 0
        return cls(
            num_experts=num_experts,
            top_k=check_int("num_experts_per_tok", hf.num_experts_per_tok, 1, num_experts),
            intermediate_size=check_int("moe_intermediate_size", size, 1),
            # By default the softmax is over the selected experts.
            renormalize=bool(getattr(hf, "norm_topk_prob", True)),
            shared_size=check_int("shared_expert_intermediate_size", shared, 0),
            gates_shared=plain is None,
            sigmoid=SigmoidRouting.from_hf(hf) if hf.model_type in ("lfm2_moe", "nemotron_h") else None,
            has_biases=is_oss,
            alternates=is_oss,
            activation="clamped" if is_oss else "relu2" if getattr(hf, "mlp_hidden_act", None) == "relu2" else "silu",
            latent_size=getattr(hf, "moe_latent_size", None),
        )


@dataclass(frozen=True)
class SigmoidRouting:
    """Weights of a token's experts that are sigmoids of the router's logits (DeepSeek-V3, arXiv:2412.19437).

    Attributes:
        has_bias: whether a number for each expert is added to its sigmoid when experts are chosen.
        eps: added to the sum that weights are divided by, if they are.
        factor: of the weights.
        is_exact: whether logits are not rounded to the model's dtype.
    """

    has_bias: bool
    eps: float
    factor: float
    is_exact: bool

    @classmethod
    def from_hf(cls, hf: Any) -> SigmoidRouting:
        """Convert a transformers config."""
        factor = float(hf.routed_scaling_factor)
        if hf.model_type == "lfm2_moe":
            return cls(bool(hf.use_expert_bias), 1e-6, factor, is_exact=False)
        return cls(True, 1e-20, factor, is_exact=True)


@dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of a gated delta net (Yang et al. 2024, arXiv:2412.06464).

    Attributes:
        num_key_heads, num_value_heads: heads of queries and keys, and of values; each of the first serves a group of
            consecutive ones of the second.
        key_size, value_size: elements of a head.
        conv_width: tokens that a filter of the convolution sees.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    conv_width: int

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @classmethod
    def from_hf(cls, hf: Any) -> DeltaNetConfig:
        """Convert a transformers config; ValueError if a size is missing, or not supported."""
        names = (
            "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
            "linear_conv_kernel_dim",
        )  # fmt: skip
        key_heads, value_heads, *sizes, width = (check_int(name, getattr(hf, name, None), 1) for name in names)
        if value_heads % key_heads:
            raise ValueError(f"linear_num_value_heads={value_heads} is no multiple of linear_num_key_heads={key_heads}")
        for name, size in zip(names[2:], sizes, strict=False):
            if size not in _STATE_SIZES:
                raise UnsupportedError(f"{name}={size} is not supported: only {_STATE_SIZES}")
        return cls(key_heads, value_heads, sizes[0], sizes[1], width)


@dataclass(frozen=True)
class MambaConfig:
    """Sizes of a Mamba-2 mixer (Dao and Gu 2024, arXiv:2405.21060).

    Attributes:
        num_heads, head_size: heads of inputs.
        num_groups: of consecutive heads that share keys and queries, of `state_size` elements.
        conv_width: tokens that a filter of the convolution sees.
        has_conv_bias: whether the convolution has a bias.
        step_limits: least and largest step size.
        norm_eps: of the output's norm.
        has_norm: whether there is one.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_width: int
    has_conv_bias: bool
    step_limits: tuple[float, float]
    norm_eps: float
    has_norm: bool = True

    @classmethod
    def from_hf(cls, hf: Any) -> MambaConfig:
        """Convert a transformers config; ValueError if a size is missing, or not supported."""
        names = ["mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_conv_bias"]
        if hasattr(hf, "ssm_state_size"):
            names = ["mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias"]
        has_bias = bool(getattr(hf, names.pop()))
        heads, head_size, groups, state_size, width = (check_int(name, getattr(hf, name, None), 1) for name in names)
        if heads % groups:
            raise ValueError(f"{names[0]}={heads} is no multiple of {names[2]}={groups}")
        if head_size % 16:
            raise UnsupportedError(f"{names[1]}={head_size} is not supported: only multiples of 16")
        if state_size not in _STATE_SIZES:
            raise UnsupportedError(f"{names[3]}={state_size} is not supported: only {_STATE_SIZES}")
        least, most = hf.time_step_limit or (0.0, math.inf)
        return cls(
            heads, head_size, groups, state_size, width, has_bias, (float(least), float(most)), _norm_eps(hf),
            bool(getattr(hf, "mamba_rms_norm", True)),
        )  # fmt: skip


@dataclass(frozen=True)
class Multipliers:
    """Constant factors of Granite's models, and of Falcon-H1's, which has others for each projection.

    Granite's residual stream is kept divided by the factor of the branches that are added to it, since norms of it,
    with an epsilon divided by the factor's square, are the same.

    Attributes:
        embedding: of embeddings, divided by `residual`.
        residual: of branches.
        attention: of the scores of queries and keys, instead of the root of their size.
        logits: what logits are divided by.
        weights: of stored weights, by the last two names of the module and the part of its weight.
    """

    embedding: float
    residual: float
    attention: float
    logits: float
    weights: Mapping[tuple[str, str | None], float] = field(default_factory=dict)

    @classmethod
    def from_hf(cls, hf: Any) -> Multipliers:
        """Convert a transformers config."""
        if hf.model_type != "falcon_h1":
            residual = hf.residual_multiplier
            return cls(hf.embedding_multiplier / residual, residual, hf.attention_multiplier, hf.logits_scaling)
        # Queries, keys and values have the factor of their input.
        values = hf.attention_in_multiplier
        gate, down = hf.mlp_multipliers
        parts = zip(("z", "x", "b", "c", "dt"), hf.ssm_multipliers, strict=True)
        weights: dict[tuple[str, str | None], float] = {
            **{("mamba.in_proj", part): hf.ssm_in_multiplier * factor for part, factor in parts},
            ("mamba.o_proj", None): hf.ssm_out_multiplier,
            ("attention.o_proj", None): hf.attention_out_multiplier * values,
            ("mlp.gate_up_proj", "gate"): gate, ("mlp.down_proj", None): down,
        }  # fmt: skip
        scale = _head_dim(hf) ** -0.5 * hf.key_multiplier * values**2
        return cls(hf.embedding_multiplier, 1.0, scale, 1 / hf.lm_head_multiplier, weights)


def is_sparse(hf: Any, layer: int) -> bool:
    """Return whether a layer has experts, in a model with some."""
    if (num_dense := getattr(hf, "num_dense_layers", None)) is not None:
        return bool(layer >= num_dense)
    step = check_int("decoder_sparse_step", getattr(hf, "decoder_sparse_step", 1), 1)
    return layer not in (getattr(hf, "mlp_only_layers", None) or []) and (layer + 1) % step == 0


_POOLINGS: dict[str, Pooling] = {
    "lasttoken": "last", "mean": "mean", "mean_tokens": "mean",
    # The sum divided by the root of its length: after normalisation, as here, it equals the mean.
    "mean_sqrt_len_tokens": "mean",
}  # fmt: skip
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")


def folder_pooling(folder: str) -> Pooling:
    """Return the pooling of a folder's own modules, "last" without any; others than the known are a ValueError."""
    pooling: Pooling = "last"
    path = os.path.join(folder, "modules.json")
    for module in read_json_list(path) if os.path.isfile(path) else []:
        kind = str(module.get("type")).rsplit(".", maxsplit=1)[-1]
        if kind not in _KNOWN_MODULES:
            raise ValueError(f"{path!r} has a module {kind!r}, which is not supported: pass `pooling` to leave it out")
        if kind == "Pooling":
            pooling = _module_pooling(os.path.join(folder, str(module.get("path")), "config.json"))
    return pooling


def _module_pooling(path: str) -> Pooling:
    config = read_json(path)
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True]
    # Newer versions give it by name.
    named = config.get("pooling_mode", [])
    modes += [named] if isinstance(named, str) else named
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(f"{path!r} asks for pooling {', '.join(modes)!r}: pass `pooling`, which is 'last' or 'mean'")
    return _POOLINGS[modes[0]]
