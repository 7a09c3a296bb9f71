"""Start engines in processes of their own, and connect to them."""

from __future__ import annotations

from nanovllm.config import Config
from nanovllm.engine.request_seeds import RequestSeeds
from nanovllm.replicas.engine_process import EngineProcesses
from nanovllm.replicas.model_files import ModelFiles, read_model_files
from nanovllm.replicas.replicated_engine import ReplicatedEngine


def start_replicas(config: Config) -> tuple[ReplicatedEngine, ModelFiles]:
    """Start `config.data_parallel_size` engines, which end with the one that is returned.

    Raises:
        ValueError: too few GPUs, or what an engine in this process would raise.
        RuntimeError: an engine has failed.
    """
    processes = EngineProcesses(config)
    with processes.stopped_on_error():
        # While they import.
        files = read_model_files(config)
        processes.load(files.folder)
        connections = [process.connect() for process in processes.all]
        exit_texts = [process.exit_text for process in processes.all]
        engine = ReplicatedEngine(config, connections, exit_texts, processes.exit, RequestSeeds(config.seed))
    return engine, files
