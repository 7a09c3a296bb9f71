"""What the benchmark computes: published shapes with random weights, and lists of prompts."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from nanovllm.llm import LLM

ON_GPU = torch.cuda.is_available()

# hidden_size, intermediate_size (of a mixture: an expert's), layers, heads, KV heads, tied embeddings
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
    "30B-A3B": (2048, 768, 48, 32, 4, False),
}
# experts, and how many of them compute a token
EXPERTS = {"30B-A3B": (128, 8)}
WORKLOADS = ("bench", "single", "eight", "prefill", "shared", "many")
LONG_WORKLOAD, LONG_NUM_SEQS = "square", 1024
"""A workload of minutes, and how many sequences an engine is to run at once for it."""


@dataclass
class Workload:
    """Prompts, and how many tokens each is to get; the first `shared_prefix` tokens of all prompts are the same."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    shared_prefix: int = 0


def make_workload(name: str, seed: str, llm: LLM) -> Workload:
    """Draw a workload; without a GPU requests and lengths are smaller."""
    rng, vocab_size, scale = Random(f"{name} {seed}"), llm.model_config.vocab_size, 1 if ON_GPU else 1 / 16

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    def size(count: int) -> int:
        return max(1, round(count * scale))

    if name == "bench":
        lens = bench_lens(size(256), size(100), size(1024))
    elif name in ("single", "eight"):
        lens = [(size(128), size(512))] * (1 if name == "single" else 8)
    elif name == "prefill":
        lens = [(size(2048), 8)] * size(256)
    elif name == LONG_WORKLOAD:
        lens = [(size(1000), size(1000))] * size(3000)
    elif name == "shared":
        lens = [(size(64), size(64))] * size(512)
    else:
        lens = [(rng.randint(size(64), size(256)), rng.randint(size(64), size(256))) for _ in range(size(2048))]
    prefix = tokens(size(1024)) if name == "shared" else []
    return Workload(name, [prefix + tokens(n) for n, _ in lens], [n for _, n in lens], len(prefix))


def bench_lens(count: int, low: int, high: int) -> list[tuple[int, int]]:
    """The lengths of nano-vLLM's benchmark, the same in every round: its seed, and its order of draws."""
    rng, prompt_lens = Random(0), []
    for _ in range(count):
        prompt_lens.append(rng.randint(low, high))
        for _ in range(prompt_lens[-1]):
            rng.randint(0, 10000)
    return [(n, rng.randint(low, high)) for n in prompt_lens]


def shape_folder(shape: str) -> str:
    """Write the config.json of a published shape to a temporary folder, which stays."""
    hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[shape]
    folder = Path(tempfile.mkdtemp(prefix=f"qwen3-{shape}-"))
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "head_dim": 128,
        "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "tie_word_embeddings": tied, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "rope_theta": 1000000, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if shape in EXPERTS:
        num_experts, top_k = EXPERTS[shape]
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": intermediate,
            "num_experts": num_experts, "num_experts_per_tok": top_k, "norm_topk_prob": True,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
