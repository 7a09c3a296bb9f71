"""How fast decode attention reads keys and values, by rows and tokens of metadata.

Run with `python -m tests.tools.decode_bandwidth` on a GPU, of a cache in e4m3 with the argument `fp8`. Not a test:
nothing is asserted. A call is all that a layer does between its products: norm, RoPE, store, attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from bench import measure_ceilings
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import AttentionMetadata, set_attention_metadata
from nanovllm.attention.triton import DecodeVariant, TritonBackend
from nanovllm.configs.rope import RopeConfig
from nanovllm.kernels.policy import FASTEST
from nanovllm.kernels.qkv_rope_store import KVPages, KVScales
from nanovllm.layers.attention import Attention
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
ROWS = (1, 8, 64, 256, 512)
CONTEXTS = (1, 256, 1024, 4096, 32768)
HEADS = {"Qwen3-0.6B": (16, 8), "Qwen3-8B": (32, 8)}
HEAD_DIM, BLOCK_SIZE = 128, 256
REPEATS = 20
MOST_LAYERS, MOST_BYTES = 28, 2**34
"""Each call reads memory of its own, as a model's layers do, unless it is so much that no cache holds any of it."""


def graph_microseconds(step: Callable[[], None]) -> float:
    """Least time of a warm step as a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return min(times)


def make_pages(cache: torch.Tensor, dtype: torch.dtype) -> KVPages:
    """Return pages of any values; cache: of a layer, [2, num_blocks, block_size, num_kv_heads, HEAD_DIM], bytes."""
    values = cache.view(dtype)
    if dtype == DTYPE:
        values.normal_()
        return KVPages(values[0], values[1])
    cache.random_(0, 64)
    ones = torch.ones(cache.shape[3], device=DEVICE)
    return KVPages(values[0], values[1], KVScales(ones, ones, torch.zeros(1, dtype=torch.int64, device=DEVICE)))


def microseconds(
    num_heads: int, num_kv_heads: int, rows: int, length: int, dtype: torch.dtype = DTYPE
) -> tuple[float, float]:
    """Time of a call, and its bytes of keys and values."""
    torch.cuda.empty_cache()
    num_bytes = 2 * dtype.itemsize * rows * length * num_kv_heads * HEAD_DIM
    num_layers = min(MOST_LAYERS, max(1, MOST_BYTES // num_bytes))
    max_blocks = -(-length // BLOCK_SIZE)
    num_blocks = rows * max_blocks
    spec = Paged(num_kv_heads, HEAD_DIM, HEAD_DIM, None, dtype)
    backend = TritonBackend(DEVICE, DTYPE, BLOCK_SIZE, num_heads, [spec], num_slots=512)
    cache_shape = (num_layers, 2, num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM * dtype.itemsize)
    cache = torch.empty(cache_shape, dtype=torch.uint8, device=DEVICE)
    rotary = RotaryEmbedding(HEAD_DIM, RopeConfig(1e6))
    rotary.tabulate(length, DEVICE)
    layers = [Attention(num_kv_heads, HEAD_DIM, 1e-6, rotary) for _ in range(num_layers)]
    for layer, of_layer in zip(layers, cache, strict=True):
        layer.bind(make_pages(of_layer, dtype), backend)

    tables = torch.randperm(num_blocks, device=DEVICE).int().view(rows, max_blocks)
    lens = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    none = lens[:0]
    metadata = AttentionMetadata(
        num_decodes=rows,
        slot_mapping=tables[:, -1] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE,
        block_tables=tables,
        seq_lens=lens,
        cu_seqlens_q=none,
        query_tiles=none,
        sample_tiles=none,
        variant=DecodeVariant(single_split=FASTEST.single_split(num_kv_heads, lens.cpu().numpy())),
    )
    backend.plan([metadata])
    qkv = torch.randn(rows, num_heads + 2 * num_kv_heads, HEAD_DIM, dtype=DTYPE, device=DEVICE)
    norms = [RMSNorm(HEAD_DIM, 1e-6).to(DEVICE, DTYPE) for _ in range(2)]

    def step() -> None:
        for layer in layers:
            layer(qkv, layer.rope(norms[0], norms[1]), lens - 1)

    with torch.inference_mode(), set_attention_metadata([metadata]):
        step()
        return graph_microseconds(step) / num_layers, num_bytes


def main() -> None:
    """Print a table for each shape."""
    ceiling = measure_ceilings().read_bandwidth
    dtype = torch.float8_e4m3fn if "fp8" in sys.argv[1:] else DTYPE
    print(f"{torch.cuda.get_device_name()}, reads {ceiling / 1e12:.2f} TB/s; us a call, TB/s, share of what it reads")
    for name, heads in HEADS.items():
        print(f"\n| {name}, rows | " + " | ".join(f"{length} tokens" for length in CONTEXTS) + " |")
        print("|---" * (len(CONTEXTS) + 1) + "|")
        for rows in ROWS:
            cells = []
            for length in CONTEXTS:
                us, num_bytes = microseconds(*heads, rows, length, dtype)
                rate = num_bytes / us * 1e6
                cells.append(f"{us:.1f}, {rate / 1e12:.2f}, {rate / ceiling:.0%}")
            print(f"| {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
