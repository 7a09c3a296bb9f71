"""An `LLM` over the mock model: of an engine in this process, or of engines in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm import LLM
from nanovllm.client.engine_server import EngineServer
from nanovllm.client.loading import LoadedModel, ModelFiles
from nanovllm.client.model_client import ModelClient
from nanovllm.client.replicated_engine import ReplicatedEngine
from nanovllm.config import Config
from nanovllm.engine.engine import Engine
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import no_constraint
from nanovllm.runner.messages import ScheduledBatch
from nanovllm.utils.device import DeviceInfo
from nanovllm.utils.processes import describe_exit
from nanovllm.weights.report import LoadedWeights, LoadFailedError, MissingWeights
from tests.forked_python import CONTEXT
from tests.mock_runner import MockHandle, MockRunner, make_engine

HALVES = ("model.norm", "lm_head")
"""The mock model's weights, each a number, which every token follows from once one of them is not 0."""


class NumberTokenizer:
    """Tokens are numbers."""

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(f"{token_id}," for token_id in token_ids)


class MockWeights:
    """The weights of a mock runner."""

    def __init__(self, runner: MockRunner) -> None:
        self.values: dict[str, int | None] = dict.fromkeys(HALVES, 0)
        self._runner = runner

    @property
    def missing(self) -> MissingWeights:
        names = [name for name, value in self.values.items() if value is None]
        return MissingWeights(len(names), names[0]) if names else MissingWeights()

    def load(self, weights: Any, strict: bool) -> LoadedWeights:
        given: Iterable[tuple[str, torch.Tensor]] = weights.items() if isinstance(weights, Mapping) else weights
        count = 0
        for name, tensor in given:
            if name not in HALVES:
                raise ValueError(f"the model has no tensor {name!r}")
            self.values[name] = value = int(tensor) if tensor >= 0 else None
            if value is None:
                raise LoadFailedError("no memory", self.missing)
            count += 1
        self._apply()
        return LoadedWeights(count, self.missing)

    def unload_adapter(self) -> int:
        return 0

    def sleep(self, keep_weights: bool) -> MissingWeights:
        if not keep_weights:
            self.values = dict.fromkeys(HALVES)
        self._runner.cache = []
        return self.missing

    def wake_up(self, tags: list[str]) -> None:
        if "kv_cache" in tags:
            self._runner.clear_cache()

    def _apply(self) -> None:
        values = [value or 0 for value in self.values.values()]
        self._runner.weights = values if any(values) else []


def make_mock_engine(step_seconds: float = 0.0, **sizes: Any) -> tuple[LLMEngine, MockRunner]:
    """An engine whose weights change, and whose next step fails if `order_fault` says so."""
    engine, runner = make_engine(**sizes)
    engine._weights_control = MockWeights(runner)
    faults: list[str] = []
    forward, schedule = runner.forward, engine.scheduler.schedule

    def order_fault(fault: str) -> None:
        faults[:] = [fault] if fault in ("plan", "launch", "loss", "exit") else []
        runner.fail_result, runner.interrupt = fault == "result", fault == "interrupt"

    def lose() -> None:
        raise RuntimeError("device lost")

    def schedule_or_fail() -> ScheduledBatch | None:
        if faults == ["plan"]:
            faults.clear()
            raise MemoryError("plan failed")
        return schedule()

    def forward_or_fail(batch: ScheduledBatch) -> MockHandle:
        time.sleep(step_seconds)
        if not faults:
            return forward(batch)
        fault = faults.pop()
        if fault == "loss":
            runner.synchronize = lose  # type: ignore[method-assign]
        raise SystemExit("exit") if fault == "exit" else RuntimeError("launch failed")

    engine.order_fault = order_fault  # type: ignore[attr-defined]
    runner.forward = forward_or_fail  # type: ignore[method-assign]
    engine.scheduler.schedule = schedule_or_fail  # type: ignore[method-assign]
    return engine, runner


def order_fault(engine: Any, fault: str) -> None:
    """Let the next step of an engine from `make_mock_engine` fail.

    A step's "plan", "launch" or "result" fails, its launch with the device ("loss"), or with a SystemExit ("exit"); or
    Ctrl-C comes with its launch ("interrupt").
    """
    engine.order_fault(fault)


def mock_llm(engine: Engine, tokenizer: Any = None) -> LLM:
    """An `LLM` of an engine over the mock model."""
    eos = frozenset[int]()
    shape: Any = SimpleNamespace(has_head=True)
    files = ModelFiles("mock", shape, tokenizer or NumberTokenizer(), engine.limits.max_model_len, eos, no_constraint)  # type: ignore[arg-type]
    device = DeviceInfo(torch.device("cpu"), torch.float32, "mock")
    config = Config("mock", device="cpu", kvcache_block_size=16, max_num_seqs=4)
    llm = LLM.__new__(LLM)
    ModelClient.__init__(llm, config, LoadedModel(engine, files, device))
    return llm


def _serve(connection: Connection, sizes: dict[str, Any]) -> None:
    """The process of an engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine, _ = make_mock_engine(**sizes)
    device = DeviceInfo(torch.device("cpu"), torch.float32, "mock")
    server = EngineServer(engine, device, no_constraint)
    server.connect(connection)
    if server.run() is not None:
        os._exit(1)


class MockReplicas:
    """Engines over the mock model in processes of their own, behind one `Engine`."""

    def __init__(self, count: int, **sizes: Any) -> None:
        self.processes, connections = [], []
        for _ in range(count):
            own, other = Pipe()
            with other:
                process = CONTEXT.Process(target=_serve, args=(other, sizes), daemon=True)
                process.start()
            self.processes.append(process)
            connections.append(own)
        texts = [self._exit_text(index) for index in range(count)]
        num_running = sizes.get("max_num_seqs", 4)
        config = Config("mock", device="cpu", kvcache_block_size=16, max_num_seqs=num_running, seed=0)
        self.engine = ReplicatedEngine(config, connections, texts, self.stop)

    def _exit_text(self, index: int) -> Any:
        def text() -> str:
            process = self.processes[index]
            process.join(10)
            return f"replica {index} {describe_exit(process.exitcode or 0)}"

        return text

    def kill(self, index: int) -> None:
        """Kill a process, and wait for its end."""
        self.processes[index].kill()
        self.processes[index].join(10)

    def stop(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
