"""Which requests an engine can serve."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_token_ids


class PromptTooLongError(ValueError):
    """A prompt is longer than the model allows."""


@dataclass(frozen=True)
class RequestLimits:
    """What a request must keep to.

    Attributes:
        vocab_size: token ids of prompts are below it.
        max_model_len: most tokens of one request, prompt and output together.
        num_kv_slots: tokens that the KV cache holds at least: more where sliding windows release their blocks.
        max_stored_tokens: most tokens of one request whose keys and values are stored, not always all at once.
        max_logprobs: most log-probabilities at a position.
    """

    vocab_size: int
    max_model_len: int
    num_kv_slots: int
    max_stored_tokens: int
    max_logprobs: int

    def check_params(self, params: Any) -> SamplingParams:
        """Return a copy of sampling parameters that the engine can serve.

        Raises:
            ValueError: a value out of its range, a contradiction, or a token id outside the vocabulary.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {params!r}")
        checked = params.checked()
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(checked, name) or ():
                if token_id >= self.vocab_size:
                    raise ValueError(
                        f"{name}: token id {token_id} is outside the vocabulary, 0 ... {self.vocab_size - 1}"
                    )
        for name in ("logprobs", "prompt_logprobs"):
            given = getattr(checked, name)
            setattr(checked, name, count := self.num_logprobs(given))
            if (count or 0) > self.max_logprobs:
                whole = f", all {count} tokens," if given == -1 else ""
                raise ValueError(f"{name}={given}{whole} is over max_logprobs={self.max_logprobs}")
        return checked

    def num_logprobs(self, given: int | None) -> int | None:
        """Return how many log-probabilities a request asks for at a position; -1 stands for the whole vocabulary."""
        return self.vocab_size if given == -1 else given

    def check_without_text(self, params: Any) -> SamplingParams:
        """Do the same for a request of an engine that has no tokenizer.

        Raises:
            ValueError: see `check_params`, or a parameter that needs text.
        """
        checked = self.check_params(params)
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(checked, name):
                raise ValueError(f"{name} needs text: give the request to an LLM, not to its engine")
        return checked

    def check_prompt(self, prompt: Any, params: SamplingParams) -> array[int]:
        """Return a prompt's token ids, if the request can be served.

        Args:
            prompt: a list of token ids.
            params: from `check_params`.

        Raises:
            ValueError: it cannot; says what is out of bounds.
        """
        try:
            token_ids = check_token_ids(prompt, self.vocab_size)
        except TypeError as error:
            kind = type(prompt).__name__
            raise ValueError(f"a prompt is a string or a list of token ids, not {kind}: {prompt!r:.80}") from error
        self.check_size(len(token_ids), params)
        return token_ids

    def check_size(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Raise a `ValueError` if a prompt of so many tokens cannot be served."""
        if num_prompt_tokens > self.max_model_len:
            message = f"the prompt has {num_prompt_tokens} tokens, over max_model_len={self.max_model_len}"
            raise PromptTooLongError(message)
        if params.prompt_logprobs_start > num_prompt_tokens:
            raise ValueError(
                f"prompt_logprobs_start={params.prompt_logprobs_start} is over the prompt's {num_prompt_tokens} tokens"
            )
        # The last token is returned and never computed, so its keys and values are not stored.
        num_stored = max(num_prompt_tokens, num_prompt_tokens + self.max_tokens(num_prompt_tokens, params) - 1)
        if num_stored > self.max_stored_tokens:
            raise ValueError(
                f"a prompt of {num_prompt_tokens} tokens and max_tokens={params.max_tokens} need {num_stored} KV "
                f"slots, over the cache's {self.max_stored_tokens} for one request: raise num_kvcache_blocks or "
                "gpu_memory_utilization"
            )

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the most tokens that a request can generate, at least 1."""
        limit = self.max_model_len - num_prompt_tokens
        if params.max_tokens is not None:
            return max(1, min(params.max_tokens, limit))
        return max(1, min(limit, self.max_stored_tokens + 1 - num_prompt_tokens))
