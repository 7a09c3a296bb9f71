"""Answers to chats: constrains their form, and splits them into reasoning, text and tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from secrets import token_hex
from typing import Any

from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.text.harmony import CHANNEL_TAGS, HarmonyParser
from nanovllm.text.reasoning import ReasoningSplitter, Start, prompt_end, reasoning_format, template_text
from nanovllm.text.text_reader import partial_start
from nanovllm.text.tool_call_reader import ToolCallDelta
from nanovllm.text.tool_call_syntax import CALL_TAGS
from nanovllm.text.tool_calls import ToolCallParser, tool_call_format, tool_call_grammar, tool_calls

Tool = Mapping[str, Any]


class AnswerFormat:
    """The format in which a model answers chats.

    Args:
        tokenizer: a transformers tokenizer; None if the model has none.
        tool_call_parser, reasoning_parser: names of formats; "auto" detects them in the chat template.
        template: a chat template to use instead of the tokenizer's.

    Attributes:
        calls: the format of tool calls.
        reasoning: the tags around reasoning.
        has_channels: whether an answer is a list of messages, whatever a request asks for.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        template: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.calls = tool_call_format(tool_call_parser, tokenizer, template)
        self.reasoning = reasoning_format(reasoning_parser, tokenizer, template)
        self.has_channels = self.calls.has_channels or self.reasoning.has_channels
        shown = template or template_text(tokenizer)
        # If the template has only the end tag of reasoning, the model may omit the begin tag.
        self._is_taught = any(end in shown and begin not in shown for begin, end in self.reasoning.tags)
        tags = CALL_TAGS | {tag for pair in self.reasoning.tags for tag in pair} | set(CHANNEL_TAGS)
        special = _special_tokens(tokenizer)
        # Tags that are special tokens appear only in text that keeps all special tokens; the others are dropped later.
        self._has_special_tags = not tags.isdisjoint(special)
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

    def kept_tags(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters that keep the tags in the text, so that it can be parsed."""
        return replace(params, skip_special_tokens=False) if self._has_special_tags else params

    def dropped_tokens(self, params: SamplingParams) -> tuple[str, ...]:
        """Return the special tokens to remove from such a text, since these parameters do not ask for them."""
        return self._dropped if self._has_special_tags and params.skip_special_tokens else ()


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
        cls,
        form: AnswerFormat,
        tools: Sequence[Tool] | None = None,
        choice: Any = None,
        parallel: bool | None = None,
        separates: bool = False,
    ) -> AnswerOptions:
        """Return the options in a request's fields.

        Args:
            form: the model's answer format.
            tools: tools as in OpenAI's API.
            choice: "auto", "none", "required", or `{"function": {"name": ...}}`.
            parallel: whether several calls are allowed; None: yes.
            separates: whether reasoning is separated from the text.

        Raises:
            ValueError: a required tool does not exist, or a value has the wrong form.
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
        return self.form.kept_tags(params) if self._is_taken_apart else params

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

    def complete(self, output: RequestOutput, params: SamplingParams | None) -> None:
        """Set the `tool_calls` of whole answers; `params`: the request's, before `constrain`."""
        params = params or SamplingParams()
        dropped = self.form.dropped_tokens(params)
        for item in output.outputs:
            splitter = self.make_splitter(output.prompt_token_ids, params)()
            item.tool_calls = tool_calls(splitter.append(item.text, final=True).calls)
            if dropped:
                item.text = re.sub("|".join(map(re.escape, dropped)), "", item.text)

    def make_splitter(self, prompt: Sequence[int], params: SamplingParams) -> Callable[[], AnswerSplitter]:
        """Return a factory of one `AnswerSplitter` per output.

        Args:
            prompt: the prompt's token ids.
            params: the request's sampling parameters, before `constrain`.
        """
        is_bound = params.structured_outputs is not None or (bool(self.tools) and self.choice != "auto")
        start = self.form.start(prompt) if self._is_taken_apart else "answer"
        if is_bound and start == "unknown":
            # A grammar applies from the start, or from the end of reasoning that has a begin tag.
            start = "before"
        # A chat template may accept tools in a form other than OpenAI's.
        given = [tool.get("function") for tool in self.tools if isinstance(tool, Mapping)]
        named = [function for function in given if isinstance(function, Mapping) and "name" in function]
        functions: list[Tool] = [{name: function.get(name) for name in ("name", "parameters")} for function in named]
        dropped = self.form.dropped_tokens(params) if self._is_taken_apart else ()
        return partial(self.splitter, start, functions, dropped)

    def splitter(self, start: Start, functions: list[Tool], dropped: tuple[str, ...]) -> AnswerSplitter:
        """Return one output's splitter, given where it begins, the callable functions, and special tokens to drop."""
        form = self.form
        make_id = _short_id if form.calls.short_ids else _call_id
        if form.has_channels:
            return AnswerSplitter(None, HarmonyParser(), dropped, make_id, separates=True)
        # Calls within reasoning do not count, even if reasoning is not separated.
        reasoning = ReasoningSplitter(start, form.reasoning, not self.separates) if self._is_taken_apart else None
        calls = ToolCallParser(form.calls, self.parallel, functions) if self.tools else None
        return AnswerSplitter(reasoning, calls, dropped, make_id, separates=self.separates)


def kept_tags(answer: AnswerOptions | None, params: Any) -> Any:
    """Return sampling parameters, one or a list, that keep the tags of tool calls in the text if calls are parsed."""
    if answer is None:
        return params
    if isinstance(params, (list, tuple)):
        return [kept_tags(answer, item) for item in params]
    # Other types are refused later.
    return answer.form.kept_tags(params or SamplingParams()) if isinstance(params, SamplingParams | None) else params


def function_of(tool: Any) -> Mapping[str, Any]:
    """Return the function of a tool or of a tool choice, as in OpenAI's API.

    Raises:
        ValueError: it has the wrong form.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool is {{'type': 'function', 'function': {{'name': ...}}}}, not {tool!r:.80}")
    return function


def _special_tokens(tokenizer: Any) -> set[str]:
    """Return the texts of the tokens that decoding skips: named ones, and added ones marked as special."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    marked = {str(token) for token in added if getattr(token, "special", True)}
    return marked | {str(token) for token in getattr(tokenizer, "all_special_tokens", [])}


def _call_id() -> str:
    return f"call_{token_hex(16)}"


def _short_id() -> str:
    """Return nine letters and digits, the only form of id that Mistral's templates accept."""
    return token_hex(5)[:9]


@dataclass
class AnswerDelta:
    """New reasoning, text and calls of an answer."""

    reasoning: str
    content: str
    calls: list[ToolCallDelta]


class AnswerSplitter:
    """Splits one output's text as it is generated; see `AnswerOptions.make_splitter`.

    Args:
        reasoning: finds the reasoning; None leaves it in the text.
        calls: finds the calls; None leaves them in the text.
        dropped: special tokens to remove from the text.
        make_id: makes the ids of calls if the model writes none.
        separates: whether reasoning is separated from the text.

    Attributes:
        call_ids: ids of the calls so far.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        calls: ToolCallParser | HarmonyParser | None,
        dropped: tuple[str, ...],
        make_id: Callable[[], str],
        *,
        separates: bool,
    ) -> None:
        self._reasoning, self._calls, self._make_id = reasoning, calls, make_id
        self._dropped = dropped
        self._pattern = re.compile("|".join(map(re.escape, dropped))) if dropped else None
        # Text that may be the start of a dropped token.
        self._held = ""
        self.separates = separates
        self.call_ids: list[str] = []

    def append(self, text: str, final: bool) -> AnswerDelta:
        """Parse new text and return the new part of the answer. `final`: no text follows."""
        text = self._without_dropped(text, final)
        if isinstance(self._calls, HarmonyParser):
            reasoning, content, calls = self._calls.append(text, final)
        else:
            reasoning, content = ("", text) if self._reasoning is None else self._reasoning.append(text, final)
            calls = []
            thoughts = "" if self.separates else reasoning
            if self._calls is not None:
                content, calls = self._calls.append(content, final)
            reasoning, content = reasoning if self.separates else "", thoughts + content
        self.call_ids += [call.id or self._make_id() for call in calls if call.name is not None]
        return AnswerDelta(reasoning, content, calls)

    def _without_dropped(self, text: str, final: bool) -> str:
        if self._pattern is None:
            return text
        text = self._pattern.sub("", self._held + text)
        end = len(text) if final else partial_start(text, self._dropped)
        text, self._held = text[:end], text[end:]
        return text
