"""Norms and linear layers over the residual stream: what they compute, fused or not, on one rank and on two."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import Shard

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

    inner, residual = gate_up(x.clone(), norm, gated=True)
    torch.testing.assert_close(residual, x)
    out, residual = down(inner[kept], residual[kept])
    normed, total = norm(out, residual)
    torch.testing.assert_close(normed, normalised(norm, x[kept] + branch))
    torch.testing.assert_close(total, x[kept] + branch)


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
    torch.testing.assert_close(head(torch.eye(SIZE))[0], rows.T)
