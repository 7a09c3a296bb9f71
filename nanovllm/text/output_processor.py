"""From an engine's token ids to the text that a user gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from nanovllm.engine.request_output import request_output
from nanovllm.engine.sequence import RequestGroup, Sequence
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer, OutputText


@dataclass
class NewTokens:
    """What is new of an output: its text, its tokens, and their records of log-probabilities if it asks for them."""

    text: str
    token_ids: list[int]
    logprobs: bytearray


class OutputState:
    """One output's tokens and text as they come: a `TokenSink` of the engine.

    The engine adds tokens in one thread; another may take them. Text is decoded where it is needed: as the tokens come
    if they may complete a stop string, otherwise when it is taken, so that the engine does not wait for it.

    Args:
        tokenizer: a transformers tokenizer; None makes no text.
        params: the request's.

    Attributes:
        on_token: called for each token, in the engine's thread.
        finds_stops: whether text is decoded as the tokens come.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        makes_text = tokenizer is not None and params.detokenize
        self._text = OutputText(tokenizer, params) if makes_text else None
        self.finds_stops = makes_text and bool(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self.on_token: Callable[[], object] | None = None
        self._lock = Lock()
        self._new = NewTokens("", [], bytearray())
        # Whether the last new token is EOS or a stop token.
        self._ends = False

    def append(self, token_id: int, is_end: bool, logprobs: bytes) -> str | None:
        """Take a token; see `TokenSink`."""
        with self._lock:
            self._new.token_ids.append(token_id)
            self._ends = is_end
            self._new.logprobs += logprobs
            if self.finds_stops:
                self._decode([token_id], is_end)
        if self.on_token is not None:
            self.on_token()
        return self._text.stop_string if self.finds_stops and self._text is not None else None

    def take(self, final: bool) -> NewTokens:
        """Return what no call has returned yet. `final`: no token follows."""
        with self._lock:
            new, ends, self._new = self._new, self._ends, NewTokens("", [], bytearray())
            if self.finds_stops:
                new.text = self._take_text(final)
        if not self.finds_stops and self._text is not None:
            # The engine does not look at the text, so it need not wait for this.
            self._decode(new.token_ids, ends)
            new.text = self._take_text(final)
        return new

    def finish(self) -> str:
        """Return the whole text of an output that may have stop strings, of which no token follows."""
        with self._lock:
            if self._text is None:
                return ""
            if self._text.stop_string is None:
                self._text.append([], final=True)
            return self._text.text

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the output."""
        return None if self._text is None else self._text.stop_string

    def _decode(self, token_ids: list[int], ends: bool) -> None:
        assert self._text is not None
        # The text of an EOS or stop token is left out, as that of a stop string is.
        self._text.append(token_ids[:-1] if ends and not self._include_stop else token_ids, final=ends)

    def _take_text(self, final: bool) -> str:
        assert self._text is not None
        if final and self._text.stop_string is None:
            self._text.append([], final=True)
        return self._text.take(final)


def _no_text(token_id: int) -> None:
    return None


class OutputProcessor:
    """Makes the outputs of finished requests.

    Args:
        tokenizer: a transformers tokenizer; None leaves texts empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens: dict[int, str] = {}

    def make_output(self, request: RequestGroup) -> RequestOutput:
        """Return the output of a request whose sequences have all ended."""
        makes_text = request.seqs[0].params.detokenize
        return request_output(request, self._text, self.decode_token if makes_text else _no_text)

    def decode_token(self, token_id: int) -> str | None:
        """Return the text of one token."""
        if self.tokenizer is None:
            return None
        if token_id not in self._tokens:
            self._tokens[token_id] = self.tokenizer.decode([token_id])
        return self._tokens[token_id]

    def _text(self, seq: Sequence) -> str:
        params, sink = seq.params, seq.features.sink
        if isinstance(sink, OutputState):
            if not sink.finds_stops:
                # Its text is taken as it comes.
                return ""
            text = sink.finish()
            # Bytes that no token can complete any more may have held back a stop string.
            if seq.stop_reason is None and sink.stop_string is not None:
                seq.finish_reason, seq.stop_reason = "stop", sink.stop_string
            return text
        if self.tokenizer is None or not params.detokenize:
            return ""
        token_ids = seq.completion_token_ids
        # The text of an EOS or stop token is left out, as that of a stop string is.
        if seq.finish_reason == "stop" and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        options = {"skip_special_tokens": params.skip_special_tokens}
        if not params.skip_special_tokens:
            options["spaces_between_special_tokens"] = params.spaces_between_special_tokens
        return Detokenizer(self.tokenizer, **options).append(token_ids, final=True)
