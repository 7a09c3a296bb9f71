"""The lines of an output: an answer or an error each, with the number of the line that it belongs to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from nanovllm.batch_files.requests import BatchRequest
from nanovllm.logprobs import Logprob
from nanovllm.openai_format import (
    ENDPOINTS,
    LEAST_LOGPROB,
    ShownTokens,
    chat_choice,
    prompt_positions,
    text_choice,
    usage,
)
from nanovllm.outputs import CompletionOutput, RequestOutput

_encode = json.JSONEncoder(allow_nan=False).encode


def result_line(
    line: int, ids: Mapping[str, Any], output: RequestOutput, request: BatchRequest, model: str
) -> dict[str, Any]:
    """Return the answer to a line. All but OpenAI's `created` and the ids of calls is the same in every run.

    Args:
        line: its number, from 1.
        ids: what its author called it.
        output: of its request.
        request: what was asked for; the answer has the same form.
        model: the model's name.
    """
    if request.url is None:
        if request.answer is not None:
            request.answer.complete(output, request.asked)
        answer: dict[str, Any] = {"outputs": [_plain_output(item, request) for item in output.outputs]}
        answer["num_prompt_tokens"] = len(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = _plain_logprobs(output.prompt_logprobs)
        return {"line": line, **ids, **answer}
    is_chat = ENDPOINTS[request.url].is_chat
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{line}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        **(_chat(output, request) if is_chat else _completion(output, request)),
        "usage": usage(len(output.prompt_token_ids), sum(len(choice.token_ids) for choice in output.outputs)),
    }
    response = {"status_code": 200, "request_id": f"req-{line}", "body": body}
    return {"line": line, "id": f"batch_req_{line}", **ids, "response": response, "error": None}


def _chat(output: RequestOutput, request: BatchRequest) -> dict[str, Any]:
    """Return the answers to messages."""
    assert request.answer is not None and request.asked is not None
    shown = ShownTokens.of(request.body)
    make_splitter = request.answer.make_splitter(output.prompt_token_ids, request.asked)
    body: dict[str, Any] = {"choices": [chat_choice(choice, make_splitter(), shown) for choice in output.outputs]}
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_positions(output, shown.names)
    return body | ({"prompt_token_ids": output.prompt_token_ids} if shown.ids else {})


def _completion(output: RequestOutput, request: BatchRequest) -> dict[str, Any]:
    """Return the completions of a prompt."""
    shown, choices = ShownTokens.of(request.body), []
    for choice in output.outputs:
        item = text_choice(choice, shown.names)
        if output.prompt_logprobs is not None:
            item["prompt_logprobs"] = prompt_positions(output, shown.names)
        if shown.ids:
            item["token_ids"], item["prompt_token_ids"] = choice.token_ids, output.prompt_token_ids
        choices.append(item)
    return {"choices": choices}


def error_line(line: int, ids: Mapping[str, Any], code: str, message: str) -> dict[str, Any]:
    """Return the error of a line; both forms of lines have the same."""
    return {"line": line, **ids, "response": None, "error": {"code": code, "message": message}}


def encode_line(result: Mapping[str, Any]) -> bytes:
    """Return a result as a line. Characters beyond ASCII are escaped: some of them end lines for some readers."""
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
