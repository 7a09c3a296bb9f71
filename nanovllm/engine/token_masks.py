"""Masks of the tokens that constraints allow."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanovllm.engine.sequence import Sequence, TokenConstraint


def fill_masks(seqs: list[Sequence | None], words: np.ndarray) -> None:
    """Write the tokens that may come next, a bit for each token.

    Args:
        seqs: those with a constraint; None for one that has just ended, which may sample anything.
        words: [num_seqs, ceil(vocab_size / 32)] int32; overwritten.
    """
    constrained: list[tuple[TokenConstraint, int]] = []
    for row, seq in enumerate(seqs):
        if seq is None or seq.features.constraint is None:
            words[row] = -1
        else:
            constrained.append((seq.features.constraint, row))
    fill_rows(constrained, words)


def fill_rows(constraints: Iterable[tuple[TokenConstraint, int]], words: np.ndarray) -> None:
    """Write the masks of constraints, each with its row; those of one kind are computed together, in threads."""
    kinds: dict[type, list[tuple[TokenConstraint, int]]] = {}
    for constraint, row in constraints:
        kinds.setdefault(type(constraint), []).append((constraint, row))
    for same in kinds.values():
        same[0][0].fill(same, words)
