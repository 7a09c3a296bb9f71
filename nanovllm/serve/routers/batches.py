"""OpenAI's files and batches; only of a server that has a folder for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import Depends, File, Form, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse

from nanovllm.serve.batches import Batches
from nanovllm.serve.protocol import Body, Metadata
from nanovllm.serve.routing import ERRORS, make_router

router = make_router()
_MOST_LISTED = 100


class BatchBody(Body):
    """A request to answer a file of requests."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


async def _batches(request: Request) -> Batches:
    batches: Batches = request.app.state.batches
    return batches


BatchesDep = Annotated[Batches, Depends(_batches)]


@router.post("/v1/files", responses=ERRORS)
async def upload(
    file: Annotated[UploadFile, File()], purpose: Annotated[Literal["batch"], Form()], batches: BatchesDep
) -> dict[str, Any]:
    """Take a file of requests, one JSON object a line."""
    file_id = batches.files.create(file.filename or "input.jsonl", purpose)
    path = batches.files.path(file_id)
    with path.open("wb") as target:
        while part := await file.read(2**20):
            await to_thread.run_sync(target.write, part)
    return batches.files.describe(file_id)


@router.get("/v1/files", responses=ERRORS)
async def list_files(batches: BatchesDep) -> dict[str, Any]:
    """List the files, the newest first."""
    return {"object": "list", "data": batches.files.list(), "has_more": False}


@router.get("/v1/files/{file_id}", responses=ERRORS)
async def describe_file(file_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Describe a file."""
    return batches.files.describe(file_id)


@router.get("/v1/files/{file_id}/content", response_class=FileResponse, responses=ERRORS)
async def content(file_id: str, batches: BatchesDep) -> FileResponse:
    """Return the content of a file."""
    described = batches.files.describe(file_id)
    return FileResponse(batches.files.path(file_id), media_type="application/jsonl", filename=described["filename"])


@router.delete("/v1/files/{file_id}", responses=ERRORS)
async def delete_file(file_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Forget a file."""
    batches.files.delete(file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@router.post("/v1/batches", responses=ERRORS)
async def create(body: BatchBody, batches: BatchesDep) -> dict[str, Any]:
    """Begin to answer a file of requests."""
    return batches.create(body.input_file_id, body.endpoint, body.metadata)


@router.get("/v1/batches", responses=ERRORS)
async def list_batches(batches: BatchesDep, after: str | None = None, limit: int = 20) -> dict[str, Any]:
    """List the batches, the newest first."""
    found = batches.list()
    ids = [batch["id"] for batch in found]
    begin = ids.index(after) + 1 if after in ids else 0
    page = found[begin : begin + max(1, min(limit, _MOST_LISTED))]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": begin + len(page) < len(found)}


@router.get("/v1/batches/{batch_id}", responses=ERRORS)
async def describe(batch_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Return the state of a batch."""
    return batches.get(batch_id)


@router.post("/v1/batches/{batch_id}/cancel", responses=ERRORS)
async def cancel(batch_id: str, batches: BatchesDep) -> dict[str, Any]:
    """End a batch with the answers that it has."""
    return batches.cancel(batch_id)
