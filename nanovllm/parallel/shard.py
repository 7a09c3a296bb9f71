"""The shard of a model that each rank holds (tensor parallelism: Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).

Attention is sharded by KV heads, each with its group of query heads; of more ranks several hold the same KV head, and
divide its query heads. The MLP is sharded by columns; experts by columns too, or as whole experts; gated delta nets by
key heads, each with its group of value heads; short convolutions by channels; Mamba-2 by
groups of heads; embedding and LM head by token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.configs.model import ExpertsConfig, ModelConfig

_MLP_UNIT = 16
"""MLP shards are multiples of this number of columns, so that the rows of every shard stay aligned."""
_VOCAB_UNIT = 64
"""Vocabulary shards are multiples of this number of token ids, so that no sampling group spans two ranks."""


@dataclass(frozen=True)
class Shard:
    """Items `start ... stop - 1` of `total`; items from `total` on are padding."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        """Number of items, including padding."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether the shard is all of `total`, without padding."""
        return self.start == 0 and self.stop == self.total

    @property
    def num_present(self) -> int:
        """Number of items without padding; they come first in the shard."""
        return self.present.stop - self.present.start

    @property
    def present(self) -> slice:
        """The items without padding, as a slice of `total`."""
        return slice(min(self.start, self.total), min(self.stop, self.total))

    def times(self, factor: int) -> Shard:
        """Return the shard in units of elements, with `factor` elements per item."""
        return Shard(self.start * factor, self.stop * factor, self.total * factor)

    @classmethod
    def whole(cls, total: int) -> Shard:
        """Return the shard of all `total` items."""
        return cls(0, total, total)


@dataclass(frozen=True)
class ExpertsShard:
    """One rank's shard of each mixture: its experts, its columns of each, and of a shared expert if there is one."""

    experts: Shard
    intermediate: Shard
    shared: Shard | None = None


@dataclass(frozen=True)
class ModelShard:
    """One rank's shard of a model: heads, MLP columns, token ids; and of mixtures and mixers that it has.

    `key_heads` are of gated delta nets, `channels` of short convolutions, `mamba_groups` of heads of Mamba-2.
    """

    kv_heads: Shard
    heads: Shard
    intermediate: Shard
    vocab: Shard
    experts: ExpertsShard | None = None
    key_heads: Shard | None = None
    channels: Shard | None = None
    mamba_groups: Shard | None = None


def shard_of(model: ModelConfig, rank: int, size: int) -> ModelShard:
    """Return the shard of rank `rank` of `size`; ValueError if the model has too few heads, columns or experts.

    Heads, MLP columns and experts are divided as evenly as possible, the first ranks taking the remainder; vocabulary
    shards have equal, padded sizes.
    """
    heads, kv_heads = _head_shards(model, rank, size)
    unit = _input_unit(model)
    return ModelShard(
        kv_heads=kv_heads,
        heads=heads,
        # A model of sparse layers alone has no MLP.
        intermediate=Shard.whole(model.intermediate_size)
        if all(layer.has_experts for layer in model.layers)
        else _column_shard("intermediate_size", model.intermediate_size, rank, size, max(_MLP_UNIT, unit)),
        vocab=vocab_shard(model.vocab_size, rank, size),
        experts=experts_shard(model.experts, rank, size, max(_MLP_UNIT, unit)) if model.experts is not None else None,
        key_heads=_head_shard("linear key heads", model.delta_net.num_key_heads, rank, size)
        if model.delta_net is not None
        else None,
        channels=_column_shard("hidden_size", model.hidden_size, rank, size, max(_MLP_UNIT, unit))
        if model.short_conv_width is not None
        else None,
        mamba_groups=_head_shard("groups of Mamba's heads", model.mamba.num_groups, rank, size)
        if model.mamba is not None
        else None,
    )


def _head_shards(model: ModelConfig, rank: int, size: int) -> tuple[Shard, Shard]:
    num_kv_heads, group, unit = model.num_kv_heads, model.num_heads // model.num_kv_heads, _input_unit(model)
    # transformers' code takes whole groups, and norms over all keys would count some twice.
    if size > num_kv_heads and (model.hf is not None or model.architecture.qk_norm == "projections"):
        raise ValueError(f"tensor_parallel_size={size} is over the model's {num_kv_heads} KV heads")
    if size > model.num_heads:
        raise ValueError(f"tensor_parallel_size={size} is over the model's {model.num_heads} heads")
    name, inputs = ("KV head's group", group) if size <= num_kv_heads else ("head", 1)
    if size > 1 and inputs * model.head_dim % unit:
        raise ValueError(
            f"tensor_parallel_size={size}: a rank's {inputs * model.head_dim} inputs of a {name} are no multiple of "
            f"the {unit} that have one scale"
        )
    if size <= num_kv_heads:
        kv_heads = _even_shard(num_kv_heads, 1, rank, size)
        return kv_heads.times(group), kv_heads
    # The ranks first ... stop - 1 hold this KV head.
    own = rank * num_kv_heads // size
    first, stop = (-(-head * size // num_kv_heads) for head in (own, own + 1))
    part = _even_shard(group, 1, rank - first, stop - first)
    return Shard(own * group + part.start, own * group + part.stop, model.num_heads), Shard(own, own + 1, num_kv_heads)


def _head_shard(what: str, total: int, rank: int, size: int) -> Shard:
    if size > total:
        raise ValueError(f"tensor_parallel_size={size} is over the model's {total} {what}")
    return _even_shard(total, 1, rank, size)


def _input_unit(model: ModelConfig) -> int:
    """Return the number of inputs that must stay together on one rank."""
    return 1 if model.quantization is None else model.quantization.input_unit


def experts_shard(experts: ExpertsConfig, rank: int, size: int, unit: int = _MLP_UNIT) -> ExpertsShard:
    """Return the shard of each mixture for rank `rank` of `size`, columns in units; see `shard_of`."""
    count, columns, shared = experts.num_experts, experts.intermediate_size, None
    if experts.shared_size:
        shared = _column_shard("shared_expert_intermediate_size", experts.shared_size, rank, size, unit)
    if not experts.is_parallel:
        own = _column_shard("moe_intermediate_size", columns, rank, size, unit)
        return ExpertsShard(Shard.whole(count), own, shared)
    if size > count:
        raise ValueError(f"tensor_parallel_size={size} is over the model's {count} experts")
    return ExpertsShard(_even_shard(count, 1, rank, size), Shard.whole(columns), shared)


def _column_shard(name: str, total: int, rank: int, size: int, unit: int) -> Shard:
    if size > max(1, total // unit):
        raise ValueError(
            f"tensor_parallel_size={size} is too large for {name}={total}: each rank takes at least {unit} columns"
        )
    return _even_shard(total, unit, rank, size)


def inputs_shard(model: ModelConfig, columns: int, rank: int, size: int) -> Shard:
    """Return a rank's share of the inputs of a product of the model that every rank has whole."""
    return _column_shard("inputs of a product", columns, rank, size, max(_MLP_UNIT, _input_unit(model)))


def even_shard(columns: int, rank: int, size: int) -> Shard:
    """Return a rank's share of the columns of an MLP, in aligned units if there are enough of them."""
    return _even_shard(columns, _MLP_UNIT if columns >= size * _MLP_UNIT else 1, rank, size)


def _even_shard(total: int, unit: int, rank: int, size: int) -> Shard:
    """Divide `total` in whole units, as evenly as possible; the last rank takes the items beyond the last unit."""
    each, more = divmod(total // unit, size)
    start, stop = (unit * (r * each + min(r, more)) for r in (rank, rank + 1))
    return Shard(start, total if rank == size - 1 else stop, total)


def vocab_shard(total: int, rank: int, size: int) -> Shard:
    """Return a rank's shard of `total` token ids; all ranks' have the same size, which includes padding."""
    if size == 1:
        return Shard.whole(total)
    each = -(-total // (size * _VOCAB_UNIT)) * _VOCAB_UNIT
    return Shard(rank * each, (rank + 1) * each, total)
