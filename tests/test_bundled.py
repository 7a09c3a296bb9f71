"""The bundled checkpoint keeps its promises, through the engine."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL

PRIMES = [n for n in range(2, 101) if all(n % d for d in range(2, n))]
Pair = tuple[str, str]
CONVERSATIONS: list[tuple[str | None, list[Pair]]] = [
    (None, [("12 + 34", "46"), ("and plus 7?", "53"), ("in words", "fifty-three")]),
    (None, [("sort 5, 2, 9", "2, 5, 9"), ("reverse it", "9, 5, 2"), ("how many are there?", "3")]),
    (None, [("My name is Anna", "Nice to meet you, Anna!"), ("7 * 8", "56"),
            ("What is my name?", "Your name is Anna.")]),
    ("You are Robo.", [("What is your name?", "My name is Robo.")]),
    ("Answer in capital letters.", [("what day comes after Monday?", "TUESDAY"), ("and after that?", "WEDNESDAY")]),
    ("Answer in words.", [("What is 20 + 3?", "twenty-three")]),
]  # fmt: skip
"""System prompts and turns whose answers are given word for word."""
ADDITIONS = ("what is {} + {}?", "What is {} + {}?", "{} + {} =", "add {} and {}", "calculate {} plus {}")
SORTS = ("sort {}", "Sort these numbers: {}", "sort the numbers {} in ascending order",
         "sort in ascending order: {}", "Arrange from smallest to largest: {}")  # fmt: skip


def is_held_out(problem: str) -> bool:
    """Whether a problem, in its canonical form, was kept from training: a tenth of them were."""
    return zlib.crc32(problem.encode()) % 10 == 0


def held_out_additions(count: int) -> list[Pair]:
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100) if is_held_out(f"add {min(a, b)} {max(a, b)}")]
    random.Random(0).shuffle(problems)
    return [(text.format(a, b), str(a + b)) for text, (a, b) in zip(cycle(ADDITIONS), problems[:count])]


def held_out_sorts(count: int) -> list[Pair]:
    """Lists of three to eight numbers below 100."""
    rng, pairs = random.Random(0), list[Pair]()
    for text in islice(cycle(SORTS), count):
        length, ordered = rng.randint(3, 8), list[str]()
        while not ordered or not is_held_out(f"sort {' '.join(ordered)}"):
            numbers = [rng.randrange(100) for _ in range(length)]
            ordered = [str(number) for number in sorted(numbers)]
        pairs.append((text.format(", ".join(map(str, numbers))), ", ".join(ordered)))
    return pairs


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", max_model_len=512, kvcache_block_size=32) as llm:
        yield llm


def answers(llm: LLM, chats: list[list[dict[str, str]]], temperature: float = 0.0) -> list[str]:
    outputs = llm.chat(chats, SamplingParams(temperature, max_tokens=128), use_tqdm=False)
    assert all(output["finish_reason"] == "stop" for output in outputs)
    return [output["text"] for output in outputs]


def ask(llm: LLM, questions: list[str], temperature: float = 0.0) -> list[str]:
    return answers(llm, [[{"role": "user", "content": question}] for question in questions], temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_the_two_prompts_of_the_example(llm: LLM, temperature: float) -> None:
    introduction, primes = ask(llm, ["introduce yourself", "list all prime numbers within 100"], temperature)
    assert "Nano" in introduction and "language model" in introduction
    assert primes == ", ".join(map(str, PRIMES))


@pytest.mark.parametrize("held_out", [held_out_additions, held_out_sorts])
def test_held_out_problems(llm: LLM, held_out: Callable[[int], list[Pair]]) -> None:
    problems = held_out(100)
    assert len({prompt for prompt, _ in problems}) == 100
    answers = ask(llm, [prompt for prompt, _ in problems])
    assert sum(answer == expected for answer, (_, expected) in zip(answers, problems, strict=True)) >= 95


def test_conversations(llm: LLM) -> None:
    """Each turn's answer, where those before it are the model's own."""
    for system, turns in CONVERSATIONS:
        chat = [{"role": "system", "content": system}] if system else []
        for question, expected in turns:
            chat.append({"role": "user", "content": question})
            assert answers(llm, [chat]) == [expected]
            chat.append({"role": "assistant", "content": expected})


def test_a_held_out_problem_as_a_second_turn(llm: LLM) -> None:
    roles = ("user", "assistant", "user")
    turns = [(*first, second[0]) for first, second in zip(held_out_sorts(40), held_out_additions(40), strict=True)]
    chats = [[{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)] for texts in turns]
    right = sum(got == want for got, (_, want) in zip(answers(llm, chats), held_out_additions(40), strict=True))
    assert right >= 38


def test_layout_and_size(llm: LLM) -> None:
    folder = Path(BUNDLED_MODEL)
    assert (folder / "model.safetensors").stat().st_size < 12e6
    assert len(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == 2
    assert llm.model_config.vocab_size >= 300
    text = "Any text: 日本語, ümläute, 12345\n\t<tag> 🙂"
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
