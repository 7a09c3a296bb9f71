"""The bundled checkpoint keeps its promises, through the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.assets.corpus import held_out_additions, held_out_sorts

PRIMES = [n for n in range(2, 101) if all(n % d for d in range(2, n))]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, device="cpu", max_model_len=512, kvcache_block_size=32) as llm:
        yield llm


def ask(llm: LLM, questions: list[str], temperature: float = 0.0) -> list[str]:
    prompts = [
        llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature, max_tokens=128), use_tqdm=False)
    assert all(output["finish_reason"] == "stop" for output in outputs)
    return [output["text"] for output in outputs]


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


def test_layout_and_size(llm: LLM) -> None:
    folder = Path(BUNDLED_MODEL)
    assert (folder / "model.safetensors").stat().st_size < 12e6
    assert len(json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == 2
    assert llm.model_config.vocab_size >= 300
    text = "Any text: 日本語, ümläute, 12345\n\t<tag> 🙂"
    assert llm.tokenizer.decode(llm.tokenizer.encode(text)) == text
