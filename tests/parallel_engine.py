"""A program that makes engines of several ranks one after the other, for `test_gpu_parallel.py`.

The first of a process has mailboxes where the GPUs allow it, and later ones have NCCL: what is to have mailboxes needs
a process of its own. Run with a pickled `Plan` and the file for the results, a list of `Result`.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.runner.batch import StepShape
from nanovllm.workers.parallel_runner import ParallelRunner


@dataclass
class Plan:
    """Settings of each engine, and what every one of them is to generate, twice; for logits, in one first step."""

    folder: str
    engines: list[dict[str, Any]]
    prompts: list[list[int]]
    params: list[SamplingParams]
    logits: bool = False


class Result(TypedDict):
    """What one engine said: its rounds' tokens, and rank 0's share of the logits after each prompt, if asked for."""

    communicator: str
    rounds: list[list[list[int]]]
    logits: torch.Tensor | None


def run(plan: Plan, settings: dict[str, Any]) -> Result:
    """Make an engine, generate, and end it."""
    with LLM(plan.folder, **settings) as llm:
        assert isinstance(llm.llm_engine._runner, ParallelRunner) and llm.llm_engine._runner._runner is not None
        runner = llm.llm_engine._runner._runner
        result: Result = {"communicator": type(runner.communicator).__name__, "rounds": [], "logits": None}
        if plan.logits:
            sampler = runner.sampler
            # Decode rows, all of them padding, come first.
            size = runner.capture_sizes.fit(StepShape(0, sum(map(len, plan.prompts)), len(plan.prompts)))
            assert size is not None
            rows = slice(size.num_decodes, size.num_decodes + len(plan.prompts))

            def recorder(logits: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
                if result["logits"] is None:
                    result["logits"] = logits[rows].float().cpu()
                tokens: torch.Tensor = sampler(logits, *args)
                return tokens

            runner.sampler = recorder  # type: ignore[assignment]
        for _ in range(2):
            outputs = llm.generate(plan.prompts, plan.params, use_tqdm=False)
            result["rounds"].append([output["token_ids"] for output in outputs])
    return result


def main() -> None:
    """Run every engine of the plan."""
    plan: Plan = pickle.loads(Path(sys.argv[1]).read_bytes())
    results = [run(plan, settings) for settings in plan.engines]
    Path(sys.argv[2]).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main()
