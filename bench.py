"""Throughput against what the machine physically can: `python bench.py [--workload all] [--shape 8B]`.

On a GPU, random weights of a published Qwen3 shape; without one, the bundled checkpoint and less work. Each workload
runs twice with fresh prompts, after one round that does not count, and the better round counts. The floor is the time
that the machine, at the read bandwidth and matmul rate measured in the same run, cannot beat: for each decode step the
longer of reading the weights and doing the products' arithmetic, plus reading the live keys and values; then the
arithmetic of the prefill. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

IMPORT_STARTED = time.perf_counter()
import torch  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.assets import BUNDLED_MODEL  # noqa: E402

IMPORT_SECONDS = time.perf_counter() - IMPORT_STARTED
ON_GPU = torch.cuda.is_available()

# hidden_size, intermediate_size, layers, heads, KV heads, tied embeddings
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}
WORKLOADS = ("bench", "single", "eight", "prefill", "shared", "many")
ROUNDS = 2


@dataclass
class Workload:
    """Prompts, and how many tokens each is to get; the first `shared_prefix` tokens of all prompts are the same."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    shared_prefix: int = 0


@dataclass
class Ceilings:
    """What the machine gives: bytes/s reading, FLOP/s of a large product in the model's dtype."""

    read_bandwidth: float
    matmul_rate: float


@dataclass
class Result:
    """One workload's better round."""

    workload: str
    gpus: int
    input_tokens: int
    output_tokens: int
    seconds: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    floor_seconds: float
    floor_share: float


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


def floor_seconds(work: Workload, llm: LLM, ceilings: Ceilings) -> float:
    """The time that the work takes at the ceilings: see the module."""
    model, itemsize = llm.model_config, 2 if ON_GPU else 4
    heads_size = model.num_heads * model.head_dim
    kv_size = model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * heads_size + 2 * kv_size + 3 * model.intermediate_size)
    layers, head = model.num_layers * layer, model.vocab_size * model.hidden_size
    kv_bytes = 2 * model.num_layers * kv_size * itemsize
    weight_seconds = (layers + head) * itemsize / ceilings.read_bandwidth

    lens = [(len(prompt), work.shared_prefix if i else 0) for i, prompt in enumerate(work.prompts)]
    computed = sum(end - start for end, start in lens)
    # Each token's scores and weighted values over all tokens up to itself.
    attended = sum(end * (end + 1) - start * (start + 1) for end, start in lens) / 2
    flops = 2 * layers * computed + 2 * head * len(lens) + 4 * model.num_layers * heads_size * attended
    seconds = flops / ceilings.matmul_rate

    # The first token of a request comes from its prefill; each decode step gives one to all that are live.
    waiting = [(len(p), n - 1) for p, n in zip(work.prompts, work.output_lens, strict=True) if n > 1][::-1]
    live: list[tuple[int, int]] = []
    while waiting or live:
        while waiting and len(live) < llm.config.max_num_running:
            live.append(waiting.pop())
        kv_tokens = sum(context - work.shared_prefix for context, _ in live) + work.shared_prefix
        seconds += max(weight_seconds, 2 * (layers + head) * len(live) / ceilings.matmul_rate)
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


def run(llm: LLM, work: Workload) -> float:
    """Return the seconds that a workload takes; a wrong token count ends the program."""
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in work.output_lens]
    started = time.perf_counter()
    outputs = llm.generate(work.prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    if [len(output["token_ids"]) for output in outputs] != work.output_lens:
        sys.exit(f"{work.name}: wrong token counts")
    return seconds


def measure_round(llm: LLM, work: Workload, ceilings: Ceilings) -> Result:
    """Run a workload once, and compare its time with its floor."""
    seconds, floor = run(llm, work), floor_seconds(work, llm, ceilings)
    inputs, outputs, gpus = sum(map(len, work.prompts)), sum(work.output_lens), llm.config.tensor_parallel_size
    rates = inputs / seconds, outputs / seconds
    return Result(work.name, gpus, inputs, outputs, seconds, *rates, floor, floor / seconds)


def measure(llm: LLM, name: str, ceilings: Ceilings) -> Result:
    """Print and return the better of a workload's rounds. One is run before, since steps capture graphs as needed."""
    run(llm, make_workload(name, "warm-up", llm))
    rounds = [measure_round(llm, make_workload(name, str(number), llm), ceilings) for number in range(ROUNDS)]
    r = max(rounds, key=lambda result: result.floor_share)
    counts = f"{r.workload:9} {r.gpus:4d} {r.input_tokens:8d} {r.output_tokens:8d} {r.seconds:8.3f}"
    rates = f"{r.input_tokens_per_second:9.0f} {r.output_tokens_per_second:9.0f}"
    print(f"{counts} {rates} {r.floor_seconds:8.3f} {r.floor_share:5.1%}", flush=True)
    return r


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
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def make_llm(options: argparse.Namespace, tensor_parallel_size: int) -> LLM:
    """Construct the engine and get a first token, and say how long that took."""
    started = time.perf_counter()
    llm = LLM(
        options.model or shape_folder(options.shape),
        load_format="auto" if options.model else "dummy",
        tensor_parallel_size=tensor_parallel_size,
        enforce_eager=options.enforce_eager,
        attention_backend=options.attention_backend,
        gpu_memory_utilization=options.gpu_memory_utilization,
        seed=0,
    )
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
    print(f"imports {IMPORT_SECONDS:.2f} s, from LLM(...) to the first token {time.perf_counter() - started:.2f} s")
    return llm


def profile(llm: LLM, work: Workload, file: str) -> None:
    """Write a trace of one round, which Perfetto and chrome://tracing open."""
    with torch.profiler.profile() as trace:
        run(llm, work)
    trace.export_chrome_trace(file)
    print(trace.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=60))


def plot(results: list[Result], title: str, file: str) -> None:
    """Draw each workload's throughput as a share of what its floor allows."""
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(8, 0.6 * len(results) + 1.6), layout="constrained")
    names = [f"{r.workload}, {r.gpus} GPUs" if r.gpus > 1 else r.workload for r in results]
    axes.barh(names, [100.0] * len(results), color="#e4e4e4", label="floor")
    bars = axes.barh(names, [100 * r.floor_share for r in results], color="#3b6fb6", label="measured")
    labels = [f"{r.output_tokens_per_second:,.0f} out, {r.input_tokens_per_second:,.0f} in" for r in results]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="share of the floor's throughput, % (tokens/s beside the bars)", title=title, xlim=(0, 130))
    figure.savefig(file, dpi=150)


def parse_arguments() -> argparse.Namespace:
    """Command line, with what depends on the machine filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="bench", choices=[*WORKLOADS, "all"])
    parser.add_argument("--shape", default="0.6B", choices=SHAPES, help="a published Qwen3 shape, random weights")
    parser.add_argument("--model", help="folder or Hub id instead of a shape")
    parser.add_argument("--tensor-parallel-size", type=int, nargs="+", default=[1], help="one after the other")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--profile", metavar="FILE.json", help="also write a trace of one more round")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results (needs matplotlib)")
    options = parser.parse_args()
    if not ON_GPU:
        options.model = options.model or BUNDLED_MODEL
    return options


def measure_apart(size: int) -> list[Result]:
    """Run this program again, in a process of its own, for one tensor-parallel size; no results if that fails."""
    changes = ["--tensor-parallel-size", str(size), "--plot", "", "--profile", ""]
    lines: list[str] = []
    with subprocess.Popen([sys.executable, *sys.argv, *changes], stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout or ():
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
    if child.returncode:
        print(f"tensor_parallel_size={size} failed with code {child.returncode}", file=sys.stderr)
        return []
    return [Result(**result) for result in json.loads(lines[-1])["results"]]


def main() -> None:
    """Measure the machine, run the workloads, print the table and the JSON."""
    options = parse_arguments()
    names = WORKLOADS if options.workload == "all" else (options.workload,)
    first, *others = options.tensor_parallel_size
    model_name = options.model or f"Qwen3-{options.shape} (random weights)"
    # Before anything begins CUDA, as in a program of its own: an engine's start depends on that.
    with make_llm(options, first) as llm:
        ceilings = measure_ceilings()
        torch.cuda.empty_cache()
        name = torch.cuda.get_device_name() if ON_GPU else f"CPU, {torch.get_num_threads()} threads"
        print(f"{model_name} on {name}, torch {torch.__version__}")
        print(f"read {ceilings.read_bandwidth / 1e12:.3f} TB/s, matmul {ceilings.matmul_rate / 1e12:.2f} TFLOP/s")
        print("workload  GPUs    input   output  seconds  in tok/s out tok/s  floor s")
        results = [measure(llm, workload, ceilings) for workload in names]
        if options.profile:
            profile(llm, make_workload(names[0], "profile", llm), options.profile)
    for size in others:
        results += measure_apart(size)
    if options.plot:
        plot(results, f"{model_name}, {name}", options.plot)
    summary = {"model": model_name, "device": name, "torch": torch.__version__, **asdict(ceilings)}
    print(json.dumps(summary | {"import_seconds": IMPORT_SECONDS, "results": [asdict(r) for r in results]}))


if __name__ == "__main__":
    main()
