"""The bundled checkpoint keeps its promises, through the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL

PRIMES = [n for n in range(2, 101) if all(n % d for d in range(2, n))]
CONVERSATIONS: list[tuple[str | None, list[tuple[str, str]]]] = [
    (None, [("12 + 34", "46"), ("and plus 7?", "53"), ("in words", "fifty-three")]),
    (None, [("sort 5, 2, 9", "2, 5, 9"), ("reverse it", "9, 5, 2"), ("how many are there?", "3")]),
    (None, [("My name is Anna", "Nice to meet you, Anna!"), ("7 * 8", "56"),
            ("What is my name?", "Your name is Anna.")]),
    ("You are Robo.", [("What is your name?", "My name is Robo.")]),
    ("Answer in capital letters.", [("what day comes after Monday?", "TUESDAY"), ("and after that?", "WEDNESDAY")]),
    ("Answer in words.", [("What is 20 + 3?", "twenty-three")]),
]  # fmt: skip
"""System prompts and turns whose answers are given word for word."""


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


def test_conversations(llm: LLM) -> None:
    """Each turn's answer, where those before it are the model's own."""
    for system, turns in CONVERSATIONS:
        chat = [{"role": "system", "content": system}] if system else []
        for question, expected in turns:
            chat.append({"role": "user", "content": question})
            assert answers(llm, [chat]) == [expected]
            chat.append({"role": "assistant", "content": expected})


def test_layout_and_size(llm: LLM) -> None:
    folder = Path(BUNDLED_MODEL)
    assert (folder / "model.safetensors").stat().st_size < 12e6
    assert len(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == 2
    assert llm.model_config.vocab_size >= 300
    text = "Any text: 日本語, ümläute, 12345\n\t<tag> 🙂"
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
