"""Requests as users make them: several outputs, priorities, bad words, dicts, defaults, conversations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from tests.cache_checks import check_blocks
from tests.mock_runner import run
from tests.reference import reference_model

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "seed": 0}
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
PROMPT = "introduce yourself"
CONVERSATION = [{"role": "user", "content": PROMPT}]
OPEN = [*CONVERSATION, {"role": "assistant", "content": "I am"}]


@pytest.fixture(scope="module")
def module_llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=100, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    """An engine from which each test must take all that it has queued."""
    yield module_llm
    assert module_llm.is_finished() and module_llm.stats()["num_used_blocks"] == 0
    check_blocks(module_llm.llm_engine.block_manager)


def encode(*pieces: str) -> list[int]:
    """Tokens of texts, each encoded alone, so that tokens end where the texts do."""
    return [token for piece in pieces for token in TOKENIZER.encode(piece, add_special_tokens=False)]


def test_priorities_order_requests() -> None:
    with LLM(BUNDLED_MODEL, num_kvcache_blocks=8, max_num_seqs=1, **SETTINGS) as single:
        done: list[int] = []
        prompts = [[10 + i] * 5 for i in range(5)]
        outputs = single.generate(
            prompts, SamplingParams(0, 2, ignore_eos=True), False, priority=[3, 0, 3, -1, 1],
            on_output=lambda output: done.append(output.prompt_token_ids[0] - 10),
        )  # fmt: skip
        assert done == [3, 1, 4, 0, 2] and [o.prompt_token_ids for o in outputs] == prompts
        for bad in ([1], "123", [1, 2, 1.5, 0, 0], 5):
            with pytest.raises(ValueError, match="priority"):
                single.generate(prompts, priority=bad)  # type: ignore[arg-type]


# One token after a space and several elsewhere; several tokens in both cases; with others that do not come.
@pytest.mark.parametrize("bad_words", [["tiny"], ["ships with"], ["Hello", "I can count", "zz"]])
def test_bad_words_are_those_of_transformers(llm: LLM, bad_words: list[str]) -> None:
    (free,) = llm.chat(CONVERSATION, SamplingParams(0, 30), use_tqdm=False)
    tokens = free.prompt_token_ids
    (output,) = llm.generate([tokens], SamplingParams(0, 30, bad_words=bad_words), use_tqdm=False)
    model = reference_model(BUNDLED_MODEL)
    ids = [encode(text) for word in bad_words for text in (word, " " + word)]
    want = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=30, bad_words_ids=ids)
    assert output.outputs[0].token_ids == want[0, len(tokens) :].tolist()
    assert bad_words[0] in free.outputs[0].text and bad_words[0] not in output.outputs[0].text


def test_bad_words_have_tokens(llm: LLM) -> None:
    with pytest.raises(ValueError, match="bad_words has '  ', which is space alone"):
        llm.generate(PROMPT, SamplingParams(0, 30, bad_words=["  "]))


def test_parameters_are_checked_again_and_copied(llm: LLM) -> None:
    params = SamplingParams(0, 3, logit_bias={70: 50})
    request_id = llm.add_request(PROMPT, params)
    params.logit_bias = {80: 50}
    params.max_tokens = 1
    assert run(llm)[request_id].outputs[0].token_ids == [70] * 3
    params.top_p = 1.5
    with pytest.raises(ValueError, match=r"top_p must be a finite number > 0 and <= 1, not 1\.5"):
        llm.generate(PROMPT, params)


def test_no_max_tokens_is_up_to_the_models_length() -> None:
    for blocks, length in ((10, 64), (3, 49)):
        with LLM(BUNDLED_MODEL, num_kvcache_blocks=blocks, **(SETTINGS | {"max_model_len": 64})) as small:
            (output,) = small.generate([[9] * 20], SamplingParams(0, None, ignore_eos=True), use_tqdm=False)
            assert len(output.outputs[0].token_ids) == length - 20
            assert output.outputs[0].finish_reason == "length"


def test_recommended_parameters(tmp_path: Path) -> None:
    assert SamplingParams.from_model(tmp_path) == SamplingParams()
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "max_new_tokens": 7, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert SamplingParams.from_model(tmp_path) == SamplingParams(0.6, 7, top_p=0.95, top_k=20)
    (tmp_path / "generation_config.json").write_text(json.dumps(config | {"do_sample": False}))
    assert SamplingParams.from_model(tmp_path).temperature == 0
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 7}))
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams.from_model(tmp_path)


def test_chat_is_the_template_with_one_bos(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bos = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 1)]
    )
    tokenizer.save_pretrained(folder)
    with LLM(folder, num_kvcache_blocks=100, **SETTINGS) as llm:
        params = SamplingParams(0, 5)
        assert llm.generate("x", params, use_tqdm=False)[0].prompt_token_ids[0] == 1
        first, second = llm.chat([CONVERSATION, OPEN], params, use_tqdm=False)
        (alone,) = llm.chat(CONVERSATION, params, use_tqdm=False)
        *_, streamed = llm.stream_chat(CONVERSATION, params)
        (left_open,) = llm.chat(OPEN, params, use_tqdm=False, continue_final_message=True)
        (other,) = llm.chat(
            CONVERSATION, params, use_tqdm=False, chat_template="{{ x }}!{{ messages[0].content }}{{ tools[0].n }}",
            chat_template_kwargs={"x": "y"}, tools=[{"n": "tool"}],
        )  # fmt: skip
        wrong: list[Any] = [[], "hi", [[]], [CONVERSATION, "hi"], [{"role": "user", "content": "x"}, []]]
        for messages in wrong:
            with pytest.raises(ValueError, match="messages must be"):
                llm.chat(messages)
        assert llm.stats()["num_used_blocks"] == 0

    def render(conversation: Any, **options: Any) -> list[int]:
        ids: list[int] = TOKENIZER.apply_chat_template(conversation, tokenize=True, return_dict=False, **options)
        return ids

    assert alone.outputs == first.outputs and streamed.prompt_token_ids == alone.prompt_token_ids
    assert alone.prompt_token_ids == first.prompt_token_ids == render(CONVERSATION, add_generation_prompt=True)
    assert second.prompt_token_ids == render(OPEN, add_generation_prompt=True)
    assert left_open.prompt_token_ids == render(OPEN, continue_final_message=True)
    assert other.prompt_token_ids == encode(f"y!{PROMPT}tool")
