"""Throughput against what the machine physically can: `nanovllm bench [--workload all] [--shape 8B]`.

On a GPU, random weights of a published Qwen3 shape; without one, the bundled checkpoint and less work. Each workload
runs twice with fresh prompts, after one round that does not count, and the better round counts; `square`, which takes
minutes and is not part of `all`, once. The floor is the time
that the machine, at the read bandwidth and matmul rate measured in the same run, cannot beat: for each decode step the
longer of reading the weights and doing the products' arithmetic, plus reading the live keys and values; then the
arithmetic of the prefill. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import get_args

import torch

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.bench import IMPORT_STARTED
from nanovllm.bench.floor import Ceilings, floor_seconds, measure_ceilings
from nanovllm.bench.workloads import (
    LONG_NUM_SEQS,
    LONG_WORKLOAD,
    ON_GPU,
    SHAPES,
    WORKLOADS,
    Workload,
    make_workload,
    shape_folder,
)
from nanovllm.config import Config, KVCacheDtype, Quantization
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.flags import CommandParser, user_errors

IMPORT_SECONDS = time.perf_counter() - IMPORT_STARTED
ROUNDS = 2


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
    return Result(
        workload=work.name,
        gpus=gpus,
        input_tokens=inputs,
        output_tokens=outputs,
        seconds=seconds,
        input_tokens_per_second=inputs / seconds,
        output_tokens_per_second=outputs / seconds,
        floor_seconds=floor,
        floor_share=floor / seconds,
    )


def measure(llm: LLM, name: str, ceilings: Ceilings) -> Result:
    """Print and return the better of a workload's rounds. One is run before, since steps capture graphs as needed.

    A round of `LONG_WORKLOAD` takes minutes, beside which graphs are nothing: there is only one.
    """
    num_rounds = 1 if name == LONG_WORKLOAD else ROUNDS
    if num_rounds > 1:
        run(llm, make_workload(name, "warm-up", llm))
    rounds = [measure_round(llm, make_workload(name, str(number), llm), ceilings) for number in range(num_rounds)]
    r = max(rounds, key=lambda result: result.floor_share)
    counts = f"{r.workload:9} {r.gpus:4d} {r.input_tokens:8d} {r.output_tokens:8d} {r.seconds:8.3f}"
    rates = f"{r.input_tokens_per_second:9.0f} {r.output_tokens_per_second:9.0f}"
    print(f"{counts} {rates} {r.floor_seconds:8.3f} {r.floor_share:5.1%}", flush=True)
    return r


def make_llm(options: argparse.Namespace, tensor_parallel_size: int) -> LLM:
    """Construct the engine and get a first token, and say how long that took."""
    started = time.perf_counter()
    with user_errors(options.parser):
        llm = LLM(
            options.model or shape_folder(options.shape),
            load_format="auto" if options.model else "dummy",
            tensor_parallel_size=tensor_parallel_size,
            enforce_eager=options.enforce_eager,
            attention_backend=options.attention_backend,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            max_num_seqs=LONG_NUM_SEQS if options.workload == LONG_WORKLOAD else Config.max_num_seqs,
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


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Command line, with what depends on the machine filled in."""
    parser = CommandParser("nanovllm bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="bench", choices=[*WORKLOADS, LONG_WORKLOAD, "all"])
    parser.add_argument("--shape", default="0.6B", choices=SHAPES, help="a published Qwen3 shape, random weights")
    parser.add_argument("--model", help="folder or Hub id instead of a shape")
    parser.add_argument("--tensor-parallel-size", type=int, nargs="+", default=[1], help="one after the other")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--quantization", choices=get_args(Quantization), help="of the linear layers' weights")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=get_args(KVCacheDtype))
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--profile", metavar="FILE.json", help="also write a trace of one more round")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the results (needs matplotlib)")
    parser.set_defaults(parser=parser)
    options = parser.parse_args(arguments)
    if not ON_GPU:
        options.model = options.model or BUNDLED_MODEL
    return options


def measure_apart(size: int, arguments: Sequence[str]) -> list[Result]:
    """Run this program again, in a process of its own, for one tensor-parallel size; no results if that fails."""
    changes = ["--tensor-parallel-size", str(size), "--plot", "", "--profile", ""]
    command = [sys.executable, "-m", "nanovllm.bench.main", *arguments, *changes]
    # The package need not be installed: `python bench.py` finds it beside the script.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    lines: list[str] = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout or ():
            lines.append(line)
            if not line.startswith("{"):
                print(line, end="", flush=True)
    if child.returncode:
        print(f"tensor_parallel_size={size} failed with code {child.returncode}", file=sys.stderr)
        return []
    return [Result(**result) for result in json.loads(lines[-1])["results"]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the machine, run the workloads, print the table and the JSON.

    Args:
        arguments: the command line; the process's if None.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
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
        results += measure_apart(size, arguments)
    if options.plot:
        plot(results, f"{model_name}, {name}", options.plot)
    summary = {"model": model_name, "device": name, "torch": torch.__version__, **asdict(ceilings)}
    print(json.dumps(summary | {"import_seconds": IMPORT_SECONDS, "results": [asdict(r) for r in results]}))


if __name__ == "__main__":
    main()
