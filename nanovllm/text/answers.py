"""Answers to chats: constrains their form, and splits them into reasoning, text and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from secrets import token_hex
from typing import Any

from nanovllm.outputs import RequestOutput, ToolCall
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.text.answer_formats import (
    CALL_TAGS,
    CHANNEL_TAGS,
    ReasoningFormat,
    Start,
    prompt_end,
    reasoning_format,
    template_text,
    tool_call_format,
)
from nanovllm.text.answer_parsers import CallReader, Events, Reasoning, ToolCallDelta, harmony, plain, reasoning
from nanovllm.text.grammars import tool_call_grammar
from nanovllm.text.text_reader import TextReader, partial_start

Tool = Mapping[str, Any]


class AnswerFormat:
    """The format in which a model answers chats; ValueError for an unknown name of a parser.

    Args:
        tokenizer: a transformers tokenizer; None if the model has none.
        tool_call_parser, reasoning_parser: names of formats; "auto" detects them in the chat template.
        template: a chat template to use instead of the tokenizer's.

    Attributes:
        has_channels: whether an answer is a list of messages, whatever a request asks for.
        has_special_tags: whether some tags are special tokens.
    """

    def __init__(
        self, tokenizer: Any, tool_call_parser: str = "auto", reasoning_parser: str = "auto",
        template: str | None = None,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self.calls = tool_call_format(tool_call_parser, tokenizer, template)
        self.reasoning = reasoning_format(reasoning_parser, tokenizer, template)
        self.has_channels = self.calls.has_channels or self.reasoning.has_channels
        shown = template or template_text(tokenizer)
        # If the template has only the end tag of reasoning, the model may omit the begin tag.
        self._is_taught = any(end in shown and begin not in shown for begin, end in self.reasoning.tags)
        tags = CALL_TAGS | {tag for pair in self.reasoning.tags for tag in pair} | set(CHANNEL_TAGS)
        # Decoding skips named ones, and added ones marked as special.
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if getattr(token, "special", True)}
        special |= {str(token) for token in getattr(tokenizer, "all_special_tokens", [])}
        # Tags that are special tokens appear only in text that keeps all special tokens; the others are dropped later.
        self.has_special_tags = not tags.isdisjoint(special)
        self._dropped = tuple(sorted(special - tags))

    @cached_property
    def tag_tokens(self) -> dict[str, int]:
        """Tags of forced calls that are single tokens."""
        form = self.calls
        written = f"{form.list_begin}{form.call}{form.list_end}{form.answer_begin}"
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {str(token): token_id for token_id, token in added.items() if str(token) in written}

    def start(self, prompt: Sequence[int]) -> Start:
        """Return the part in which an answer to a prompt begins; a chat template may have opened the reasoning."""
        return self.reasoning.start(prompt_end(self._tokenizer, prompt), self._is_taught)

    def dropped_tokens(self, params: SamplingParams) -> tuple[str, ...]:
        """Return the special tokens to remove from a text with tags, since these parameters do not ask for them."""
        return self._dropped if self.has_special_tags and params.skip_special_tokens else ()


@dataclass(frozen=True)
class AnswerOptions:
    """One request's options for its answer.

    Attributes:
        form: the model's answer format.
        tools: tools that the model may call, as in OpenAI's API; may be empty.
        choice: "auto", "required", or the name of the tool to call.
        parallel: whether several calls are allowed.
        separates: whether reasoning is separated from the text.
    """

    form: AnswerFormat
    tools: Sequence[Tool] = ()
    choice: str = "auto"
    parallel: bool = True
    separates: bool = False

    @classmethod
    def of(
        cls, form: AnswerFormat, tools: Sequence[Tool] | None = None, choice: Any = None, parallel: bool | None = None,
        separates: bool = False,
    ) -> AnswerOptions:  # fmt: skip
        """Return the options in a request's fields; ValueError if a required tool does not exist, or a value is wrong.

        `choice`: "auto", "none", "required", or `{"function": {"name": ...}}`.
        """
        names = [function_of(tool)["name"] for tool in tools or []]
        wanted = choice or "auto"
        if not isinstance(choice, str) and choice is not None:
            wanted = function_of(choice)["name"]
            if wanted not in names:
                raise ValueError(f"tool_choice names {wanted!r:.80}, which is none of the tools")
        elif wanted not in ("auto", "none", "required"):
            raise ValueError(f"tool_choice is auto, none, required or a function, not {choice!r:.80}")
        if choice == "required" and not names:
            raise ValueError("tool_choice is required, but there are no tools")
        offered = [] if choice == "none" else tools or []
        return cls(form, offered, wanted, parallel is not False, separates or form.has_channels)

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools in the form that chat templates expect."""
        return [dict(tool) for tool in self.tools] or None

    @property
    def _is_taken_apart(self) -> bool:
        return bool(self.tools) or self.separates

    @property
    def forces_calls(self) -> bool:
        """Whether a grammar leaves no room for anything but calls."""
        return bool(self.tools) and self.choice != "auto"

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters that keep the tags, and force calls or allow them instead of a JSON answer."""
        grammar, structured = self._grammar(params.structured_outputs), params.structured_outputs
        thoughts = self.form.reasoning
        after: bool | str = thoughts.tags[0][1] if thoughts.begins_inside else True
        if grammar is not None:
            # Where reasoning is a separate message, a grammar leaves no room for it.
            structured = StructuredOutputsParams(grammar=grammar, after_thinking=not self.form.has_channels and after)
        elif structured is not None and self.separates:
            structured = replace(structured, after_thinking=after)
        params = replace(params, structured_outputs=structured)
        return self.kept_tags(params) if self._is_taken_apart else params

    def _grammar(self, structured: StructuredOutputsParams | None) -> str | None:
        """Return a grammar of forced calls, or of calls as an alternative to a JSON answer."""
        answer, functions, is_auto = None, [tool["function"] for tool in self.tools], self.choice == "auto"
        if is_auto and structured is not None:
            answer = {"type": "object"} if structured.json_object else structured.json
        if not functions or (is_auto and not isinstance(answer, dict)):
            return None
        if not is_auto and self.choice != "required":
            functions = [function for function in functions if function["name"] == self.choice]
        calls = self.form.calls
        several = self.parallel and (is_auto or self.choice == "required") and not calls.has_channels
        return tool_call_grammar(functions, calls, several=several, answer=answer, tokens=self.form.tag_tokens)

    def kept_tags(self, params: Any) -> Any:
        """Return sampling parameters, one or a list, that keep the tags in the text; other types are refused later."""
        if isinstance(params, (list, tuple)):
            return [self.kept_tags(item) for item in params]
        params = SamplingParams() if params is None else params
        keeps = self.form.has_special_tags and isinstance(params, SamplingParams)
        return replace(params, skip_special_tokens=False) if keeps else params

    def complete(self, output: RequestOutput, params: SamplingParams | None) -> None:
        """Set the `tool_calls` of whole answers; `params`: the request's, before `constrain`."""
        params = params or SamplingParams()
        splitters = self.splitters(output.prompt_token_ids, params, len(output.outputs))
        for item, splitter in zip(output.outputs, splitters, strict=True):
            item.tool_calls = tool_calls(splitter.append(item.text, final=True).calls)
            item.text = _without(self.form.dropped_tokens(params), item.text)

    def splitters(self, prompt: Sequence[int], params: SamplingParams, count: int = 1) -> list[AnswerSplitter]:
        """Return a splitter for each of `count` outputs; `params`: the request's, before `constrain`."""
        is_bound = params.structured_outputs is not None or self.forces_calls
        start = self.form.start(prompt) if self._is_taken_apart else "answer"
        if is_bound and start == "unknown":
            # A grammar applies from the start, or from the end of reasoning that has a begin tag.
            start = "before"
        dropped = self.form.dropped_tokens(params) if self._is_taken_apart else ()
        return [AnswerSplitter(self, start, dropped) for _ in range(count)]


def function_of(tool: Any) -> Mapping[str, Any]:
    """Return the function of a tool or of a tool choice, as in OpenAI's API; another form is a ValueError."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool is {{'type': 'function', 'function': {{'name': ...}}}}, not {tool!r:.80}")
    return function


@dataclass
class AnswerDelta:
    """New reasoning, text and calls of an answer."""

    reasoning: str
    content: str
    calls: list[ToolCallDelta]


class AnswerSplitter:
    """Splits one output's text as it is generated, without the special tokens in `dropped`; `call_ids`: so far."""

    def __init__(self, options: AnswerOptions, start: Start, dropped: tuple[str, ...] = ()) -> None:
        form = options.form
        self.separates = options.separates or form.has_channels
        self.call_ids: list[str] = []
        self._has_short_ids = form.calls.short_ids
        # Of several calls.
        self._keeps_all = options.parallel or form.has_channels
        self._has_text = not options.forces_calls
        self._dropped = dropped
        # Text that may be the start of a dropped token.
        self._held = ""
        # A chat template may accept tools in a form other than OpenAI's.
        given = [tool.get("function") for tool in options.tools if isinstance(tool, Mapping)]
        functions = [function for function in given if isinstance(function, Mapping) and "name" in function]
        self._reader = CallReader(form.calls, functions) if options.tools else TextReader()
        self._events = harmony(self._reader) if form.has_channels else self._parts(start, form.reasoning)

    def _parts(self, start: Start, form: ReasoningFormat) -> Events:
        # Calls within reasoning do not count, even if reasoning is not separated.
        yield from reasoning(self._reader, start, form, keeps_tags=not self.separates)
        yield from self._reader.events() if isinstance(self._reader, CallReader) else plain(self._reader)

    def append(self, text: str, final: bool = False) -> AnswerDelta:
        """Parse new text and return the new part of the answer. `final`: no text follows."""
        text = _without(self._dropped, self._held + text)
        end = len(text) if final else partial_start(text, self._dropped)
        self._reader.text += text[:end]
        self._held = text[end:]
        self._reader.is_final = final
        new = AnswerDelta("", "", [])
        for event in self._events:
            if event is None:
                break
            if isinstance(event, ToolCallDelta):
                if event.index == 0 or self._keeps_all:
                    new.calls.append(event)
            elif self.separates and isinstance(event, Reasoning):
                new.reasoning += event
            elif self._has_text or isinstance(event, Reasoning):
                # Otherwise it is the beginning of a call that was cut.
                new.content += event
        for call in new.calls:
            if call.name is not None:
                # Mistral's templates accept only ids of nine letters and digits.
                new_id = token_hex(5)[:9] if self._has_short_ids else f"call_{token_hex(16)}"
                self.call_ids.append(call.id or new_id)
        return new


def _without(tokens: tuple[str, ...], text: str) -> str:
    return re.sub("|".join(map(re.escape, tokens)), "", text) if tokens else text


def tool_calls(deltas: Iterable[ToolCallDelta]) -> list[ToolCall]:
    """Return complete calls, except calls whose arguments are not a JSON object."""
    calls = []
    for name, arguments in whole_calls(deltas):
        try:
            # Models that write code may forget to escape line breaks.
            value = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            calls.append(ToolCall(name, value))
    return calls


def whole_calls(deltas: Iterable[ToolCallDelta]) -> list[tuple[str, str]]:
    """Return the names and arguments of calls."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta.name, ""))
        calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return calls
