"""Decodes one output incrementally, and finds stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import decode_function

_REPLACEMENT = "\ufffd"
"""Decoded form of an incomplete character, some of whose bytes are in later tokens."""

_MAX_START = 16
"""Maximum textless tokens kept at the start of an output; decoding thousands again for each token would be slow."""

_TAIL = 4
"""Tokens at the end of a prompt that are tried first as context."""


class Detokenizer:
    """Decodes one request's tokens incrementally; the texts of all calls join to the text of all tokens.

    A token's text may depend on the previous token, so the tokens of the last call are decoded again together with the
    new ones, and their earlier text is cut off (as in Hugging Face's text-generation-inference and in vLLM). The first
    tokens of an output are decoded after the prompt's last ones, since SentencePiece decoders drop the space at the
    start of a text.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: token ids that precede the output; empty at the start of a text.
        options: keyword arguments of the tokenizer's `decode`.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), **options: bool) -> None:
        self._decode_tokens = decode_function(tokenizer)
        self._options = options or {"skip_special_tokens": True}
        self._prompt: Sequence[int] = prompt
        # Returned tokens on which the next text may depend, followed by pending tokens.
        self._context: list[int] = []
        self._waiting: list[int] = []
        # The text of the context; None: not decoded yet.
        self._before: str | None = None

    def append(self, token_ids: list[int], final: bool = False) -> str:
        """Return the text that these tokens add; an incomplete character is held back unless `final`."""
        self._waiting += token_ids
        if len(self._prompt):
            self._begin_after_prompt()
        if self._before is None:
            self._before = self._decode(self._context) if self._context else ""
        before, text = self._before, self._decode(self._context + self._waiting)
        if (text.endswith(_REPLACEMENT) or len(text) < len(before)) and not final:
            return ""
        context = self._waiting
        if before.endswith(_REPLACEMENT) and not text.startswith(before):
            # The prompt ends within a character that these tokens complete: the context must include all of it.
            before, context = before.rstrip(_REPLACEMENT), self._context + self._waiting
        if len(text) > len(before):
            self._context, self._before = context, None
        elif not before:
            # At the start even textless tokens matter, since a text's leading space is dropped.
            self._context, self._before = (self._context + self._waiting)[:_MAX_START], None
        # Within a text, textless tokens such as skipped special ones do not affect the next token.
        self._waiting = []
        return text[len(before) :]

    def _begin_after_prompt(self) -> None:
        """Use the prompt's last tokens as context, enough of them to have text."""
        prompt, length = self._prompt, _TAIL
        self._prompt = ()
        while True:
            self._context = list(prompt[-length:])
            self._before = self._decode(self._context)
            if length >= len(prompt) or self._before.strip(_REPLACEMENT):
                return
            length *= 4

    def _decode(self, token_ids: list[int]) -> str:
        return self._decode_tokens(token_ids, **self._options)


def decode_options(params: SamplingParams) -> dict[str, bool]:
    """Return the keyword arguments of a tokenizer's `decode` for an output with these parameters."""
    if params.skip_special_tokens:
        return {"skip_special_tokens": True}
    return {"skip_special_tokens": False, "spaces_between_special_tokens": params.spaces_between_special_tokens}


class OutputText:
    """The text of one output: decoded, and cut at the first complete stop string.

    Args:
        tokenizer: a transformers tokenizer.
        params: the request's sampling parameters.
        prompt: the prompt's token ids.

    Attributes:
        text: all text so far; without the stop string that ended it, unless `include_stop_str_in_output`.
        stop_string: the stop string that ended it; None if there was none so far.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, **decode_options(params))
        self._stop = list(params.stop or [])
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._num_taken = 0
        # Stop strings that end before this position precede `min_tokens`.
        self._checked = 0
        self.text = ""
        self.stop_string: str | None = None

    def append(self, token_ids: list[int], final: bool = False) -> bool:
        """Add tokens, and return whether a stop string is complete. `final`: no token follows."""
        self._num_tokens += len(token_ids)
        self.text += self._detokenizer.append(token_ids, final)
        if self.stop_string is not None or not self._stop:
            return False
        if self._num_tokens <= self._min_tokens:
            self._checked = len(self.text)
            return False
        # The first to be complete, as if text arrived by character; the longer one if two end together.
        found = [(place + len(stop), -len(stop), stop) for stop in self._stop if (place := self._find(stop)) >= 0]
        self._checked = len(self.text)
        if not found:
            return False
        end, negative_len, self.stop_string = min(found)
        self.text = self.text[: end if self._include_stop else end + negative_len]
        return True

    def take(self, final: bool) -> str:
        """Return the text not returned yet; a possible start of a stop string is held back unless `final`."""
        end = len(self.text)
        if not final and self.stop_string is None:
            longest = max(map(len, self._stop), default=1) - 1
            starts = range(max(self._num_taken, end - longest), end)
            end = next((i for i in starts if any(stop.startswith(self.text[i:]) for stop in self._stop)), end)
        new, self._num_taken = self.text[self._num_taken : end], max(end, self._num_taken)
        return new

    def _find(self, stop: str) -> int:
        """Return the start of a stop string that ends after the checked text; -1 if not found."""
        return self.text.find(stop, max(0, self._checked - len(stop) + 1))


class TextOffsets:
    """Counts the characters before each token of a text, by decoding it incrementally.

    A token that completes a character begins where the character does.

    Args:
        tokenizer: a transformers tokenizer; None makes no text.
        start: number of characters before the first token.
        prompt: token ids before the first token.
        options: keyword arguments of the tokenizer's `decode`.
    """

    def __init__(self, tokenizer: Any, start: int = 0, prompt: Sequence[int] = (), **options: bool) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt, **options)
        self._end = start

    def take(self, token_ids: list[int]) -> list[int]:
        """Return the offsets of more tokens, as if no stop string cut the text."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            if self._detokenizer is not None:
                self._end += len(self._detokenizer.append([token_id]))
        return offsets
