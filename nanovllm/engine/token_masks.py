"""Masks of the tokens that constraints allow."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanovllm.engine.request import TokenConstraint
from nanovllm.engine.sequence import Sequence


def token_masks(seqs: list[Sequence | None], vocab_size: int) -> np.ndarray:
    """Return the tokens that may come next, [num_seqs, ceil(vocab_size / 32)] int32, a bit for each token.

    seqs: those with a constraint; None for one that has just ended, which may sample anything.
    """
    words = np.empty((len(seqs), -(-vocab_size // 32)), dtype=np.int32)
    constrained: list[tuple[TokenConstraint, int]] = []
    for row, seq in enumerate(seqs):
        if seq is None or seq.constraint is None:
            words[row] = -1
        else:
            constrained.append((seq.constraint, row))
    fill_rows(constrained, words)
    return words


def fill_rows(constraints: Iterable[tuple[TokenConstraint, int]], words: np.ndarray) -> None:
    """Write the masks of constraints, each with its row; those of one kind are computed together, in threads."""
    kinds: dict[type, list[tuple[TokenConstraint, int]]] = {}
    for constraint, row in constraints:
        kinds.setdefault(type(constraint), []).append((constraint, row))
    for same in kinds.values():
        same[0][0].fill(same, words)
