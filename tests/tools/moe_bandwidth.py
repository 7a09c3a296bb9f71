"""How fast the products of a mixture of experts are, by rows: TB/s of the weights of chosen experts, and TFLOP/s.

Run with `python -m tests.tools.moe_bandwidth` on a GPU. Not a test: nothing is asserted. The shape is
Qwen3-30B-A3B's; each call reads the weights of a layer of its own. `torch._grouped_mm` is given rows that are sorted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm.kernels.moe.expert_gemm import expert_gemm
from nanovllm.kernels.moe.expert_gemv import down_gemv, gate_up_gemv
from nanovllm.kernels.moe.fused_experts import fused_experts
from nanovllm.kernels.moe.grouped_gemm import choose_tile, grouped_gemm
from nanovllm.kernels.moe.route import Routing, route
from nanovllm.kernels.moe.sort_slots import sort_slots
from nanovllm.kernels.policy import MAX_EXPERT_ROWS
from tests.tools.decode_bandwidth import graph_microseconds

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
HIDDEN, SIZE, NUM_EXPERTS, TOP_K, NUM_LAYERS = 2048, 768, 128, 8, 8
DTYPE = torch.bfloat16

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The weights of the router, of gate and up, and of down."""


def make_layer() -> Layer:
    """Draw a layer's weights."""
    shapes = (NUM_EXPERTS, HIDDEN), (NUM_EXPERTS, 2 * SIZE, HIDDEN), (NUM_EXPERTS, HIDDEN, SIZE)
    router, gate_up, down = (torch.empty(shape, dtype=DTYPE, device="cuda").normal_(0, 0.02) for shape in shapes)
    return router, gate_up, down


def steps(x: torch.Tensor, layers: list[Layer], routings: list[Routing]) -> dict[str, Callable[[int], object]]:
    """Return what is timed, by name: functions of a layer's number."""
    rows = len(x)
    activated = torch.randn(rows, TOP_K, SIZE, dtype=DTYPE, device="cuda")
    parts = torch.empty(rows, TOP_K, HIDDEN, dtype=DTYPE, device="cuda")
    orders = [sort_slots(routing, 0, NUM_EXPERTS) for routing in routings]
    found: dict[str, Callable[[int], object]] = {
        "route": lambda i: route(x, layers[i][0], TOP_K, True),
        "experts": lambda i: fused_experts(x, routings[i], layers[i][1], layers[i][2]),
    }
    if rows == 1:
        found["gate_up"] = lambda i: gate_up_gemv(x, routings[i], layers[i][1], activated, 0)
        found["down"] = lambda i: down_gemv(activated, routings[i], layers[i][2], parts[0, :1], 0)
    elif rows <= MAX_EXPERT_ROWS:
        found["gate_up"] = lambda i: expert_gemm(x, routings[i], layers[i][1], activated, 0, gated=True)
        found["down"] = lambda i: expert_gemm(activated, routings[i], layers[i][2], parts, 0, gated=False)
    else:
        flat, out = activated.flatten(0, 1), parts.flatten(0, 1)
        found["sort"] = lambda i: sort_slots(routings[i], 0, NUM_EXPERTS)
        found["gate_up"] = lambda i: grouped_gemm(x, routings[i], orders[i], layers[i][1], flat, gated=True)
        found["down"] = lambda i: grouped_gemm(flat, routings[i], orders[i], layers[i][2], out, gated=False)
    gathered = [x[order.slots.long() // TOP_K] for order in orders]
    stops = [order.starts[1:].clone() for order in orders]
    found["torch"] = lambda i: torch._grouped_mm(gathered[i], layers[i][1].transpose(1, 2), offs=stops[i])
    return found


def describe(name: str, rows: int, us: float, num_chosen: float) -> str:
    """Return a cell of the table."""
    weights = {"gate_up": 2, "torch": 2, "down": 1, "experts": 3}.get(name, 0) * SIZE * HIDDEN
    if not weights:
        return f"{name} {us:.1f} us"
    rate, flops = 2 * weights * num_chosen / us / 1e6, 2 * weights * rows * TOP_K / us / 1e6
    return f"{name} {us:.1f} us, {rate:.2f} TB/s, {flops:.0f} TFLOP/s"


def main() -> None:
    """Print a line for each number of rows."""
    print(torch.cuda.get_device_name())
    layers = [make_layer() for _ in range(NUM_LAYERS)]
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN, dtype=DTYPE, device="cuda")
        routings = [route(x, router, TOP_K, True)[0] for router, _, _ in layers]
        num_chosen = sum(len(routing.experts.unique()) for routing in routings) / NUM_LAYERS
        cells = []
        for name, step in steps(x, layers, routings).items():

            def run(step: Callable[[int], object] = step) -> None:
                for i in range(NUM_LAYERS):
                    step(i)

            run()
            cells.append(describe(name, rows, graph_microseconds(run) / NUM_LAYERS, num_chosen))
        tile = choose_tile(
            x, layers[0][1], routings[0].experts.numel() / routings[0].num_experts, gated=True, has_blocks=False
        )
        print(f"{rows} rows, {num_chosen:.0f} experts, tile {tile.rows} x {tile.outs}: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
