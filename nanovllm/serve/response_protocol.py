"""The bodies of requests for responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nanovllm.serve.field_types import TOOL_CHOICE, IsObject, TextOrObjects, ToolChoiceMode
from nanovllm.serve.protocol import MOST_TOOLS, Body, Metadata, StreamOptions, ToolFunction


class ResponseText(Body):
    """What form the text of a response has."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="without effect")


class ResponseTool(ToolFunction):
    """A function that a model may call."""

    type: Literal["function"]


class ResponseToolChoice(Body):
    """The function to call."""

    type: Literal["function"]
    name: str


class ResponseBody(Body):
    """A request for a response, in text."""

    model: str | None = None
    input: TextOrObjects
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: ResponseText | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Annotated[ToolChoiceMode | Annotated[ResponseToolChoice, IsObject], TOOL_CHOICE] | None = None
    # Not supported.
    truncation: Literal["disabled"] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    background: Literal[False] | None = None
    # Without effect here.
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_options: StreamOptions | None = None
    reasoning: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    top_logprobs: Literal[0] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    parallel_tool_calls: bool | None = None
