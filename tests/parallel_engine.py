"""A program that has a process group of its own and makes engines of several ranks, for `test_gpu_parallel.py`.

Run with a pickled `Plan` and the file for the results, a list of `Result`.
"""

from __future__ import annotations

import pickle
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from nanovllm import LLM, SamplingParams
from nanovllm.runner.batch import StepShape
from nanovllm.runner.parallel_runner import ParallelRunner
from nanovllm.sampling.sampler import Sampled


@dataclass
class Plan:
    """The prompts that every engine generates from, twice; for logits, in one first step.

    An engine is its settings, and whether it takes NCCL although the GPUs may reach each other. All engines are alive
    at the same time.
    """

    folder: str
    engines: list[tuple[dict[str, Any], bool]]
    prompts: list[list[int]]
    params: list[SamplingParams]
    logits: bool = False


class Result(TypedDict):
    """One engine's tokens of each round, and rank 0's share of the logits after each prompt, if asked for."""

    communicator: str
    rounds: list[list[list[int]]]
    logits: torch.Tensor | None


def make_engine(folder: str, settings: dict[str, Any], nccl: bool) -> LLM:
    """Make an engine, with NCCL or with what rank 0 chooses."""
    with mock.patch("torch.cuda.can_device_access_peer", lambda a, b: False) if nccl else nullcontext():
        return LLM(folder, **settings)


def run(plan: Plan, llm: LLM) -> Result:
    """Generate all of a plan with one engine."""
    assert isinstance(llm.llm_engine._runner, ParallelRunner) and llm.llm_engine._runner._runner is not None
    runner = llm.llm_engine._runner._runner
    result: Result = {"communicator": type(runner.communicator).__name__, "rounds": [], "logits": None}
    if plan.logits:
        sample, fit, sizes = runner.sampler.sample, runner.capture_sizes.fit, []

        def noting_size(shape: StepShape) -> StepShape | None:
            sizes.append(fit(shape))
            return sizes[-1]

        def recorder(logits: torch.Tensor, *args: Any) -> Sampled:
            if result["logits"] is None:
                # Decode rows, all of them padding, come first.
                first = sizes[-1].num_decodes if sizes[-1] is not None else 0
                result["logits"] = logits[first : first + len(plan.prompts)].float().cpu()
            return sample(logits, *args)

        runner.capture_sizes.fit = noting_size  # type: ignore[method-assign]
        runner.sampler.sample = recorder  # type: ignore[method-assign, assignment]
    for _ in range(2):
        outputs = llm.generate(plan.prompts, plan.params, use_tqdm=False, schedule="arrival")
        result["rounds"].append([output["token_ids"] for output in outputs])
    return result


def main() -> None:
    """Run every engine of the plan."""
    plan: Plan = pickle.loads(Path(sys.argv[1]).read_bytes())
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        engines = [stack.enter_context(make_engine(plan.folder, *engine)) for engine in plan.engines]
        results = [run(plan, llm) for llm in engines]
    dist.barrier()
    Path(sys.argv[2]).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
