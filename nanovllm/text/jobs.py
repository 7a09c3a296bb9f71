"""Jobs: many prompts in one call, which are read, checked and encoded ahead of the engine.

A thread prepares a thousand prompts at a time. The engine gets as many of them as keep its batch full, so that what a
job holds does not grow with its length, but for its outputs.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput, StepError, failed_output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.engine_client import EngineClient
from nanovllm.text.input_processor import InputProcessor, of_prompt, parse_prompt
from nanovllm.text.read_ahead import ReadAhead
from nanovllm.text.run_requests import Progress, as_prompts, check_priorities, expand_params
from nanovllm.utils.checks import check_bool
from nanovllm.utils.interrupt import deferred_signals

CHUNK_SIZE = 1000
"""Prompts that are prepared in one call: tokenizers then use every core, and their lists become arrays soon."""

Schedule = Literal["prefix", "arrival"]
"""The order in which prompts of equal priority run: those that begin alike one after the other, so that they find each
other's blocks before these are evicted; or as they are given."""


class PreparedPrompt(NamedTuple):
    """A prompt of a job: its place, and its request, or why it cannot be served."""

    place: int
    prompt: Any
    request: Request | ValueError


FinishedPrompt = tuple[PreparedPrompt, RequestOutput]


class Job:
    """The prompts of a call, and what is asked for them.

    Args:
        processor: checks and encodes them.
        prompts: see `LLM.generate`; with `template`, conversations.
        params: one for all, or one each.
        priority: of each.
        schedule: the order in which they run.
        template: makes the text of a conversation.
        pooling: asks for hidden states.

    Attributes:
        num_prompts: how many there are; None if it is not known.

    Raises:
        ValueError: what is given are no prompts, or there are not as many parameters or priorities as prompts.
    """

    def __init__(
        self,
        processor: InputProcessor,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None = None,
        *,
        schedule: Schedule = "prefix",
        template: Callable[[Any], str] | None = None,
        pooling: str | None = None,
    ) -> None:
        if schedule not in ("prefix", "arrival"):
            raise ValueError(f"schedule must be 'prefix' or 'arrival', not {schedule!r:.80}")
        self._processor = processor
        self._schedule = schedule
        self._template, self._pooling = template, pooling
        self._prompts: list[Any] | Iterable[Any] = as_prompts(prompts)
        self.num_prompts = len(self._prompts) if isinstance(self._prompts, list) else None
        if self.num_prompts is None and (isinstance(params, (list, tuple)) or priority is not None):
            raise ValueError("sampling_params and priorities for each prompt need prompts in a list")
        # Of what gives prompts one by one, those of each.
        num_given = 1 if self.num_prompts is None else self.num_prompts
        self._params, self._priorities = expand_params(params, num_given), check_priorities(priority, num_given)
        # Where all of them are prepared in one call, or none is known before.
        self._sorts_requests = schedule == "prefix" and (self.num_prompts or 0) <= CHUNK_SIZE
        self._checker = processor.params_checker()
        # Noise follows from the place: a request's first output has the number `first + index * num_outputs`.
        self._num_outputs = max((p.n for p in self._params if isinstance(p, SamplingParams)), default=1)
        self._first_number = processor.seeds.reserve(self._num_outputs * (self.num_prompts or 0))

    def read(self) -> ReadAhead[tuple[int, Any], list[PreparedPrompt]]:
        """Return the prompts in the order in which they run, of an iterator in that of each chunk."""
        prompts = self._prompts
        if not isinstance(prompts, list):
            return ReadAhead(enumerate(prompts), self._prepare, CHUNK_SIZE)
        items = ((index, prompts[index]) for index in self._order(prompts))
        return ReadAhead(list(items) if len(prompts) <= CHUNK_SIZE else items, self._prepare, CHUNK_SIZE)

    def _order(self, prompts: list[Any]) -> Sequence[int]:
        """Return the places of prompts in the order in which they run."""
        order: Sequence[int] = range(len(prompts))
        if self._schedule == "prefix" and not self._sorts_requests:
            if self._template is not None:
                # Their texts begin alike if they do.
                order = sorted(order, key=list(map(repr, prompts)).__getitem__)
            elif set(map(type, prompts)) == {str}:
                order = sorted(order, key=prompts.__getitem__)
            else:
                order = sorted(order, key=list(map(_prefix_key, prompts)).__getitem__)
        return sorted(order, key=self._priorities.__getitem__) if any(self._priorities) else order

    def _prepare(self, items: list[tuple[int, Any]]) -> list[PreparedPrompt]:
        count, num_outputs, seeds = len(items), self._num_outputs, self._processor.seeds
        if self.num_prompts is None:
            first = seeds.reserve(num_outputs * count) - items[0][0] * num_outputs
            params, priorities = self._params * count, self._priorities * count
        else:
            first = self._first_number
            params, priorities = [self._params[i] for i, _ in items], [self._priorities[i] for i, _ in items]
        requests = self._processor.process_each(
            [prompt for _, prompt in items],
            params,
            priorities,
            pooling=self._pooling,
            template=self._template,
            seeds=[seeds.of(first + index * num_outputs) for index, _ in items],
            checker=self._checker,
        )
        prepared = [PreparedPrompt(*item, request) for item, request in zip(items, requests, strict=True)]
        if self._sorts_requests:
            prepared.sort(key=_request_key)
        return prepared


class JobRun:
    """Runs prompts that are read ahead.

    Args:
        client: drives the engine.
        deliver: gets what each step has finished, and prompts that cannot be served.
        most_pending: requests that the engine has at a time.
        returns_errors: whether prompts that cannot be served, and requests that fail while the engine goes on, have an
            output with their error.
    """

    def __init__(
        self,
        client: EngineClient,
        deliver: Callable[[list[FinishedPrompt]], None],
        *,
        most_pending: int,
        returns_errors: bool,
    ) -> None:
        self._client = client
        self._deliver = deliver
        self._most_pending = most_pending
        self._returns_errors = returns_errors
        # What the engine does not need yet.
        self._ready: deque[PreparedPrompt] = deque()
        self._pending: dict[int, PreparedPrompt] = {}

    def run(self, prompts: ReadAhead[Any, list[PreparedPrompt]], progress: Progress) -> None:
        """Run all prompts; on any exception drop what is queued."""
        try:
            while self._fill(prompts, progress):
                self._client.run_step()
                self._pass_on(self._claim(), progress)
        except BaseException:
            self._client.drop(set(self._pending))
            raise

    def _fill(self, prompts: ReadAhead[Any, list[PreparedPrompt]], progress: Progress) -> bool:
        """Queue requests until there are enough; returns whether one is left. With none, waits for a chunk."""
        while (missing := self._most_pending - len(self._pending)) > 0:
            if not self._ready:
                chunk = prompts.take(wait=not self._pending)
                if chunk is None:
                    break
                self._take_chunk(chunk, progress)
            self._enqueue(missing)
        return bool(self._pending)

    def _take_chunk(self, chunk: list[PreparedPrompt], progress: Progress) -> None:
        if not self._returns_errors:
            _raise_errors(chunk)
        self._ready.extend(item for item in chunk if isinstance(item.request, Request))
        self._pass_on([(item, _refused(item)) for item in chunk if isinstance(item.request, ValueError)], progress)

    def _enqueue(self, count: int) -> None:
        # Deferred, so that the id of every queued request is known.
        with deferred_signals():
            items = [self._ready.popleft() for _ in range(min(count, len(self._ready)))]
            requests = [item.request for item in items if isinstance(item.request, Request)]
            states = self._client.enqueue_all(requests)
            self._pending.update({state.request_id: item for state, item in zip(states, items, strict=True)})

    def _claim(self) -> list[FinishedPrompt]:
        """Return what has finished; other requests' results stay for their callers."""
        pending = self._pending
        try:
            done = self._client.claim(pending.keys())
        except StepError as error:
            failed = [request_id for request_id in error.request_ids if request_id in pending]
            if not self._returns_errors or not failed:
                raise
            self._client.drop(set(failed))
            return [(item := pending.pop(i), _failed(i, item, error)) for i in failed]
        return [(pending.pop(request_id), output) for request_id, output in done.items()]

    def _pass_on(self, done: list[FinishedPrompt], progress: Progress) -> None:
        if done:
            self._deliver(done)
            progress.update(len(done))


class Outputs:
    """What `LLM.generate` and its like do with outputs.

    Args:
        on_output: gets each as it finishes.
        keep: whether they are returned.
        finish: completes each of them first, given its place.
    """

    def __init__(
        self,
        on_output: Callable[[RequestOutput], None] | None = None,
        keep: bool = True,
        finish: Callable[[int, RequestOutput], None] | None = None,
    ) -> None:
        check_bool("keep", keep)
        if not keep and on_output is None:
            raise ValueError("keep=False needs on_output: nobody would get the outputs")
        self._on_output, self._keep, self._finish = on_output, keep, finish
        self._by_place: dict[int, RequestOutput] = {}

    def take(self, done: list[FinishedPrompt]) -> None:
        """Take what has finished."""
        for item, output in done:
            if self._finish is not None:
                self._finish(item.place, output)
            if self._keep:
                self._by_place[item.place] = output
        if self._on_output is not None:
            for _, output in done:
                self._on_output(output)

    def in_order(self) -> list[RequestOutput]:
        """Return the outputs in the order of the prompts."""
        return [self._by_place[place] for place in range(len(self._by_place))]


def _raise_errors(chunk: list[PreparedPrompt]) -> None:
    """Raise the first error of a chunk, with the place of its prompt unless it is one of all of them."""
    errors = [(item.place, item.request) for item in chunk if isinstance(item.request, ValueError)]
    if errors:
        place, error = min(errors, key=itemgetter(0))
        concerns_all = all(item.request is error for item in chunk) and (len(chunk) > 1 or place == 0)
        raise error if concerns_all else of_prompt(place, error)


def _refused(item: PreparedPrompt) -> RequestOutput:
    assert isinstance(item.request, ValueError)
    return failed_output(-1, item.request, item.prompt if isinstance(item.prompt, str) else None)


def _failed(request_id: int, item: PreparedPrompt, error: StepError) -> RequestOutput:
    assert isinstance(item.request, Request)
    return failed_output(request_id, error, item.request.prompt, item.request.token_ids)


def _request_key(item: PreparedPrompt) -> tuple[int, str, bytes]:
    """Return by what requests that share blocks of the prefix cache are neighbours when sorted."""
    request = item.request
    if isinstance(request, ValueError):
        return 0, "", b""
    return request.priority, request.cache_salt or "", request.token_ids.tobytes()


def _prefix_key(prompt: Any) -> tuple[str, str, bytes]:
    """Return by what prompts that begin alike are neighbours when sorted; of one that is none, what is first."""
    try:
        ids, text, salt = parse_prompt(prompt)
        packed = b"" if ids is None else struct.pack(f"{len(ids)}i", *ids)
    except (ValueError, TypeError, struct.error):
        return "", "", b""
    return salt or "", text or "", packed
