"""What a request costs the host: `LLM.generate` and `nanovllm run` with a runner that computes nothing.

    python -m tests.tools.host_cost ids|texts|run [--count 20000] [--rounds 5] [--profile]
    python -m tests.tools.host_cost memory [--count 200000] [--stream]

Times are CPU time, the least of several rounds, of the engine's thread and of the process, beside that of a loop in
plain Python, which shows how fast the core was.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.cli.batch_files import InputFile, ResultFile, UnansweredLines
from nanovllm.cli.batch_lines import RequestParser
from nanovllm.cli.run import BatchRun
from tests.null_runner import NullRunner

PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
NUM_TOKENS = 64


def make_llm() -> LLM:
    with patch("nanovllm.runner.model_runner.ModelRunner", NullRunner):
        return LLM(BUNDLED_MODEL, device="cpu", max_model_len=1024, max_num_batched_tokens=16384, seed=0)


def make_texts(llm: LLM, count: int) -> Iterator[str]:
    """Stretches of a text that have about as many tokens."""
    corpus = Path(os.__file__).read_text(encoding="utf-8")
    length = NUM_TOKENS * len(corpus) // len(llm.tokenizer.encode(corpus, verbose=False))
    rng = random.Random(0)
    return (corpus[k : k + length] for k in (rng.randrange(len(corpus) - length) for _ in range(count)))


def loop_us() -> float:
    """CPU time of a loop in plain Python, in microseconds for a thousand turns."""
    start, total = time.thread_time(), 0
    for i in range(200_000):
        total += i
    return (time.thread_time() - start) / 200 * 1e6


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(work: Callable[[], object], count: int, rounds: int, profile: bool) -> None:
    """Print what each of `count` requests costs."""
    if profile:
        profiler = cProfile.Profile(time.thread_time)
        profiler.runcall(work)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(32)
        return
    found = []
    for _ in range(rounds):
        gc.collect()
        start = time.thread_time(), time.process_time(), time.perf_counter()
        work()
        ends = time.thread_time(), time.process_time(), time.perf_counter()
        found.append([(end - begin) / count * 1e6 for begin, end in zip(start, ends, strict=True)] + [loop_us()])
    thread, process, wall, loop = map(min, zip(*found, strict=True))
    print(
        f"{count} requests: {thread:.1f} us in the engine's thread, {process:.1f} in the process, {wall:.1f} elapsed; "
        f"a loop of 1000: {loop:.1f} us"
    )


def generate(llm: LLM, prompts: list[Any], options: argparse.Namespace) -> None:
    measure(lambda: llm.generate(prompts, PARAMS, use_tqdm=False), len(prompts), options.rounds, options.profile)


def run_lines(llm: LLM, options: argparse.Namespace) -> None:
    """Measure `nanovllm run`."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        given = (json.dumps({"id": i, "prompt": text}) for i, text in enumerate(make_texts(llm, options.count)))
        path.write_text("\n".join(given), encoding="utf-8")
        defaults = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}

        def work() -> None:
            with ResultFile(str(out)) as results:
                results.clear()
                lines = UnansweredLines(InputFile(str(path)).lines, results.answered)
                BatchRun(llm, lines, RequestParser({}, defaults, llm.answer_format), "0" * 16, results.write).run()

        measure(work, options.count, options.rounds, options.profile)


def memory(llm: LLM, options: argparse.Namespace) -> None:
    """Print the peak of a job, above what the engine and its prompts need."""
    prompts: Any = make_texts(llm, options.count)
    extra: dict[str, Any] = {"keep": False, "on_output": lambda output: None} if options.stream else {}
    if not options.stream:
        prompts = list(prompts)
    before = peak_mib()
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, **extra)
    used = peak_mib() - before
    each = used / options.count * 2**20
    print(f"{options.count} requests, {len(outputs)} outputs: peak +{used:.0f} MiB, {each:.0f} B each")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["ids", "texts", "run", "memory"])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--stream", action="store_true", help="memory: prompts from a generator, outputs are dropped")
    options = parser.parse_args()
    llm = make_llm()
    if options.what == "ids":
        rng = random.Random(0)
        generate(llm, [[rng.randrange(257, 512) for _ in range(NUM_TOKENS)] for _ in range(options.count)], options)
    elif options.what == "texts":
        generate(llm, list(make_texts(llm, options.count)), options)
    else:
        (run_lines if options.what == "run" else memory)(llm, options)


if __name__ == "__main__":
    main()
