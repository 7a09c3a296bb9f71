"""Time of each small op as this library does it, and of its plain form under `torch.compile`.

Run with `python -m tests.tools.compile_vs_kernels`; on a GPU where there is one. Not a test: nothing is asserted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.kernels.qkv_rope_store import KVPages, NormRope, qkv_rope_store, qkv_rope_store_ref
from nanovllm.kernels.rms_norm import rms_norm, rms_norm_ref
from nanovllm.kernels.sampling import sample, sample_ref
from nanovllm.kernels.silu_and_mul import silu_and_mul, silu_and_mul_ref

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ROWS = (1, 8, 128, 4096) if DEVICE.type == "cuda" else (1, 8, 64)
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 1024, 3072, 16, 8, 128, 151936
REPEATS = 20


def inputs(op: str, rows: int) -> list[Any]:
    """Arguments of an op, of the sizes of Qwen3-0.6B."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=DTYPE, device=DEVICE)

    if op == "residual and norm":
        return [randn(rows, HIDDEN), randn(HIDDEN), 1e-6, randn(rows, HIDDEN)]
    if op == "SiLU and product":
        return [randn(rows, 2 * INTERMEDIATE)]
    if op == "norm, RoPE and store":
        cache = randn(2, rows // 256 + 1, 256, KV_HEADS, HEAD_DIM)
        positions = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        qkv = randn(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        angles = torch.rand(rows, HEAD_DIM, device=DEVICE)
        rope = NormRope((randn(HEAD_DIM), randn(HEAD_DIM)), 1e-6, angles)
        return [qkv, rope, positions, KVPages(cache[0], cache[1]), positions]
    return [
        randn(min(rows, 256), VOCAB),
        torch.full((min(rows, 256),), 0.6, device=DEVICE),
        torch.randint(2**31, (min(rows, 256), 2), dtype=torch.int32, device=DEVICE),
        torch.zeros(min(rows, 256), dtype=torch.int32, device=DEVICE),
    ]


def microseconds(function: Callable[..., Any], args: list[Any]) -> float:
    """Least time of a call; on a GPU from a CUDA graph, so that launching costs nothing."""
    for _ in range(3):
        function(*args)
    if DEVICE.type == "cuda":

        def calls() -> None:
            for _ in range(REPEATS):
                function(*args)

        return graph_microseconds(calls) / REPEATS
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - started)
    return min(times) * 1e6


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


def main() -> None:
    """Print one line for each op and number of rows."""
    ops: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "residual and norm": (rms_norm, rms_norm_ref),
        "SiLU and product": (silu_and_mul, silu_and_mul_ref),
        "norm, RoPE and store": (qkv_rope_store, qkv_rope_store_ref),
        "sampling": (sample, sample_ref),
    }
    print(f"{'op':22} {'rows':>5} {'nanovllm us':>12} {'compiled us':>12}")
    for op, (ours, plain) in ops.items():
        # For each number of rows anew: with sizes left open, GCC 12 fails on the code for sampling.
        compiled: Callable[..., Any] = torch.compile(plain, dynamic=False)
        for rows in ROWS:
            args = inputs(op, rows)
            with torch.inference_mode():
                print(f"{op:22} {rows:5d} {microseconds(ours, args):12.1f}", end="", flush=True)
                if DEVICE.type == "cuda" and op == "norm, RoPE and store":
                    print("  selects rows, which no graph can hold")
                else:
                    print(f" {microseconds(compiled, args):12.1f}", flush=True)


if __name__ == "__main__":
    main()
