"""The lines of an output: an answer or an error each, with the number of the line that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from nanovllm.batch_files.requests import BatchRequest
from nanovllm.logprobs import Logprob
from nanovllm.openai_format import ENDPOINTS, LEAST_LOGPROB, completion_body
from nanovllm.outputs import CompletionOutput, RequestOutput

_encode = json.JSONEncoder(allow_nan=False).encode


def result_line(
    line: int, ids: Mapping[str, Any], output: RequestOutput, request: BatchRequest, model: str
) -> dict[str, Any]:
    """Return the answer to a line. All but OpenAI's `created` is the same in every run.

    Args:
        line: its number, from 1.
        ids: what its author called it.
        output: of its request.
        request: what was asked for; the answer has the same form.
        model: the model's name.
    """
    if request.url is None:
        answer: dict[str, Any] = {"outputs": [_plain_output(item) for item in output.outputs]}
        answer["num_prompt_tokens"] = len(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = _plain_logprobs(output.prompt_logprobs)
        return {"line": line, **ids, **answer}
    body = completion_body(output, line, model, ENDPOINTS[request.url].is_chat, request.params.logprobs)
    response = {"status_code": 200, "request_id": f"req-{line}", "body": body}
    return {"line": line, "id": f"batch_req_{line}", **ids, "response": response, "error": None}


def error_line(line: int, ids: Mapping[str, Any], code: str, message: str) -> dict[str, Any]:
    """Return the error of a line; both forms of lines have the same."""
    return {"line": line, **ids, "response": None, "error": {"code": code, "message": message}}


def encode_line(result: Mapping[str, Any]) -> bytes:
    """Return a result as a line. Characters beyond ASCII are escaped: some of them end lines for some readers."""
    return _encode(result).encode() + b"\n"


def _plain_output(output: CompletionOutput) -> dict[str, Any]:
    values = {name: getattr(output, name) for name in ("text", "token_ids", "finish_reason", "stop_reason")}
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
