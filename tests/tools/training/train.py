"""Train the bundled checkpoint from nothing: text, tokenizer, model, and a check of what it learnt.

    python -m tests.tools.training.train --output DIR

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

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from nanovllm.assets import BUNDLED_MODEL
from tests.tools.training.checkpoint import CONFIG, save_checkpoint, train_tokenizer
from tests.tools.training.conversations import FIXED_CONVERSATIONS, Conversation, converse
from tests.tools.training.corpus import END_OF_TEXT, SYSTEM, generate, held_out_additions, held_out_sorts, render
from tests.tools.training.tasks import INTRODUCTION, join

SEED = 2025
STEPS = 16000
WARMUP = 500
PEAK_RATE = 1e-3
WEIGHT_DECAY = 0.1
ROW_LENGTH = 384
ROWS = 64
CONVERSATIONS = 800_000
CONVERSATIONS_PER_STEP = 600
TOKENIZER_PAIRS = 60_000
CHUNK = 20_000
IGNORED = -100
HELD_OUT = 200
PASS_RATE = 0.95
PRIMES = [n for n in range(2, 100) if all(n % d for d in range(2, n))]


class Rows(NamedTuple):
    """Conversations packed into rows of one length; a position of 0 marks where one begins."""

    tokens: Tensor
    positions: Tensor
    labels: Tensor


def build_tokenizer() -> Tokenizer:
    """The tokenizer, from a draw of its own so that it is the same however long the training."""
    pairs = generate(TOKENIZER_PAIRS, SEED)
    # The special tokens are left out: as plain text they would take merges that nothing uses.
    return train_tokenizer(chain.from_iterable(("user", "assistant", "system", SYSTEM, *pair) for pair in pairs))


def encode(tokenizer: Tokenizer, conversations: list[Conversation]) -> Iterator[tuple[list[int], list[int]]]:
    """Each conversation in tokens, as many turns as a row holds, and its labels: only answers carry them."""
    for start in range(0, len(conversations), CHUNK):
        rendered = [render(*conversation) for conversation in conversations[start : start + CHUNK]]
        texts = tokenizer.encode_batch_fast([text for turns in rendered for pair in turns for text in pair])
        pieces = iter([text.ids for text in texts])
        for turns in rendered:
            tokens: list[int] = []
            labels: list[int] = []
            length = 0
            for _ in turns:
                prompt, answer = next(pieces), next(pieces)
                tokens += prompt + answer
                labels += [IGNORED] * len(prompt) + answer
                if len(tokens) <= ROW_LENGTH:
                    length = len(tokens)
            yield tokens[:length], labels[:length]


def pack(tokenizer: Tokenizer, conversations: list[Conversation]) -> Rows:
    """Lay the conversations end to end in rows, none across two."""
    tokens, positions, labels = array("h"), array("h"), array("h")
    filler = tokenizer.encode(END_OF_TEXT).ids
    for own_tokens, own_labels in encode(tokenizer, conversations):
        room = -len(tokens) % ROW_LENGTH
        if len(own_tokens) > room > 0:
            tokens.extend(filler * room)
            positions.extend([0] * room)
            labels.extend([IGNORED] * room)
        tokens.extend(own_tokens)
        positions.extend(range(len(own_tokens)))
        labels.extend(own_labels)
    whole = len(tokens) // ROW_LENGTH * ROW_LENGTH
    flat = (torch.frombuffer(values, dtype=torch.int16)[:whole] for values in (tokens, positions, labels))
    return Rows(*(values.view(-1, ROW_LENGTH) for values in flat))


def batches(rows: Rows, steps: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """`steps` batches of rows in random order, again and again; each conversation sees itself alone."""
    rows = Rows(*(values.to(device) for values in rows))
    causal = torch.ones(ROW_LENGTH, ROW_LENGTH, dtype=torch.bool, device=device).tril()
    order = torch.empty(0, dtype=torch.long, device=device)
    for _ in range(steps):
        if len(order) < ROWS:
            order = torch.randperm(len(rows.tokens), device=device)
        chosen, order = order[:ROWS], order[ROWS:]
        positions = rows.positions[chosen].long()
        place = (positions == 0).cumsum(1)
        yield {
            "input_ids": rows.tokens[chosen].long(),
            "position_ids": positions,
            "attention_mask": ((place[:, :, None] == place[:, None, :]) & causal)[:, None],
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


def answer(model: Any, tokenizer: Any, chats: list[list[dict[str, str]]]) -> list[str]:
    """Greedy answers to chats, through the chat template."""
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False)
    answers = output[:, inputs["input_ids"].shape[1] :]
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]


def messages(conversation: Conversation) -> list[dict[str, str]]:
    """A conversation up to its last answer, as chat templates know it."""
    system, turns = conversation
    chat = [] if system is None else [{"role": "system", "content": system}]
    for prompt, reply in turns:
        chat += [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return chat[:-1]


def check(folder: Path, device: torch.device) -> bool:
    """Load what was saved as a user would, weights rounded, and print whether it keeps its promises."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = model.float().eval().to(device)
    passed = True
    additions, sorts = held_out_additions(HELD_OUT), held_out_sorts(HELD_OUT)
    exact = [("introduce yourself", INTRODUCTION), ("list all prime numbers within 100", join(PRIMES))]
    for name, conversations, pass_rate in (
        ("held-out additions", [Conversation(None, [pair]) for pair in additions], PASS_RATE),
        ("held-out sorts", [Conversation(None, [pair]) for pair in sorts], PASS_RATE),
        (
            "held-out additions after sorts",
            [Conversation(None, list(p)) for p in zip(sorts, additions, strict=True)],
            PASS_RATE,
        ),
        (
            "held-out sorts after additions",
            [Conversation(SYSTEM, list(p)) for p in zip(additions, sorts, strict=True)],
            PASS_RATE,
        ),
        ("conversations like those of training", converse(HELD_OUT, SEED + 2), PASS_RATE),
        ("prompts of the example", [Conversation(None, [pair]) for pair in exact], 1.0),
        ("fixed conversations", FIXED_CONVERSATIONS, 1.0),
    ):
        answers = answer(model, tokenizer, [messages(conversation) for conversation in conversations])
        wrong = [(case, got) for case, got in zip(conversations, answers, strict=True) if case.turns[-1][1] != got]
        print(f"{name}: {len(conversations) - len(wrong)} of {len(conversations)} right")
        for case, got in wrong[:8]:
            print(f"  {case}: got {got!r}")
        passed &= len(wrong) <= (1 - pass_rate) * len(conversations)
    return passed


def main() -> int:
    """Train, save, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(BUNDLED_MODEL))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    started = time.perf_counter()
    device = torch.device(options.device)
    torch.manual_seed(SEED)

    tokenizer = build_tokenizer()
    conversations = converse(min(CONVERSATIONS, CONVERSATIONS_PER_STEP * options.steps), SEED + 1)
    rows = pack(tokenizer, conversations)
    print(
        f"{len(conversations)} conversations in {len(rows.tokens)} rows, {time.perf_counter() - started:.1f} s",
        flush=True,
    )

    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).float().to(device)
    print(f"{sum(weight.numel() for weight in model.parameters())} weights on {device}")
    train(model, rows, options.steps)
    save_checkpoint(options.output, model, tokenizer)
    passed = check(options.output, device)
    print(f"{'passed' if passed else 'FAILED'} in {time.perf_counter() - started:.1f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
