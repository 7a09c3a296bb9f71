"""The configuration of mixtures of experts, read from a transformers config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.utils.checks import UnsupportedError, check_int


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
        num_experts: in each layer that has them.
        top_k: experts that compute a token.
        intermediate_size: of one expert.
        renormalize: whether the probabilities of a token's experts are divided by their sum.
        is_parallel: whether ranks hold whole experts, instead of a slice of every one.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    is_parallel: bool = False

    @classmethod
    def from_hf(cls, hf: Any) -> ExpertsConfig:
        """Convert a transformers config.

        Raises:
            ValueError: a size is missing, or out of range; an `UnsupportedError` if there are no experts.
        """
        num_experts = check_int("num_experts", getattr(hf, "num_local_experts", getattr(hf, "num_experts", None)), 0)
        if num_experts == 0:
            # To transformers' code, of some families, that is a model without mixtures.
            raise UnsupportedError("num_experts=0 is not supported")
        size = getattr(hf, "moe_intermediate_size", hf.intermediate_size)
        return cls(
            num_experts=num_experts,
            top_k=check_int("num_experts_per_tok", hf.num_experts_per_tok, 1, num_experts),
            intermediate_size=check_int("moe_intermediate_size", size, 1),
            # Where the config does not say so, the softmax is over the experts that are taken.
            renormalize=bool(getattr(hf, "norm_topk_prob", True)),
        )


def is_sparse(hf: Any, layer: int) -> bool:
    """Return whether a layer has experts, of a model that has any."""
    step = check_int("decoder_sparse_step", getattr(hf, "decoder_sparse_step", 1), 1)
    return layer not in (getattr(hf, "mlp_only_layers", None) or []) and (layer + 1) % step == 0
