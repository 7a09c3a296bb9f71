"""Jobs: the order in which their prompts run, what they hold, and how they end."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL

SETTINGS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "seed": 0, "max_num_seqs": 4,
}  # fmt: skip
NUM_DOCUMENTS, NUM_QUESTIONS, DOCUMENT_BLOCKS = 8, 4, 4


def documents_asked_about() -> list[list[int]]:
    """Questions about documents, shuffled."""
    rng = Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(4, 256) for _ in range(count)]

    documents = [tokens(DOCUMENT_BLOCKS * 16) for _ in range(NUM_DOCUMENTS)]
    prompts = [document + tokens(8) for document in documents for _ in range(NUM_QUESTIONS)]
    rng.shuffle(prompts)
    return prompts


@pytest.mark.parametrize("as_texts", [False, True])
def test_prompts_that_begin_alike_follow_each_other(as_texts: bool) -> None:
    prompts: list[Any] = documents_asked_about()
    params = SamplingParams(1.0, 4, ignore_eos=True)
    num_computed, results = {}, []
    for schedule, num_blocks in ("arrival", 200), ("arrival", 14), ("prefix", 14):
        with LLM(BUNDLED_MODEL, num_kvcache_blocks=num_blocks, **SETTINGS) as llm:
            given = [llm.tokenizer.decode(prompt) for prompt in prompts] if as_texts else prompts
            outputs = llm.generate(given, params, use_tqdm=False, schedule=schedule)  # type: ignore[arg-type]
            stats = llm.stats()
            num_computed[schedule, num_blocks] = stats["num_prompt_tokens"] - stats["num_cached_tokens"]
        results.append([(output.prompt, output.prompt_token_ids, output.outputs) for output in outputs])
    # The noise follows from the place in the list.
    assert results[0] == results[1] == results[2]
    assert num_computed["prefix", 14] == num_computed["arrival", 200] < num_computed["arrival", 14] / 2
