"""Command `nanovllm serve`: checks the options, loads the model, and runs the server."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import logging.config
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from nanovllm.config import Config
from nanovllm.serve.settings import ServeSettings
from nanovllm.utils.display import install_hint
from nanovllm.utils.flags import flag_values, user_errors
from nanovllm.utils.host import num_gpus

_INSTALL = f"nanovllm serve needs further packages: {install_hint('serve')}"
_logger = logging.getLogger(__name__)


def serve(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the server until SIGINT or SIGTERM, and return the exit code."""
    try:
        # Only look for them: with several front ends, only the front ends' processes import them.
        for package in ("fastapi", "httptools", "prometheus_client", "uvicorn"):
            if find_spec(package) is None:
                raise ImportError(f"No module named {package!r}")
        from nanovllm.serve.logs import log_config  # noqa: PLC0415
    except ImportError as error:
        parser.error(f"{_INSTALL} ({error})")
    # Prints a traceback when native code crashes.
    faulthandler.enable()
    with user_errors(parser):
        settings = ServeSettings(**flag_values(options, ServeSettings))
        settings = replace(settings, api_key=settings.api_key or _environment_keys())
        settings.check_access()
        config = Config(**flag_values(options, Config))
        logging.config.dictConfig(log_config(settings.access_log, settings.log_requests))
        # Loading may take minutes.
        if settings.uds is None:
            asyncio.run(_check_port(settings.host, settings.port))
        _logger.info("loading %s", config.model)
        size = _num_front_ends(config, settings)
        run = _load(config, settings) if size == 1 else _load_front_ends(config, settings, size)
    return run()


def _environment_keys() -> list[str] | None:
    key = os.environ.get("NANOVLLM_API_KEY")
    return [key] if key else None


async def _check_port(host: str, port: int) -> None:
    """Raise an OSError if the server cannot listen on the address."""
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    server.close()


def _num_front_ends(config: Config, settings: ServeSettings) -> int:
    is_on_gpu = settings.front_ends is None and config.device != "cpu" and num_gpus() > 0
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return settings.num_front_ends(is_on_gpu, num_cores)


def _load_front_ends(config: Config, settings: ServeSettings, size: int) -> Callable[[], int]:
    """Load the model in separate processes, and return the function that runs a server of several front ends."""
    from nanovllm.serve.front_ends import FrontEnds  # noqa: PLC0415

    front_ends = FrontEnds(config, settings, size)
    front_ends.load()
    return front_ends.run


def _load(config: Config, settings: ServeSettings) -> Callable[[], int]:
    """Load the model, report if it runs on the CPU, and return the function that runs the server."""
    import torch  # noqa: PLC0415

    from nanovllm.llm import LLM  # noqa: PLC0415
    from nanovllm.serve.limits import raise_descriptor_limit  # noqa: PLC0415
    from nanovllm.serve.process import run_server  # noqa: PLC0415

    llm = LLM(**vars(config))
    if config.device == "auto" and not torch.cuda.is_available():
        print("nanovllm serve: no GPU was found; the model runs on the CPU, slowly", file=sys.stderr)
    return partial(run_server, llm, settings, raise_descriptor_limit(settings.max_connections))
