"""Splits a model's thoughts, between <think> and </think>, from its answer, as text comes."""

from __future__ import annotations

from nanovllm.text.thinking import BEGIN, END


class ReasoningSplitter:
    """Splits the text of one output.

    Space around the tags belongs to neither part. The begin tag counts at the start of the output alone; a chat
    template may also have put it at the end of the prompt.

    Args:
        is_inside: whether the output begins within the thoughts.
    """

    def __init__(self, is_inside: bool = False) -> None:
        self._state = "inside" if is_inside else "before"
        # Text that may be part of a tag, or space that may be before one.
        self._held = ""
        self._has_thoughts = False

    def append(self, text: str, final: bool = False) -> tuple[str, str]:
        """Return what new text adds to the thoughts and to the answer. `final`: no text follows."""
        self._held += text
        reasoning = content = ""
        if self._state == "before":
            start = self._held.lstrip()
            if start.startswith(BEGIN):
                self._state, self._held = "inside", start[len(BEGIN) :]
            elif final or not BEGIN.startswith(start):
                self._state = "answer"
        if self._state == "inside":
            reasoning = self._take_reasoning(final)
        if self._state == "after":
            # Space between the end tag and the answer.
            self._held = self._held.lstrip()
            self._state = "answer" if self._held else "after"
        if self._state == "answer":
            content, self._held = self._held, ""
        return reasoning, content

    def _take_reasoning(self, final: bool) -> str:
        if not self._has_thoughts:
            self._held = self._held.lstrip()
            self._has_thoughts = bool(self._held)
        thoughts, tag, rest = self._held.partition(END)
        if tag:
            self._state, self._held = "after", rest
            return thoughts.rstrip()
        if final:
            self._held = ""
            return thoughts
        # What may belong to the end tag, and space before it, waits.
        length = next((n for n in range(len(END) - 1, 0, -1) if thoughts.endswith(END[:n])), 0)
        end = len(thoughts[: len(thoughts) - length].rstrip())
        self._held = thoughts[end:]
        return thoughts[:end]
