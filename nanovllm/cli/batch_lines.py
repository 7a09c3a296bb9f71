"""Parses request lines of `nanovllm run`, and formats answers and errors as result lines.

A request is `{"prompt": ...}` or `{"messages": ...}` with sampling parameters, or a request of OpenAI's batch API,
which `openai_format` translates. A result has the number of its line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
from nanovllm.sampling_params import SamplingParams, make_params
from nanovllm.serve.openai_format import (
    ENDPOINTS,
    LEAST_LOGPROB,
    NEUTRAL_VALUES,
    SAMPLING_FIELDS,
    ShownTokens,
    chat_choice,
    prompt_positions,
    request_params,
    template_values,
    text_choice,
    usage,
)
from nanovllm.text.answers import AnswerFormat, AnswerOptions
from nanovllm.text.chat_template import ChatTemplateOptions, one_conversation, render_text, template_options
from nanovllm.text.input_processor import InputProcessor, TokensPrompt
from nanovllm.utils.checks import check_bool, check_int

IDS = ("id", "custom_id")
"""Fields by which a line's author identifies it."""
_OPENAI = {"custom_id", "method", "url", "body"}
_TEMPLATE = ChatTemplateOptions.__annotations__.keys()
_OWN = {"prompt", "messages", *IDS, *SAMPLING_FIELDS, *_TEMPLATE}
_ENCODING = ("add_special_tokens", "truncate_prompt_tokens", "cache_salt")
# Options that `render_text` and `apply_chat_template` set themselves.
_RESERVED = {"tokenizer", "conversation", "tokenize"}
_encode = json.JSONEncoder(allow_nan=False).encode


@dataclass(slots=True)
class BatchRequest:
    """A parsed line: a prompt, or `messages` with the options of `render_text` and for splitting their answer.

    Attributes:
        asked: the sampling parameters before `answer` constrained them.
        url: OpenAI's endpoint; None for a line in this library's form.
        body: the other fields of a request in OpenAI's form.
    """

    prompt: str | list[int] | TokensPrompt | None
    params: SamplingParams
    messages: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    answer: AnswerOptions | None = None
    asked: SamplingParams | None = None
    url: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, processor: InputProcessor) -> None:
        """Encode the prompt if the request has encoding options, or raise a ValueError; others are encoded together."""
        adds, most, salt = (self.body.get(name) for name in _ENCODING)
        if adds is most is salt is None:
            return
        prompt: Any = self.prompt if self.messages is None else self.rendered(processor.tokenizer)
        if most == -1:
            most = max(1, processor.limits.max_model_len - (self.params.max_tokens or 1))
        elif most is not None:
            check_int("truncate_prompt_tokens", most, 1, processor.limits.max_model_len)
        (encoded,) = processor.encode([prompt], self.messages is None if adds is None else bool(adds), most)
        self.prompt, self.messages = encoded if salt is None else {**encoded, "cache_salt": salt}, None

    def rendered(self, tokenizer: Any) -> str:
        """Render the conversation; ValueError if it does not fit the model's chat template."""
        return render_text(tokenizer, one_conversation(self.messages), **self.template)


def load_line(text: bytes) -> dict[str, Any]:
    """Parse a line; ValueError if it is not a JSON object."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {text[:80]!r}")
    return record


class RequestParser:
    """Parses lines as requests; requests with equal sampling parameters share one object.

    `recommended` are the sampling parameters of the model's `generation_config.json`, `chosen` the user's defaults.
    """

    def __init__(
        self, recommended: Mapping[str, Any], chosen: Mapping[str, Any], form: AnswerFormat, separates: bool = False
    ) -> None:
        self._recommended, self._chosen = recommended, chosen
        self._form, self._separates = form, separates
        # Keyed by the values in lines, except lists.
        self._params: dict[Any, SamplingParams] = {}

    def parse(self, record: Mapping[str, Any]) -> BatchRequest:
        """Return the request of a parsed line; ValueError for an unknown field or an invalid value."""
        if not record.keys().isdisjoint(_OPENAI - {"custom_id"}):
            return self._parse_openai(record)
        record = _given(record)
        _refuse_unknown(record, _OWN)
        if ("prompt" in record) == ("messages" in record):
            raise ValueError("a line has either a prompt or messages")
        params = self._sampling_params({name: value for name, value in record.items() if name in SAMPLING_FIELDS})
        template: Any = {name: record[name] for name in _TEMPLATE if name in record}
        if "prompt" in record:
            if template:
                raise ValueError(f"{' and '.join(template)} need messages")
            return BatchRequest(_check_prompt(record["prompt"]), params)
        request = BatchRequest(None, params, record["messages"], _template(template))
        if template.get("tools"):
            request.answer, request.asked = AnswerOptions.of(self._form, template["tools"]), params
            request.params = request.answer.kept_tags(params)
        return request

    def _sampling_params(self, values: dict[str, Any]) -> SamplingParams:
        # Include types in the key: True equals 1.
        key = *values.items(), *map(type, values.values())
        given = {"max_tokens": None, **self._recommended, **self._chosen, **values}
        try:
            found = self._params.get(key)
        except TypeError:
            return make_params(given)
        if found is None:
            found = self._params[key] = make_params(given)
        return found

    def _parse_openai(self, record: Mapping[str, Any]) -> BatchRequest:
        _refuse_unknown(record, _OPENAI)
        url, body = record.get("url"), record.get("body")
        if not isinstance(url, str) or url not in ENDPOINTS or record.get("method", "POST") != "POST":
            raise ValueError(f"the request must be a POST to {' or '.join(ENDPOINTS)}, not {url!r:.80}")
        if not isinstance(body, dict):
            raise ValueError("body must be an object")
        given, is_chat = _given(body), "messages" in ENDPOINTS[url]
        _refuse_unknown(given, ENDPOINTS[url])
        if (name := "messages" if is_chat else "prompt") not in given:
            raise ValueError(f"body needs {name}")
        for field_name, neutral in NEUTRAL_VALUES.items():
            if field_name in given and given[field_name] not in neutral:
                raise ValueError(f"{field_name}={given[field_name]!r:.80} is not supported")
        params = request_params(given, is_chat=is_chat, recommended=self._recommended, chosen=self._chosen)
        content = given.pop(name)
        if is_chat:
            return self._parse_chat(BatchRequest(None, params, content, asked=params, url=url, body=given))
        # The API accepts a list of prompts; a list of one is a prompt.
        is_single = isinstance(content, list) and len(content) == 1 and not isinstance(content[0], int)
        return BatchRequest(_check_prompt(content[0] if is_single else content), params, url=url, body=given)

    def _parse_chat(self, request: BatchRequest) -> BatchRequest:
        """Complete a chat request with the tools, reasoning and template options in its body."""
        body = request.body
        separates = body.get("separate_reasoning", self._separates)
        check_bool("separate_reasoning", separates)
        tools, choice, parallel = (body.get(name) for name in ("tools", "tool_choice", "parallel_tool_calls"))
        answer = AnswerOptions.of(self._form, tools, choice, parallel, separates)
        options: Any = {name: body[name] for name in _TEMPLATE if name in body}
        options |= {"chat_template_kwargs": template_values(body), "tools": answer.template_tools()}
        request.template, request.answer = _template(options), answer
        request.params = answer.constrain(request.params)
        return request


def _given(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with a value: null means a missing one, as in exported tables."""
    return {name: value for name, value in record.items() if value is not None}


def _refuse_unknown(record: Mapping[str, Any], known: set[str]) -> None:
    if not record.keys() <= known:
        unknown = sorted(set(record) - known)
        raise ValueError(f"unknown field {', '.join(map(repr, unknown))[:200]}")


def _check_prompt(prompt: Any) -> str | list[int]:
    # The items of a list are checked when the request is queued.
    if not isinstance(prompt, (str, list)):
        raise ValueError(f"a prompt is a string or a list of token ids, not {prompt!r:.80}")
    return prompt


def _template(options: Any) -> dict[str, Any]:
    """Return options of `render_text` for a chat template's options."""
    variables = options.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict) or variables.keys() & _RESERVED:
        raise ValueError(f"chat_template_kwargs must be an object without {', '.join(sorted(_RESERVED))}")
    return template_options(options)


def result_fields(
    line: int, ids: Mapping[str, Any], output: RequestOutput, request: BatchRequest, model: str
) -> dict[str, Any]:
    """Return the answer to a line in its request's form, reproducible but for OpenAI's `created` and calls' ids."""
    states = {"hidden_states": [layer.tolist() for layer in output.hidden_states]} if output.hidden_states else {}
    if request.url is None:
        if request.answer is not None:
            request.answer.complete(output, request.asked)
        answer: dict[str, Any] = {"outputs": [_plain_output(item, request) for item in output.outputs]}
        answer["num_prompt_tokens"] = len(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = _plain_logprobs(output.prompt_logprobs)
        return {**ids, **answer, **states}
    is_chat = "messages" in ENDPOINTS[request.url]
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        **(_chat(output, request) if is_chat else _completion(output, request)),
        "usage": usage(len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs)),
        **states,
    }
    response = {"status_code": 200, "request_id": f"req-{line}", "body": body}
    return {"id": f"batch_req_{line}", **ids, "response": response, "error": None}


def _chat(output: RequestOutput, request: BatchRequest) -> dict[str, Any]:
    assert request.answer is not None and request.asked is not None
    shown = ShownTokens.of(request.body)
    splitters = request.answer.splitters(output.prompt_token_ids, request.asked, len(output.outputs))
    pairs = zip(output.outputs, splitters, strict=True)
    body: dict[str, Any] = {"choices": [chat_choice(choice, splitter, shown) for choice, splitter in pairs]}
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_positions(output, shown)
    return body | ({"prompt_token_ids": output.prompt_token_ids} if shown.ids else {})


def _completion(output: RequestOutput, request: BatchRequest) -> dict[str, Any]:
    shown, choices = ShownTokens.of(request.body), []
    for choice in output.outputs:
        item = text_choice(choice, shown)
        if output.prompt_logprobs is not None:
            item["prompt_logprobs"] = prompt_positions(output, shown)
        if shown.ids:
            item["token_ids"], item["prompt_token_ids"] = choice.token_ids, output.prompt_token_ids
        choices.append(item)
    return {"choices": choices}


def encode_line(result: Mapping[str, Any]) -> bytes:
    """Return a result as a line. Non-ASCII characters are escaped: some of them are line breaks for some readers."""
    return _encode(result).encode() + b"\n"


def _plain_output(output: CompletionOutput, request: BatchRequest) -> dict[str, Any]:
    values = {name: getattr(output, name) for name in ("text", "token_ids", "finish_reason", "stop_reason")}
    if request.answer is not None:
        values["tool_calls"] = [asdict(call) for call in output.tool_calls]
    if output.logprobs is not None:
        values["cumulative_logprob"] = max(output.cumulative_logprob or 0.0, LEAST_LOGPROB)
        values["logprobs"] = _plain_logprobs(output.logprobs)
    return values


def _plain_logprobs(positions: Iterable[dict[int, Logprob] | None]) -> list[dict[int, dict[str, Any]] | None]:
    return [
        None if logprobs is None else {token_id: _plain_logprob(item) for token_id, item in logprobs.items()}
        for logprobs in positions
    ]


def _plain_logprob(item: Logprob) -> dict[str, Any]:
    return {**asdict(item), "logprob": max(item.logprob, LEAST_LOGPROB)}
