"""Turns an engine's token ids into text: decodes outputs incrementally, and finds stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.text_reader import partial_start

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
    tokens of an output are decoded after the last ones of `prompt`, since SentencePiece decoders drop the space at the
    start of a text.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), **options: bool) -> None:
        # transformers' method checks for tensors and batches first, which takes longer than decoding a few tokens.
        is_theirs = getattr(type(tokenizer), "decode", None) is PreTrainedTokenizerBase.decode
        self._decode_tokens: Callable[..., str] = tokenizer._decode if is_theirs else tokenizer.decode
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


class OutputDelta(NamedTuple):
    """New text and tokens of an output, with log-probability records if requested."""

    text: str
    token_ids: list[int]
    logprobs: bytearray


class OutputState:
    """Accumulates one output's tokens and text, cut at the first complete stop string.

    One thread adds tokens; another may read them. Tokens are decoded on arrival if there are stop strings, otherwise
    when they are read, so that the engine's thread does not wait for decoding.

    Attributes:
        num_tokens: tokens so far; tokens after a stop string are dropped.
        stop_string: the stop string that ended the output; None if there was none so far.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, prompt: Sequence[int]) -> None:
        makes_text = tokenizer is not None and params.detokenize
        self.num_tokens = 0
        self.stop_string: str | None = None
        self._detokenizer = Detokenizer(tokenizer, prompt, **decode_options(params)) if makes_text else None
        self._stop = list(params.stop or []) if makes_text else []
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._lock = Lock()
        self._token_ids: list[int] = []
        self._logprobs = bytearray()
        # Whether the last new token is EOS or a stop token.
        self._ends = False
        self._num_decoded = 0
        # All text so far, without the stop string that ended it unless `include_stop_str_in_output`.
        self._text = ""
        self._num_taken = 0
        # Stop strings that end before this position precede `min_tokens`.
        self._checked = 0

    def append(self, position: int, token_id: int, is_end: bool, logprobs: bytes) -> bool:
        """Add a token, and return whether it completes a stop string. See `StreamedToken`.

        A token that is there already comes from an engine that runs the request again.
        """
        with self._lock:
            if self.stop_string is None and position == self.num_tokens:
                self.num_tokens += 1
                self._token_ids.append(token_id)
                self._ends = is_end
                if logprobs:
                    self._logprobs += logprobs
                if self._stop:
                    self._decode([token_id], is_end)
            return self.stop_string is not None and position + 1 == self.num_tokens

    def take(self, final: bool) -> OutputDelta:
        """Return the text and tokens not returned yet. `final`: no token follows."""
        with self._lock:
            token_ids, logprobs, ends = self._token_ids, self._logprobs, self._ends
            self._token_ids, self._logprobs = [], bytearray()
            if self._stop:
                return OutputDelta(self._take_text(final), token_ids, logprobs)
        if self._detokenizer is None:
            return OutputDelta("", token_ids, logprobs)
        # Without stop strings decoding is deferred until now.
        self._decode(token_ids, ends)
        return OutputDelta(self._take_text(final), token_ids, logprobs)

    def _decode(self, token_ids: list[int], ends: bool) -> None:
        """Add tokens to the text, and cut it at a stop string. `ends`: the last token is EOS or a stop token."""
        assert self._detokenizer is not None
        # The text of an EOS or stop token is left out, like a stop string.
        token_ids = token_ids[:-1] if ends and not self._include_stop else token_ids
        self._num_decoded += len(token_ids)
        self._text += self._detokenizer.append(token_ids, final=ends)
        if self.stop_string is not None or not self._stop:
            return
        if self._num_decoded > self._min_tokens:
            # The first to be complete, as if text arrived by character; the longer one if two end together.
            places = [(self._text.find(stop, max(0, self._checked - len(stop) + 1)), stop) for stop in self._stop]
            found = [(place + len(stop), -len(stop), stop) for place, stop in places if place >= 0]
            if found:
                end, negative_length, self.stop_string = min(found)
                self._text = self._text[: end if self._include_stop else end + negative_length]
        self._checked = len(self._text)

    def _take_text(self, final: bool) -> str:
        """Return the text not returned yet; a possible start of a stop string is held back unless `final`."""
        if final and self.stop_string is None:
            self._decode([], True)
        end = len(self._text)
        if not final and self.stop_string is None:
            end = max(self._num_taken, partial_start(self._text, self._stop))
        new, self._num_taken = self._text[self._num_taken : end], max(end, self._num_taken)
        return new


class OutputProcessor:
    """Decodes tokens; without a tokenizer texts are empty."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.token_bytes = token_bytes_function(tokenizer)

    def decode(self, prompt: Sequence[int], token_ids: list[int], params: SamplingParams, ends: bool) -> str:
        """Return the text of a whole output without stop strings; `ends`: its last token is EOS or a stop token."""
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


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes_function(tokenizer: Any) -> Callable[[int], bytes | None]:
    """Return a function from a token to its bytes, None if unknown; consecutive ones join to the text in UTF-8."""
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    is_byte_level, has_byte_tokens = "ByteLevel" in decoder, "ByteFallback" in decoder
    # The bytes that the characters of byte-level tokens stand for.
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

    @cache
    def anchor() -> tuple[list[int], int]:
        """Tokens to decode before another one, and their text's length: decoders drop a text's leading space."""
        token_ids = tokenizer.encode("x", add_special_tokens=False)
        return token_ids, len(tokenizer.decode(token_ids))

    @cache
    def token_bytes(token_id: int) -> bytes | None:
        if tokenizer is None:
            return None
        before, length = anchor()
        text: str = tokenizer.decode([*before, token_id])[length:]
        if "\ufffd" not in text:
            return text.encode()
        # Part of a character: the token's name tells its bytes.
        name = tokenizer.convert_ids_to_tokens(token_id)
        if is_byte_level and byte_of.keys() >= set(name):
            return bytes(byte_of[character] for character in name)
        if has_byte_tokens:
            byte = _BYTE_TOKEN.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else text.encode()
        return None

    return token_bytes
