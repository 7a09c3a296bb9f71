"""Which part of a model each rank holds (tensor parallelism, Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).

Attention is split by KV heads, each with its group of query heads; the MLP by columns; embedding and LM head by tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.model_config import ModelConfig

_MLP_UNIT = 16
"""Columns of the MLP come in multiples of this, so that rows of every share stay aligned."""
_VOCAB_UNIT = 64
"""Tokens come in multiples of this; whatever treats neighbouring ids together finds them on one rank."""


@dataclass(frozen=True)
class Shard:
    """Items `start ... stop - 1` of `total`. A share that reaches beyond `total` is padded there."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        """Items, padding included."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether it is everything, and no padding."""
        return self.start == 0 and self.stop == self.total

    @property
    def num_present(self) -> int:
        """Items that exist, the first ones of the share."""
        return self.present.stop - self.present.start

    @property
    def present(self) -> slice:
        """The items that exist."""
        return slice(min(self.start, self.total), min(self.stop, self.total))

    def times(self, factor: int) -> Shard:
        """The same share of something with `factor` elements an item."""
        return Shard(self.start * factor, self.stop * factor, self.total * factor)

    @classmethod
    def whole(cls, total: int) -> Shard:
        """All of it."""
        return cls(0, total, total)


@dataclass(frozen=True)
class ModelShard:
    """One rank's part of a model: its KV heads, query heads, MLP columns and token ids."""

    kv_heads: Shard
    heads: Shard
    intermediate: Shard
    vocab: Shard


def shard_of(model: ModelConfig, rank: int, size: int) -> ModelShard:
    """Return the part of rank `rank` of `size`.

    Shares are as even as they go, the first ranks have what is left over; those of the vocabulary are equal and padded.

    Raises:
        ValueError: more ranks than the model can be split over.
    """
    if size > model.num_kv_heads:
        raise ValueError(f"tensor_parallel_size={size} is over the model's {model.num_kv_heads} KV heads")
    if size > max(1, model.intermediate_size // _MLP_UNIT):
        raise ValueError(
            f"tensor_parallel_size={size} is too large for intermediate_size={model.intermediate_size}: "
            f"each rank takes at least {_MLP_UNIT} columns"
        )
    kv_heads = _even_share(model.num_kv_heads, 1, rank, size)
    return ModelShard(
        kv_heads=kv_heads,
        heads=kv_heads.times(model.num_heads // model.num_kv_heads),
        intermediate=_even_share(model.intermediate_size, _MLP_UNIT, rank, size),
        vocab=_padded_share(model.vocab_size, rank, size),
    )


def _even_share(total: int, unit: int, rank: int, size: int) -> Shard:
    """Whole units, as evenly as they go; what is less than a unit goes to the last rank."""
    each, more = divmod(total // unit, size)
    start, stop = (unit * (r * each + min(r, more)) for r in (rank, rank + 1))
    return Shard(start, total if rank == size - 1 else stop, total)


def _padded_share(total: int, rank: int, size: int) -> Shard:
    if size == 1:
        return Shard.whole(total)
    each = -(-total // (size * _VOCAB_UNIT)) * _VOCAB_UNIT
    return Shard(rank * each, (rank + 1) * each, total)
