"""Tools in requests: what the chat template gets, what constrains the answer, and how the answer is taken apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.serve.protocol import NamedToolChoice, Tool
from nanovllm.serve.reasoning import ReasoningSplitter
from nanovllm.text.tool_calls import ToolCallDelta, ToolCallFormat, ToolCallParser, tool_call_grammar


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        tools: that the model may call; empty if it may call none.
        choice: "auto", "required", or the name of the one to call.
        parallel: whether there may be several calls.
        form: how the model writes calls.
    """

    tools: list[Tool]
    choice: str
    parallel: bool
    form: ToolCallFormat

    @classmethod
    def of(
        cls,
        tools: list[Tool] | None,
        choice: str | NamedToolChoice | None,
        parallel: bool | None,
        form: ToolCallFormat,
    ) -> ToolUse:
        """Return what the fields of a request ask for.

        Raises:
            ValueError: a call is required of a tool that is not there.
        """
        names = [tool.function.name for tool in tools or []]
        wanted = choice.function.name if isinstance(choice, NamedToolChoice) else choice or "auto"
        if isinstance(choice, NamedToolChoice) and wanted not in names:
            raise ValueError(f"tool_choice names {wanted!r:.80}, which is none of the tools")
        if wanted == "required" and not names:
            raise ValueError("tool_choice is required, but there are no tools")
        return cls([] if wanted == "none" else tools or [], wanted, parallel is not False, form)

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as chat templates take them."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] or None

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters that allow for the calls: they are forced, or come instead of a JSON answer."""
        structured, answer = params.structured_outputs, None
        functions = [tool.function.model_dump() for tool in self.tools]
        is_auto = self.choice == "auto"
        if is_auto and structured is not None:
            answer = {"type": "object"} if structured.json_object else structured.json
        if not functions or (is_auto and not isinstance(answer, dict)):
            return params
        if not is_auto and self.choice != "required":
            functions = [function for function in functions if function["name"] == self.choice]
        several = self.parallel and (is_auto or self.choice == "required")
        grammar = tool_call_grammar(functions, self.form, several=several, answer=answer)
        return replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))

    def make_parser(self) -> Callable[[], ToolCallParser] | None:
        """Return what makes a parser for each output, and keeps none of the tools; None if there are none."""
        return partial(ToolCallParser, self.form, self.parallel) if self.tools else None


@dataclass
class AnswerDelta:
    """What is new of an answer: text of its thoughts, text, and pieces of its calls."""

    reasoning: str
    content: str
    calls: list[ToolCallDelta]


class AnswerSplitter:
    """Takes one output's text apart as it comes.

    Args:
        make_parser: see `ToolUse.make_parser`.
        separates: whether thoughts are split off.
        is_inside: whether the output begins within the thoughts.

    Attributes:
        call_ids: of the calls so far.
    """

    def __init__(self, make_parser: Callable[[], ToolCallParser] | None, separates: bool, is_inside: bool) -> None:
        self._reasoning = ReasoningSplitter(is_inside) if separates else None
        self._calls = None if make_parser is None else make_parser()
        self.separates = separates
        self.call_ids: list[str] = []

    def append(self, text: str, final: bool) -> AnswerDelta:
        """Return what new text adds. `final`: no text follows."""
        reasoning, content = ("", text) if self._reasoning is None else self._reasoning.append(text, final)
        calls: list[ToolCallDelta] = []
        if self._calls is not None:
            content, calls = self._calls.append(content, final)
        self.call_ids += [f"call_{uuid4().hex}" for call in calls if call.name is not None]
        return AnswerDelta(reasoning, content, calls)


def whole_calls(deltas: list[ToolCallDelta]) -> list[tuple[str, str]]:
    """Return the names and the arguments of calls."""
    names = [delta.name for delta in deltas if delta.name is not None]
    return [(name, "".join(d.arguments for d in deltas if d.index == index)) for index, name in enumerate(names)]
