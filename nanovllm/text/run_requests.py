"""Drive an engine until requests are done, all at once or as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from tqdm.auto import tqdm

from nanovllm.engine.protocol import Engine
from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput, StepError, failed_output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.engine_client import EngineClient
from nanovllm.utils.interrupt import deferred_signals

Schedule = Literal["prefix", "arrival"]
"""The order in which the requests of a job that have the same priority are admitted: so that prompts which begin alike
are neighbours, and find each other's blocks before these are evicted; or as they are given."""


def check_schedule(schedule: Any) -> None:
    """Raise a `ValueError` unless it is a `Schedule`."""
    if schedule not in ("prefix", "arrival"):
        raise ValueError(f"schedule must be 'prefix' or 'arrival', not {schedule!r:.80}")


def prompt_list(prompts: Any) -> list[Any]:
    """Return prompts as a list; a single text or dict is a list of one."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if getattr(prompts, "ndim", None) == 2 and hasattr(prompts, "tolist"):
        rows: list[Any] = prompts.tolist()
        return rows
    if not isinstance(prompts, (list, tuple)):
        raise ValueError(f"prompts must be a string or a list, not {type(prompts).__name__}")
    return list(prompts)


def one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return sampling parameters for `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, (list, tuple)):
        raise ValueError(f"sampling_params must be SamplingParams, or a list of them, not {params!r}")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one each")
    return list(params)


def check_priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    """Return a priority for each of `count` prompts, not checked yet."""
    if priority is None:
        return [0] * count
    if not isinstance(priority, (list, tuple)) or len(priority) != count:
        raise ValueError(f"priority must be a list of {count} integers, one for each prompt, not {priority!r:.80}")
    return list(priority)


def run_requests(
    client: EngineClient,
    requests: list[Request],
    use_tqdm: bool,
    on_output: Callable[[RequestOutput], None] | None = None,
    *,
    schedule: Schedule = "prefix",
    returns_errors: bool = False,
) -> list[RequestOutput]:
    """Queue requests, step until they are done, and return their outputs in order; on any exception drop them.

    schedule: how they are admitted.
    returns_errors: requests that fail while the engine goes on have an output with their error.
    """
    ids: list[int] = []
    order = list(range(len(requests)))
    if schedule == "prefix":
        order.sort(key=lambda index: _prefix_key(requests[index]))
    ordered = [requests[index] for index in order]
    try:
        _enqueue(client, ordered, ids)
        by_id = dict(zip(ids, ordered, strict=True))
        outputs = _step_until_done(client, by_id, use_tqdm, on_output, returns_errors)
    except BaseException:
        client.drop(set(ids))
        raise
    return [outputs[request_id] for _, request_id in sorted(zip(order, ids, strict=True))]


def _prefix_key(request: Request) -> tuple[str, bytes]:
    """Return by what prompts that share blocks of the prefix cache are neighbours when sorted."""
    return request.cache_salt or "", request.token_ids.tobytes()


def run_good_requests(
    client: EngineClient,
    each: list[Request | ValueError],
    prompts: list[Any],
    use_tqdm: bool,
    on_output: Callable[[RequestOutput], None] | None,
    schedule: Schedule,
) -> list[RequestOutput]:
    """Run the requests that can be served, and return all outputs in order; the others' have their errors.

    each: a request, or why it cannot be served, for each of `prompts`.
    """
    good = [item for item in each if isinstance(item, Request)]
    outputs = iter(run_requests(client, good, use_tqdm, on_output, schedule=schedule, returns_errors=True))
    return [
        next(outputs)
        if isinstance(item, Request)
        else failed_output(-1, item, prompt if isinstance(prompt, str) else None)
        for item, prompt in zip(each, prompts, strict=True)
    ]


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
        for request in requests:
            ids.append(client.enqueue(request).request_id)


def _step_until_done(
    client: EngineClient,
    requests: dict[int, Request],
    use_tqdm: bool,
    on_output: Callable[[RequestOutput], None] | None,
    returns_errors: bool,
) -> dict[int, RequestOutput]:
    """Return the outputs of requests by id; other requests' results stay for their callers."""
    outputs = dict[int, RequestOutput]()
    with Progress(client.engine, len(requests), "request", disable=not use_tqdm) as progress:
        while len(outputs) < len(requests):
            client.run_step()
            try:
                done = client.claim(requests.keys())
            except StepError as error:
                failed = {i: requests[i] for i in error.request_ids if i in requests}
                if not returns_errors or not failed:
                    raise
                client.drop(set(failed))
                done = {i: failed_output(i, error, r.prompt, r.prompt_token_ids) for i, r in failed.items()}
            outputs.update(done)
            if done:
                progress.update(len(done))
            if on_output is not None:
                for output in done.values():
                    on_output(output)
    return outputs


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
        if not self._bar.disable:
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
