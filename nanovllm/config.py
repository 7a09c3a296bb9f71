"""Defines the engine's settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from nanovllm.utils.checks import check_bool, check_int, check_number, strict_keywords

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
AttentionBackendName = Literal["auto", "sdpa", "triton", "flash_attn"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["fp8", "int4"]
KVCacheDtype = Literal["auto", "fp8"]
ModelImpl = Literal["auto", "native", "transformers"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "scaled_logprobs"]
Pooling = Literal["last", "mean"]
SpeculativeMethod = Literal["ngram", "eagle3", "mtp"]
_LEAST = {"kvcache_block_size": 16, "num_kvcache_blocks": -1, "max_logprobs": -1} | dict.fromkeys(
    ("tensor_parallel_size", "data_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"), 1
)
_MOST = {"num_speculative_tokens": 15, "prompt_lookup_min": 5, "prompt_lookup_max": 5}


@strict_keywords
@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculation: how tokens are drafted, for a step to verify.

    Attributes:
        method: "ngram" drafts the tokens that followed the longest match of the newest tokens, in prompt and output;
            "eagle3" with the EAGLE-3 head in `model`, "mtp" with the model's own head.
        num_speculative_tokens: maximum drafts of a row in a step, 1 to 15.
        prompt_lookup_min, prompt_lookup_max: tokens of a match, 1 to 5; of "ngram".
        model: folder or Hub id of the head; of "eagle3" alone.

    Raises:
        ValueError: a value is unknown or out of range, or a keyword is unknown.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    model: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        known = get_args(SpeculativeMethod)
        if self.method not in known:
            raise ValueError(f"method of speculative_config must be one of {', '.join(known)}, not {self.method!r}")
        if (self.method == "eagle3") != isinstance(self.model, str | os.PathLike):
            raise ValueError(
                "method 'eagle3' of speculative_config needs model, the folder or Hub id of a head, and other methods "
                f"take none: method={self.method!r}, model={self.model!r:.80}"
            )
        for name, high in _MOST.items():
            object.__setattr__(self, name, check_int(f"{name} of speculative_config", getattr(self, name), 1, high))
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min={shortest} must be at most prompt_lookup_max={longest}")


@strict_keywords
@dataclass(frozen=True)
class Config:
    """Settings of one engine. Values are checked here; limits that depend on the model are checked at loading.

    Attributes:
        model: a folder in the Hub's layout, local or opened by fsspec (`s3://bucket/model`, whose weights are copied to
            `~/.cache/nanovllm`); a GGUF file; or a Hub id, which is downloaded unless `HF_HUB_OFFLINE=1` is set.
        tokenizer: folder or Hub id of a tokenizer to use instead of the model's.
        device: "cpu", "cuda", or "cuda:N", the first GPU if there are several ranks; "auto" is CUDA if there is a GPU.
        dtype: "float32", "bfloat16" or "float16"; "auto" is the checkpoint's on CUDA, and float32 on the CPU. Weights
            stored in another of these dtypes are converted.
        tensor_parallel_size: number of ranks that share the model, each with its own GPU, or all on the CPU; at most
            the number of attention heads.
        data_parallel_size: number of engines with the same model, in separate processes, which share the requests; each
            has `tensor_parallel_size` GPUs of its own, or all are on the CPU.
        enable_expert_parallel: give each rank whole experts of a mixture, instead of a slice of every expert.
        max_model_len: maximum tokens of one request, prompt and output together; capped by the model's own limit. A
            prompt of exactly this length still gets one token.
        max_num_seqs: maximum sequences running at once.
        max_num_batched_tokens: maximum tokens in one step, decode and prompt tokens together; may be below
            `max_num_seqs`.
        gpu_memory_utilization: share of the GPU's memory that the engine may use, in (0, 1].
        enforce_eager: launch kernels one by one instead of replaying CUDA graphs.
        kvcache_block_size: tokens in a cache block, a multiple of 16.
        kv_cache_dtype: "fp8" stores keys and values in e4m3, which doubles the tokens in the same memory, with the
            checkpoint's scales, or 1 without any; "auto" stores them in `dtype`.
        num_kvcache_blocks: blocks in the cache; -1 uses the remaining GPU memory, or on the CPU a tenth of the free
            memory, at most 1 GiB. If only some layers have sliding windows, each kind of layer gets this number.
        swap_space: GiB of host memory for evicted cache blocks, of keys or states, for all ranks of an engine together.
            With it, layers with sliding windows keep the same blocks as layers without.
        enable_prefix_caching: share the cache blocks of equal prefixes.
        attention_backend: "triton" (heads of up to 512 elements), "flash_attn" (block size a multiple of 256, no
            float32) or "sdpa" (needs no Triton); "auto" is "triton" on CUDA and "sdpa" on the CPU.
        load_format: "auto" reads safetensors; "dummy" draws seeded random weights, and needs only a `config.json`.
        quantization: while loading "fp8" rounds linear layers and experts to e4m3, with a scale for each output, and
            "int4" to four bits, with one for 128 inputs; quantised checkpoints need no value.
        model_impl: "native" runs this library's own model code, "transformers" runs transformers' code with this
            library's attention and cache; "auto" prefers native code.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: run the code that the model's config or tokenizer names (`auto_map`). Without it,
            transformers' own code runs, and a model that transformers lacks is refused.
        logprobs_mode: "raw_logprobs" are of the model's logits; "processed_logprobs" of the sampled distribution, after
            masks, penalties, temperature and truncation; "scaled_logprobs" as trainers compute them, without truncation
            and without masks of grammars and `min_tokens`.
        max_logprobs: maximum log-probabilities that a request may ask for at each position; -1 allows the whole
            vocabulary.
        seed: seed of dummy weights (0 if None), and of requests without their own seed (random if None).
        speculative_config: draft tokens and verify several in one step, which changes no output beyond rounding. A
            mapping with the attributes of `SpeculativeConfig`: `method` ("ngram", "eagle3" or "mtp"),
            `num_speculative_tokens`, and `model` of a head, or `prompt_lookup_min` and `prompt_lookup_max`.

    Raises:
        ValueError: a value is out of range, or a keyword is unknown.
    """

    model: str
    tokenizer: str | None = None
    device: str = "auto"
    dtype: Dtype = "auto"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    max_model_len: int = 4096
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 16384
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    kvcache_block_size: int = 256
    kv_cache_dtype: KVCacheDtype = "auto"
    num_kvcache_blocks: int = -1
    swap_space: float = 0.0
    enable_prefix_caching: bool = True
    attention_backend: AttentionBackendName = "auto"
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    model_impl: ModelImpl = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_logprobs: int = 20
    seed: int | None = None
    speculative_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, low in _LEAST.items():
            object.__setattr__(self, name, check_int(name, getattr(self, name), low))
        for name, kind in get_type_hints(type(self)).items():
            if kind is bool:
                check_bool(name, getattr(self, name))
            elif get_origin(kind) is Literal and getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        if self.kvcache_block_size % 16:
            raise ValueError(f"kvcache_block_size must be a positive multiple of 16, not {self.kvcache_block_size}")
        if self.num_kvcache_blocks == 0:
            raise ValueError("num_kvcache_blocks must be at least 1, or -1, not 0")
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, above=True)
        check_number("swap_space", self.swap_space, 0)
        if self.swap_space and not self.enable_prefix_caching:
            raise ValueError(f"swap_space={self.swap_space} needs enable_prefix_caching=True")
        if self.seed is not None:
            object.__setattr__(self, "seed", check_int("seed", self.seed, 0, 2**64 - 1))
        if not isinstance(self.device, str):
            raise ValueError(f"device must be a string such as 'cuda:0', not {self.device!r}")
        if self.tokenizer is not None and not isinstance(self.tokenizer, str | os.PathLike):
            raise ValueError(f"tokenizer must be a folder or a Hub id, not {self.tokenizer!r}")
        if self.kv_cache_dtype == "fp8" and self.attention_backend == "flash_attn":
            raise ValueError("attention_backend='flash_attn' does not support kv_cache_dtype='fp8'")
        if self.quantization not in (None, *get_args(Quantization)):
            raise ValueError(f"quantization must be None, 'fp8' or 'int4', not {self.quantization!r}")
        speculation: Any = self.speculative_config
        if isinstance(speculation, Mapping):
            # The caller may change its mapping, or have one that does not pickle.
            given = {"method": None, "num_speculative_tokens": None} | {str(k): v for k, v in speculation.items()}
            object.__setattr__(self, "speculative_config", speculation := SpeculativeConfig(**given))
        if not isinstance(speculation, SpeculativeConfig | None):
            example = {"method": "ngram", "num_speculative_tokens": 4}
            raise ValueError(f"speculative_config must be a mapping such as {example}, not {speculation!r:.80}")

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The settings in `speculative_config`; None: no speculation."""
        return cast("SpeculativeConfig | None", self.speculative_config)

    @property
    def num_drafts(self) -> int:
        """Maximum drafts of a row in a step; 0 without speculation."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def max_num_running(self) -> int:
        """Maximum running sequences such that one token of each fits the step's token budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def most_logprobs(self, vocab_size: int) -> int:
        """Return the maximum log-probabilities at a position, for a model with this vocabulary."""
        return vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, vocab_size)
