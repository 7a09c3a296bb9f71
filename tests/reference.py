"""Transformers' model and logits processors: what tokens and sampling parameters must come to."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput
from tests.cache_checks import check_blocks

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
Process = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@functools.cache
def reference_model(folder: Path | str) -> Any:
    """The model of a folder in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logits(folder: Path | str, token_ids: list[int]) -> torch.Tensor:
    """Logits at each position, [num_tokens, vocab_size]."""
    logits: torch.Tensor = reference_model(folder)(torch.tensor([token_ids])).logits[0]
    return logits


@functools.cache
def likeliest(folder: Path, token_ids: tuple[int, ...]) -> list[int]:
    """Return the likeliest token after each token of a text."""
    tokens: list[int] = reference_logits(folder, list(token_ids)).argmax(1).tolist()
    return tokens


@functools.cache
def complete(folder: Path, prompt: tuple[int, ...]) -> list[int]:
    """Return the tokens that transformers' `generate` adds to a prompt."""
    ids, model = torch.tensor([prompt]), reference_model(folder)
    ends = {"max_new_tokens": MAX_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **ends)
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def check_tokens(folder: Path, prompt: list[int], token_ids: list[int]) -> None:
    """Assert that each token of an answer is the likeliest after the text before it."""
    text = (*prompt, *token_ids)
    assert len(token_ids) == MAX_TOKENS
    assert token_ids == likeliest(folder, text)[len(prompt) - 1 : -1], f"prompt of {len(prompt)} tokens"


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random tokens of the small checkpoint's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(320, (n,), generator=generator).tolist() for n in lengths]


def make_llm(folder: Path, **kwargs: Any) -> LLM:
    settings: dict[str, Any] = {"max_model_len": 512, "kvcache_block_size": 16, "num_kvcache_blocks": 200}
    return LLM(folder, **(settings | kwargs))


def set_depth(llm: LLM, depth: int) -> None:
    """Have a step launched before the one before it is taken in, or not."""
    assert llm.llm_engine._runner is not None
    llm.llm_engine._runner.pipeline_depth = depth


def check(llm: LLM, folder: Path, batch: list[list[int]]) -> list[int]:
    """Assert that each greedy token is transformers' after the text before it; return how many were cached of each."""
    # Who finds whose blocks depends on the order.
    outputs = llm.generate(batch, GREEDY, use_tqdm=False, schedule="arrival")
    for prompt, output in zip(batch, outputs, strict=True):
        check_tokens(folder, prompt, output["token_ids"])
    check_blocks(llm.llm_engine.block_manager, llm.llm_engine.scheduler.sequences)
    assert llm.stats()["num_used_blocks"] == 0
    return [output["num_cached_tokens"] for output in outputs]


def processors_of(params: SamplingParams, num_prompt_tokens: int, eos_token_ids: list[int], vocab: int) -> list[Any]:
    """Transformers' processors in vLLM's order; the penalties of OpenAI, which it lacks, by their definition."""
    found: list[LogitsProcessor | Process] = []
    if params.allowed_token_ids is not None:
        found.append(SuppressTokensLogitsProcessor(sorted(set(range(vocab)) - set(params.allowed_token_ids))))
    if params.min_tokens:
        ends = [*eos_token_ids, *(params.stop_token_ids or [])]
        found.append(MinNewTokensLengthLogitsProcessor(num_prompt_tokens, params.min_tokens, ends))
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(token,): value for token, value in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))

    def subtract(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(ids[0, num_prompt_tokens:], minlength=vocab)
        return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    found.append(subtract)
    if params.temperature:
        found.append(lambda ids, scores: scores / params.temperature)
        found += [MinPLogitsWarper(params.min_p)] if params.min_p else []
        found += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        found += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    return found


def processed(
    folder: Path | str, params: SamplingParams, num_prompt_tokens: int, token_ids: list[int], eos: list[int]
) -> torch.Tensor:
    """Return the processed logits at each position of an output, [num_output_tokens, vocab_size]."""
    logits = reference_logits(folder, token_ids)
    processors = processors_of(params, num_prompt_tokens, eos, logits.shape[1])
    rows = []
    for end in range(num_prompt_tokens, len(token_ids)):
        scores = logits[end - 1 : end]
        for process in processors:
            scores = process(torch.tensor([token_ids[:end]]), scores)
        rows.append(scores[0])
    return torch.stack(rows)


def check_logprobs(output: RequestOutput, want: torch.Tensor, num_logprobs: int) -> None:
    """Compare an output's log-probabilities with those that follow from logits, [num_output_tokens, vocab_size]."""
    completion, expected = output.outputs[0], want.log_softmax(1)
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
    for token_id, at, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
        check_position(at, token_id, row, num_logprobs)
    total = expected[range(len(expected)), completion.token_ids].sum().item()
    assert math.isclose(completion.cumulative_logprob or 0, total, rel_tol=1e-4, abs_tol=1e-3)


def check_position(likely: Any, token_id: int, row: torch.Tensor, num_logprobs: int) -> None:
    """Compare one position's log-probabilities with a row of [vocab_size]."""
    possible = min(num_logprobs, int((row > -math.inf).sum()))
    ranked = row.topk(possible).indices.tolist()
    assert set(likely) == {token_id, *ranked}
    for token, item in likely.items():
        assert abs(item.logprob - row[token].item()) < 1e-4
        assert item.rank == 1 + int((row > row[token]).sum())


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens of the small checkpoint's vocabulary, none of them special."""
    return torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
