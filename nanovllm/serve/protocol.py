"""Request bodies of OpenAI's and vLLM's APIs, and the types of their fields.

`SamplingParams`, which checks limits, and OpenAI's reference explain the fields. Unsupported fields of OpenAI's and
vLLM's APIs may have a neutral value. Other fields are ignored, and logged with `log_requests`.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from nanovllm.serve.errors import ApiError, validation_error
from nanovllm.serve.logs import one_line

_logger = logging.getLogger(__name__)
MOST_CHOICES = 10_000
"""Maximum choices in `structured_outputs`, which take 0.2 s."""
MOST_FIELDS, MOST_MESSAGES, MOST_PROMPTS, MOST_TOOLS = 128, 4096, 1024, 256
_MOST_IDS, _MOST_STOPS, _MOST_TOKENS = 4096, 64, 2**20
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "json_object")}
"""Maps vLLM's retired fields to the fields of `structured_outputs` that replace them."""
# Validation of a list stops at the first error: an error for each of a million entries would take minutes.
Nothing = Annotated[dict[str, Any], Field(max_length=0)]
# JSON's true and 1.0 are not ids.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(max_length=_MOST_TOKENS, fail_fast=True)]
_PromptIds = Annotated[TokenIds, Field(min_length=1)]
_TokenLists = Annotated[list[_PromptIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
TextOrTexts = str | Texts
Stops = Annotated[list[str], Field(max_length=_MOST_STOPS, fail_fast=True)]
TextOrStops = str | Stops
TextOrObject = str | dict[str, Any]
Objects = Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES, fail_fast=True)]
TextOrObjects = str | Objects
TextOrParts = str | Annotated[list[TextOrObject], Field(max_length=MOST_MESSAGES, fail_fast=True)]
Prompts = str | Texts | _PromptIds | _TokenLists
ToolChoiceMode = Literal["auto", "none", "required"]

_Value = TypeVar("_Value")


def at_most(count: int, given: _Value) -> _Value:
    """Return a value, or raise if it has too many fields: each could become a pydantic error."""
    if isinstance(given, dict) and len(given) > count:
        raise ValueError(f"{len(given)} fields are over {count}")
    return given


def _invalid(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name} {problem}", name, code="invalid_value")


class Body(BaseModel):
    """A JSON object. Other fields, such as OpenAI's `user` and `store`, are ignored, as in vLLM."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        if not isinstance(at_most(MOST_FIELDS, given), dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if unknown := given.keys() - known:
            _logger.info("ignored: fields that %s lacks: %s", cls.__name__, one_line(", ".join(sorted(unknown))))
        return given


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """A JSON schema for the answer."""

    name: str
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """A constraint on the answer; exactly one field is set. See `StructuredOutputsParams`."""

    json_: TextOrObject | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = Field(None, description=f"at most {MOST_CHOICES}")
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class SamplingBody(Body):
    """Common fields of chats and completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: TextOrStops | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(partial(at_most, _MOST_IDS))] | None = None
    response_format: ResponseFormat | None = None
    # Fields of vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=_MOST_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: Stops | None = None
    allowed_token_ids: TokenIds | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower ones run first")
    prompt_logprobs: int | None = Field(None, description="not with stream")
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(None, description='log-probabilities name tokens "token_id:123"')
    cache_salt: str | None = Field(None, min_length=1, max_length=256, description="only equal ones share prefixes")
    truncate_prompt_tokens: int | None = Field(None, ge=-1, description="last tokens that are kept; -1: what fits")
    add_special_tokens: bool | None = Field(None, description="whether encoding a text adds tokens such as BOS")
    # Not supported.
    use_beam_search: Literal[False] | None = None
    length_penalty: Annotated[float, Field(ge=1, le=1)] | None = None
    logits_processors: Annotated[list[Any], Field(max_length=0)] | None = None
    mm_processor_kwargs: Nothing | None = None
    kv_transfer_params: Nothing | None = None
    vllm_xargs: Nothing | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_guided(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("structured_outputs") is None:
            for name, instead in _GUIDED.items():
                if given.get(name) not in (None, False):
                    message = f'{name} is retired: send structured_outputs={{"{instead}": ...}}'
                    raise ApiError(400, message, name, code="unsupported_parameter")
        return given

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "needs stream: true")
        return self


class ChatMessage(BaseModel):
    """A message; other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: TextOrParts | None = None


class ToolFunction(BaseModel):
    """A function that the model may call; other fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="without effect")


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: ToolFunction


class ToolName(Body):
    """The name of a function."""

    name: str


class NamedToolChoice(Body):
    """The function to call."""

    type: Literal["function"]
    function: ToolName


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ChatBody(SamplingBody):
    """A request to answer messages."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceMode | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, description="a variable of the chat template")
    echo: bool | None = Field(None, description="put the last message, if it is the assistant's, before the answer")
    chat_template: str | None = Field(None, description="refused: the server has one")
    documents: Objects | None = Field(None, description="for the chat template")
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = Field(None, description="split off the thoughts as reasoning")
    # Not supported.
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    include_reasoning: Literal[True] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.tool_choice == "auto" and self.tools is None:
            raise _invalid("tool_choice", "is auto, but there are no tools")
        if self.continue_final_message and self.add_generation_prompt:
            raise _invalid("continue_final_message", "and add_generation_prompt exclude each other")
        return self

    @classmethod
    def translated(cls, values: dict[str, Any]) -> Self:
        """Return another API's request as a chat, without its null values; ValueError if one is invalid."""
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            errors = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
            raise ValueError(str(validation_error(errors, given))) from error


class CompletionBody(SamplingBody):
    """A request to complete prompts: texts or token ids."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    # Not supported.
    best_of: int | None = None
    suffix: Literal[""] | None = None
    prompt_embeds: None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n or 1):
            raise _invalid("best_of", f"must be n={self.n or 1}, if given, not {self.best_of}")
        return self


class TokenizeBody(Body):
    """A request to tokenize a text or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Objects | None = None
    chat_template: str | None = Field(None, description="refused: the server has one")
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """A request to decode token ids."""

    model: str | None = None
    tokens: TokenIds


class GenerateBody(Body):
    """A request to complete token ids with token ids; `sampling_params` have vLLM's names."""

    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    model: str | None = None
    token_ids: _PromptIds
    sampling_params: dict[str, Any] = {}
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="lower ones run first")


def prompt_list(prompts: Any) -> list[Any]:
    """Return a request's prompts; a list of token ids is a single prompt."""
    return [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else list(prompts)
