"""The time that a workload cannot beat on this machine, from its measured bandwidth and matmul rate."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.bench.workloads import ON_GPU, Workload
from nanovllm.llm import LLM
from nanovllm.model_config import ModelConfig


@dataclass
class Ceilings:
    """What the machine gives: bytes/s reading, FLOP/s of a large product in the model's dtype."""

    read_bandwidth: float
    matmul_rate: float


@dataclass
class ModelWeights:
    """Numbers of a model's weights.

    Attributes:
        dense: of all layers, without experts.
        head: of the LM head.
        expert: of one expert of each layer that has them.
        num_experts, top_k: of each such layer.
    """

    dense: int
    head: int
    expert: int
    num_experts: int
    top_k: int

    @classmethod
    def of(cls, model: ModelConfig) -> ModelWeights:
        """Count them."""
        hidden, experts = model.hidden_size, model.experts
        attention = 2 * hidden * (model.num_heads + model.num_kv_heads) * model.head_dim
        num_mixtures = sum(layer.has_experts for layer in model.layers)
        mlps = 3 * hidden * model.intermediate_size * (model.num_layers - num_mixtures)
        dense, head = model.num_layers * attention + mlps, model.vocab_size * hidden
        if experts is None:
            return cls(dense, head, 0, 1, 1)
        dense += num_mixtures * hidden * experts.num_experts
        expert = num_mixtures * 3 * hidden * experts.intermediate_size
        return cls(dense, head, expert, experts.num_experts, experts.top_k)

    @property
    def of_row(self) -> int:
        """Return the weights of the layers that one row multiplies."""
        return self.dense + self.top_k * self.expert

    def read_by(self, num_rows: int) -> float:
        """Return the weights that are read for so many rows, whose experts are chosen at random."""
        num_chosen = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_rows)
        return self.dense + self.head + num_chosen * self.expert


def floor_seconds(work: Workload, llm: LLM, ceilings: Ceilings) -> float:
    """The time that the work takes at the ceilings: see the module."""
    model, itemsize = llm.model_config, 2 if ON_GPU else 4
    weights = ModelWeights.of(model)
    layer_itemsize = 1 if model.quantization is not None else itemsize
    heads_size = model.num_heads * model.head_dim
    kv_itemsize = 1 if llm.config.kv_cache_dtype == "fp8" else itemsize
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * kv_itemsize

    lens = [(len(prompt), work.shared_prefix if i else 0) for i, prompt in enumerate(work.prompts)]
    computed = sum(end - start for end, start in lens)
    # Each token's scores and weighted values over all tokens up to itself.
    attended = sum(end * (end + 1) - start * (start + 1) for end, start in lens) / 2
    flops = 2 * weights.of_row * computed + 2 * weights.head * len(lens) + 4 * model.num_layers * heads_size * attended
    seconds = flops / ceilings.matmul_rate

    # The first token of a request comes from its prefill; each decode step gives one to all that are live.
    waiting = [(len(p), n - 1) for p, n in zip(work.prompts, work.output_lens, strict=True) if n > 1][::-1]
    live: list[tuple[int, int]] = []
    while waiting or live:
        while waiting and len(live) < llm.config.max_num_running:
            live.append(waiting.pop())
        kv_tokens = sum(context - work.shared_prefix for context, _ in live) + work.shared_prefix
        layer_bytes = (weights.read_by(len(live)) - weights.head) * layer_itemsize
        weight_seconds = (layer_bytes + weights.head * itemsize) / ceilings.read_bandwidth
        seconds += max(weight_seconds, 2 * (weights.of_row + weights.head) * len(live) / ceilings.matmul_rate)
        seconds += kv_tokens * kv_bytes / ceilings.read_bandwidth
        live = [(context + 1, left - 1) for context, left in live if left > 1]
    # Ranks on the CPU share one machine.
    return seconds / (llm.config.tensor_parallel_size if ON_GPU else 1)


def measure_ceilings() -> Ceilings:
    """Measure the read bandwidth (a sum over a large tensor) and the matmul rate, the best of several tries.

    Beside an engine, which leaves some of the GPU's memory.
    """
    device, synchronize = ("cuda", torch.cuda.synchronize) if ON_GPU else ("cpu", lambda: None)
    num_bytes = min(2**32, torch.cuda.mem_get_info()[0] // 2) if ON_GPU else 2**30
    data = torch.ones(num_bytes // 4, device=device, dtype=torch.float32)
    side, dtype = (8192, torch.bfloat16) if ON_GPU else (1024, torch.float32)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))

    def best(function: Callable[[], object]) -> float:
        def five_times() -> None:
            for _ in range(5):
                function()
            synchronize()

        return min(timeit.repeat(five_times, number=1, repeat=10)) / 5

    return Ceilings(data.numel() * 4 / best(data.sum), 2 * side**3 / best(lambda: a @ b))
