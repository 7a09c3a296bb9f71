"""Train the bundled checkpoint from nothing: text, tokenizer, model, and a check of what it learnt.

    python nanovllm/assets/train.py --output DIR

It is seeded and needs no network. One recent GPU takes some minutes; a CPU serves only to try the script, with
a few `--steps`. The exit status is 1 when the saved checkpoint misses what the package promises of it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from array import array
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

# Run as a file, Python looks for modules beside this one, not where the package is.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from nanovllm.assets.checkpoint import CONFIG, save_checkpoint, train_tokenizer
from nanovllm.assets.corpus import END_OF_TEXT, SYSTEM, generate, held_out_additions, held_out_sorts, render
from nanovllm.assets.tasks import INTRODUCTION, Pair, join

SEED = 2025
STEPS = 12000
WARMUP = 500
PEAK_RATE = 1e-3
WEIGHT_DECAY = 0.1
ROW_LENGTH = 256
ROWS = 96
PAIRS = 1_600_000
PAIRS_PER_STEP = 600
TOKENIZER_PAIRS = 60_000
CHUNK = 20_000
IGNORED = -100
HELD_OUT = 200
PASS_RATE = 0.95
PRIMES = [n for n in range(2, 100) if all(n % d for d in range(2, n))]


class Rows(NamedTuple):
    """Pairs packed into rows of one length; a position of 0 marks where a pair begins."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor


def build_tokenizer() -> Tokenizer:
    """The tokenizer, from a draw of its own so that it is the same however long the training."""
    pairs = generate(TOKENIZER_PAIRS, SEED)
    # The special tokens are left out: as plain text they would take merges that nothing uses.
    return train_tokenizer(chain.from_iterable(("user", "assistant", "system", SYSTEM, *pair) for pair in pairs))


def encode(tokenizer: Tokenizer, pairs: list[Pair]) -> Iterator[tuple[list[int], list[int]]]:
    """Each pair's prompt and answer in tokens; one in ten stands behind a system message."""
    for start in range(0, len(pairs), CHUNK):
        rendered = [render(pair, index % 10 == 0) for index, pair in enumerate(pairs[start : start + CHUNK])]
        prompts = tokenizer.encode_batch_fast([prompt for prompt, _ in rendered])
        answers = tokenizer.encode_batch_fast([answer for _, answer in rendered])
        for prompt, answer in zip(prompts, answers, strict=True):
            yield prompt.ids, answer.ids


def pack(tokenizer: Tokenizer, pairs: list[Pair]) -> Rows:
    """Lay the pairs end to end in rows, none across two; only answers carry labels."""
    tokens, positions, labels = array("h"), array("h"), array("h")
    filler = tokenizer.encode(END_OF_TEXT).ids
    for prompt, answer in encode(tokenizer, pairs):
        length = len(prompt) + len(answer)
        room = -len(tokens) % ROW_LENGTH
        if length > ROW_LENGTH:
            raise ValueError(f"a pair of {length} tokens does not fit a row of {ROW_LENGTH}")
        if length > room > 0:
            tokens.extend(filler * room)
            positions.extend([0] * room)
            labels.extend([IGNORED] * room)
        tokens.extend(prompt + answer)
        positions.extend(range(length))
        labels.extend([IGNORED] * len(prompt) + answer)
    whole = len(tokens) // ROW_LENGTH * ROW_LENGTH
    flat = (torch.frombuffer(values, dtype=torch.int16)[:whole] for values in (tokens, positions, labels))
    return Rows(*(values.view(-1, ROW_LENGTH) for values in flat))


def batches(rows: Rows, steps: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """`steps` batches of rows in random order, again and again; each pair sees itself alone."""
    rows = Rows(*(values.to(device) for values in rows))
    causal = torch.ones(ROW_LENGTH, ROW_LENGTH, dtype=torch.bool, device=device).tril()
    order = torch.empty(0, dtype=torch.long, device=device)
    for _ in range(steps):
        if len(order) < ROWS:
            order = torch.randperm(len(rows.tokens), device=device)
        chosen, order = order[:ROWS], order[ROWS:]
        positions = rows.positions[chosen].long()
        pair = (positions == 0).cumsum(1)
        yield {
            "input_ids": rows.tokens[chosen].long(),
            "position_ids": positions,
            "attention_mask": ((pair[:, :, None] == pair[:, None, :]) & causal)[:, None],
            "labels": rows.labels[chosen].long(),
        }


def learning_rate(step: int, steps: int) -> float:
    """The share of the peak rate at a step: a linear rise, then half a cosine to nothing."""
    warmup = min(WARMUP, steps // 10 + 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def build_optimizer(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    """AdamW that lets the norms alone when it decays."""
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.98), fused=model.device.type == "cuda")


def train(model: Qwen3ForCausalLM, rows: Rows, steps: int) -> None:
    """Fit the model to the rows in float32, its products in bfloat16."""
    optimizer = build_optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    started = time.perf_counter()
    model.train()
    for step, batch in enumerate(batches(rows, steps, model.device), start=1):
        with torch.autocast(model.device.type, torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 == 0 or step == steps:
            print(f"step {step:6d}  loss {loss.item():.5f}  {time.perf_counter() - started:6.1f} s", flush=True)


def answer(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Greedy answers to single-turn prompts, through the chat template."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
    answers = output[:, inputs["input_ids"].shape[1] :]
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]


def check(folder: Path, device: torch.device) -> bool:
    """Load what was saved as a user would, weights rounded, and print whether it keeps its promises."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = model.float().eval().to(device)
    passed = True
    for name, pairs in (("additions", held_out_additions(HELD_OUT)), ("sorts", held_out_sorts(HELD_OUT))):
        answers = answer(model, tokenizer, [prompt for prompt, _ in pairs])
        wrong = [(*pair, got) for pair, got in zip(pairs, answers, strict=True) if pair[1] != got]
        print(f"held-out {name}: {len(pairs) - len(wrong)} of {len(pairs)} right")
        for prompt, expected, got in wrong[:5]:
            print(f"  {prompt!r}: expected {expected!r}, got {got!r}")
        passed &= len(wrong) <= (1 - PASS_RATE) * len(pairs)
    exact = {"introduce yourself": INTRODUCTION, "list all prime numbers within 100": join(PRIMES)}
    for (prompt, expected), got in zip(exact.items(), answer(model, tokenizer, list(exact)), strict=True):
        print(f"{prompt!r}: {got!r}")
        passed &= got == expected
    return passed


def main() -> int:
    """Train, save, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "qwen3-tiny")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    started = time.perf_counter()
    device = torch.device(options.device)
    torch.manual_seed(SEED)

    tokenizer = build_tokenizer()
    pairs = generate(min(PAIRS, PAIRS_PER_STEP * options.steps), SEED + 1)
    rows = pack(tokenizer, pairs)
    print(f"{len(pairs)} pairs in {len(rows.tokens)} rows, {time.perf_counter() - started:.1f} s", flush=True)

    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).float().to(device)
    print(f"{sum(weight.numel() for weight in model.parameters())} weights on {device}")
    train(model, rows, options.steps)
    save_checkpoint(options.output, model, tokenizer)
    passed = check(options.output, device)
    print(f"{'passed' if passed else 'FAILED'} in {time.perf_counter() - started:.1f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
