"""Batch inference with Ray Data: engines in a pool of actors, using only Ray's public API.

A row that is retried in any actor gives the same tokens in float32: its seed is a hash of the config's seed and the
row. Importing this module does not import torch, which a driver may lack.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams, make_params
from nanovllm.utils.checks import check_int
from nanovllm.utils.display import install_hint

try:
    import ray.data
except ImportError as error:
    raise ImportError(f"nanovllm.integrations.ray needs Ray Data: {install_hint('ray')}") from error

Row = dict[str, Any]
Map = Callable[[Row], Row]


@dataclass
class ProcessorConfig:
    """Settings of a batch job; invalid values raise a ValueError.

    Attributes:
        model_source: a folder on every node, a URL that fsspec opens (`s3://`), or a Hub id.
        engine_kwargs: settings of `LLM`.
        sampling_params: defaults for rows without their own.
        batch_size: rows of a task, which are returned together, and retried together if their actor dies; None: a
            quarter of `max_num_seqs`. Ray schedules about ten tasks a second, so small ones leave a fast GPU idle.
        concurrency: number of actors, or a pair of minimum and maximum.
        max_concurrent_batches: batches of an actor at a time; None: 1.25 * `max_num_seqs` rows. With more, the first
            ready actor would take work from the others. Rows beyond `max_num_seqs` wait in the actor.
        should_continue_on_error: whether a failed row gets an `__inference_error__`, instead of failing the job.
        num_gpus: GPUs of an actor; None: one for each rank of each replica, none with `device="cpu"`.
        num_cpus: CPUs of an actor.
        seed: base of the rows' seeds.
        sort_by_prefix: run rows with equal prefixes one after the other; the whole dataset is read first.
    """

    model_source: str
    engine_kwargs: Row = field(default_factory=dict)
    sampling_params: Row = field(default_factory=dict)
    batch_size: int | None = None
    concurrency: int | tuple[int, int] = 1
    max_concurrent_batches: int | None = None
    should_continue_on_error: bool = False
    num_gpus: float | None = None
    num_cpus: float = 1
    seed: int = 0
    sort_by_prefix: bool = False

    def __post_init__(self) -> None:
        # Raise errors here instead of in an actor.
        _params(self.sampling_params)
        engine = Config(self.model_source, **self.engine_kwargs)
        max_num_seqs = engine.data_parallel_size * engine.max_num_seqs
        most = int(1.25 * max_num_seqs)
        size, in_flight = self.batch_size, self.max_concurrent_batches
        self.batch_size = size = check_int("batch_size", max(1, max_num_seqs // 4) if size is None else size, 1)
        in_flight = max(1, most // size) if in_flight is None else in_flight
        self.max_concurrent_batches = check_int("max_concurrent_batches", in_flight, 1)
        if (rows := self.max_rows) > most:
            raise ValueError(f"batch_size * max_concurrent_batches must be 1 to {most}, 1.25 max_num_seqs, not {rows}")
        if self.num_gpus is None:
            self.num_gpus = 0 if engine.device == "cpu" else engine.data_parallel_size * engine.tensor_parallel_size
        least, most = self.num_actors
        if not 1 <= least <= most:
            raise ValueError(f"concurrency={self.concurrency!r} must be a number of actors, or the least and the most")

    @property
    def num_actors(self) -> tuple[int, int]:
        """Minimum and maximum number of actors."""
        given = self.concurrency
        pair = given if isinstance(given, tuple) and len(given) == 2 else (given, given)
        return check_int("concurrency", pair[0]), check_int("concurrency", pair[1])

    @property
    def max_rows(self) -> int:
        """Maximum rows that Ray assigns to an actor at a time."""
        return (self.batch_size or 0) * (self.max_concurrent_batches or 0)


def row_seed(seed: int, row: Row) -> int:
    """Return a row's sampling seed: 63 bits of a hash of the job's seed and the row after `preprocess`."""
    text = json.dumps([seed, row], sort_keys=True, default=lambda x: x.tolist() if hasattr(x, "tolist") else repr(x))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class EngineActor:
    """An engine in an actor; concurrent batches share its steps."""

    def __init__(self, config: ProcessorConfig) -> None:
        from nanovllm.client.async_llm import AsyncLLM  # noqa: PLC0415 (imports torch)

        self._config = config
        # Ray may put rows of several blocks into a task, and thus exceed `max_rows`: they wait in the engine.
        self._llm = AsyncLLM(config.model_source, max_pending_requests=sys.maxsize, **config.engine_kwargs)
        self._running = set[Any]()

    async def __call__(self, batch: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Answer a batch."""
        # The event loop holds only weak references to tasks: without this one they could be garbage-collected.
        answers = asyncio.gather(*map(self._answer, map(pickle.loads, batch["row"])))
        self._running.add(answers)
        answers.add_done_callback(self._running.discard)
        yield {"row": list(map(pickle.dumps, await answers))}

    async def _answer(self, row: Row) -> Row:
        try:
            return {**row, **await self._generate(row), "__inference_error__": ""}
        except (ValueError, RuntimeError) as error:
            if self._llm.errored:
                # Ray restarts an actor whose process dies, but would keep sending batches to one that raises.
                os._exit(1)
            if not self._config.should_continue_on_error:
                raise
            empty = {"generated_text": "", "generated_tokens": [], "num_input_tokens": 0, "num_generated_tokens": 0}
            return {**row, **empty, "__inference_error__": str(error)}

    async def _generate(self, row: Row) -> Row:
        given = row.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise ValueError(f"sampling_params is a dict, not {given!r:.80}")
        own = {name: value for name, value in given.items() if value is not None}
        params = _params({"seed": row_seed(self._config.seed, row), **self._config.sampling_params, **own})
        if (row.get("prompt") is None) == (row.get("messages") is None):
            raise ValueError("a row has either a prompt or messages")
        is_chat, llm = row.get("prompt") is None, self._llm
        output = await (llm.chat(row["messages"], params) if is_chat else llm.generate(row["prompt"], params))
        tokens = list(output.outputs[0].token_ids)
        counts = {"num_input_tokens": len(output.prompt_token_ids), "num_generated_tokens": len(tokens)}
        return {"generated_text": output.outputs[0].text, "generated_tokens": tokens, **counts}


def build_processor(
    config: ProcessorConfig, preprocess: Map | None = None, postprocess: Map | None = None
) -> Callable[[ray.data.Dataset], ray.data.Dataset]:
    """Return a function that processes a dataset; ValueError if the cluster lacks GPUs, or a CPU for reading.

    Args:
        config: the job's settings.
        preprocess: returns columns to add to a row: `prompt` or `messages`, and optionally `sampling_params`.
        postprocess: makes the result of an answered row; None: the row with `generated_text`, `generated_tokens`,
            `num_input_tokens`, `num_generated_tokens`, `__inference_error__`.
    """
    least, most = config.num_actors

    def pack(row: Row) -> Row:
        row = {**row, **(preprocess(row) if preprocess else {})}
        # As bytes: an Arrow table has one schema, which would give each row the columns of all rows.
        packed = {"row": pickle.dumps(row)}
        return {**packed, "prefix": str(row.get("prompt") or row.get("messages"))} if config.sort_by_prefix else packed

    def unpack(packed: Row) -> Row:
        row: Row = pickle.loads(packed["row"])
        return row if postprocess is None or row["__inference_error__"] else postprocess(row)

    def process(dataset: ray.data.Dataset) -> ray.data.Dataset:
        _check_cluster(config, least)
        packed, in_flight = dataset.map(pack), config.max_concurrent_batches
        packed = packed.sort("prefix") if config.sort_by_prefix else packed
        # A task is one block. A file read as one block would be one task, with only four batches at a time.
        packed = packed.repartition(target_num_rows_per_block=config.batch_size)
        pool = ray.data.ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=in_flight)
        with warnings.catch_warnings():
            # In Ray 2.60 there is no other way to set `max_concurrency` of actors.
            warnings.filterwarnings("ignore", message="`ray_remote_args`")
            answered = packed.map_batches(
                EngineActor, fn_constructor_args=(config,), batch_size=config.batch_size, compute=pool,
                max_concurrency=in_flight, num_gpus=config.num_gpus, num_cpus=config.num_cpus,
            )  # fmt: skip
        return answered.map(unpack)

    return process


def _params(values: Row) -> SamplingParams:
    try:
        params = make_params(values)
    except TypeError as error:
        raise ValueError(f"sampling_params: {error}") from error
    if params.n != 1:
        raise ValueError(f"a row has one answer: n must be 1, not {params.n}")
    return params


def _check_cluster(config: ProcessorConfig, num_actors: int) -> None:
    """Raise an error where Ray would wait silently."""
    if not ray.is_initialized():
        ray.init()
    total = ray.cluster_resources()
    gpus, cpus = num_actors * (config.num_gpus or 0), num_actors * config.num_cpus
    if gpus > total.get("GPU", 0):
        raise ValueError(f"{num_actors} actors need {gpus} GPUs, and the cluster has {total.get('GPU', 0)}")
    if cpus >= total.get("CPU", 0):
        raise ValueError(
            f"{num_actors} actors of {config.num_cpus} CPUs leave none of {total.get('CPU', 0)} to read with"
        )
