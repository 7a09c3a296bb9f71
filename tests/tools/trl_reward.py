"""Trains the bundled model with TRL to write the letter e, generates with nanovllm, and prints a row a step as JSON.

python -m tests.tools.trl_reward --steps 60 --plot .github/trl-reward.png
python -m torch.distributed.run --nproc-per-node 2 -m tests.tools.trl_reward --steps 20 --sleep
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, RLOOConfig

from nanovllm.assets import BUNDLED_MODEL
from nanovllm.integrations.trl import GRPOTrainer, NanoVLLMGeneration, RLOOTrainer

BEGINNINGS = [
    "The sea", "A dog", "One day", "My house", "In the morning", "Children", "The old man", "Rain", "Tell me about the",
    "We went to",
]  # fmt: skip
DIFFERENCE = "sampling/sampling_logp_difference/"


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    """The reward."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The trainer's."""
    is_cuda = torch.cuda.is_available()
    return {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": options.sleep, "use_cpu": not is_cuda,
        "per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": 32, "beta": 0.0,
        "max_steps": options.steps, "learning_rate": 2e-4, "logging_steps": 1, "save_strategy": "no", "seed": 1,
        "report_to": "none", "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
        "top_p": options.top_p, "top_k": options.top_k, "vllm_gpu_memory_utilization": 0.3,
    }  # fmt: skip


def train(options: argparse.Namespace, folder: str) -> list[dict[str, float]]:
    """Return the trainer's log."""
    is_grpo = options.trainer == "grpo"
    make, config = (GRPOTrainer, GRPOConfig) if is_grpo else (RLOOTrainer, RLOOConfig)
    data = Dataset.from_list([{"prompt": text} for text in BEGINNINGS] * 8)
    args = config(output_dir=folder, **settings(options))
    trainer = make(BUNDLED_MODEL, reward_funcs=share_of_e, args=args, train_dataset=data)
    if options.no_updates:
        trainer.vllm_generation.sync_weights = lambda: None
    trainer.train()
    if not trainer.accelerator.is_main_process:
        return []
    names = {"reward": "reward", "difference": f"{DIFFERENCE}mean", "largest": f"{DIFFERENCE}max", "time": "step_time"}
    return [
        {key: row[name] for key, name in names.items() if name in row}
        for row in trainer.state.log_history
        if "reward" in row
    ]


def plot(rows: list[dict[str, float]], file: str) -> None:
    """Draw the reward over the steps."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rows) + 1), [row["reward"] for row in rows], color="tab:blue", linewidth=1.5)
    axes.set(xlabel="step", ylabel="share of the letter e", xlim=(1, len(rows)), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=100)


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", choices=("grpo", "rloo"), default="grpo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--no-updates", action="store_true", help="leave the engine its first weights")
    parser.add_argument("--plot", metavar="FILE", help="draw the reward to a PNG file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        NanoVLLMGeneration.engine_settings = {"num_kvcache_blocks": 256, "kvcache_block_size": 16, "max_model_len": 256}
    with tempfile.TemporaryDirectory() as folder:
        rows = train(options, folder)
    for row in rows:
        print(json.dumps(row), flush=True)
    if options.plot and rows:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
