"""Batches: files of requests that are answered when nobody waits for the engine, as OpenAI's batch API has them.

A batch's state and answers are files, so that a server that was ended goes on with it when it is started again.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

from anyio import to_thread
from pydantic import BaseModel, ValidationError

from nanovllm.serve.batch_endpoints import ENDPOINTS, answer_line
from nanovllm.serve.errors import ApiError, api_error, parse_json
from nanovllm.serve.file_store import FileStore, read_json, write_json
from nanovllm.serve.guard import MOST_VALUES, num_values
from nanovllm.serve.service import Service

_logger = logging.getLogger(__name__)
_PRIORITY = 2**20
"""Of a batch's requests: they run when no others wait."""
_WINDOW_SECONDS = 24 * 3600
_MOST_FAULTS = 20
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


class BatchLine(BaseModel):
    """One request of an input."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class Batches:
    """The batches of a server, which does one after another.

    Args:
        service: answers.
        folder: of batches and files.
        max_lines_at_once: requests of a batch that wait or run at once.
    """

    def __init__(self, service: Service, folder: Path, max_lines_at_once: int) -> None:
        self.files = FileStore(folder / "files")
        self._folder = folder / "batches"
        self._folder.mkdir(exist_ok=True)
        states = self._folder.glob("batch_*.json")
        self._batches: dict[str, dict[str, Any]] = {path.stem: read_json(path) for path in states}
        self._origin = service
        # A batch's requests come after all others, whether or not clients may choose a priority.
        self._service = copy.copy(service)
        self._service.settings = replace(service.settings, allow_priority=True)
        self._max_lines = max_lines_at_once
        self._news = asyncio.Event()

    def create(self, input_file_id: str, endpoint: str, metadata: dict[str, str] | None) -> dict[str, Any]:
        """Queue a batch.

        Raises:
            ApiError: there is no such file or endpoint.
        """
        self.files.describe(input_file_id)
        if endpoint not in ENDPOINTS:
            raise ApiError(400, f"endpoint {endpoint!r:.80} is none of {', '.join(ENDPOINTS)}", "endpoint")
        created = int(time.time())
        batch: dict[str, Any] = {
            "id": f"batch_{uuid4().hex}", "object": "batch", "endpoint": endpoint, "errors": None,
            "input_file_id": input_file_id, "completion_window": "24h", "status": "validating",
            "output_file_id": None, "error_file_id": None, "created_at": created,
            "expires_at": created + _WINDOW_SECONDS, "metadata": metadata,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }  # fmt: skip
        self._batches[batch["id"]] = batch
        self._save(batch)
        self._news.set()
        return batch

    def get(self, batch_id: str) -> dict[str, Any]:
        """Return the state of a batch.

        Raises:
            ApiError: there is none.
        """
        if batch_id not in self._batches:
            raise ApiError(404, f"there is no batch {batch_id!r:.80}", "batch_id")
        return self._batches[batch_id]

    def list(self) -> list[dict[str, Any]]:
        """Return the states of all batches, the newest first."""
        return sorted(self._batches.values(), key=lambda batch: (-batch["created_at"], batch["id"]))

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """End a batch with the answers that it has."""
        batch = self.get(batch_id)
        if batch["status"] not in _UNFINISHED:
            raise ApiError(409, f"the batch has ended: it is {batch['status']}")
        return self._set_status(batch, "cancelling")

    async def run(self) -> None:
        """Do batches until this is cancelled."""
        while True:
            self._news.clear()
            for batch in reversed(self.list()):
                if batch["status"] in _UNFINISHED:
                    await self._run_batch(batch)
            await self._news.wait()

    async def _run_batch(self, batch: dict[str, Any]) -> None:
        try:
            path = self.files.path(batch["input_file_id"])
            most = self._service.settings.max_body_bytes
            total, faults = await to_thread.run_sync(_check_lines, path, batch["endpoint"], most)
            if faults:
                batch["errors"] = {"object": "list", "data": faults}
                self._set_status(batch, "failed")
                return
            self._begin(batch, total)
            await self._answer_lines(batch, path)
        except (OSError, ApiError) as error:
            _logger.exception("batch %s cannot go on", batch["id"])
            batch["errors"] = {"object": "list", "data": [{"code": "server_error", "message": str(error)}]}
            self._set_status(batch, "failed")

    def _begin(self, batch: dict[str, Any], total: int) -> None:
        """Give a batch its files, unless it goes on after an interruption."""
        if batch["output_file_id"] is None:
            batch["output_file_id"] = self.files.create(f"{batch['id']}_output.jsonl", "batch_output")
            batch["error_file_id"] = self.files.create(f"{batch['id']}_error.jsonl", "batch_output")
        batch["request_counts"]["total"] = total
        if batch["status"] == "validating":
            self._set_status(batch, "in_progress")

    async def _answer_lines(self, batch: dict[str, Any], path: Path) -> None:
        """Answer what has no answer yet, some lines at once."""
        places = {name: self.files.path(batch[f"{name}_file_id"]) for name in ("output", "error")}
        answered = {name: await to_thread.run_sync(_whole_lines, place) for name, place in places.items()}
        counts = batch["request_counts"]
        counts["completed"], counts["failed"] = len(answered["output"]), len(answered["error"])
        done, running = answered["output"] | answered["error"], set[asyncio.Task[None]]()
        end = "completed"
        with places["output"].open("ab") as output, places["error"].open("ab") as errors:
            try:
                for line in _lines(path):
                    # Thousands of lines may have answers already, or get them at once.
                    await asyncio.sleep(0)
                    if (end := self._why_to_end(batch)) != "completed":
                        break
                    if line.custom_id in done:
                        continue
                    running.add(asyncio.create_task(self._answer(batch, line, output, errors)))
                    if len(running) >= self._max_lines:
                        finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                        for task in finished:
                            task.result()
                if end == "completed":
                    await asyncio.gather(*running)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        if not self._origin.is_ending and self._service.llm.is_running:
            self._set_status(batch, end)

    def _why_to_end(self, batch: dict[str, Any]) -> str:
        """Return the status of a batch that must end now; "completed" if it may go on."""
        if batch["status"] == "cancelling":
            return "cancelled"
        return "expired" if time.time() > batch["expires_at"] else "completed"

    async def _answer(self, batch: dict[str, Any], line: BatchLine, output: BinaryIO, errors: BinaryIO) -> None:
        """Answer a line, and write the answer or the error."""
        try:
            status, answer = 200, await answer_line(self._service, line.url, {**line.body, "priority": _PRIORITY})
        except Exception as error:
            problem = api_error(error)
            status, answer = problem.status, problem.body()
        if self._origin.is_ending or not self._service.llm.is_running:
            # The server that goes on with the batch answers it.
            return
        batch["request_counts"]["completed" if status == 200 else "failed"] += 1
        response = {"status_code": status, "request_id": uuid4().hex, "body": answer}
        record = {"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
        file = output if status == 200 else errors
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()

    def _set_status(self, batch: dict[str, Any], status: str) -> dict[str, Any]:
        batch["status"] = status
        batch[f"{status}_at"] = int(time.time())
        self._save(batch)
        return batch

    def _save(self, batch: dict[str, Any]) -> None:
        write_json(self._path(batch["id"]), batch)

    def _path(self, batch_id: str) -> Path:
        return self._folder / f"{batch_id}.json"


def _lines(path: Path) -> Iterator[BatchLine]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield BatchLine.model_validate(parse_json(line))


def _check_lines(path: Path, endpoint: str, most_bytes: int) -> tuple[int, list[dict[str, Any]]]:
    """Return how many requests a file has, and what is wrong with it; `most_bytes`: of a line."""
    faults: list[dict[str, Any]] = []
    known: set[str] = set()
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if len(faults) == _MOST_FAULTS:
                break
            if not text.strip():
                continue
            fault = _size_fault(text, most_bytes) or _fault(text, endpoint, known)
            if fault is not None:
                faults.append({"line": number, "param": None, **fault})
    if not known and not faults:
        faults.append({"line": None, "param": None, "code": "empty_file", "message": "the file has no requests"})
    return len(known), faults


def _size_fault(text: bytes, most_bytes: int) -> dict[str, str] | None:
    """Return what is wrong with a line that is larger than the body of a request may be."""
    if len(text) <= most_bytes and num_values(text) <= MOST_VALUES:
        return None
    most = f"{most_bytes} bytes (max_body_bytes), and {MOST_VALUES} quotes and brackets"
    return {"code": "line_too_large", "message": f"a line has at most {most}"}


def _fault(text: bytes, endpoint: str, known: set[str]) -> dict[str, str] | None:
    """Return what is wrong with a line, whose id is known from then on."""
    try:
        line = BatchLine.model_validate(parse_json(text))
    except ApiError as error:
        return {"code": "invalid_json_line", "message": str(error)}
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return {"code": "invalid_json_line", "message": f"{place or 'line'}: {first['msg']}"}
    if line.method != "POST" or line.url != endpoint:
        return {"code": "invalid_url", "message": f"{line.method} {line.url!r:.80} is not POST {endpoint}"}
    if line.custom_id in known:
        return {"code": "duplicate_custom_id", "message": f"custom_id {line.custom_id!r:.80} is there twice"}
    known.add(line.custom_id)
    return None


def _whole_lines(path: Path) -> set[str]:
    """Return the ids that a file of answers has, and cut off a line that was interrupted."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return {json.loads(line)["custom_id"] for line in whole.splitlines()}
