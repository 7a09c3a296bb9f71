"""Tokens per second of nanovllm and of transformers' `generate`.

Run with `python -m tests.tools.throughput_vs_transformers`.

64 requests of mixed lengths (8-120 tokens in, 8-120 out) to the bundled checkpoint on the CPU in float32, greedy.
transformers takes them in padded batches of 16, each of which runs until its longest is done. The two alternate in one
process; only the tokens that were asked for count.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL

NUM_REQUESTS, BATCH_SIZE, ROUNDS = 64, 16, 5


def run_nanovllm(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds that nanovllm takes."""
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert [len(output["token_ids"]) for output in outputs] == lengths
    return seconds


@torch.inference_mode()
def run_transformers(model: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """Return the seconds that transformers takes."""
    started = time.perf_counter()
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = prompts[start : start + BATCH_SIZE]
        width = max(map(len, batch))
        token_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        longest = max(lengths[start : start + BATCH_SIZE])
        output = model.generate(
            token_ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert output.shape == (len(batch), width + longest)
    return time.perf_counter() - started


def main() -> None:
    """Alternate the two and print their rates and the median ratio."""
    rng = random.Random(0)
    llm = LLM(BUNDLED_MODEL, device="cpu", max_model_len=512, enable_prefix_caching=False)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL).float().eval()
    ratios = []
    for number in range(ROUNDS + 1):
        prompts = [[rng.randrange(3, 512) for _ in range(rng.randint(8, 120))] for _ in range(NUM_REQUESTS)]
        lengths = [rng.randint(8, 120) for _ in range(NUM_REQUESTS)]
        ours, theirs = run_nanovllm(llm, prompts, lengths), run_transformers(model, prompts, lengths)
        if number:
            ratios.append(theirs / ours)
            print(f"nanovllm {sum(lengths) / ours:6.0f} tok/s, transformers {sum(lengths) / theirs:6.0f} tok/s")
    print(f"ratio: median {statistics.median(ratios):.2f}, least {min(ratios):.2f} ({torch.get_num_threads()} threads)")


if __name__ == "__main__":
    main()
