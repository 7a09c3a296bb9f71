"""From what a user asks to the token ids that an engine takes."""

from __future__ import annotations

from array import array
from typing import Any

from nanovllm.engine.request_limits import RequestLimits
from nanovllm.sampling_params import SamplingParams


class InputProcessor:
    """Encodes prompts and checks requests.

    Args:
        tokenizer: a transformers tokenizer; None takes token ids alone.
        limits: what the engine can serve.
    """

    def __init__(self, tokenizer: Any, limits: RequestLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits

    def process(self, prompts: list[Any], params: list[SamplingParams]) -> list[array[int]]:
        """Return the token ids of prompts (strings or lists of token ids), if all the requests can be served.

        Raises:
            ValueError: one cannot; says what is out of bounds.
        """
        token_ids = iter(self._tokenize([prompt for prompt in prompts if isinstance(prompt, str)]))
        return [
            self.limits.check(next(token_ids) if isinstance(prompt, str) else prompt, param)
            for prompt, param in zip(prompts, params, strict=True)
        ]

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
                # Encoding one at a time shows which text is at fault.
                return [self._tokenize([text])[0] for text in texts]
            raise ValueError(f"prompt {texts[0][:40]!r} cannot be tokenized: {error}") from error
        return token_ids
