"""Parses gpt-oss answers, messages in OpenAI's harmony format (https://cookbook.openai.com/articles/openai-harmony)."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from nanovllm.text.text_reader import TextReader, partial_start
from nanovllm.text.tool_call_reader import ToolCallDelta

_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_HEADER_WORDS = ("assistant", "to=", "analysis", "commentary", "final")
_HEADER = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
CHANNEL_TAGS = (*_ENDS, "<|message|>", "<|constrain|>")
_RECIPIENT = re.compile(r"to=([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


@dataclass
class ReasoningPiece:
    """A piece of reasoning."""

    text: str


Events = Generator["str | ReasoningPiece | ToolCallDelta | None", None, None]


class HarmonyParser:
    """Splits the text of one output, special tokens included, into reasoning, text and calls.

    Messages in the channel `analysis` are reasoning, messages to `functions.name` are calls, and all others are text.
    """

    def __init__(self) -> None:
        self._reader = TextReader()
        self._events = self._run()
        self._num_calls = 0

    def append(self, text: str, final: bool = False) -> tuple[str, str, list[ToolCallDelta]]:
        """Parse new text, and return new reasoning, text and calls. `final`: no text follows."""
        self._reader.text += text
        self._reader.is_final = final
        reasoning, content, calls = "", "", list[ToolCallDelta]()
        for event in self._events:
            if event is None:
                break
            if isinstance(event, str):
                content += event
            elif isinstance(event, ReasoningPiece):
                reasoning += event.text
            else:
                calls.append(event)
        return reasoning, content, calls

    def _run(self) -> Events:
        reader = self._reader
        while True:
            yield from reader.skip_space()
            reader.trim()
            if not reader.text:
                return
            header, is_tagged = "", bool((yield from reader.peek(*_HEADER)))
            # A prompt may end within a header, and a text may have no header.
            if is_tagged or (yield from reader.peek(*_HEADER_WORDS)):
                header, end = yield from reader.until("<|message|>")
                if not end and not is_tagged:
                    yield header
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            if recipient is not None and recipient[1].startswith("functions."):
                yield ToolCallDelta(self._num_calls, recipient[1].removeprefix("functions."), "")
                self._num_calls += 1
                yield from self._message("call")
            else:
                yield from self._message("analysis" if channel is not None and channel[1] == "analysis" else "final")

    def _message(self, kind: str) -> Events:
        """Yield a message incrementally."""
        reader, is_empty = self._reader, True
        reader.trim()
        while True:
            end = partial_start(reader.text, _ENDS) if not reader.is_final else len(reader.text)
            places = [(at, tag) for tag in _ENDS if (at := reader.text.find(tag)) >= 0]
            at, tag = min(places, default=(end, ""))
            if at:
                is_empty, piece = False, reader.text[:at]
                yield piece if kind == "final" else self._piece(kind, piece)
            # The tag that opens the next message is part of its header.
            reader.at = at if tag in _HEADER else at + len(tag)
            reader.trim()
            if tag or reader.is_final:
                if kind == "call" and is_empty:
                    yield self._piece(kind, "{}")
                return
            yield None

    def _piece(self, kind: str, text: str) -> ReasoningPiece | ToolCallDelta:
        return ReasoningPiece(text) if kind == "analysis" else ToolCallDelta(self._num_calls - 1, None, text)
