"""The bundled checkpoint keeps its promises, through the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from tests.tools.training.conversations import FIXED_CONVERSATIONS
from tests.tools.training.corpus import held_out_additions, held_out_sorts

PRIMES = [n for n in range(2, 101) if all(n % d for d in range(2, n))]


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
def test_held_out_problems(llm: LLM, held_out: object) -> None:
    assert callable(held_out)
    problems = held_out(200)
    assert len({prompt for prompt, _ in problems}) == 200
    answers = ask(llm, [prompt for prompt, _ in problems])
    right = sum(answer == expected for answer, (_, expected) in zip(answers, problems, strict=True))
    assert right >= 190


def test_conversations(llm: LLM) -> None:
    """Each turn's answer, where those before it are the model's own."""
    chats = [[{"role": "system", "content": case.system}] if case.system else [] for case in FIXED_CONVERSATIONS]
    for turn in range(max(len(case.turns) for case in FIXED_CONVERSATIONS)):
        going_on = [
            (chat, case) for chat, case in zip(chats, FIXED_CONVERSATIONS, strict=True) if turn < len(case.turns)
        ]
        for chat, case in going_on:
            chat.append({"role": "user", "content": case.turns[turn][0]})
        replies = answers(llm, [chat for chat, _ in going_on])
        assert replies == [case.turns[turn][1] for _, case in going_on]
        for (chat, _), reply in zip(going_on, replies, strict=True):
            chat.append({"role": "assistant", "content": reply})


def test_a_held_out_problem_as_a_second_turn(llm: LLM) -> None:
    chats = [
        [
            {"role": "user", "content": sort},
            {"role": "assistant", "content": is_sorted},
            {"role": "user", "content": sum_},
        ]
        for (sort, is_sorted), (sum_, _) in zip(held_out_sorts(100), held_out_additions(100), strict=True)
    ]
    right = sum(got == want for got, (_, want) in zip(answers(llm, chats), held_out_additions(100), strict=True))
    assert right >= 95


def test_layout_and_size(llm: LLM) -> None:
    folder = Path(BUNDLED_MODEL)
    assert (folder / "model.safetensors").stat().st_size < 12e6
    assert len(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == 2
    assert llm.model_config.vocab_size >= 300
    text = "Any text: 日本語, ümläute, 12345\n\t<tag> 🙂"
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
