"""Scores continuations by their log-probabilities, for `LLM.score`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nanovllm.outputs import Logprobs, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.input_processor import InputProcessor
from nanovllm.utils.checks import token_list


def split_pairs(processor: InputProcessor, prompts: Any, continuations: Any) -> list[tuple[list[int], int]]:
    """Return each pair's joined token ids, and the number of its prompt's tokens; ValueError if it has none."""
    if not isinstance(prompts, (list, tuple)) or not isinstance(continuations, (list, tuple)):
        raise ValueError("prompts and continuations must be lists; `rank` compares a query with documents")
    if len(prompts) != len(continuations):
        raise ValueError(f"{len(continuations)} continuations for {len(prompts)} prompts: give one each")
    texts: list[str] = []
    pairs = [(token_list(p), token_list(c)) for p, c in zip(prompts, continuations, strict=True)]
    for prompt, continuation in pairs:
        if isinstance(prompt, str) and isinstance(continuation, str):
            # A token includes the space before it, so trailing space moves to the continuation.
            stripped = prompt.rstrip()
            texts += [stripped, prompt + continuation]
        elif not isinstance(prompt, list) or not isinstance(continuation, list):
            raise ValueError(
                "a prompt and its continuation must both be strings, or both be a list of token ids, not "
                f"{prompt!r:.40} and {continuation!r:.40}"
            )
    encoded = iter(processor.tokenize(texts))
    split = []
    for prompt, continuation in pairs:
        if isinstance(prompt, str):
            num_prompt_tokens, token_ids = len(next(encoded)), next(encoded)
        else:
            num_prompt_tokens, token_ids = len(prompt), [*prompt, *continuation]
        if num_prompt_tokens == 0:
            raise ValueError("a prompt to score after has no tokens: at least one is needed")
        if len(token_ids) <= num_prompt_tokens:
            raise ValueError(f"continuation {continuation!r:.40} has no tokens after its prompt")
        split.append((token_ids, num_prompt_tokens))
    return split


def score_params(num_prompt_tokens: int) -> SamplingParams:
    """Return the parameters of a request that scores the tokens after the first `num_prompt_tokens`."""
    return SamplingParams(0, 1, prompt_logprobs=0, prompt_logprobs_start=num_prompt_tokens, detokenize=False)


@dataclass
class ScoreOutput:
    """Log-probabilities of a continuation.

    Attributes:
        token_ids: the continuation's tokens.
        token_logprobs: their log-probabilities.
        logprob: sum of the log-probabilities.
        is_greedy: whether every token is the most likely one at its position.
    """

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    is_greedy: bool


def score_output(output: RequestOutput, num_prompt_tokens: int) -> ScoreOutput:
    """Return the scores of the tokens after the prompt, from a request with `prompt_logprobs=0`."""
    found = output.prompt_logprobs
    assert isinstance(found, Logprobs)
    logprobs = found.token_logprobs[num_prompt_tokens:].tolist()
    is_greedy = bool((found.ranks[num_prompt_tokens:] == 1).all())
    return ScoreOutput(output.prompt_token_ids[num_prompt_tokens:], logprobs, sum(logprobs), is_greedy)
