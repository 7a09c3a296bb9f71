"""Separates a model's reasoning from its answer, and exempts it from grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nanovllm.engine.request import TokenConstraint, fill_rows
from nanovllm.text.text_reader import partial_start

Start = Literal["inside", "before", "unknown", "answer"]
_TAIL = 16
"""Number of last tokens that can hold a whole tag and the space after it."""


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags around a model's reasoning.

    Attributes:
        tags: pairs of begin and end tag.
        begins_inside: whether an answer begins within the reasoning even without a begin tag in prompt or answer.
        has_channels: whether an answer is a list of messages, as in gpt-oss's harmony.
    """

    tags: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    begins_inside: bool = False
    has_channels: bool = False

    def start(self, prompt: str, is_taught: bool) -> Start:
        """Return the part in which an answer begins.

        Args:
            prompt: the end of the prompt.
            is_taught: whether the chat template contains the tags: then the begin tag may be missing.
        """
        end = prompt.rstrip()
        if any(end.endswith(begin.rstrip()) for begin, _ in self.tags):
            return "inside"
        if any(end.endswith(tag.rstrip()) for _, tag in self.tags):
            return "answer"
        return "inside" if self.begins_inside else "unknown" if is_taught else "before"


_THINK = ReasoningFormat()
_DEEPSEEK_R1 = ReasoningFormat(begins_inside=True)
_SEED = ReasoningFormat((("<seed:think>", "</seed:think>"),))
_MISTRAL = ReasoningFormat((("[THINK]", "[/THINK]"),))
_GRANITE = ReasoningFormat(
    tuple((f"{here} my thought process:", f"{here} my response:") for here in ("Here is", "Here's"))
)
_COHERE = ReasoningFormat((("<|START_THINKING|>", "<|END_THINKING|>"),))
_GEMMA = ReasoningFormat((("<|channel>thought\n", "<channel|>"),))
_HARMONY = ReasoningFormat((("<|start|>assistant", "<|channel|>final<|message|>"),), has_channels=True)
ANY = ReasoningFormat((*_THINK.tags, *_SEED.tags, *_MISTRAL.tags, *_GEMMA.tags, *_COHERE.tags))
REASONING_FORMATS = {
    "cohere": _COHERE, "deepseek_r1": _DEEPSEEK_R1, "deepseek_v3": _THINK, "ernie45": _THINK, "gemma4": _GEMMA,
    "glm45": _THINK, "granite": _GRANITE, "holo2": _THINK, "kimi_k2": _THINK, "minimax_m2": _DEEPSEEK_R1,
    "mistral": _MISTRAL, "nemotron_v3": _DEEPSEEK_R1, "olmo3": _THINK, "openai_gptoss": _HARMONY, "qwen3": _THINK,
    "seed_oss": _SEED, "step3": _DEEPSEEK_R1, "step3p5": _THINK,
}  # fmt: skip
"""Formats by name, vLLM's where it has one."""
HARMONY_MARK = "<|channel|>"


def reasoning_format(name: str, tokenizer: Any, template: str | None = None) -> ReasoningFormat:
    """Return a format by name; "auto" detects it in the chat template, and else accepts any tags.

    Args:
        name: the format's name.
        tokenizer: a transformers tokenizer, or None.
        template: a chat template to use instead of the tokenizer's.

    Raises:
        ValueError: an unknown name.
    """
    if name != "auto":
        if name not in REASONING_FORMATS:
            raise ValueError(f"reasoning_parser must be auto or one of {', '.join(REASONING_FORMATS)}, not {name!r}")
        return REASONING_FORMATS[name]
    return _HARMONY if HARMONY_MARK in (template or template_text(tokenizer)) else ANY


def template_text(tokenizer: Any) -> str:
    """Return a tokenizer's chat templates as one text, to search for tags; empty if it has no template."""
    return str(getattr(tokenizer, "chat_template", None) or "")


def prompt_end(tokenizer: Any, prompt: Any) -> str:
    """Return the text of a prompt's last tokens, with special tokens."""
    return "" if tokenizer is None else str(tokenizer.decode(list(prompt[-_TAIL:])))


class ReasoningSplitter:
    """Splits the text of one output into reasoning and answer.

    Space around the tags belongs to neither part. A begin tag counts only at the start of the output.

    Args:
        start: whether the output begins within the reasoning, or before it; "unknown": text before an end tag is
            reasoning, so text waits for an end tag. "answer": there is no reasoning.
        form: the tags.
        keeps_tags: whether tags and the space around them are part of the reasoning.
    """

    def __init__(self, start: Start = "unknown", form: ReasoningFormat = ANY, keeps_tags: bool = False) -> None:
        self._state: str = start
        self._tags, self._keeps_tags = form.tags, keeps_tags
        self._begins, self._ends = (tuple(tag[i] for tag in form.tags) for i in (0, 1))
        # Text that may be part of a tag, or space that may precede one.
        self._held = ""
        self._has_thoughts = keeps_tags

    def append(self, text: str, final: bool = False) -> tuple[str, str]:
        """Parse new text, and return new reasoning and answer. `final`: no text follows."""
        self._held += text
        reasoning = content = ""
        if self._state in ("before", "unknown"):
            reasoning = self._begin(final)
        if self._state == "inside":
            reasoning += self._take_reasoning(final)
        if self._state == "after":
            # Skip space between the end tag and the answer.
            self._held = self._held.lstrip()
            self._state = "answer" if self._held else "after"
        if self._state == "answer":
            content, self._held = self._held, ""
        return reasoning, content

    def _begin(self, final: bool) -> str:
        """Determine how the output begins, and return a begin tag that is part of the reasoning."""
        start = self._held.lstrip()
        begin = next((begin for begin in self._begins if start.startswith(begin)), None)
        if begin is not None:
            self._state, length = "inside", len(self._held) - len(start) + len(begin)
            tag, self._held = self._held[:length], self._held[length:]
            self._ends = tuple(end for own, end in self._tags if own == begin)
            return tag if self._keeps_tags else ""
        if not final and any(begin.startswith(start) for begin in self._begins):
            return ""
        if self._state == "before":
            self._state = "answer"
        elif any(end in self._held for end in self._ends):
            self._state = "inside"
        elif final:
            self._state = "answer"
        return ""

    def _take_reasoning(self, final: bool) -> str:
        if not self._has_thoughts:
            self._held = self._held.lstrip()
            self._has_thoughts = bool(self._held)
        at, tag = min(((self._held.find(end), end) for end in self._ends if end in self._held), default=(-1, ""))
        if tag:
            thoughts, rest = self._held[:at], self._held[at + len(tag) :]
            if self._keeps_tags:
                self._state, self._held = "answer", rest
                return thoughts + tag
            self._state, self._held = "after", rest
            return thoughts.rstrip()
        if final:
            thoughts, self._held = self._held, ""
            return thoughts
        # Hold back a possible start of an end tag, and space before it.
        end = len(self._held[: partial_start(self._held, self._ends)].rstrip())
        thoughts, self._held = self._held[:end], self._held[end:]
        return thoughts


class AfterThinkingConstraint:
    """A `TokenConstraint` that leaves reasoning free, and then applies another constraint.

    Args:
        tokenizer: a transformers tokenizer.
        inner: the constraint on the answer.
        prompt_token_ids: the prompt, which may end within the reasoning, or after it.
        end: end tag of reasoning that begins with the output; None: the prompt or the model opens it.
    """

    def __init__(
        self, tokenizer: Any, inner: TokenConstraint, prompt_token_ids: Sequence[int], end: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._tail: list[int] = []
        before = prompt_end(tokenizer, prompt_token_ids).rstrip()
        tags = reasoning_format("auto", tokenizer).tags if end is None else ((before, end),)
        # The end tag of the reasoning; None once the answer has begun.
        has_ended = any(before.endswith(end.rstrip()) for _, end in tags)
        begun = [end for begin, end in tags if before.endswith(begin.rstrip())]
        self._end = None if has_ended or not begun else begun[0]
        # Tokens with which the model may begin reasoning now.
        self._begins = {} if has_ended or begun else _single_tokens(tokenizer, tags)

    def accept(self, token_id: int) -> None:
        """Accept a token of the output; raises as the answer's constraint does."""
        if self._end is not None:
            self._tail = [*self._tail[1 - _TAIL :], token_id]
            if self._end in self._tokenizer.decode(self._tail):
                self._end = None
        elif token_id in self._begins:
            self._end = self._begins[token_id]
        else:
            self._inner.accept(token_id)
        self._begins = {}

    def fill(self, constraints: list[tuple[AfterThinkingConstraint, int]], words: np.ndarray) -> None:
        """Write the masks of several constraints; see `TokenConstraint`."""
        fill_rows([(item._inner, row) for item, row in constraints if item._end is None], words)
        for constraint, row in constraints:
            if constraint._end is not None:
                words[row] = -1
            for begin in constraint._begins:
                words[row].view(np.uint32)[begin // 32] |= np.uint32(1 << begin % 32)


def _single_tokens(tokenizer: Any, tags: Sequence[tuple[str, str]]) -> dict[int, str]:
    """Return the begin tags that are single tokens, with their end tags."""
    encoded = [(tokenizer.encode(begin, add_special_tokens=False), end) for begin, end in tags]
    return {int(token_ids[0]): end for token_ids, end in encoded if len(token_ids) == 1}
