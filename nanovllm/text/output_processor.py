"""From an engine's token ids to the text that a user gets."""

from __future__ import annotations

from typing import Any

from nanovllm.engine.request_output import request_output
from nanovllm.engine.sequence import RequestGroup, Sequence
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.detokenizer import Detokenizer, OutputText


class OutputState:
    """One output's tokens and text as they come: a `TokenSink` of the engine.

    Args:
        tokenizer: a transformers tokenizer; None makes no text.
        params: the request's.

    Attributes:
        text: the output's text; None without a tokenizer.
        new_token_ids: tokens that `take_tokens` has not returned yet.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams) -> None:
        makes_text = tokenizer is not None and params.detokenize
        self.text = OutputText(tokenizer, params) if makes_text else None
        self._include_stop = params.include_stop_str_in_output
        self.new_token_ids: list[int] = []

    def append(self, token_id: int, is_end: bool) -> str | None:
        """Take a token; returns the stop string that it completes. `is_end`: it is EOS or a stop token."""
        self.new_token_ids.append(token_id)
        if self.text is None:
            return None
        self.text.append([] if is_end and not self._include_stop else [token_id], final=is_end)
        return self.text.stop_string

    def finish(self) -> str:
        """Return the whole text, of which no token follows."""
        if self.text is None:
            return ""
        if self.text.stop_string is None:
            self.text.append([], final=True)
        return self.text.text

    def take(self, final: bool) -> tuple[str, list[int]]:
        """Return text and tokens that no call has returned yet."""
        tokens, self.new_token_ids = self.new_token_ids, []
        return "" if self.text is None else self.text.take(final), tokens


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

    def make_output(self, group: RequestGroup) -> RequestOutput:
        """Return the output of a request whose sequences have all finished."""
        makes_text = next(iter(group.finished.values())).params.detokenize
        return request_output(group, self._text, self.decode_token if makes_text else _no_text)

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
            text = sink.finish()
            # Bytes that no token can complete any more may have held back a stop string.
            if seq.stop_reason is None and sink.text is not None and sink.text.stop_string is not None:
                seq.finish_reason, seq.stop_reason = "stop", sink.text.stop_string
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
