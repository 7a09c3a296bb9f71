"""`nanovllm serve`: the server's process."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import logging.config
import os
import sys
from dataclasses import replace
from typing import Any

from nanovllm.config import Config
from nanovllm.serve.settings import ServeSettings
from nanovllm.utils.extras import install_hint
from nanovllm.utils.flags import flag_values, user_errors

_INSTALL = f"nanovllm serve needs further packages: {install_hint('serve')}"
_logger = logging.getLogger(__name__)


def serve(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the server until it gets SIGINT or SIGTERM, and return the exit code."""
    try:
        from nanovllm.serve.connection import raise_descriptor_limit  # noqa: PLC0415
        from nanovllm.serve.logs import log_config  # noqa: PLC0415
        from nanovllm.serve.process import run_server  # noqa: PLC0415
    except ImportError as error:
        parser.error(f"{_INSTALL} ({error})")
    # A crash of native code says where it was.
    faulthandler.enable()
    with user_errors(parser):
        settings = ServeSettings(**flag_values(options, ServeSettings))
        settings = replace(settings, api_key=settings.api_key or _environment_keys())
        settings.check_access()
        config = Config(**flag_values(options, Config))
        logging.config.dictConfig(log_config(settings.access_log))
        # Loading may take minutes.
        if settings.uds is None:
            asyncio.run(_check_port(settings.host, settings.port))
        _logger.info("loading %s", config.model)
        llm = _load(config, settings)
        max_connections = raise_descriptor_limit(settings.max_connections)
    return run_server(llm, settings, max_connections)


def _environment_keys() -> list[str] | None:
    key = os.environ.get("NANOVLLM_API_KEY")
    return [key] if key else None


async def _check_port(host: str, port: int) -> None:
    """Raise an OSError if the server could not listen there."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    server.close()


def _load(config: Config, settings: ServeSettings) -> Any:
    """Load the model, and say if it runs on the CPU."""
    import torch  # noqa: PLC0415

    from nanovllm.async_llm import AsyncLLM  # noqa: PLC0415
    from nanovllm.serve.protocol import MOST_PROMPTS  # noqa: PLC0415

    # No request takes the place of others: texts to compare come in two lists.
    most_pending = settings.max_requests * max(settings.max_outputs, 2 * MOST_PROMPTS)
    llm = AsyncLLM(**vars(config), max_pending_requests=most_pending)
    if config.device == "auto" and not torch.cuda.is_available():
        print("nanovllm serve: no GPU was found; the model runs on the CPU, slowly", file=sys.stderr)
    return llm
