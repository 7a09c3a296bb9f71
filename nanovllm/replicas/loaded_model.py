"""A model that is ready, in this process or in others, as its front end knows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.config import Config
from nanovllm.engine.protocol import Engine
from nanovllm.engine.request import RequestSeeds
from nanovllm.replicas.engine_process import EngineProcesses
from nanovllm.replicas.local_engine import LocalEngine, make_local_engine
from nanovllm.replicas.model_files import ModelFiles, read_model_files
from nanovllm.replicas.replicated_engine import ReplicatedEngine
from nanovllm.utils.device import device_name


@dataclass(frozen=True)
class LoadedModel:
    """An engine with what a front end knows of its model.

    Attributes:
        engine: it, or replicas of it.
        seeds: numbers their requests.
        files: of the model.
        device: where the model runs; of several ranks and replicas, the first one's.
        dtype: of weights and KV cache.
        device_name: what people call the device, or devices, such as "2 x NVIDIA H200".
        local: the engine with its runner, if it is in this process.
    """

    engine: Engine
    seeds: RequestSeeds
    files: ModelFiles
    device: torch.device
    dtype: torch.dtype
    device_name: str
    local: LocalEngine | None = None

    def require_local(self) -> LocalEngine:
        """Return the engine, if it is in this process.

        Raises:
            ValueError: it is in others.
        """
        if self.local is None:
            raise ValueError("this needs an engine in this process (data_parallel_size=1), and it is in others")
        return self.local


def load_model(config: Config) -> LoadedModel:
    """Load a model, with one engine into this process; replicas end with the engine that stands for them.

    Raises:
        ValueError: too few GPUs, or see `LLM`.
        RuntimeError: a rank or a replica has failed.
    """
    if config.data_parallel_size == 1:
        local = make_local_engine(config)
        name = device_name(config.device, config.tensor_parallel_size)
        return LoadedModel(local.engine, local.engine.seeds, local.files, local.device, local.dtype, name, local)
    processes = EngineProcesses(config)
    with processes.stopped_on_error():
        # While they import.
        files = read_model_files(config)
        processes.load(files.folder)
        connections = [process.connect() for process in processes.all]
        exit_texts = [process.exit_text for process in processes.all]
        engine = ReplicatedEngine(config, connections, exit_texts, processes.exit)
    return over_replicas(engine, files, RequestSeeds(config.seed))


def over_replicas(engine: ReplicatedEngine, files: ModelFiles, seeds: RequestSeeds) -> LoadedModel:
    """Return the model of engines in other processes; `seeds` numbers the requests of this front end."""
    info, count = engine.info, engine.num_replicas
    name = info.device_name if count == 1 else f"{count} x {info.device_name}"
    return LoadedModel(engine, seeds, files, torch.device(info.device), getattr(torch, info.dtype), name)
