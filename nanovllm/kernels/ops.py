"""The ops that layers and the sampler call; each op's file is imported when it is first used.

So a layer can be read, and imported, without the kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.kernels._triton import device_limits
    from nanovllm.kernels.gates import add_gated, gate_heads
    from nanovllm.kernels.linear.norm_linear import linear_into, norm_linear
    from nanovllm.kernels.linear.persistent_gemm import persistent_qkv_rope_store
    from nanovllm.kernels.linear.quantize_rows import quantize_rows
    from nanovllm.kernels.logits import LogitsEdits, cutoffs, edit_logits, own_logprobs, token_logprobs
    from nanovllm.kernels.policy import FASTEST
    from nanovllm.kernels.qkv_rope_store import NormRope, qkv_rope_store
    from nanovllm.kernels.rms_norm import Norm, QKNorms, norm_dtype, normalize_qk, rms_norm, sum_squares
    from nanovllm.kernels.sampling import sample

_FILES = {
    "_triton": ("device_limits",),
    "gates": ("add_gated", "gate_heads"),
    "linear.norm_linear": ("linear_into", "norm_linear"),
    "linear.persistent_gemm": ("persistent_qkv_rope_store",),
    "linear.quantize_rows": ("quantize_rows",),
    "logits": ("LogitsEdits", "cutoffs", "edit_logits", "own_logprobs", "token_logprobs"),
    "policy": ("FASTEST",),
    "qkv_rope_store": ("NormRope", "qkv_rope_store"),
    "rms_norm": ("Norm", "QKNorms", "norm_dtype", "normalize_qk", "rms_norm", "sum_squares"),
    "sampling": ("sample",),
}
__all__ = [
    "FASTEST", "LogitsEdits", "Norm", "NormRope", "QKNorms", "add_gated", "cutoffs", "device_limits", "edit_logits",
    "gate_heads", "linear_into", "norm_dtype", "norm_linear", "normalize_qk", "own_logprobs",
    "persistent_qkv_rope_store", "qkv_rope_store", "quantize_rows", "rms_norm", "sample", "sum_squares",
    "token_logprobs",
]  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        for file, names in _FILES.items():
            if name in names:
                # From now on an attribute of this module.
                globals()[name] = found = getattr(import_module(f"nanovllm.kernels.{file}"), name)
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
