"""A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538), without limits to what an expert takes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from typing_extensions import override

from nanovllm.configs.model import ExpertsConfig, ModelConfig
from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.kernels import ops
from nanovllm.kernels.moe.activation import Activation, is_gated
from nanovllm.kernels.moe.fused_experts import Biases, fused_experts
from nanovllm.kernels.moe.route import Routing, SharedExpert, SigmoidScores, route
from nanovllm.kernels.policy import ExpertsKernel
from nanovllm.kernels.rms_norm import Norm
from nanovllm.layers.layernorm import AllReduceRMSNorm
from nanovllm.layers.linear import MLP, ColumnParallelLinear
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import ExpertsShard, ModelShard, Shard
from nanovllm.quantization import make_weight
from nanovllm.quantization.weight import DenseWeight, MatrixShard, Stream, Weight
from nanovllm.weights.slices import LoadableModule, LoadableVector


class Router(LoadableModule):
    """Chooses each token's experts; the same on every rank.

    Attributes:
        weight: [num_experts, hidden_size].
        bias: [num_experts], of logits; None for zero.
        expert_bias: see `SigmoidScores`.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size), requires_grad=False)
        self.top_k, self.renormalize, self.sigmoid = config.top_k, config.renormalize, config.sigmoid
        self.bias = nn.Parameter(torch.empty(config.num_experts), requires_grad=False) if config.has_biases else None
        has_expert_bias = config.sigmoid is not None and config.sigmoid.has_bias
        experts = Shard.whole(config.num_experts)
        self.expert_bias = LoadableVector(experts, torch.float32) if has_expert_bias else None

    @property
    @override
    def kernel_sizes(self) -> tuple[Collection[int], Collection[int]]:
        return {*self.policy.expert_rows(len(self.weight), self.top_k), *self.policy.dense_rows}, ()

    def forward(
        self, x: torch.Tensor, norm: AllReduceRMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Routing, torch.Tensor | None]:
        """Return `norm(x + residual)`, [num_tokens, hidden_size], each token's experts, and `x + residual`.

        Takes the arguments of `ColumnParallelLinear`.
        """
        how = self.sigmoid
        biases = None if self.expert_bias is None else self.expert_bias.values
        sigmoid = None if how is None else SigmoidScores(biases, how.eps, how.factor, how.is_exact)
        if norm is not None and norm.communicator.size > 1:
            (x, residual), norm = norm(x, residual), None
        params, added = (None, None) if norm is None else (Norm(norm.weight, norm.eps), residual)
        routing, rows, total = route(
            x, self.weight, self.top_k, self.renormalize, params, added,
            sigmoid=sigmoid, policy=self.policy, bias=self.bias,
        )  # fmt: skip
        return rows, routing, residual if norm is None else total


class _ExpertsLinear(nn.Module):
    """One projection of all experts, which holds its weight by the name that it has in checkpoints."""

    def __init__(
        self, shard: MatrixShard, config: ExpertsConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.weight = make_weight(quant_config, prefix, shard, config.has_biases)
        self.weight.alternates = config.alternates


class FusedExperts(nn.Module):
    """All experts of a layer: of each rank some, or a slice of every one. The result is one rank's part of a sum."""

    def __init__(
        self, hidden_size: int, shard: ExpertsShard, communicator: Communicator,
        config: ExpertsConfig, *, quant_config: QuantizationConfig | None = None, prefix: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        hidden, size = Shard.whole(hidden_size), shard.intermediate
        self.activation: Activation = config.activation
        has_gate = is_gated(config.activation)
        outputs: dict[str | None, Shard] = {"gate": size, "up": size} if has_gate else {None: size}
        name = "gate_up_proj" if has_gate else "up_proj"
        up, down = MatrixShard(outputs, hidden, shard.experts), MatrixShard({None: hidden}, size, shard.experts)
        # A checkpoint has the modules of each; where one is stored as it is and another is not, scales are missing.
        first = _ExpertsLinear(up, config, quant_config, f"{prefix}.0.{name}")
        self.add_module(name, first)
        self.down_proj = _ExpertsLinear(down, config, quant_config, f"{prefix}.0.down_proj")
        self.communicator, self.first_expert = communicator, shard.experts.start
        # In a tuple, so that they are registered under their own names alone.
        self._products = first, self.down_proj

    @property
    def weights(self) -> tuple[Weight, Weight]:
        """The weights of the first product and the last one."""
        first, last = self._products
        return first.weight, last.weight

    @property
    def biases(self) -> Biases | None:
        """The biases of both products, or None."""
        up, down = (weight.bias for weight in self.weights)
        return None if up is None or down is None else (up, down)

    def shared_expert(self, weights: tuple[Weight, Weight], gate: torch.Tensor | None) -> SharedExpert | None:
        """Return an expert of every token as `forward` takes it beside one token; None if it is not like the others."""
        own = [weight.values for weight in weights if isinstance(weight, DenseWeight)]
        others = [weight.values for weight in self.weights if isinstance(weight, DenseWeight)]
        is_alike = len(others) == 2 and [values.shape for values in own] == [values.shape[1:] for values in others]
        return SharedExpert(own[0], own[1], gate) if is_alike and self.biases is None else None

    def forward(self, x: torch.Tensor, routing: Routing, shared: SharedExpert | None = None) -> torch.Tensor:
        """Return the experts' outputs for x, [num_tokens, hidden_size], or the parts of a sum for the next norm."""
        up, down = self.weights
        out = fused_experts(
            x, routing, up.matrix, down.matrix, self.first_expert, up.policy, self.activation,
            biases=self.biases, shared=shared,
        )  # fmt: skip
        return out.sum(0) if self.communicator.size > 1 and out.dim() == 3 else out


class ReplicatedLinear(ColumnParallelLinear):
    """A product that every rank computes as a whole."""

    def __init__(
        self, in_features: int, out_features: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        shard = MatrixShard({None: Shard.whole(out_features)}, Shard.whole(in_features))
        super().__init__(make_weight(quant_config, prefix, shard))


class TokenGate(LoadableModule):
    """The weight of a gate of one number for each token, [1, hidden_size]; the same on every rank."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size), requires_grad=False)


class SparseMLP(nn.Module):
    """A mixture of experts; a router chooses some for each token.

    Attributes:
        shared_expert: the MLP that computes every token, maybe scaled by a gate; None if there is none.
    """

    def __init__(self, config: ModelConfig, shard: ModelShard, communicator: Communicator, prefix: str) -> None:
        super().__init__()
        assert config.experts is not None and shard.experts is not None
        hidden_size, latent_size, quant_config = config.hidden_size, config.experts.latent_size, config.quantization
        self.gate = Router(hidden_size, config.experts)
        self.experts = FusedExperts(
            latent_size or hidden_size, shard.experts, communicator, config.experts,
            quant_config=quant_config, prefix=f"{prefix}.experts",
        )  # fmt: skip
        self.fc1_latent_proj: ReplicatedLinear | None = None
        self.fc2_latent_proj: ReplicatedLinear | None = None
        if latent_size is not None:
            name = f"{prefix}.fc%d_latent_proj"
            self.fc1_latent_proj = ReplicatedLinear(hidden_size, latent_size, quant_config, name % 1)
            self.fc2_latent_proj = ReplicatedLinear(latent_size, hidden_size, quant_config, name % 2)
        size, has_gate = shard.experts.shared, config.experts.gates_shared
        self.shared_expert = None if size is None else MLP(config, size, f"{prefix}.shared_expert")
        self.shared_expert_gate = None if size is None or not has_gate else TokenGate(config.hidden_size)

    def forward(
        self, x: torch.Tensor, norm: AllReduceRMSNorm | None = None, residual: torch.Tensor | None = None
    ) -> Stream:
        """Compute the experts of `norm(x + residual)`; see `MLP.forward`."""
        rows, routing, residual = self.gate(x, norm, residual)
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            shared = self._one_more_expert(len(rows))
            out = self.experts(rows, routing, shared)
            if shared is not None:
                return out, residual
        else:
            out = self.experts(self.fc1_latent_proj(rows)[0], routing)
            out = self.fc2_latent_proj(out if out.dim() == 2 else out.sum(0))[0]
        if self.shared_expert is not None:
            gate = self.shared_expert_gate
            out = ops.add_gated(rows, None if gate is None else gate.weight, self.shared_expert(rows)[0], out)
        return out, residual

    def _one_more_expert(self, num_tokens: int) -> SharedExpert | None:
        """Return the shared expert where it is computed with the others, to save kernels; or None."""
        if self.shared_expert is None or self.gate.policy.experts(num_tokens) is not ExpertsKernel.EXPERT_GEMV:
            return None
        gate = self.shared_expert_gate
        return self.experts.shared_expert(self.shared_expert.weights, None if gate is None else gate.weight)
