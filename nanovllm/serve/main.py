"""Command `nanovllm serve`: loads the model, and runs the server in this process or in several.

With several front ends, this process supervises them and the engines, which have no HTTP, and answers no requests. A
front end that exits is restarted, and only its clients notice; each has its own listening socket on the port, and the
kernel distributes connections. A front end's process starts in `run_front_end`, and exits with the supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import logging.config
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import FrameType

from nanovllm.client.engine_process import EngineProcesses
from nanovllm.config import Config
from nanovllm.serve.logs import log_config
from nanovllm.serve.settings import ServerCounts, ServeSettings, SharedServer
from nanovllm.utils.display import install_hint
from nanovllm.utils.flags import flag_values, user_errors
from nanovllm.utils.host import num_gpus
from nanovllm.utils.hub import resolve_model
from nanovllm.utils.processes import PythonProcess, describe_exit, end_with_parent, start_python

_logger = logging.getLogger(__name__)
_NO_START = "nanovllm serve: error: a front end could not be started"
_POLL_SECONDS = 0.05
_START_SECONDS = 300.0
_EXTRA_SECONDS = 3.0
"""Extra time for a front end's exit after the grace period."""
_EXITED = "the engine's process has exited; the server's log says how"


def serve(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run the server until SIGINT or SIGTERM, and return the exit code."""
    # Only look for them: with several front ends, only the front ends' processes import them.
    for package in ("fastapi", "httptools", "prometheus_client", "uvicorn"):
        if find_spec(package) is None:
            hint = install_hint("serve")
            parser.error(f"nanovllm serve needs further packages: {hint} (No module named {package!r})")
    # Prints a traceback when native code crashes.
    faulthandler.enable()
    with user_errors(parser):
        settings = ServeSettings(**flag_values(options, ServeSettings))
        key = os.environ.get("NANOVLLM_API_KEY")
        settings = replace(settings, api_key=settings.api_key or ([key] if key else None))
        settings.check_access()
        config = Config(**flag_values(options, Config))
        logging.config.dictConfig(log_config(settings.access_log, settings.log_requests))
        # Loading may take minutes.
        if settings.uds is None:
            asyncio.run(_check_port(settings.host, settings.port))
        _logger.info("loading %s", config.model)
        is_on_gpu = settings.front_ends is None and config.device != "cpu" and num_gpus() > 0
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        size = settings.num_front_ends(is_on_gpu, num_cores)
        run = _load(config, settings) if size == 1 else FrontEnds(config, settings, size).load()
    return run()


async def _check_port(host: str, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    server.close()


def _load(config: Config, settings: ServeSettings) -> Callable[[], int]:
    """Load the model, report if it runs on the CPU, and return the function that runs the server."""
    import torch  # noqa: PLC0415

    from nanovllm.llm import LLM  # noqa: PLC0415
    from nanovllm.serve.app import run_server  # noqa: PLC0415
    from nanovllm.serve.limits import raise_descriptor_limit  # noqa: PLC0415

    llm = LLM(**vars(config))
    if config.device == "auto" and not torch.cuda.is_available():
        print("nanovllm serve: no GPU was found; the model runs on the CPU, slowly", file=sys.stderr)
    return partial(run_server, llm, settings, raise_descriptor_limit(settings.max_connections))


class FrontEndProcess(PythonProcess):
    """A front end's process with a connection to it."""

    def __init__(self, process: subprocess.Popen[bytes], control: Connection) -> None:
        super().__init__(process)
        self.control, self._is_ready = control, False

    @property
    def is_ready(self) -> bool:
        """Whether it has ever been ready, which its only message says."""
        with suppress(EOFError, OSError):
            self._is_ready = self._is_ready or (self.control.poll() and self.control.recv())
        return self._is_ready


class FrontEnds:
    """Supervises the processes of a server with `size` front ends; OSError or ValueError for a port not to be had."""

    def __init__(self, config: Config, settings: ServeSettings, size: int) -> None:
        if not hasattr(socket, "SO_REUSEPORT"):
            raise ValueError(f"front_ends={size} needs Linux or macOS")
        self._config, self._settings, self._size = config, settings, size
        # Reserves the port without listening.
        self._place = _bound(settings.host, settings.port)
        self._folder = resolve_model(
            config.model, config.revision, config.load_format != "dummy", config.trust_remote_code
        )
        self._engines = EngineProcesses(config)
        # A file without a name, inherited by front ends.
        self._memory = tempfile.TemporaryFile()  # noqa: SIM115
        self._memory.truncate(ServerCounts.size(size))
        self._metrics_folder = ""
        self._num_started = 0
        self._front_ends: list[FrontEndProcess] = []
        self._ended_engines: set[int] = set()
        self._signal: int | None = None

    def load(self) -> Callable[[], int]:
        """Load the model while the front ends start, and return `run`; see `EngineProcesses.load`."""
        with self._engines.stopped_on_error(), ExitStack() as stack:
            stack.callback(self._stop_front_ends, 0.0)
            self._metrics_folder = tempfile.mkdtemp(prefix="nanovllm-metrics-")
            for index in range(self._size):
                self._front_ends.append(self._start(index))
            self._engines.load(self._folder)
            stack.pop_all()
        for front_end in self._front_ends:
            self._connect(front_end)
        return self.run

    def run(self) -> int:
        """Serve until SIGINT or SIGTERM, which is re-raised, or a failure; return the exit code."""
        before = {number: signal.signal(number, self._note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = self._watch()
        finally:
            self._stop_front_ends(self._settings.grace_seconds + _EXTRA_SECONDS)
            self._engines.exit()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._signal is not None:
            signal.raise_signal(self._signal)
        return code

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        if self._signal is not None:
            # A second one ends their requests.
            for front_end in self._front_ends:
                front_end.terminate()
        self._signal = number

    def _start(self, index: int) -> FrontEndProcess:
        """Start a front end with its own socket, which then waits for `_connect`."""
        control, other = Pipe()
        listener = _bound(*self._place.getsockname()[:2])
        shared = SharedServer(
            self._folder, listener.fileno(), self._memory.fileno(), index, self._num_started, self._metrics_folder
        )
        self._num_started += 1
        with other, listener:
            arguments, title = (other.fileno(), os.getpid()), f"nanovllm front end {index}"
            descriptors = [other.fileno(), shared.listener, shared.counts]
            process = start_python("nanovllm.serve.main", "run_front_end", arguments, title, descriptors)
        control.send((self._config, self._settings, shared))
        return FrontEndProcess(process, control)

    def _connect(self, front_end: FrontEndProcess) -> None:
        """Connect a front end, which may have exited meanwhile, to each live engine."""
        engines = [engine for engine in self._engines.all if engine.exit_code is None]
        with suppress(OSError):
            front_end.control.send(len(engines))
            for engine in engines:
                with engine.connect() as connection:
                    send_handle(front_end.control, connection.fileno(), front_end.pid)

    def _stop_front_ends(self, seconds: float) -> None:
        """Terminate the front ends, and kill them after `seconds`."""
        for front_end in self._front_ends:
            front_end.terminate()
        deadline = time.monotonic() + seconds
        for front_end in self._front_ends:
            front_end.stop(deadline - time.monotonic())
        shutil.rmtree(self._metrics_folder, ignore_errors=True)

    def _announce(self) -> None:
        name, port = self._place.getsockname()[:2]
        scheme = "https" if self._settings.ssl_certfile else "http"
        model = (self._settings.served_model_name or [os.path.basename(self._config.model)])[0]
        place = f"{scheme}://{name}:{port}"
        print(f"nanovllm serve: {model} at {place}", flush=True)
        _logger.info("serving %s at %s by %d front ends", model, place, self._size)

    def _watch(self) -> int:
        """Restart front ends and log how engines exited, until a signal; return the exit code."""
        deadline, is_announced = time.monotonic() + _START_SECONDS, False
        while self._signal is None:
            for engine in self._engines.all:
                if engine.exit_code is not None and engine.index not in self._ended_engines:
                    self._ended_engines.add(engine.index)
                    _logger.error("%s", engine.exit_text())
            is_lost = len(self._ended_engines) == len(self._engines.all)
            if is_lost and self._settings.exit_when_engine_fails:
                _logger.error("ending, since the engine is lost")
                return 1
            for index, front_end in enumerate(self._front_ends):
                if (code := front_end.exit_code) is not None and not self._restart(index, code, is_lost):
                    return 1
            if not is_announced and all(front_end.is_ready for front_end in self._front_ends):
                is_announced = True
                self._announce()
            elif not is_announced and time.monotonic() > deadline:
                print(_NO_START, file=sys.stderr)
                return 1
            time.sleep(_POLL_SECONDS)
        return 0

    def _restart(self, index: int, code: int, is_lost: bool) -> bool:
        """Restart a front end, and return whether the server can continue."""
        ended = self._front_ends[index]
        _logger.error("front end %d %s", index, describe_exit(code))
        if not ended.is_ready:
            print(_NO_START, file=sys.stderr)
        if is_lost or not ended.is_ready:
            return False
        ended.control.close()
        size = ServerCounts.size(1)
        os.pwrite(self._memory.fileno(), bytes(size), index * size)
        self._front_ends[index] = self._start(index)
        self._connect(self._front_ends[index])
        return True


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port that this server's other sockets share; OSError if the port is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def run_front_end(descriptor: int, parent: int) -> None:
    """Run a front end's process, given the socket to the supervisor, and the supervisor's process id."""
    faulthandler.enable()
    control = Connection(descriptor)
    try:
        config, settings, shared = control.recv()
    except EOFError:
        return
    end_with_parent(parent, partial(shutil.rmtree, shared.metrics_folder, ignore_errors=True))
    # The engines print these messages.
    warnings.filterwarnings("ignore", "max_model_len=.* is capped")
    # Prometheus' client reads it at import.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared.metrics_folder
    logging.config.dictConfig(log_config(settings.access_log, settings.log_requests))
    sys.exit(_answer(config, settings, shared, control))


def _answer(config: Config, settings: ServeSettings, shared: SharedServer, control: Connection) -> int:
    """Start while the engines load, then serve; return the exit code."""
    # These import torch and Prometheus' client.
    from nanovllm.client.loading import LoadedModel, read_model_files  # noqa: PLC0415
    from nanovllm.client.model_client import ModelClient  # noqa: PLC0415
    from nanovllm.client.replicated_engine import ReplicatedEngine  # noqa: PLC0415
    from nanovllm.serve.app import run_server  # noqa: PLC0415
    from nanovllm.serve.limits import raise_descriptor_limit  # noqa: PLC0415

    # The engines report problems with the model.
    reading = ThreadPoolExecutor(1).submit(read_model_files, replace(config, model=shared.model_folder))
    try:
        connections = [Connection(recv_handle(control)) for _ in range(control.recv())]
    except EOFError:
        # The engines failed to start, which the supervisor reports.
        return 1
    exit_texts = [lambda: _EXITED] * len(connections)
    engine = ReplicatedEngine(config, connections, exit_texts, lambda: None, number=shared.number)
    llm = ModelClient(config, LoadedModel(engine, reading.result(), engine.device))
    max_connections = raise_descriptor_limit(settings.max_connections)
    return run_server(llm, settings, max_connections, shared, partial(control.send, True))
