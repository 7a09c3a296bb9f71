"""Endpoints for the server's state: health, version, load, metrics, and the page that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import nanovllm
from nanovllm.engine.stats import BlockUsage
from nanovllm.serve.routing import ERRORS, ServiceDep
from nanovllm.serve.server_counts import Counted

router = APIRouter()
PAGE = Path(__file__).parent / "page"
_INDEX = (PAGE / "index.html").read_bytes()
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@router.get("/health", responses={503: ERRORS[503]})
@router.get("/ping", responses={503: ERRORS[503]})
async def health(service: ServiceDep) -> dict[str, str]:
    """Answer with status 200 if the engine works, else 503."""
    service.llm.require_running()
    service.llm.llm.require_awake()
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return nanovllm's version."""
    return {"version": nanovllm.__version__}


@router.get("/load", responses={401: ERRORS[401]})
async def load(service: ServiceDep) -> dict[str, int]:
    """Return the number of requests in the engine."""
    service.counts.set(Counted.PENDING, service.llm.num_pending_requests)
    return {"server_load": service.counts.total(Counted.PENDING)}


@router.get("/metrics", response_class=Response, responses={401: ERRORS[401]})
def metrics(service: ServiceDep) -> Response:
    """Return the metrics in Prometheus' text format."""
    # Not async, so it runs in a thread: an engine in another process answers between two steps.
    text, media_type = service.metrics.render()
    return Response(text, media_type=media_type)


@router.get("/stats", responses={401: ERRORS[401]})
def stats(service: ServiceDep) -> dict[str, Any]:
    """Return the engine's state."""
    return service.state()


@router.get("/stats/blocks", responses={401: ERRORS[401]})
def blocks(service: ServiceDep) -> BlockUsage:
    """Return the state of the cache's blocks."""
    # Not async, so it runs in a thread: 100,000 blocks take about 10 ms.
    return service.llm.llm.block_usage()


@router.get("/", response_class=Response)
async def index() -> Response:
    """Return a page with a chat and the engine's state."""
    return Response(_INDEX, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)
