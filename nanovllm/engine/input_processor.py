"""From what a user asks to token ids, if the engine can serve it."""

from __future__ import annotations

from array import array
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_token_ids


class InputProcessor:
    """Encodes prompts and checks requests.

    Args:
        tokenizer: a transformers tokenizer; None takes token ids alone.
        vocab_size: token ids of prompts must be below it.
        max_model_len: most tokens of one request.
        capacity: tokens that the cache holds.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int, capacity: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.capacity = capacity

    def process(self, prompts: list[Any], params: list[SamplingParams]) -> list[array[int]]:
        """Return the token ids of prompts (strings or lists of token ids), if all the requests can be served.

        Raises:
            ValueError: one cannot; says what is out of bounds.
        """
        token_ids = iter(self._tokenize([prompt for prompt in prompts if isinstance(prompt, str)]))
        return [
            self._check(next(token_ids) if isinstance(prompt, str) else prompt, param)
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def _check(self, prompt: Any, params: SamplingParams) -> array[int]:
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {params!r}")
        try:
            token_ids = check_token_ids(prompt, self.vocab_size)
        except TypeError as error:
            kind = type(prompt).__name__
            raise ValueError(f"a prompt is a string or a list of token ids, not {kind}: {prompt!r:.80}") from error
        if len(token_ids) > self.max_model_len:
            raise ValueError(f"the prompt has {len(token_ids)} tokens, over max_model_len={self.max_model_len}")
        # The last token is returned, never computed, so its keys need no place.
        num_stored = max(len(token_ids), min(len(token_ids) + params.max_tokens, self.max_model_len) - 1)
        if num_stored > self.capacity:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and max_tokens={params.max_tokens} need {num_stored} places, "
                f"over the cache's {self.capacity} (num_kvcache_blocks * kvcache_block_size)"
            )
        return token_ids

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        """Encode texts, all in one call, since tokenizers then use every core."""
        if not texts:
            return []
        if self.tokenizer is None:
            raise ValueError(f"prompt {texts[0][:40]!r} is a string, but the model has no tokenizer: pass token ids")
        try:
            token_ids: list[list[int]] = self.tokenizer(texts)["input_ids"]
        except TypeError as error:
            if len(texts) > 1:
                # Which of them it is shows when each goes alone.
                return [self._tokenize([text])[0] for text in texts]
            raise ValueError(f"prompt {texts[0][:40]!r} cannot be tokenized: {error}") from error
        return token_ids
