"""A chat's answer: the model's form of it, its constraints, and its split into thoughts, text and calls."""

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
    """A model's form of answers to chats.

    Args:
        tokenizer: a transformers tokenizer; None makes no text.
        tool_call_parser, reasoning_parser: names of formats; "auto": by the chat template.
        template: a chat template instead of the tokenizer's.

    Attributes:
        calls: its form of calls.
        reasoning: its marks of thoughts.
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
        # A template that knows the end of thoughts alone is of a model that may leave out their beginning.
        self._is_taught = any(end in shown and begin not in shown for begin, end in self.reasoning.tags)
        tags = CALL_TAGS | {tag for pair in self.reasoning.tags for tag in pair} | set(CHANNEL_TAGS)
        special = _special_tokens(tokenizer)
        # Tags that are special tokens are part of a text if it has all special tokens; the others are dropped then.
        self._has_special_tags = not tags.isdisjoint(special)
        self._dropped = tuple(sorted(special - tags))

    @cached_property
    def tag_tokens(self) -> dict[str, int]:
        """Tags of forced calls that are tokens of their own."""
        form = self.calls
        written = f"{form.list_begin}{form.call}{form.list_end}{form.answer_begin}"
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {str(token): token_id for token_id, token in added.items() if str(token) in written}

    def start(self, prompt: Sequence[int]) -> Start:
        """Return where an answer to a prompt begins; a chat template may have begun the thoughts."""
        return self.reasoning.start(prompt_end(self._tokenizer, prompt), self._is_taught)

    def kept_tags(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of an output that is to be taken apart: its text has the tags."""
        return replace(params, skip_special_tokens=False) if self._has_special_tags else params

    def dropped_tokens(self, params: SamplingParams) -> tuple[str, ...]:
        """Return the special tokens that are in such a text, and that these parameters do not ask for."""
        return self._dropped if self._has_special_tags and params.skip_special_tokens else ()


@dataclass(frozen=True)
class AnswerOptions:
    """The wishes of one request about its answer.

    Attributes:
        form: how the model writes answers.
        tools: that the model may call, as in OpenAI's API; empty if it may call none.
        choice: "auto", "required", or the name of the one to call.
        parallel: whether there may be several calls.
        separates: whether thoughts are split off the text.
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
        """Return the wishes in a request's fields.

        Args:
            form: how the model writes answers.
            tools: as in OpenAI's API.
            choice: "auto", "none", "required", or `{"function": {"name": ...}}`.
            parallel: whether there may be several calls; None: yes.
            separates: whether thoughts are split off the text.

        Raises:
            ValueError: a call is required of a tool that is not there, or something is of another form.
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
        """Return the tools as chat templates take them."""
        return [dict(tool) for tool in self.tools] or None

    @property
    def _is_taken_apart(self) -> bool:
        return bool(self.tools) or self.separates

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Return the sampling parameters of the answer: calls are forced, or come instead of JSON; tags are in it."""
        grammar, structured = self._grammar(params.structured_outputs), params.structured_outputs
        thoughts = self.form.reasoning
        after: bool | str = thoughts.tags[0][1] if thoughts.begins_inside else True
        if grammar is not None:
            # Where thoughts are a message of their own, a grammar leaves none.
            structured = StructuredOutputsParams(grammar=grammar, after_thinking=not self.form.has_channels and after)
        elif structured is not None and self.separates:
            structured = replace(structured, after_thinking=after)
        params = replace(params, structured_outputs=structured)
        return self.form.kept_tags(params) if self._is_taken_apart else params

    def _grammar(self, structured: StructuredOutputsParams | None) -> str | None:
        """Return the grammar of forced calls, or of calls as an alternative to a JSON answer."""
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
        """Set the `tool_calls` of whole answers; `params`: of the request, before its tags were kept."""
        params = params or SamplingParams()
        dropped = self.form.dropped_tokens(params)
        for item in output.outputs:
            splitter = self.make_splitter(output.prompt_token_ids, params)()
            item.tool_calls = tool_calls(splitter.append(item.text, final=True).calls)
            if dropped:
                item.text = re.sub("|".join(map(re.escape, dropped)), "", item.text)

    def make_splitter(self, prompt: Sequence[int], params: SamplingParams) -> Callable[[], AnswerSplitter]:
        """Return a function that makes an `AnswerSplitter` for each output.

        Args:
            prompt: its token ids.
            params: of the request, before `constrain`.
        """
        is_bound = params.structured_outputs is not None or (bool(self.tools) and self.choice != "auto")
        start = self.form.start(prompt) if self._is_taken_apart else "answer"
        if is_bound and start == "unknown":
            # A grammar binds from the start, or from where thoughts that have a begin tag end.
            start = "before"
        # A chat template may take tools of another form than OpenAI's.
        given = [tool.get("function") for tool in self.tools if isinstance(tool, Mapping)]
        named = [function for function in given if isinstance(function, Mapping) and "name" in function]
        functions: list[Tool] = [{name: function.get(name) for name in ("name", "parameters")} for function in named]
        dropped = self.form.dropped_tokens(params) if self._is_taken_apart else ()
        return partial(self.splitter, start, functions, dropped)

    def splitter(self, start: Start, functions: list[Tool], dropped: tuple[str, ...]) -> AnswerSplitter:
        """Return a splitter of an output: where it begins, the functions to call, and special tokens to drop."""
        form = self.form
        make_id = _short_id if form.calls.short_ids else _call_id
        if form.has_channels:
            return AnswerSplitter(None, HarmonyParser(), dropped, make_id, separates=True)
        # Calls within thoughts do not count, even if thoughts are not split off.
        reasoning = ReasoningSplitter(start, form.reasoning, not self.separates) if self._is_taken_apart else None
        calls = ToolCallParser(form.calls, self.parallel, functions) if self.tools else None
        return AnswerSplitter(reasoning, calls, dropped, make_id, separates=self.separates)


def kept_tags(answer: AnswerOptions | None, params: Any) -> Any:
    """Return sampling parameters, one or a list, of texts that have the tags of calls if these are looked for."""
    if answer is None:
        return params
    if isinstance(params, (list, tuple)):
        return [kept_tags(answer, item) for item in params]
    # Other types are refused later.
    return answer.form.kept_tags(params or SamplingParams()) if isinstance(params, SamplingParams | None) else params


def function_of(tool: Any) -> Mapping[str, Any]:
    """Return the function of a tool, or of a choice of one, as in OpenAI's API.

    Raises:
        ValueError: it has another form.
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
    """Return nine letters and digits, the only ids that Mistral's templates take."""
    return token_hex(5)[:9]


@dataclass
class AnswerDelta:
    """A new part of an answer: of its thoughts, its text and its calls."""

    reasoning: str
    content: str
    calls: list[ToolCallDelta]


class AnswerSplitter:
    """Takes one output's text apart as it comes; see `AnswerOptions.make_splitter`.

    Args:
        reasoning: finds the thoughts; None: they are text.
        calls: finds the calls; None: they are text.
        dropped: special tokens that are in the text, and not wanted.
        make_id: makes ids of calls if the model does not.
        separates: whether thoughts are split off the text.

    Attributes:
        call_ids: of the calls so far.
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
        # Text that may be part of a token that is dropped.
        self._held = ""
        self.separates = separates
        self.call_ids: list[str] = []

    def append(self, text: str, final: bool) -> AnswerDelta:
        """Return the new part of the answer. `final`: no text follows."""
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
