"""`nanovllm serve`: the server's process."""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import sys
from dataclasses import replace
from typing import Any

from nanovllm.config import Config
from nanovllm.serve.settings import ServeSettings
from nanovllm.utils.extras import install_hint
from nanovllm.utils.flags import flag_values, user_errors

_INSTALL = f"nanovllm serve needs further packages: {install_hint('serve')}"
_SWITCH_SECONDS = 0.0005
"""How long one thread may hold the interpreter while another waits.

With Python's 5 ms the engine's thread, which waits for the device some times in each step, would lose that much each
time to the threads that write answers.
"""

_ABORT_SECONDS = 5
"""How long requests that were aborted have to be answered."""


def serve(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the server until it gets SIGINT or SIGTERM, and return the exit code."""
    try:
        import uvicorn  # noqa: PLC0415

        from nanovllm.serve.app import create_app  # noqa: PLC0415
        from nanovllm.serve.connection import timed_protocol  # noqa: PLC0415
        from nanovllm.serve.service import Service  # noqa: PLC0415
    except ImportError as error:
        parser.error(f"{_INSTALL} ({error})")
    with user_errors(parser):
        settings = ServeSettings(**flag_values(options, ServeSettings))
        settings = replace(settings, api_key=settings.api_key or os.environ.get("NANOVLLM_API_KEY") or None)
        config = Config(**flag_values(options, Config))
        # Loading may take minutes.
        asyncio.run(_check_port(settings.host, settings.port))
        llm = _load(config, settings)
    service = Service(llm, settings)
    app = create_app(service)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # What is loaded stays: looking through it for garbage would hold the event loop.
    gc.collect()
    gc.freeze()

    class Server(uvicorn.Server):
        """Says where it listens, which port 0 leaves to the system."""

        async def startup(self, sockets: Any = None) -> None:
            await _warm_up(app, settings.api_key)
            await super().startup(sockets)
            for listening in self.servers:
                for socket in listening.sockets:
                    host, port = socket.getsockname()[:2]
                    print(f"nanovllm serve: {service.model} at http://{host}:{port}", flush=True)

        async def shutdown(self, sockets: Any = None) -> None:
            # What is aborted is answered with what it has, which takes a moment.
            asyncio.get_running_loop().call_later(settings.grace_seconds, llm.abort_all)
            await super().shutdown(sockets)

    server = Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            http=timed_protocol(settings, service.metrics.count_error),
            backlog=settings.max_requests,
            timeout_graceful_shutdown=math.ceil(settings.grace_seconds) + _ABORT_SECONDS,
            # Clients keep their connections longer than uvicorn's 5 s, and fail when one closes as they send.
            timeout_keep_alive=75,
            lifespan="on",
        )
    )
    server.run()
    return 0


async def _check_port(host: str, port: int) -> None:
    """Raise an OSError if the server could not listen there."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    server.close()


async def _warm_up(app: Any, api_key: str | None) -> None:
    """Answer a request that nobody has sent: the first one imports modules and builds tables for some 20 ms.

    Args:
        app: the ASGI application.
        api_key: the server's.
    """
    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {api_key}".encode())]
    path = "/detokenize"
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
    }
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"tokens": []}', "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app(scope, receive, send)
    if statuses != [200]:
        raise RuntimeError(f"the server answered its own request with {statuses}")


def _load(config: Config, settings: ServeSettings) -> Any:
    """Load the model, and say if it runs on the CPU."""
    import torch  # noqa: PLC0415

    from nanovllm.async_llm import AsyncLLM  # noqa: PLC0415

    llm = AsyncLLM(**vars(config), max_pending_requests=settings.max_requests * settings.max_outputs)
    if config.device == "auto" and not torch.cuda.is_available():
        print("nanovllm serve: no GPU was found; the model runs on the CPU, slowly", file=sys.stderr)
    return llm
