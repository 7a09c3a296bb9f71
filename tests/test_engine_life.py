"""An engine's life: all that callers, other threads and signals do to it, and all that fails, in any order.

The same machine runs against an engine in this process and against two in processes of their own, which may be killed.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanovllm import RequestOutput, SamplingParams, StepError
from nanovllm.engine.engine import Engine
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.weights.report import LoadFailedError
from tests.examples import num_examples
from tests.mock_llm import HALVES, MockReplicas, NumberTokenizer, make_mock_engine, mock_llm, order_fault
from tests.mock_runner import check_engine, complete, next_token

TAGS = {"weights", "kv_cache"}
FAULTS = {"plan failed", "launch failed", "step failed", "exit"}
REFUSALS = (
    r"the engine is paused|requests are pending|is asleep|are asleep|were dropped by sleep|a pause still waits|"
    r"the engine is closed"
)
TEXT = NumberTokenizer()

PROMPT = st.tuples(
    st.sampled_from([[], [1] * 16, list(range(20))]), st.lists(st.integers(0, 4), min_size=1, max_size=4)
).map(lambda parts: parts[0] + parts[1])
PARAMS = st.builds(
    SamplingParams,
    temperature=st.just(0.5),
    max_tokens=st.integers(1, 24),
    n=st.sampled_from([1, 1, 1, 3]),
    ignore_eos=st.just(True),
    stop=st.sampled_from([None, None, "7,", "1,2"]),
)
# What happens at the n-th call of a method of the engine within a call that drives it; Ctrl-C comes at its end.
SITES = ("run_step", "run_step", "take_results", "take_results", "enqueue_all", "stop", "abort")
ACTIONS = (
    "interrupt", "nested", "end own", "abort own", "abort others",
    "thread adds", "thread pauses", "thread generates",
)  # fmt: skip
CTRL_C = st.tuples(st.just("interrupt"), st.sampled_from(["run_step", "take_results"]), st.integers(1, 3))
EVENT = (
    st.none()
    | CTRL_C
    | st.tuples(st.sampled_from(ACTIONS), st.sampled_from(SITES), st.sampled_from([1, 1, 2, 3, 5, 8]))
)
Event = tuple[str, str, int] | None


@dataclass
class Wanted:
    """A request, the first weights that may make its tokens, and whether it came during a pause, or was aborted."""

    prompt: list[int]
    params: SamplingParams
    version: int
    is_held: bool
    is_aborted: bool = False
    is_dropped: bool = False


class Life(RuleBasedStateMachine):
    """An engine, and a model of the state that it should be in."""

    is_remote: ClassVar[bool]

    @initialize(
        depth=st.integers(0, 1),
        max_num_seqs=st.integers(1, 4),
        num_blocks=st.sampled_from([8, 40]),
        max_num_batched_tokens=st.integers(4, 32),
    )
    def start(self, depth: int, **sizes: int) -> None:
        given: dict[str, Any] = {"pipeline_depth": depth, "max_model_len": 64, **sizes}
        self.engine: Engine
        if self.is_remote:
            self.replicas = MockReplicas(2, step_seconds=0.001, **given)
            self.engine = self.replicas.engine
        else:
            self.engine, self.runner = make_mock_engine(**given)
        self.llm = mock_llm(self.engine)
        self.wanted: dict[int, Wanted] = {}
        self.is_paused = self.may_fail = self.is_closed = self.is_lost = False
        self.asleep: set[str] = set()
        self.weights: dict[str, int | None] = dict.fromkeys(HALVES, 0)
        self.versions: list[list[int]] = [[]]
        self.num_rules, self.killed = 0, set[int]()

    @property
    def cannot_run(self) -> bool:
        return self.is_closed or bool(self.asleep) or None in self.weights.values()

    @contextmanager
    def refused_if(self, refused: bool) -> Iterator[None]:
        """Assert that a call is refused, or is not."""
        if refused:
            with pytest.raises(RuntimeError, match=REFUSALS):
                yield
        else:
            yield

    def control(self, call: Callable[[], Any], refused: bool = False) -> None:
        """Make a call that changes the engine, once more if a process has been killed without answering."""
        with self.refused_if(refused or self.is_closed):
            try:
                call()
            except RuntimeError as error:
                if "was killed" not in str(error):
                    raise
                call()

    @contextmanager
    def happening(self, event: Event) -> Iterator[None]:
        """Let an event happen within a call that drives the engine, and take the exceptions that it may raise."""
        action, site, left = event or ("", "run_step", 0)
        original, engine = getattr(self.engine, site), vars(self.engine)
        threads: list[Future[None]] = []

        def call_with_event(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left:
                return original(*args, **kwargs)
            engine.pop(site, None)
            if action.startswith("thread"):
                threads.append(pool.submit(self.call_beside, action))
            elif action != "interrupt":
                self.call_within(action)
            result = original(*args, **kwargs)
            if action == "interrupt":
                signal.raise_signal(signal.SIGINT)
            return result

        if event is not None:
            engine[site] = call_with_event
        pool = ThreadPoolExecutor(1)
        try:
            yield
        except KeyboardInterrupt:
            assert action == "interrupt" or self.may_fail
        except StepError as error:
            assert self.may_fail and (str(error.__cause__) in FAULTS or self.is_closed), error
        except SystemExit:
            assert self.may_fail
        except RuntimeError as error:
            is_aborted = "aborted by another caller" in str(error) and action.startswith("abort")
            assert is_aborted or (self.is_closed and "the engine is closed" in str(error)), error
        finally:
            engine.pop(site, None)
            for thread in threads:
                thread.result(60)
            pool.shutdown()

    def call_within(self, action: str) -> None:
        """Act as a callback within a call."""
        if action == "nested":
            # Not once the call only drops what is left.
            calls = (lambda: self.llm.generate([[1]], use_tqdm=False), self.llm.step) if self.engine.is_driven else ()
            for call in calls:
                with pytest.raises(RuntimeError, match=f"already running|{REFUSALS}"):
                    call()
            if not self.is_remote and calls:
                with pytest.raises(RuntimeError, match=f"of this thread has not ended|{REFUSALS}"):
                    self.llm.reset_prefix_cache()
        elif action == "end own":
            self.engine.abort(self.engine.request_ids - self.wanted.keys(), keep_outputs=True)
        else:
            self.drop(list(self.wanted if action == "abort others" else self.engine.request_ids - self.wanted.keys()))

    def call_beside(self, action: str) -> None:
        """Act as another thread beside a call."""
        with suppress(RuntimeError):
            if action == "thread adds":
                self.add_now([5, 6], SamplingParams(0.5, 9, ignore_eos=True), 0)
            elif action == "thread pauses" and not self.is_paused:
                self.control(self.llm.pause)
                self.control(self.llm.reset_prefix_cache)
                self.control(self.llm.resume)
            elif action == "thread exits":
                self.llm.exit()
            # A Ctrl-C of its step would come to the other thread.
            elif action == "thread generates" and not self.may_fail:
                # It is refused until the other call is over.
                self.llm.generate([[1]], SamplingParams(0.5, 2, ignore_eos=True), use_tqdm=False)

    def add_now(self, prompt: list[int], params: SamplingParams, priority: int) -> None:
        version = len(self.versions) - 1
        self.wanted[self.llm.add_request(prompt, params, priority=priority)] = Wanted(
            prompt, params, version, self.is_paused
        )

    def drop(self, request_ids: list[int]) -> None:
        for request_id in self.wanted.keys() & set(request_ids):
            # One that has finished still waits for its caller.
            self.wanted[request_id].is_dropped = True
        self.llm.abort(request_ids)

    def check_output(self, output: RequestOutput, wanted: Wanted) -> None:
        assert len(output.outputs) == wanted.params.n and list(output.prompt_token_ids) == wanted.prompt
        for item in output.outputs:
            self.check_tokens(item.token_ids, wanted)
            text = TEXT.decode(item.token_ids)
            stop = (wanted.params.stop or ["none"])[0]
            assert stop not in TEXT.decode(item.token_ids[:-1])
            if item.finish_reason == "stop":
                assert item.stop_reason == stop and item.text == text[: text.index(stop)]
            elif item.finish_reason == "length":
                assert len(item.token_ids) == wanted.params.max_tokens and item.text == text
            else:
                assert item.finish_reason == "abort" and wanted.is_aborted

    def check_tokens(self, token_ids: list[int], wanted: Wanted) -> None:
        """Every token follows from those before it, by some weights that the engine has had since."""
        version = wanted.version
        for end, token_id in enumerate(token_ids):
            context = wanted.prompt + token_ids[:end]
            while next_token([*context, *self.versions[version]]) != token_id:
                version += 1
                assert version < len(self.versions), "no weights make this token"

    @rule(prompt=PROMPT, params=PARAMS, priority=st.sampled_from([0, 0, 1]))
    def add(self, prompt: list[int], params: SamplingParams, priority: int) -> None:
        with self.refused_if(self.cannot_run):
            self.add_now(prompt, params, priority)

    @rule(count=st.integers(1, 6), event=EVENT)
    def step(self, count: int, event: Event) -> None:
        with self.happening(event):
            for _ in range(count):
                self.step_once()

    def step_once(self) -> None:
        try:
            finished = self.llm.step().finished
        except StepError as error:
            for request_id in error.request_ids:
                del self.wanted[request_id]
            raise
        for request_id, output in finished:
            wanted = self.wanted.pop(request_id)
            assert not wanted.is_held or wanted.is_aborted, "it runs although the engine is paused"
            self.check_output(output, wanted)

    @rule(
        prompts=st.lists(PROMPT, min_size=1, max_size=4), params=PARAMS, event=EVENT, fails=st.sampled_from([0, 0, 1])
    )
    def generate(self, prompts: list[list[int]], params: SamplingParams, event: Event, fails: bool) -> None:
        def fail(output: RequestOutput) -> None:
            raise KeyboardInterrupt

        def call() -> list[RequestOutput]:
            return self.llm.generate(prompts, params, use_tqdm=False, on_output=fail if fails else None)

        if self.cannot_run or self.is_paused:
            with self.refused_if(True):
                call()
            return
        with self.happening(("interrupt", "enqueue_all", -1) if fails else event):
            for prompt, output in zip(prompts, call(), strict=True):
                is_aborted = event is not None and event[0] == "end own"
                self.check_output(output, Wanted(prompt, params, len(self.versions) - 1, False, is_aborted))
            if not self.wanted:
                assert self.llm.is_finished() or self.killed
        self.check_nothing_else_is_queued()

    @rule(
        prompt=PROMPT, params=PARAMS, event=EVENT, count=st.integers(1, 9), end=st.sampled_from(["", "close", "drop"])
    )
    def stream(self, prompt: list[int], params: SamplingParams, event: Event, count: int, end: str) -> None:
        if self.cannot_run or self.is_paused:
            with self.refused_if(True):
                self.llm.stream([prompt], params)
            return
        streamed: dict[tuple[Any, int], list[int]] = {}
        stream = self.llm.stream([prompt] * 3, params)
        with self.happening(event):
            for number, part in enumerate(stream, 1):
                for item in part.outputs:
                    streamed.setdefault((part.request_id, item.index), []).extend(item.token_ids)
                if number == count and end:
                    break
            if end == "close":
                stream.close()
            # Or it is dropped.
            del stream
        for token_ids in streamed.values():
            self.check_tokens(token_ids, Wanted(prompt, params, len(self.versions) - 1, False))
        self.check_nothing_else_is_queued()

    def check_nothing_else_is_queued(self) -> None:
        assert self.engine.request_ids <= self.wanted.keys()

    @rule(index=st.integers(0, 5), offset=st.integers(0, 2), keeps=st.booleans())
    def abort(self, index: int, offset: int, keeps: bool) -> None:
        if self.wanted:
            request_id = list(self.wanted)[index % len(self.wanted)]
            wanted = self.wanted[request_id]
            # The id of any output is its request's.
            ids = [request_id + offset % wanted.params.n, 10**6]
            if keeps:
                wanted.is_aborted = True
                self.engine.abort(ids, keep_outputs=True)
            else:
                wanted.is_dropped = True
                self.llm.abort(ids)

    @rule(fault=st.sampled_from(["plan", "launch", "result", "exit", "interrupt"]))
    def order_fault(self, fault: str) -> None:
        if not (self.is_closed or (self.is_remote and fault in ("exit", "interrupt"))):
            self.may_fail = True
            self.control(lambda: self.engine.call(order_fault, fault))

    @rule(mode=st.sampled_from(["keep", "keep", "wait", "abort"]))
    def pause(self, mode: Any) -> None:
        for wanted in self.wanted.values():
            wanted.is_aborted |= mode == "abort"
            wanted.is_held &= mode != "wait"
        try:
            self.control(lambda: self.llm.pause(mode))
        except (KeyboardInterrupt, SystemExit):
            assert self.may_fail
            self.control(lambda: self.llm.pause(mode))
        self.is_paused = True

    @rule()
    def resume(self) -> None:
        self.control(self.llm.resume)
        self.is_paused = False
        for wanted in self.wanted.values():
            wanted.is_held = False

    @property
    def is_busy(self) -> bool:
        return bool(self.engine.request_ids) and not self.is_paused

    @rule(level=st.sampled_from([1, 1, 1, 2]))
    def sleep(self, level: int) -> None:
        refused = self.is_busy or self.is_closed
        self.control(lambda: self.llm.sleep(level), refused)
        if not refused:
            self.asleep = set(TAGS)
            if level == 2:
                self.weights = dict.fromkeys(HALVES)

    @rule(tags=st.sampled_from([None, None, None, None, ["weights"], ["kv_cache"], []]))
    def wake_up(self, tags: list[str] | None) -> None:
        self.control(lambda: self.llm.wake_up(tags))
        self.asleep -= TAGS if tags is None else set(tags)

    @rule(half=st.sampled_from(HALVES), value=st.sampled_from([0, 1, 2, 3, -1]))
    def load(self, half: str, value: int) -> None:
        """Load a half of the weights, and what is missing; a value of -1 fails in the middle."""
        refused = self.is_busy or self.is_closed or "weights" in self.asleep
        chosen = [name for name, now in self.weights.items() if name == half or now is None]
        with pytest.raises(LoadFailedError) if value < 0 and not refused else nullcontext():
            self.control(lambda: self.llm.load_weights({name: torch.tensor(value) for name in chosen}), refused)
        if refused:
            return
        if value < 0:
            self.weights[chosen[0]] = None
        else:
            self.weights |= dict.fromkeys(chosen, value)
            values = [value or 0 for value in self.weights.values()]
            self.versions.append(values if any(values) else [])

    @rule()
    def reset(self) -> None:
        self.control(self.llm.reset_prefix_cache)

    @precondition(lambda self: self.num_rules > 9)
    @rule(how=st.sampled_from(["exit", "loss", "thread"]))
    def close(self, how: str) -> None:
        if how != "exit" and (self.cannot_run or self.is_paused):
            return
        if how == "loss":
            self.is_lost = not self.is_remote
            self.control(lambda: self.engine.call(order_fault, "loss"))
        self.may_fail = self.is_closed = True
        with self.happening(("thread exits", "run_step", 2) if how == "thread" else None):
            if how != "exit":
                self.llm.generate([[1]] * 4, SamplingParams(0, 60), use_tqdm=False)
        if how != "loss":
            self.llm.exit()
        assert not self.engine.is_open

    @precondition(lambda self: self.is_remote and self.num_rules > 4)
    @rule(index=st.integers(0, 1))
    def kill(self, index: int) -> None:
        """Kill a process: the other one runs its requests again, if there is one."""
        self.replicas.kill(index)
        self.killed.add(index)
        if len(self.killed) == 2:
            self.may_fail = self.is_closed = True
            while self.engine.is_open:
                with self.happening(None):
                    self.step_once()

    @invariant()
    def state_is_as_expected(self) -> None:
        self.num_rules += 1
        if not self.is_closed:
            assert (self.llm.is_paused, self.llm.is_sleeping) == (self.is_paused, bool(self.asleep))
            if isinstance(self.engine, LLMEngine) and not self.is_paused:
                check_engine(self.engine)

    def teardown(self) -> None:
        try:
            self.check_end()
        finally:
            if self.is_remote:
                self.replicas.stop()

    def check_end(self) -> None:
        """All requests end, nothing is left of them, and a closed engine refuses whatever comes."""
        if not self.is_closed:
            self.control(lambda: self.engine.call(order_fault, ""))
            self.pause("keep")
            self.wake_up(None)
            self.control(lambda: self.llm.load_weights(dict.fromkeys(HALVES, torch.tensor(0))))
            self.versions.append([])
            self.resume()
            for _ in range(10_000):
                if self.llm.is_finished():
                    break
                with self.happening(None):
                    self.step_once()
            assert self.llm.is_finished() and all(wanted.is_dropped for wanted in self.wanted.values())
            (output,) = self.llm.generate([[1, 2]], SamplingParams(0.5, 9, ignore_eos=True), use_tqdm=False)
            assert output["token_ids"] == complete([1, 2], 9, frozenset(), 64)
            stats = self.llm.stats()
            assert stats["num_running"] == stats["num_waiting"] == stats["num_used_blocks"] == 0
            assert not self.llm.engine_client._states
        self.llm.exit()
        self.llm.exit()
        self.is_closed = self.may_fail = True
        with pytest.raises(RuntimeError, match="the engine is closed"):
            for _ in range(100):
                with suppress(StepError):
                    self.llm.step()
        calls = (self.llm.pause, self.llm.wake_up, lambda: self.llm.add_request([1]), lambda: self.llm.generate([[1]]))
        for call in calls:
            with pytest.raises(RuntimeError, match="the engine is closed"):
                call()
        if self.is_remote:
            assert not any(process.is_alive() for process in self.replicas.processes)
        else:
            # A device that is lost is left alone.
            assert self.runner.closed == (not self.is_lost)


class LocalLife(Life):
    """An engine in this process."""

    is_remote = False


class RemoteLife(Life):
    """Two engines in processes of their own."""

    is_remote = True


TestLocal, TestRemote = LocalLife.TestCase, RemoteLife.TestCase
TestLocal.settings = settings(
    max_examples=num_examples(25, 200),
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
TestRemote.settings = settings(TestLocal.settings, max_examples=num_examples(5, 40))
pytestmark = pytest.mark.filterwarnings("ignore:replica:UserWarning")
