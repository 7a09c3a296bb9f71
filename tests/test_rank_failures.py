"""A rank that fails or dies, at whatever moment: the caller is told which and why, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.outputs import StepError
from nanovllm.parallel.channel import Sender
from nanovllm.parallel.distributed_communicator import DistributedCommunicator
from nanovllm.runner import parallel_runner, worker_processes
from nanovllm.runner.batch import StepShape
from nanovllm.runner.step_outputs import PendingStep
from nanovllm.runner.worker import StepOrder, WorkerFailure, WorkerPlan
from nanovllm.runner.worker_processes import WorkerError, WorkerProcess, WorkerProcesses, start_worker
from nanovllm.utils.processes import PythonProcess, start_python
from tests.forked_python import started
from tests.rank_processes import rank_pids

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(40))]


def make_llm(folder: Path, size: int = 2) -> LLM:
    return LLM(
        folder, device="cpu", tensor_parallel_size=size, max_model_len=128, kvcache_block_size=16, num_kvcache_blocks=20
    )


@pytest.fixture(scope="module")
def folder(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(num_attention_heads=3, num_key_value_heads=3)


def open_pipes() -> set[str]:
    """The pipes that this process has open."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        # The folder's own descriptor is closed again.
        with suppress(FileNotFoundError):
            found.add(os.readlink(descriptor))
    return {name for name in found if name.startswith("pipe:")}


@pytest.fixture(autouse=True)
def channel_pipes(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The pipes of the channels that a test makes; none is left behind it, nor a rank."""
    pipes: set[str] = set()
    construct = Sender.__init__

    def noting(sender: Sender, num_receivers: int) -> None:
        construct(sender, num_receivers)
        pipes.update(os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in sender.receivers)

    monkeypatch.setattr(Sender, "__init__", noting)
    yield pipes
    assert not rank_pids() and not dist.is_initialized()
    assert not pipes & open_pipes()


@pytest.fixture
def real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started as outside of tests, and not forked."""
    monkeypatch.setattr(worker_processes, "start_python", start_python)


def kill(rank: int) -> None:
    """Kill a rank's process, as the out-of-memory killer would, and wait until the system has done it."""
    pid = rank_pids()[rank]
    forked = next((process for process in started if process.pid == pid), None)
    os.kill(pid, signal.SIGKILL)
    # The engine's watching thread may have asked first.
    with suppress(ChildProcessError, ValueError):
        if forked is None:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        else:
            wait([forked._process.sentinel])


def kill_when(owner: Any, name: str, rank: int, call: int) -> None:
    """Kill a rank just before the `call`-th call of `owner.name`."""
    original, calls = getattr(owner, name), []

    def killing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            kill(rank)
        return original(*args, **kwargs)

    setattr(owner, name, killing)


def parallel(llm: LLM) -> Any:
    assert isinstance(llm.llm_engine._runner, parallel_runner.ParallelRunner)
    return llm.llm_engine._runner


@pytest.mark.usefixtures("real_ranks")
def test_killed_in_decode_and_a_new_engine_in_the_same_process(folder: Path) -> None:
    llm = make_llm(folder, 3)
    want = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    # In the middle of a step, when all ranks are at work.
    kill_when(parallel(llm)._runner.model, "compute_logits", rank=2, call=5)
    started = time.monotonic()
    with pytest.raises(StepError, match=r"rank 2 was killed by SIGKILL.*the engine is closed") as caught:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    # Connections would notice after half an hour.
    assert time.monotonic() - started < 100
    assert isinstance(caught.value.__cause__, WorkerError)
    assert not rank_pids(), "the others have ended too"
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(PROMPTS, GREEDY)
    llm.exit()
    with make_llm(folder) as again:
        assert again.generate(PROMPTS, GREEDY, use_tqdm=False) == want


@pytest.mark.compat
@pytest.mark.usefixtures("real_ranks")
def test_killed_between_steps(folder: Path) -> None:
    with make_llm(folder) as llm:
        parallel(llm).pipeline_depth = 1
        kill_when(parallel(llm), "forward", rank=1, call=3)
        with pytest.raises(StepError, match="rank 1 was killed by SIGKILL") as caught:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert isinstance(caught.value.__cause__, WorkerError)


class Later:
    """A device that is done some time later."""

    def __init__(self, seconds: float) -> None:
        self.time = time.monotonic() + seconds

    def query(self) -> bool:
        return time.monotonic() > self.time


# Done at once, with what it had, or never.
@pytest.mark.parametrize("seconds", [0.0, pytest.param(1e9, marks=pytest.mark.compat)])
def test_what_a_device_says_after_a_rank_has_died_is_no_token(folder: Path, seconds: float) -> None:
    with make_llm(folder) as llm:
        runner = parallel(llm)
        launch = runner._runner.sample
        steps = []

        def killing(*args: Any) -> PendingStep:
            handle = launch(*args)
            steps.append(handle)
            if len(steps) < (GREEDY.max_tokens or 0):
                return handle
            # The last step: nothing is ordered of the ranks after it.
            kill(1)
            return replace(handle, copied=Later(seconds))

        runner._runner.sample = killing
        with pytest.raises(StepError, match="rank 1 was killed by SIGKILL"):
            llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
        assert len(steps) == GREEDY.max_tokens


def test_a_collective_with_a_dead_rank_can_be_interrupted() -> None:
    """gloo misses some deaths, as if the rank were alive and did nothing."""
    # Threads of other tests may still wait.
    store, device, before = HashStore(), torch.device("cpu"), threading.enumerate()
    with ThreadPoolExecutor(2) as pool:
        ours, silent = pool.map(lambda rank: DistributedCommunicator(rank, 2, device, store), range(2))
    threading.Timer(0.3, ours.interrupt).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="interrupted because a rank has died"):
        ours.all_reduce_min(1)
    assert time.monotonic() - started > 0.2
    (waiting,) = (t for t in threading.enumerate() if "_outlast" in t.name and t not in before)
    del ours
    gc.collect()
    assert waiting.is_alive()
    # The wait ends with the connection.
    del silent
    waiting.join(240)
    assert not waiting.is_alive()


def test_a_rank_has_ended_though_another_thread_asks_too() -> None:
    asking, answer = threading.Event(), threading.Event()

    class SlowPopen(subprocess.Popen[bytes]):
        """Takes its time to note the process's end; meanwhile `poll` says to other threads that it runs."""

        def _handle_exitstatus(self, *args: Any, **kwargs: Any) -> None:
            asking.set()
            assert answer.wait(240)
            super()._handle_exitstatus(*args, **kwargs)  # type: ignore[misc]

    process = SlowPopen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    rank = WorkerProcess(1, PythonProcess(process), None)  # type: ignore[arg-type]
    watching = threading.Thread(target=lambda: rank.process.exit_code)
    watching.start()
    assert asking.wait(240)
    threading.Timer(0.2, answer.set).start()
    assert rank.process.exit_code == 0
    watching.join()


def test_the_rank_that_failed_first_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(rank: int, seconds: float) -> WorkerProcess:
        receiver, sender = Pipe(duplex=False)
        with sender:
            sender.send(WorkerFailure(seconds, f"rank {rank}'s traceback"))
        process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        return WorkerProcess(rank, PythonProcess(process), receiver)

    def end(rank: WorkerProcess) -> None:
        process = rank.process._process
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

    ranks = WorkerProcesses(1)
    # The one that failed first takes longer to end: it runs until it is waited for.
    consequence, cause = failing(1, 2.0), failing(2, 1.0)
    ranks._ranks = [consequence, cause]
    end(consequence)
    monkeypatch.setattr(time, "sleep", lambda seconds: end(cause))
    try:
        with pytest.raises(WorkerError, match="rank 2 failed:\nrank 2's traceback"):
            ranks.check()
    finally:
        ranks.stop()


def test_ranks_that_stand_still_are_not_waited_for_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_runner, "_STEP_SECONDS", 0.3)
    with make_llm(folder) as llm:
        runner = parallel(llm)
        with pytest.raises(RuntimeError, match="a step has not ended within 0 s"):
            runner.wait(PendingStep(StepShape(1), 1, 0, torch.zeros(1), Later(60)))  # type: ignore[arg-type]
        assert not rank_pids()


def test_killed_before_exit(folder: Path, channel_pipes: set[str]) -> None:
    llm = make_llm(folder)
    # Otherwise the check after each test would find nothing.
    assert channel_pipes and channel_pipes <= open_pipes()
    kill(1)
    with pytest.warns(UserWarning, match="while the engine was idle, rank 1 was killed by SIGKILL"):
        llm.exit()
    llm.exit()


@pytest.mark.parametrize("name", [pytest.param("connect", marks=pytest.mark.compat), "ModelRunner"])
def test_killed_while_rank_0_joins_or_loads(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Undone at the end.
    monkeypatch.setattr(parallel_runner, name, getattr(parallel_runner, name))
    kill_when(parallel_runner, name, rank=1, call=1)
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        make_llm(folder)


def test_an_exception_in_construction(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The others look for their weights where there are none.
    monkeypatch.setattr(parallel_runner, "WorkerPlan", lambda *args: replace(WorkerPlan(*args), folder=str(tmp_path)))
    with pytest.raises(
        WorkerError, match=r"(?s)rank 1 failed:\nTraceback.*in load_folder.*ValueError: .* has no \*\.safet"
    ):
        make_llm(folder)


def test_an_exception_on_rank_0_ends_all(folder: Path) -> None:
    def failing(*_: Any) -> None:
        raise MemoryError("no room")

    with make_llm(folder) as llm:
        parallel(llm)._runner.model.forward = failing
        with pytest.raises(StepError, match=r"no room; the engine is closed: its ranks have ended") as caught:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert isinstance(caught.value.__cause__, MemoryError)
        assert not rank_pids()


def test_bad_weights_are_a_value_error_as_ever(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        make_llm(tmp_path)


def start(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    """Run a script in a process group of its own; its output ends with the last of its processes."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, str(file)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment,
    )  # fmt: skip


def test_ranks_survive_ctrl_c_and_end_with_a_killed_rank_0(tmp_path: Path) -> None:
    script = start(
        tmp_path,
        f"""
        import signal
        from nanovllm import LLM, SamplingParams

        def main():
            with LLM({BUNDLED_MODEL!r}, device="cpu", tensor_parallel_size=2, max_model_len=512) as llm:
                try:
                    print("ready", flush=True)
                    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=500, ignore_eos=True), use_tqdm=False)
                except KeyboardInterrupt:
                    short = SamplingParams(max_tokens=3, ignore_eos=True)
                    print(len(llm.generate([[1, 2]], short, use_tqdm=False)[0]["token_ids"]), flush=True)
                # The ranks wait for an order: at work they would notice by their connections.
                signal.pause()

        if __name__ == "__main__":
            main()
        """,
    )
    assert script.stdout is not None and script.stdout.readline() == "ready\n"
    os.killpg(script.pid, signal.SIGINT)
    assert script.stdout.readline() == "3\n"
    script.kill()
    _, errors = script.communicate(timeout=240)
    assert "Traceback" not in errors


def test_a_script_needs_no_main_guard_exit_or_joined_threads(tmp_path: Path) -> None:
    script = start(
        tmp_path,
        f"""
        import os, sys, threading, time
        from pathlib import Path
        # As some programs do, though Python takes no notice of it.
        sys.path.append(Path("elsewhere"))
        from nanovllm import LLM, SamplingParams
        llm = LLM({BUNDLED_MODEL!r}, device="cpu", tensor_parallel_size=2, max_model_len=512)
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        for call_exit in (False, True):
            child = os.fork()
            if not child:
                if call_exit:
                    llm.exit()
                # Ends as any program does, with what was registered for that.
                sys.exit(5)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
            print(len(llm.generate([[1, 2]], params, use_tqdm=False)[0]["token_ids"]))
        work = lambda: llm.generate([[1, 2]] * 5_000, params, use_tqdm=False)
        # A daemon thread that prints while the interpreter ends can end it by itself.
        threading.excepthook = lambda hook: None
        threading.Thread(target=work, daemon=True).start()
        while llm.stats()["num_output_tokens"] < 40:
            time.sleep(0.01)
        sys.exit(3)
        """,
    )
    assert (*script.communicate(timeout=240), script.returncode) == ("3\n3\n", "", 3)


@pytest.mark.usefixtures("real_ranks")
def test_a_rank_that_never_starts_times_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.runner.parallel_runner.START_SECONDS", 0.5)

    def stop_soon() -> None:
        while not rank_pids():
            time.sleep(0.01)
        os.kill(rank_pids()[1], signal.SIGSTOP)

    threading.Thread(target=stop_soon).start()
    with pytest.raises(WorkerError, match="rank 1 is not started after 0 s"):
        make_llm(folder)


@pytest.mark.usefixtures("real_ranks")
def test_an_interrupt_while_ranks_are_started_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start_rank = start_worker

    def interrupted_start(*args: Any) -> Any:
        rank = start_rank(*args)
        signal.raise_signal(signal.SIGINT)
        return rank

    monkeypatch.setattr("nanovllm.runner.worker_processes.start_worker", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        WorkerProcesses(3)
    assert not rank_pids()


def test_whoever_watches_is_told_of_a_rank_that_fails() -> None:
    ranks, told = WorkerProcesses(3), threading.Event()
    try:
        ranks.watch(told.set)
        assert not told.wait(0.2)
        kill(2)
        assert told.wait(240)
        with pytest.raises(WorkerError, match="rank 2 was killed by SIGKILL"):
            ranks.check()
    finally:
        ranks.stop()
    # A second time it leaves what others have opened meanwhile alone.
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    ranks.stop()
    for descriptor in descriptors:
        os.close(descriptor)


def test_an_exception_in_a_step_arrives_with_the_end_of_its_traceback(folder: Path) -> None:
    with make_llm(folder) as llm:
        parallel(llm)._ranks.send(StepOrder(LongError(), False))  # type: ignore[arg-type]
        with pytest.raises(StepError, match=r"(?s)rank 1 failed:\n.*LLL the end") as caught:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert 10_000 < len(str(caught.value)) < 20_000


class LongError:
    """Pickled, it is a call that raises an exception of 200 kB where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise ValueError('L' * 200_000 + ' the end')",)
