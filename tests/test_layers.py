"""Norms and linear layers that compute when they are taken: what they compute, and when."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import Shard
from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import AllReduceRMSNorm, DeferredBranch, ResidualStream
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear

ROWS, SIZE = 5, 8
CPU, META = torch.device("cpu"), torch.device("meta")


class TwoRanks(Communicator):
    """A rank of two, the other of which adds nothing."""

    size = 2


def filled(layer: nn.Module) -> nn.Module:
    for param in layer.parameters():
        param.data.normal_()
    return layer


def normalised(norm: nn.Module, total: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(total, (SIZE,), norm.get_parameter("weight"), 1e-6)


@pytest.mark.parametrize("communicator", [Communicator(), TwoRanks()])
@pytest.mark.parametrize("rows", [None, torch.tensor([4, 1])])
def test_a_branch_of_the_residual_stream(communicator: Communicator, rows: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    norm = filled(AllReduceRMSNorm(SIZE, 1e-6, communicator))
    gate_up = filled(MergedColumnParallelLinear(SIZE, {"gate": Shard.whole(6), "up": Shard.whole(6)}, bias=False))
    down = filled(RowParallelLinear(Shard.whole(6), SIZE))
    x = torch.randn(ROWS, SIZE)
    gate, up = (normalised(norm, x) @ gate_up.get_parameter("weight.values").T).chunk(2, dim=-1)
    kept = slice(None) if rows is None else rows
    branch = (functional.silu(gate) * up)[kept] @ down.get_parameter("weight.values").T

    stream = ResidualStream(x.clone())
    inner = gate_up(norm(stream)).compute(gated=True)
    torch.testing.assert_close(stream.residual, x)
    stream += down(inner[kept], rows)
    torch.testing.assert_close(norm(stream).compute(), normalised(norm, x[kept] + branch))
    torch.testing.assert_close(stream.residual, x[kept] + branch)


@pytest.mark.parametrize("rows", [None, torch.tensor([4, 1])])
def test_a_branch_is_normalised_before_it_is_added(rows: torch.Tensor | None) -> None:
    norm, x = filled(AllReduceRMSNorm(SIZE, 1e-6, Communicator())), torch.randn(ROWS, SIZE)
    product = torch.randn(ROWS if rows is None else len(rows), SIZE)

    def add_to(residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        # As products do that add the residual themselves.
        return product if residual is None else product + residual, None

    stream = ResidualStream(x)
    assert stream.total().compute() is x
    stream += cast("AllReduceRMSNorm", norm).of(DeferredBranch(add_to, rows))
    kept = x if rows is None else x[rows]
    torch.testing.assert_close(stream.total().compute(), kept + normalised(norm, product))


def test_a_tied_head_is_the_embedding_transposed_wherever_the_weights_are() -> None:
    with META:
        embedding = VocabParallelEmbedding(Shard.whole(7), SIZE)
        head = ParallelLMHead(Shard.whole(7), SIZE, tied_to=embedding)
        model = nn.ModuleList([embedding, head])
    assert len(list(model.parameters())) == 1
    embedding.weight.allocate(torch.bfloat16, CPU)
    assert next(head.parameters()).dtype == torch.bfloat16
    filled(model.to_empty(device=CPU).float())
    rows = embedding(torch.arange(7))
    torch.testing.assert_close(head.multiply(torch.eye(SIZE)), rows.T)


def test_a_norm_adds_up_the_stream_once() -> None:
    norm = filled(AllReduceRMSNorm(SIZE, 1e-6, Communicator()))
    stream = ResidualStream(torch.randn(ROWS, SIZE))
    with pytest.raises(AssertionError):
        stream += RowParallelLinear(Shard.whole(6), SIZE)(torch.randn(ROWS, 6))
    normed = norm(stream)
    normed.compute()
    with pytest.raises(AssertionError):
        normed.compute()
