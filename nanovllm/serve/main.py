"""`nanovllm serve`: the server's process."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import logging.config
import math
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any, cast

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

_ABORT_SHARE, _CUT_SHARE = 0.8, 0.95
"""The shares of the grace after which requests are aborted, and connections cut that have not taken their answers."""

_logger = logging.getLogger(__name__)


def serve(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the server until it gets SIGINT or SIGTERM, and return the exit code."""
    try:
        import uvicorn  # noqa: PLC0415

        from nanovllm.serve.app import create_app  # noqa: PLC0415
        from nanovllm.serve.connection import Connection, ConnectionPool, raise_descriptor_limit  # noqa: PLC0415
        from nanovllm.serve.logs import log_config  # noqa: PLC0415
        from nanovllm.serve.service import Service  # noqa: PLC0415
    except ImportError as error:
        parser.error(f"{_INSTALL} ({error})")
    # A crash of native code says where it was.
    faulthandler.enable()
    with user_errors(parser):
        settings = ServeSettings(**flag_values(options, ServeSettings))
        settings = replace(settings, api_key=settings.api_key or os.environ.get("NANOVLLM_API_KEY") or None)
        config = Config(**flag_values(options, Config))
        logging.config.dictConfig(log_config(settings.access_log))
        # Loading may take minutes.
        asyncio.run(_check_port(settings.host, settings.port))
        _logger.info("loading %s", config.model)
        llm = _load(config, settings)
        max_connections = raise_descriptor_limit(settings.max_connections)
    service = Service(llm, settings)
    app = create_app(service)
    pool = ConnectionPool(settings, service.metrics.count_error, max_connections)
    sys.setswitchinterval(_SWITCH_SECONDS)
    # What is loaded stays: looking through it for garbage would hold the event loop.
    gc.collect()
    gc.freeze()

    class Server(uvicorn.Server):
        """Says where it listens, which port 0 leaves to the system."""

        async def startup(self, sockets: Any = None) -> None:
            await _warm_up(app, settings)
            await super().startup(sockets)
            for listening in self.servers:
                for socket in listening.sockets:
                    host, port = socket.getsockname()[:2]
                    print(f"nanovllm serve: {service.model} at http://{host}:{port}", flush=True)
                    _logger.info("serving %s at http://%s:%d", service.model, host, port)

        async def shutdown(self, sockets: Any = None) -> None:
            _logger.info(
                "ending within %g s; %d requests are running", settings.grace_seconds, llm.num_pending_requests
            )
            loop = asyncio.get_running_loop()
            loop.call_later(settings.grace_seconds * _ABORT_SHARE, llm.abort_all)
            loop.call_later(settings.grace_seconds * _CUT_SHARE, self._cut_connections)
            await super().shutdown(sockets)
            _logger.info("ended")

        def _cut_connections(self) -> None:
            left = list(self.server_state.connections)
            if left:
                _logger.warning("cutting %d connections, which have not ended", len(left))
            for connection in left:
                connection.transport.abort()

    server = Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=settings.access_log,
            proxy_headers=False,
            # uvicorn calls it, whatever it is.
            http=cast("type[asyncio.Protocol]", partial(Connection, pool)),
            ws="none",
            backlog=settings.max_requests,
            timeout_graceful_shutdown=math.ceil(settings.grace_seconds) + 1,
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


async def _warm_up(app: Any, settings: ServeSettings) -> None:
    """Answer a request that nobody has sent: the first one imports modules and builds tables for some 20 ms.

    Args:
        app: the ASGI application.
        settings: the server's.
    """
    host = settings.trusted_hosts[0].replace("*", "a")
    headers = [(b"content-type", b"application/json"), (b"host", host.encode())]
    headers.append((b"authorization", f"Bearer {settings.api_key}".encode()))
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
