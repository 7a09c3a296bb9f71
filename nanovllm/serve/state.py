"""Endpoints for the server's state and its page, and, enabled by `control`, for training loops.

The latter have vLLM's and prime-rl's names.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import Response

import nanovllm
from nanovllm.engine.engine import PauseMode, SleepTag
from nanovllm.engine.stats import BlockUsage
from nanovllm.serve.errors import ERRORS, ApiError
from nanovllm.serve.protocol import Body
from nanovllm.serve.service import BodyRoute, Service, ServiceDep
from nanovllm.serve.settings import Counted
from nanovllm.weights.report import LoadFailedError

_logger = logging.getLogger(__name__)
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
    """Return the number of requests that wait or run."""
    return {"server_load": service.counts.total(Counted.REQUESTS)}


@router.get("/metrics", response_class=Response, responses={401: ERRORS[401]})
def metrics(service: ServiceDep) -> Response:
    """Return the metrics in Prometheus' text format."""
    # Not async, so it runs in a thread: an engine in another process answers between two steps.
    text, media_type = service.metrics.render()
    return Response(text, media_type=media_type)


@router.get("/stats", responses={401: ERRORS[401]})
def stats(service: ServiceDep) -> dict[str, Any]:
    """Return the engine's state."""
    # Not async, for the same reason.
    llm = service.llm.llm
    counts, sample = llm.stats(), llm.stats_history()[-1]
    head = {"model": service.model, "device": llm.device_name}
    return {**head, **sample._asdict(), "num_preemptions": counts["num_preemptions"]}


@router.get("/stats/blocks", responses={401: ERRORS[401]})
def blocks(service: ServiceDep) -> BlockUsage:
    """Return the state of the cache's blocks."""
    # Not async, so it runs in a thread: 100,000 blocks take about 10 ms.
    return service.llm.llm.block_usage()


@router.get("/", response_class=Response)
async def index() -> Response:
    """Return a page with a chat and the engine's state."""
    return Response(_INDEX, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)


class WeightsBody(Body):
    """A request to load weights."""

    weight_dir: str


async def _refuse_pages(request: Request) -> None:
    """Refuse requests from web pages, whose scripts can send requests without a body to any server on this machine."""
    if "origin" in request.headers:
        raise ApiError(403, "a web page cannot control the engine")


class _ControlRoute(BodyRoute):
    is_limited = False


control = APIRouter(route_class=_ControlRoute, dependencies=[Depends(_refuse_pages)], responses=ERRORS)


@asynccontextmanager
async def _between_steps(what: str) -> AsyncIterator[None]:
    """Log an operation, and answer with status 409 if the engine's state does not allow it."""
    _logger.info("%s", what)
    try:
        yield
    except LoadFailedError as error:
        raise ApiError(500, str(error)) from error
    except RuntimeError as error:
        raise ApiError(409, str(error)) from error


@control.get("/liveness")
async def liveness(service: ServiceDep) -> dict[str, str]:
    """Answer whether the engine is alive, asleep or not."""
    service.llm.require_running()
    return {"status": "alive"}


@control.get("/get_world_size")
async def get_world_size(service: ServiceDep) -> dict[str, int]:
    """Return the number of ranks."""
    return {"world_size": service.config.tensor_parallel_size}


@control.post("/pause")
async def pause(service: ServiceDep, mode: PauseMode = "keep", clear_cache: bool = False) -> dict[str, str]:
    """Pause before the next step; see `LLM.pause`. With `clear_cache`, forget the prefix cache."""
    async with _between_steps(f"pause: {mode}"):
        await service.llm.pause(mode)
        if clear_cache:
            await service.llm.reset_prefix_cache()
    return {"status": "paused"}


@control.post("/resume")
async def resume(service: ServiceDep) -> dict[str, str]:
    """Resume after a pause."""
    async with _between_steps("resume"):
        await service.llm.resume()
    return {"status": "resumed"}


@control.get("/is_paused")
async def is_paused(service: ServiceDep) -> dict[str, bool]:
    """Answer whether the engine is paused."""
    return {"is_paused": service.llm.is_paused}


@control.post("/sleep")
async def sleep(service: ServiceDep, level: int = 1) -> dict[str, str]:
    """Release memory; see `LLM.sleep`."""
    async with _between_steps(f"sleep: level {level}"):
        await service.llm.sleep(level)
    return {"status": "asleep"}


@control.post("/wake_up")
async def wake_up(service: ServiceDep, tags: Annotated[list[SleepTag] | None, Query()] = None) -> dict[str, str]:
    """Allocate memory again; see `LLM.wake_up`."""
    async with _between_steps(f"wake up: {tags or 'all'}"):
        await service.llm.wake_up(tags)
    return {"status": "asleep" if service.llm.is_sleeping else "awake"}


@control.get("/is_sleeping")
async def is_sleeping(service: ServiceDep) -> dict[str, bool]:
    """Answer whether the engine is asleep."""
    return {"is_sleeping": service.llm.is_sleeping}


@control.post("/reset_prefix_cache")
async def reset_prefix_cache(service: ServiceDep) -> dict[str, bool]:
    """Clear the prefix cache; see `LLM.reset_prefix_cache`."""
    async with _between_steps("reset of the prefix cache"):
        return {"success": await service.llm.reset_prefix_cache()}


@control.post("/update_weights")
async def update_weights(body: WeightsBody, service: ServiceDep) -> dict[str, Any]:
    """Load weights from a folder, and clear the prefix cache. Requests continue afterwards, unless paused."""
    folder, llm = _folder(service, body.weight_dir), service.llm
    async with _between_steps(f"update of the weights: {folder}"):
        was_paused = llm.is_paused
        await llm.pause("keep")
        try:
            loaded = await llm.load_and_report(folder)
            await llm.reset_prefix_cache()
        finally:
            if not was_paused:
                await llm.resume()
    if loaded.nan_names:
        _logger.warning("%d tensors of %s have NaN, such as %r", len(loaded.nan_names), folder, loaded.nan_names[0])
    return {"status": "ok", "num_tensors": loaded.count, "nan_tensors": loaded.nan_names}


def _folder(service: Service, given: str) -> Path:
    root = service.settings.weights_root
    if root is None:
        raise ApiError(400, "this server loads no weights: it has no --weights-root", "weight_dir")
    folder = (Path(root).resolve() / given).resolve()
    if not folder.is_relative_to(Path(root).resolve()) or not folder.is_dir():
        raise ApiError(400, f"weight_dir {given!r:.200} is no folder under the server's --weights-root", "weight_dir")
    return folder
