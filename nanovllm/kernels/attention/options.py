"""A layer's attention: window, softcap and sinks, and the buffers of its outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from nanovllm.kernels._triton import converts_e4m3, triton
from nanovllm.kernels.attention.online_softmax import LOG2E
from nanovllm.kernels.linear.quantize_rows import Fp8Rows

MAX_HEAD_SIZE = 512
"""Most elements of a key and of a value: of more, no tile of one fits."""


@dataclass(frozen=True)
class AttentionOptions:
    """Changes to a layer's scores besides their scale.

    Attributes:
        window: tokens that a query sees, its own included (sliding window attention); None for all.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118); None for none.
        sinks: [num_heads]; the score of a key without a value that every query of a head sees (gpt-oss,
            arXiv:2508.10925); None for none.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is plain causal attention."""
        return self.window is None and self.softcap is None and self.sinks is None

    def score_scales(self, scale: float) -> tuple[float | None, float]:
        """Return the factor of the scores before the tanh, None without one, and of a softmax of base 2."""
        return (None, scale * LOG2E) if self.softcap is None else (scale / self.softcap, self.softcap * LOG2E)


PLAIN = AttentionOptions()


def padded_size(size: int) -> int:
    """Return the elements to which kernels pad a key or a value: a power of two, and at least what a product takes."""
    return max(16, triton.next_power_of_2(size))


HeadOutputs: TypeAlias = torch.Tensor | Fp8Rows
"""[num_rows, num_heads, value_size], contiguous; or rows of num_heads * value_size elements, each head a group."""


def rows_of(out: HeadOutputs, rows: slice) -> HeadOutputs:
    """Return some rows of the outputs."""
    return out.part(rows) if isinstance(out, Fp8Rows) else out[rows]


def pointer(out: HeadOutputs) -> torch.Tensor:
    """Return the outputs as kernels take them, e4m3 as uint8."""
    return out.values.view(torch.uint8) if isinstance(out, Fp8Rows) else out


def scaling(out: HeadOutputs) -> dict[str, Any]:
    """Return where kernels store the scales, as their arguments; none if outputs are not rounded."""
    if not isinstance(out, Fp8Rows):
        return {}
    row_stride, head_stride = out.scales.stride()
    return {
        "out_scale_ptr": out.scales, "out_scale_row_stride": row_stride, "out_scale_head_stride": head_stride,
        "OUT_NATIVE": converts_e4m3(out.scales.device),
    }  # fmt: skip
