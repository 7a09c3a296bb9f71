"""Turns an engine's token ids into text."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer, OutputText, decode_options
from nanovllm.text.token_bytes import token_bytes_function


class NewTokens(NamedTuple):
    """New text and tokens of an output, with log-probability records if requested."""

    text: str
    token_ids: list[int]
    logprobs: bytearray


class OutputState:
    """Accumulates one output's tokens and text.

    One thread adds tokens; another may read them. Tokens are decoded on arrival if there are stop strings, otherwise
    when they are read, so that the engine's thread does not wait for decoding.

    Args:
        tokenizer: a transformers tokenizer; None makes no text.
        params: the request's sampling parameters.
        prompt: the prompt's token ids.

    Attributes:
        num_tokens: tokens so far; tokens after a stop string are dropped.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt: Sequence[int]) -> None:
        makes_text = tokenizer is not None and params.detokenize
        self.num_tokens = 0
        self._text = OutputText(tokenizer, params, prompt) if makes_text else None
        self._finds_stops = makes_text and bool(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._has_stopped = False
        self._lock = Lock()
        self._token_ids: list[int] = []
        self._logprobs = bytearray()
        # Whether the last new token is EOS or a stop token.
        self._ends = False

    def append(self, token_id: int, is_end: bool, logprobs: bytes) -> bool:
        """Add a token, and return whether it completes a stop string. See `StreamedToken`."""
        with self._lock:
            if self._has_stopped:
                return False
            self.num_tokens += 1
            self._token_ids.append(token_id)
            self._ends = is_end
            if logprobs:
                self._logprobs += logprobs
            if self._finds_stops:
                self._has_stopped = self._decode([token_id], is_end)
            return self._has_stopped

    def take(self, final: bool) -> NewTokens:
        """Return the text and tokens not returned yet. `final`: no token follows."""
        with self._lock:
            token_ids, logprobs, ends = self._token_ids, self._logprobs, self._ends
            self._token_ids, self._logprobs = [], bytearray()
            if self._finds_stops:
                return NewTokens(self._take_text(final), token_ids, logprobs)
        if self._text is None:
            return NewTokens("", token_ids, logprobs)
        # Without stop strings decoding is deferred until now.
        self._decode(token_ids, ends)
        return NewTokens(self._take_text(final), token_ids, logprobs)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return None if self._text is None else self._text.stop_string

    def _decode(self, token_ids: list[int], ends: bool) -> bool:
        """Add tokens to the text, and return whether a stop string is complete."""
        assert self._text is not None
        # The text of an EOS or stop token is left out, like a stop string.
        return self._text.append(token_ids[:-1] if ends and not self._include_stop else token_ids, final=ends)

    def _take_text(self, final: bool) -> str:
        assert self._text is not None
        if final and self._text.stop_string is None:
            self._text.append([], final=True)
        return self._text.take(final)


class OutputProcessor:
    """Decodes tokens.

    Args:
        tokenizer: a transformers tokenizer; None leaves texts empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.token_bytes = token_bytes_function(tokenizer)

    def decode(self, prompt: Sequence[int], token_ids: list[int], params: SamplingParams, ends: bool) -> str:
        """Return the text of a whole output without stop strings.

        Args:
            prompt: the prompt's token ids.
            token_ids: the output's token ids.
            params: the request's sampling parameters.
            ends: whether the last token is EOS or a stop token, whose text is left out.
        """
        if self.tokenizer is None or not params.detokenize:
            return ""
        whole = token_ids[:-1] if ends and not params.include_stop_str_in_output else token_ids
        return Detokenizer(self.tokenizer, prompt, **decode_options(params)).append(whole, final=True)

    def decode_token(self, token_id: int) -> str | None:
        """Return the text of one token within a text."""
        if self.tokenizer is None:
            return None
        found = self.token_bytes(token_id)
        return str(self.tokenizer.decode([token_id])) if found is None else found.decode(errors="replace")
