"""From a line of a batch file to a request.

A line is `{"prompt": ...}` or `{"messages": ...}` with sampling parameters beside it, or a request of OpenAI's batch
API, which `openai_format` translates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nanovllm.openai_format import ENDPOINTS, sampling_values
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.text.chat_template import conversations, render_text

_IDS = ("id", "custom_id")
_OPENAI = {"custom_id", "method", "url", "body"}
_SAMPLING = {item.name for item in fields(SamplingParams)}
_TEMPLATE = {"tools", "chat_template_kwargs"}
_OWN = {"prompt", "messages", *_IDS, *_SAMPLING, *_TEMPLATE}
_OPENAI_ONLY = {"url", "body", "method"}
# What `render_text` and `apply_chat_template` decide themselves.
_RESERVED = {"tokenizer", "conversation", "tokenize"}


@dataclass(slots=True)
class BatchRequest:
    """What a line asks for.

    Attributes:
        prompt: a text or token ids; None for a conversation.
        params: how the answer is sampled.
        messages: a conversation; None for a prompt.
        template: variables of the chat template.
        url: OpenAI's endpoint; None for a line in our own form.
    """

    prompt: str | list[int] | None
    params: SamplingParams
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    url: str | None = None

    def rendered(self, tokenizer: Any) -> str:
        """Return the text that the chat template makes of the conversation.

        Raises:
            ValueError: the messages do not fit the model's chat template.
        """
        found, is_list = conversations(self.messages)
        if is_list:
            raise ValueError("a line has one conversation: messages must be a list of dicts")
        return render_text(tokenizer, found[0], **{"add_generation_prompt": True, **self.template})


def load_line(text: bytes) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ValueError: the line is none.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {text[:80]!r}")
    return record


def line_ids(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields by which a line's author finds its answer."""
    return {name: record[name] for name in _IDS if name in record}


class RequestParser:
    """Makes requests of lines; those with equal sampling parameters share them.

    Args:
        defaults: sampling parameters of lines that do not say.
    """

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        self._defaults = defaults
        # By the values that lines give, as far as these are no lists.
        self._params: dict[Any, SamplingParams] = {}

    def parse(self, record: Mapping[str, Any]) -> BatchRequest:
        """Return what a line's object asks for.

        Raises:
            ValueError: an unknown field, or a bad value.
        """
        if not record.keys().isdisjoint(_OPENAI_ONLY):
            return _parse_openai(record, self._defaults)
        _refuse_unknown(record, _OWN)
        if ("prompt" in record) == ("messages" in record):
            raise ValueError("a line has either a prompt or messages")
        params = self._sampling_params({name: value for name, value in record.items() if name in _SAMPLING})
        if "prompt" in record:
            if not record.keys().isdisjoint(_TEMPLATE):
                raise ValueError("tools and chat_template_kwargs need messages")
            return BatchRequest(_check_prompt(record["prompt"]), params)
        return BatchRequest(None, params, record["messages"], _template(record))

    def _sampling_params(self, values: dict[str, Any]) -> SamplingParams:
        # Types too: True is 1.
        key = *values.items(), *map(type, values.values())
        try:
            found = self._params.get(key)
        except TypeError:
            return _sampling_params({"max_tokens": None, **self._defaults, **values})
        if found is None:
            found = self._params[key] = _sampling_params({"max_tokens": None, **self._defaults, **values})
        return found


def _parse_openai(record: Mapping[str, Any], defaults: Mapping[str, Any]) -> BatchRequest:
    _refuse_unknown(record, _OPENAI)
    url, body = record.get("url"), record.get("body")
    if not isinstance(url, str) or url not in ENDPOINTS or record.get("method", "POST") != "POST":
        raise ValueError(f"the request must be a POST to {' or '.join(ENDPOINTS)}, not {url!r:.80}")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    # null stands for what is not given.
    given = {name: value for name, value in body.items() if value is not None}
    endpoint = ENDPOINTS[url]
    _refuse_unknown(given, {endpoint.content, "chat_template_kwargs", *endpoint.fields, *_SAMPLING})
    if endpoint.content not in given:
        raise ValueError(f"body needs {endpoint.content}")
    params = _sampling_params({**endpoint.defaults, **defaults, **sampling_values(given, endpoint, _SAMPLING)})
    content = given[endpoint.content]
    if endpoint.is_chat:
        return BatchRequest(None, params, content, _template(given), url)
    # The API takes a list of prompts; a list of one is a prompt.
    is_single = isinstance(content, list) and len(content) == 1 and not isinstance(content[0], int)
    return BatchRequest(_check_prompt(content[0] if is_single else content), params, url=url)


def _refuse_unknown(record: Mapping[str, Any], known: set[str]) -> None:
    if not record.keys() <= known:
        unknown = sorted(set(record) - known)
        raise ValueError(f"unknown field {', '.join(map(repr, unknown))[:200]}")


def _sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    structured = values.get("structured_outputs")
    if isinstance(structured, dict):
        values = {**values, "structured_outputs": StructuredOutputsParams(**structured)}
    return SamplingParams(**values)


def _check_prompt(prompt: Any) -> str | list[int]:
    # What a list holds is checked when the request is queued.
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"a prompt is a string or a list of token ids, not {prompt!r:.80}")
    return prompt


def _template(record: Mapping[str, Any]) -> dict[str, Any]:
    options = record.get("chat_template_kwargs", {})
    if not isinstance(options, dict) or options.keys() & _RESERVED:
        raise ValueError(f"chat_template_kwargs must be an object without {', '.join(sorted(_RESERVED))}")
    tools = record.get("tools")
    return {**options, **({} if tools is None else {"tools": tools})}
