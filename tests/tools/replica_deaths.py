"""Kills ten replicas at random moments: `python -m tests.tools.replica_deaths [SEED]`.

Eleven replicas of the bundled model on the CPU do one job after the other; in each of ten, one is killed at a random
moment, in whatever it does then. Nothing may be lost or doubled, and the tokens must be those of one engine, whole
answers and streams alike. It takes some two minutes on two cores.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from tests.rank_processes import engine_pids

SETTINGS = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 100, "seed": 0}
NUM_KILLS = 10


def kill_later(rng: random.Random, most_seconds: float) -> threading.Timer:
    """Kill one of the replicas that are left, at a moment within so many seconds."""
    victim = rng.choice(sorted(engine_pids().values()))
    timer = threading.Timer(rng.uniform(0, most_seconds), os.kill, (victim, signal.SIGKILL))
    timer.start()
    return timer


def streamed(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    tokens: dict[int | str, list[int]] = defaultdict(list)
    for part in llm.stream(prompts, params):
        tokens[part.request_id] += part.outputs[0].token_ids
    return [tokens[request_id] for request_id in sorted(tokens)]


def main(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(5, 300) for _ in range(rng.randint(1, 60))] for _ in range(60)]
    params = [SamplingParams(1.0, rng.randint(1, 40), seed=i, ignore_eos=True) for i in range(60)]
    with LLM(BUNDLED_MODEL, **SETTINGS) as llm:  # type: ignore[arg-type]
        want = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    settings = {**SETTINGS, "data_parallel_size": NUM_KILLS + 1}
    with LLM(BUNDLED_MODEL, **settings) as llm, warnings.catch_warnings(record=True) as caught:  # type: ignore[arg-type]
        warnings.simplefilter("always")
        began = time.monotonic()
        assert [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)] == want
        seconds = time.monotonic() - began
        for number in range(NUM_KILLS):
            timer = kill_later(rng, seconds)
            if number % 2:
                found = streamed(llm, prompts, params)
            else:
                found = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
            timer.join()
            assert found == want, number
            print(f"kill {number}: {len(engine_pids())} replicas left, tokens equal", flush=True)
        # The last death may come when the job is done, and is seen with the next.
        assert [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)] == want
    for warning in caught:
        print(warning.message)
    assert len(caught) == NUM_KILLS and not engine_pids()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else random.SystemRandom().randrange(1000))
