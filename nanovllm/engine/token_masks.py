"""Masks of the tokens that constraints allow."""

from __future__ import annotations

import numpy as np

from nanovllm.engine.sequence import Sequence, TokenConstraint


def fill_masks(seqs: list[Sequence | None], words: np.ndarray) -> None:
    """Write the tokens that may come next, a bit for each token.

    Args:
        seqs: those with a constraint; None for one that has just ended, which may sample anything.
        words: [num_seqs, ceil(vocab_size / 32)] int32; overwritten.
    """
    # Constraints of one kind are computed together, by as many threads as their library has.
    kinds: dict[type, list[tuple[TokenConstraint, int]]] = {}
    for row, seq in enumerate(seqs):
        if seq is None or seq.features.constraint is None:
            words[row] = -1
        else:
            kinds.setdefault(type(seq.features.constraint), []).append((seq.features.constraint, row))
    for constraints in kinds.values():
        constraints[0][0].fill(constraints, words)
