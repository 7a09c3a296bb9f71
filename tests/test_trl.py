"""TRL's own trainers, of the version that is installed, generate with nanovllm: the bundled model learns."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("trl")

from trl.trainer import grpo_trainer, rloo_trainer

from nanovllm.integrations.trl import NanoVLLMGeneration, patched

TRAIN = ["-m", "tests.tools.trl_reward"]
TWO = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *TRAIN]


def train(*command: str) -> list[dict[str, float]]:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"reward"')]


def has_learnt(rows: list[dict[str, float]]) -> bool:
    """Whether the engine has said what the trainer thinks it has, and the reward has doubled."""
    rewards = [row["reward"] for row in rows]
    says_the_same = all(row["difference"] < 1e-5 and row["largest"] < 1e-4 for row in rows)
    return says_the_same and sum(rewards[-5:]) / 5 >= 2 * sum(rewards[:2]) / 2


# A minute or two on two idle cores.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [
        [*TRAIN, "--sleep"],
        pytest.param([*TRAIN, "--top-p", "0.8", "--top-k", "20"], marks=pytest.mark.compat),
        pytest.param(TWO, marks=pytest.mark.compat),
        pytest.param([*TWO, "--sleep"], marks=pytest.mark.compat),
    ],
)
def test_twenty_steps_of_grpo(command: list[str]) -> None:
    rows = train(*command, "--steps", "20")
    assert len(rows) == 20 and has_learnt(rows)


@pytest.mark.compat
def test_without_updates_the_two_disagree() -> None:
    assert not has_learnt(train(*TRAIN, "--steps", "20", "--no-updates"))


def test_three_steps_of_rloo() -> None:
    assert len(train(*TRAIN, "--steps", "3", "--trainer", "rloo")) == 3


@pytest.mark.parametrize(
    ("name", "value"), [("mode", "server"), ("tensor_parallel_size", 2), ("model_impl", "terratorch")]
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    settings = {"mode": "colocate", "tensor_parallel_size": 1, "model_impl": "auto"} | {name: value}
    generation: Any = NanoVLLMGeneration.__new__(NanoVLLMGeneration)
    vars(generation).update(settings)
    with pytest.raises(ValueError, match=f"vllm_{name}={value!r} is not supported"):
        generation._init_vllm()
    with pytest.raises(ValueError, match="images are not supported"):
        generation.generate([[1]], [["a picture"]], 1)


def test_other_trainers_are_made_within_a_context() -> None:
    theirs = grpo_trainer.VLLMGeneration
    with patched():
        assert grpo_trainer.VLLMGeneration is rloo_trainer.VLLMGeneration is NanoVLLMGeneration
    assert grpo_trainer.VLLMGeneration is theirs
