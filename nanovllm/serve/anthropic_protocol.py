"""The bodies of requests for Anthropic's messages, whose reference says what a field means."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanovllm.serve.field_types import MOST_MESSAGES, Stops, TextOrObjects
from nanovllm.serve.protocol import Body

_MOST_TOOLS = 256


class Turn(Body):
    """A message; its content is a text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: TextOrObjects


class MessagesTool(BaseModel):
    """A tool that a model may call; further fields are without effect."""

    model_config = ConfigDict(extra="allow")

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]


class MessagesToolChoice(Body):
    """Which tool to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class NoThinking(Body):
    """Thoughts before an answer, which cannot be asked for here."""

    type: Literal["disabled"]


class UserMetadata(Body):
    """Who asks; without effect."""

    user_id: str | None = None


class OutputFormat(Body):
    """A JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What form an answer has."""

    format: OutputFormat | None = None
    effort: str | None = Field(None, description="without effect")


class CountTokensBody(Body):
    """A request for the number of tokens in messages."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    system: TextOrObjects | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=_MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: NoThinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = Field(None, description="without effect; prefixes are cached anyway")


class MessagesBody(CountTokensBody):
    """A request for the answer to messages."""

    max_tokens: int
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: UserMetadata | None = None
    service_tier: str | None = Field(None, description="without effect")


class MessagesErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str


class MessagesError(BaseModel):
    """An answer that is an error."""

    type: Literal["error"]
    error: MessagesErrorDetail
