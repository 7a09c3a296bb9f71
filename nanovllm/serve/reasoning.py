"""Reads from a chat what it asks of its answer: calls of tools, and thoughts apart from the text."""

from __future__ import annotations

from nanovllm.serve.protocol import ChatBody
from nanovllm.serve.service import Service
from nanovllm.text.answers import AnswerOptions
from nanovllm.text.reasoning import ReasoningSplitter

__all__ = ["ReasoningSplitter", "answer_options"]


def answer_options(service: Service, body: ChatBody) -> AnswerOptions:
    """Return what a request asks for; what it does not say is the server's setting.

    Raises:
        ValueError: a call is required of a tool that is not there.
    """
    settings = service.settings
    default = settings.separate_reasoning or settings.reasoning_parser is not None
    given = body.model_dump(include={"tools", "tool_choice"}, exclude_unset=True)
    return AnswerOptions.of(
        service.answer_format,
        given.get("tools"),
        given.get("tool_choice"),
        body.parallel_tool_calls,
        default if body.separate_reasoning is None else body.separate_reasoning,
    )
