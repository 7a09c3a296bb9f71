"""Drive an engine until requests are done, all at once or as they come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.protocol import Engine
from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.engine_client import EngineClient
from nanovllm.utils.checks import check_int
from nanovllm.utils.interrupt import deferred_signals


def as_prompts(prompts: Any) -> Any:
    """Return prompts as a list, a single text or dict as a list of one; other iterables as they are."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    num_dimensions = getattr(prompts, "ndim", None)
    if num_dimensions == 2 and hasattr(prompts, "tolist"):
        return prompts.tolist()
    if isinstance(prompts, (list, tuple)):
        return list(prompts)
    if num_dimensions is not None or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a string or a list, or give prompts, not {type(prompts).__name__}")
    return prompts


def expand_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return sampling parameters for `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise ValueError(f"sampling_params must be SamplingParams, or a list of them, not {params!r}")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one each")
    return list(params)


def check_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    """Return a priority for each of `count` prompts."""
    if priority is None:
        return [0] * count
    if not isinstance(priority, (list, tuple)) or len(priority) != count:
        raise ValueError(f"priority must be a list of {count} integers, one for each prompt, not {priority!r:.80}")
    return [check_int("priority", value) for value in priority]


def run_requests(client: EngineClient, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
    """Queue requests, step until they are done, and return their outputs in order; on any exception drop them."""
    ids: list[int] = []
    outputs = dict[int, RequestOutput]()
    try:
        _enqueue(client, requests, ids)
        wanted = set(ids)
        with Progress(client.engine, len(requests), "request", disable=not use_tqdm) as progress:
            while len(outputs) < len(requests):
                client.run_step()
                done = client.claim(wanted)
                outputs.update(done)
                progress.update(len(done))
    except BaseException:
        client.drop(set(ids))
        raise
    return [outputs[request_id] for request_id in ids]


def stream_requests(client: EngineClient, requests: list[Request]) -> Iterator[RequestOutput]:
    """Queue streamed requests and yield what is new after each step; aborts what is left when it is closed."""
    ids: list[int] = []
    try:
        _enqueue(client, requests, ids)
        unfinished = set(ids)
        while unfinished:
            client.run_step()
            for request_id, output in client.claim_new(unfinished).items():
                if output.finished:
                    unfinished.discard(request_id)
                yield output
    finally:
        client.drop(set(ids))


def _enqueue(client: EngineClient, requests: list[Request], ids: list[int]) -> None:
    # Deferred, so that the id of every queued request is known.
    with deferred_signals():
        ids += [state.request_id for state in client.enqueue_all(requests)]


class Progress:
    """A progress bar over requests, with rates and the engine's state.

    Args:
        engine: computes the requests.
        total: number of requests; None if it is not known.
        unit: what a request is called.
        disable: show nothing; None shows the bar on a terminal alone.
    """

    def __init__(self, engine: Engine, total: int | None, unit: str, *, disable: bool | None) -> None:
        self._engine = engine
        self._bar: Any = tqdm(total=total, desc="Generating", unit=unit, dynamic_ncols=True, disable=disable)
        self._started, self._before = time.perf_counter(), engine.stats()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def update(self, num_done: int) -> None:
        """Show that so many more requests are done."""
        if num_done and not self._bar.disable:
            stats, seconds = self._engine.stats(), time.perf_counter() - self._started
            names = "num_prompt_tokens", "num_output_tokens"
            rates = [(stats[name] - self._before[name]) / seconds for name in names]
            cache = stats["num_used_blocks"] / max(1, stats["num_used_blocks"] + stats["num_free_blocks"])
            self._bar.set_postfix_str(
                f"{rates[0]:.0f} tok/s in, {rates[1]:.0f} out, {stats['num_running']} running, "
                f"{stats['num_waiting']} waiting, cache {cache:.0%}",
                refresh=False,
            )
        self._bar.update(num_done)
