"""Masks of the tokens that constraints allow."""

from __future__ import annotations

import numpy as np

from nanovllm.engine.sequence import Sequence, TokenConstraint


def make_masks(seqs: list[Sequence | None], vocab_size: int) -> np.ndarray:
    """Return the tokens that may come next, [num_seqs, ceil(vocab_size / 32)] int32, a bit for each token.

    seqs: those with a constraint; None for one that has just ended, which may sample anything.
    """
    words = np.full((len(seqs), -(-vocab_size // 32)), -1, dtype=np.int32)
    # Constraints of one kind are computed together, by as many threads as their library has.
    kinds: dict[type, list[tuple[TokenConstraint, int]]] = {}
    for row, seq in enumerate(seqs):
        if seq is not None and seq.features.constraint is not None:
            kinds.setdefault(type(seq.features.constraint), []).append((seq.features.constraint, row))
    for constraints in kinds.values():
        constraints[0][0].fill(constraints, words)
    return words
