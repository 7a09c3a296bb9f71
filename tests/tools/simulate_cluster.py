"""Simulate a job on many engines: static shards, and batches that free engines take (as Ray Data's actors do).

    python -m tests.tools.simulate_cluster                                # step times measured here
    python -m tests.tools.simulate_cluster --costs 3.87 0.0313 43600      # those of Qwen3-8B on an H200

The costs are: milliseconds of a step, milliseconds more for each of its sequences, prompt tokens per second. An engine
starts after some seconds, is slower or faster by a spread, and may die; it is back after some more, and computes again
what it had in flight.
"""

from __future__ import annotations

import argparse
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import Random
from typing import Literal

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL

Policy = Literal["every nth", "contiguous", "batches"]


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, of each sequence in it and of a prompt token; sequences that run at once, cached tokens."""

    step: float
    row: float
    prompt_token: float
    max_num_seqs: int = 512
    cache_tokens: int = 750_000


@dataclass(frozen=True)
class Row:
    """Tokens in (beside the prefix) and out, and which prefix it has."""

    prompt: int
    output: int
    group: int


@dataclass(frozen=True)
class Setting:
    """What engines meet: seconds until ready, their speeds, hours between deaths, seconds until one is there."""

    engines: int = 64
    start: tuple[float, float] = (20.0, 40.0)
    spread: float = 0.02
    stragglers: float = 0.0
    mtbf_hours: float = 0.0
    replace: float = 120.0
    prefix: int = 0


@dataclass
class Engine:
    now: float
    speed: float
    dies: float
    steps: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    prefixes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    prefix_tokens: int = 0

    def admit(self, index: int, row: Row, prefix: int, costs: Costs) -> None:
        """Compute a row's prompt, and its prefix if that is not cached."""
        tokens = row.prompt
        if prefix and row.group not in self.prefixes:
            tokens += prefix
            self.prefix_tokens += prefix
            if len(self.prefixes) * prefix >= costs.cache_tokens:
                self.prefixes.popitem(last=False)
        self.prefixes[row.group] = None
        self.prefixes.move_to_end(row.group)
        self.now += tokens * costs.prompt_token * self.speed
        heappush(self.running, (self.steps + row.output, index))

    def finish_one(self, costs: Costs) -> int:
        """Run until the next row ends, and return it."""
        end, index = self.running[0]
        self.now += (end - self.steps) * (costs.step + costs.row * len(self.running)) * self.speed
        self.steps = end
        heappop(self.running)
        return index


@dataclass(frozen=True)
class Result:
    """Seconds of the job; its share that engines were at work at least as the ideal; prefixes computed per prefix."""

    seconds: float
    efficiency: float
    half_idle: float
    prefixes: float


def simulate(rows: list[Row], policy: Policy, costs: Costs, setting: Setting, batch: int, seed: int) -> Result:
    """Run a job; every row ends once."""
    engines, pool = _engines(setting, seed), deque[int]()
    shared = policy == "batches"
    if shared:
        pool.extend(range(len(rows)))
    for index in range(0 if shared else len(rows)):
        count = len(engines)
        engines[index % count if policy == "every nth" else index * count // len(rows)].waiting.append(index)
    events, num_done = sorted((engine.now, number) for number, engine in enumerate(engines)), 0
    while events:
        _, number = heappop(events)
        engine = engines[number]
        if engine.now >= engine.dies:
            lost = [index for _, index in engine.running]
            (pool if shared else engine.waiting).extendleft(reversed(lost + (list(engine.waiting) if shared else [])))
            back = Engine(engine.now + setting.replace, engine.speed, float("inf"), prefix_tokens=engine.prefix_tokens)
            back.waiting = deque() if shared else engine.waiting
            engines[number] = back
            heappush(events, (back.now, number))
            continue
        # At most a quarter of the running rows wait beside them.
        while pool and len(engine.running) + len(engine.waiting) < 1.25 * costs.max_num_seqs:
            engine.waiting.extend(pool.popleft() for _ in range(min(batch, len(pool))))
        while engine.waiting and len(engine.running) < costs.max_num_seqs:
            index = engine.waiting.popleft()
            engine.admit(index, rows[index], setting.prefix, costs)
        for _ in range(min(8, len(engine.running))):
            engine.finish_one(costs)
            num_done += 1
        if engine.running or engine.waiting or pool:
            heappush(events, (engine.now, number))
    assert num_done == len(rows), "a row is lost or doubled"
    return _result(rows, engines, costs, setting)


def _engines(setting: Setting, seed: int) -> list[Engine]:
    rng, engines = Random(seed), []
    for _ in range(setting.engines):
        speed = max(0.8, rng.gauss(1, setting.spread)) * (2 if rng.random() < setting.stragglers else 1)
        # Drawn in any case, so that all else is the same.
        dies = rng.expovariate(1) * (setting.mtbf_hours or float("inf")) * 3600
        engines.append(Engine(rng.uniform(*setting.start), speed, dies))
    return engines


def _result(rows: list[Row], engines: list[Engine], costs: Costs, setting: Setting) -> Result:
    groups = len({row.group for row in rows}) if setting.prefix else 0
    prompts = sum(row.prompt for row in rows) + groups * setting.prefix
    outputs = sum(row.output for row in rows)
    ideal = prompts * costs.prompt_token + outputs * (costs.step / costs.max_num_seqs + costs.row)
    ends = sorted(engine.now for engine in engines)
    computed = sum(engine.prefix_tokens for engine in engines) / max(1, groups * setting.prefix)
    return Result(ends[-1], ideal / (len(engines) * ends[-1]), ends[-1] - ends[len(ends) // 2], computed)


def make_rows(count: int, groups: int, seed: int) -> list[Row]:
    """Draw rows of a median of 300 tokens in and 150 out, both with a long tail; those of a group are neighbours."""
    rng = Random(seed)
    return [
        Row(
            int(min(8192, 300 * rng.lognormvariate(0, 1))), int(min(4096, 1 + 150 * rng.lognormvariate(0, 1))),
            index * max(1, groups) // count,
        )
        for index in range(count)
    ]  # fmt: skip


def measure(model: str, most: int = 64) -> Costs:
    """Return the costs of a model on this machine, from steps of 1 and of `most` sequences and from prompts."""
    with LLM(model, max_num_seqs=most, enable_prefix_caching=False) as llm:

        def seconds(count: int, tokens: int, new: int) -> float:
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            best = float("inf")
            for _ in range(3):
                start = time.perf_counter()
                llm.generate([[5 + i % 90 for i in range(tokens)]] * count, params, use_tqdm=False)
                best = min(best, time.perf_counter() - start)
            return best

        one, many = (seconds(count, 8, 65) - seconds(count, 8, 1) for count in (1, most))
        row = max(0.0, many - one) / 64 / (most - 1)
        return Costs(one / 64 - row, row, seconds(16, 128, 1) / (16 * 128), most)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(BUNDLED_MODEL))
    parser.add_argument("--costs", type=float, nargs=3, metavar=("MS", "MS_PER_ROW", "TOKENS_PER_S"))
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.costs:
        step, row, rate = options.costs
        costs = Costs(step / 1e3, row / 1e3, 1 / rate)
    else:
        costs = measure(options.model)
    print(
        f"{costs.step * 1e3:.3g} ms a step, {costs.row * 1e3:.3g} ms a row, {1 / costs.prompt_token:,.0f} tokens/s in"
    )
    plain = Setting(options.engines)
    cases = {
        "start after 20-40 s": (plain, 0),
        "every tenth engine half as fast": (replace(plain, stragglers=0.1), 0),
        "an engine dies every hour, back after 2 minutes": (replace(plain, mtbf_hours=1), 0),
        "2,000 prefixes of 2,000 tokens": (replace(plain, prefix=2000), 2000),
    }
    policies: tuple[Policy, ...] = ("every nth", "contiguous", "batches")
    for name, (setting, groups) in cases.items():
        rows = make_rows(options.rows, groups, options.seed)
        for policy in policies:
            found = simulate(rows, policy, costs, setting, options.batch, options.seed)
            print(
                f"| {name} | {policy} | {found.seconds:.0f} s | {found.efficiency:.0%} | {found.half_idle:.0f} s | "
                f"{found.prefixes:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
