"""Kernels compiled by processes or threads before their first launch, for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch

from nanovllm import LLM
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.client import loading
from nanovllm.config import Config
from nanovllm.kernels.compile_ahead import _shared_out
from nanovllm.workers import worker as rank

PROGRAM = """
    import multiprocessing
    import os
    import resource
    import signal
    import sys
    import threading
    import time
    import warnings
    from functools import partial
    import torch
    import triton.backends.nvidia.driver
    from triton._C.libtriton import llvm
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime import driver

    # As in a terminal: a shell that starts the tests in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parent, launched, loaded = os.getpid(), [], []

    class Launcher:
        def __init__(self, source, metadata):
            self.name = source.fn.__name__
            note("launcher", self.name)

        def __call__(self, *args, **kwargs):
            launched.append(self.name)

    def note(*words):
        with open("notes", "a") as file:
            print(os.getpid(), *words, file=file)

    def notes(*kinds):
        "For each kind of note, which processes wrote it, and of what; they are gone then."
        with open("notes", "a+") as file:
            file.seek(0)
            lines = [line.split() for line in file]
        os.remove("notes")
        return [[(int(pid), name) for pid, kind, name in lines if kind == wanted] for wanted in kinds]

    class Utils:
        def load_binary(self, name, *args):
            loaded.append(name)
            return 1, 2, 32, 0, 1024

        def get_device_properties(self, device):
            return {"max_shared_mem": 232448}

    class Driver:
        launcher_cls, utils = Launcher, Utils()

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self):
            return torch.device("cpu")

    # That of Triton 3.6 has something to compile.
    triton.backends.nvidia.driver.CudaLauncher = Launcher
    driver.set_active(Driver())
    torch.cuda.set_device = lambda device: None
    torch.cuda.device_count = lambda: 1

    import nanovllm.kernels.compile_ahead as ahead
    import nanovllm.kernels.compilers as module
    from nanovllm.kernels._triton import jit, tl
    from nanovllm.kernels.compile_ahead import compile_ahead
    from nanovllm.kernels.compilers import Compilers
    from nanovllm.kernels.attention.hopper_prefill import hopper_prefill_attention
    from nanovllm.kernels.attention.prefill_attention import ChunkRows
    from nanovllm.kernels.linear.splitk_gemm import splitk_gemm
    from nanovllm.kernels.attention.decode_attention import plan_decode
    from nanovllm.kernels.attention.hopper_decode import hopper_decode_attention
    from nanovllm.kernels.linear.persistent_gemm import persistent_gated_gemm, persistent_qkv_rope_store
    from nanovllm.kernels.attention.cascade_attention import CascadeGroups
    from nanovllm.kernels import rms_norm, silu_and_mul
    from nanovllm.kernels.qkv_rope_store import KVPages, NormRope

    rms_norm.uses_triton = silu_and_mul.uses_triton = lambda device: True
    x, device = torch.zeros(4, 64), torch.device("cpu")
    half = torch.zeros(256, 128, dtype=torch.bfloat16)
    heads, cache, ints = half.view(128, 4, 64), half.view(1, 256, 2, 64), torch.zeros(1, 2, dtype=torch.int32)
    whole = plan_decode(ints[0] + 1, 4, 2, 64, 64, 1)
    shared = CascadeGroups(torch.zeros(1, 4, dtype=torch.int32), ints[0], torch.zeros(3, 2, dtype=torch.int32))
    after_prefix = plan_decode(ints[0] + 1, 4, 2, 64, 64, 2, shared=shared)
    wide = cache.view(1, 256, 1, 128)
    pages, chunks = KVPages(cache, cache), ChunkRows(ints, ints[0], ints[0], ints[0])
    runs = [
        partial(persistent_gated_gemm, half, half, 132),
        partial(splitk_gemm, half, half, True),
        partial(hopper_prefill_attention, heads, pages, heads, chunks, 1.0, 132),
        partial(hopper_decode_attention, heads, pages, heads, ints, ints[0], whole, 1.0),
        partial(
            hopper_decode_attention, half.view(64, 8, 64), pages, heads[:64], ints, ints[0], whole, 1.0,
            rope=NormRope((half[0], half[0]), 1e-6, x),
        ),
        partial(hopper_decode_attention, heads, pages, heads, ints, ints[0], after_prefix, 1.0),
        partial(
            persistent_qkv_rope_store, half, torch.zeros(512, 128, dtype=torch.bfloat16),
            NormRope((half[0], half[0]), 1e-6, x), ints[0], KVPages(wide, wide), ints[0], 132,
        ),
        partial(rms_norm.rms_norm, x, x[0], 1e-6, x),
        partial(silu_and_mul.silu_and_mul, x),
        partial(silu_and_mul.silu_and_mul, half),
    ]
    kernels = [
        "_persistent_gated_kernel", "_splitk_gemm_kernel", "_hopper_prefill_kernel", "_hopper_decode_kernel",
        "_hopper_decode_kernel", "_cascade_kernel", "_hopper_decode_kernel", "_merge_splits_kernel",
        "_persistent_qkv_kernel", "_rms_norm_kernel", "_silu_and_mul_kernel", "_silu_and_mul_kernel",
    ]

    bars = []

    class Bar:
        "Takes the place of the terminal's."

        def __init__(self, stage, total, unit, rank):
            self.total, self.n = total, 0
            bars.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def update(self):
            self.n += 1

    ahead.loading_bar = Bar

    def start(runs, rank=0, size=1):
        "Do what the start of an engine does."
        with Compilers() as compilers:
            compile_ahead(device, runs, compilers, rank, size)

    def fails(error, runs):
        try:
            start(runs)
        except error:
            return True
        return False

    def fail():
        raise KeyError("a run's own")

    @jit
    def _wrong_kernel(x_ptr):
        tl.store(x_ptr, undefined)

    def fail_to_compile():
        _wrong_kernel[(1,)](x)

    @jit
    def _late_kernel(x_ptr, LATE: tl.constexpr):
        tl.store(x_ptr, LATE)

    def late(number):
        return partial(_late_kernel[(1,)], x, LATE=number)

    def local():
        @jit
        def _local_kernel(x_ptr):
            tl.store(x_ptr, 1)

        _local_kernel[(1,)](x)

    def _new_kernel(x_ptr):
        tl.store(x_ptr, 2)

    def new():
        global _new_kernel
        _new_kernel = jit(_new_kernel)
        _new_kernel[(1,)](x)

    def noted(parse):
        def make_ir(source, *args):
            note("parsed", source.fn.__name__)
            note("thread", threading.current_thread().name)
            warnings.warn("an error in the engine, but nowhere else")
            return parse(source, *args)

        return make_ir

    def not_linked(*args):
        raise AssertionError("kernels of attention and norms do without the library of device functions")

    def stop(*args):
        os.kill(os.getpid(), 9)

    def stand_still(*args):
        note("still", os.getppid())
        time.sleep(1000)

    def interrupt(*args):
        # The note comes first: whoever is interrupted may end this process at once.
        note("still", os.getppid())
        os.kill(parent, signal.SIGINT)
        time.sleep(1000)

    def slow(job):
        global both_ranks
        if both_ranks:
            both_ranks.wait(100)
            both_ranks = None
        time.sleep(0.05)
        compile_kernel(job)

    def soon(ask):
        end = time.monotonic() + 100
        while not (answer := ask()) and time.monotonic() < end:
            time.sleep(0.05)
        return answer

    def has_ended(pid):
        "Whether a process is gone, or a zombie that nobody has asked after."
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rsplit(")", 1)[1].split()[0] == "Z"
        except FileNotFoundError:
            return True

    def no_more():
        raise BlockingIOError("no more processes")

    def interrupted():
        child = fork()
        if child:
            signal.raise_signal(signal.SIGINT)
        return child

    def warned():
        "Python's own, from 3.12 on."
        child = fork()
        if child:
            warnings.warn("the process is multi-threaded", DeprecationWarning)
        return child

    def no_fork():
        raise AssertionError("forked")

    def no_children_left():
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        return False

    def open_descriptors():
        # That of the folder itself is closed again.
        return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name)}

    ASTSource.make_ir, GluonASTSource.make_ir = noted(ASTSource.make_ir), noted(GluonASTSource.make_ir)
    llvm.link_extern_libs = not_linked

    fork, cores, compile_kernel, serve, work, patience = (
        os.fork, os.sched_getaffinity, module.compile_kernel, module._serve, module._work, module._PATIENCE_SECONDS
    )

    # A start that went wrong, a failing run, and a kernel that does not compile leave nothing behind.
    empty = module.empty_kernel
    ahead.empty_kernel = module.empty_kernel = None
    assert fails(KeyError, [late(-1), fail]) and not loaded
    assert fails(CompilationError, [fail_to_compile]) and no_children_left()
    assert [pid == parent for pid, name in notes("parsed")[0]] == [True, True]
    ahead.empty_kernel = module.empty_kernel = empty
    ahead.compiler_ready.cache_clear()
    os.sched_getaffinity = lambda pid: range(1)
    assert fails(CompilationError, [fail_to_compile, late(-1)]) and no_children_left()
    parsed = [(pid == parent, name) for pid, name in notes("parsed")[0] if name != "empty_kernel"]
    wrong = [(here, "_wrong_kernel") for here in (False, True, True)]
    assert parsed == [wrong[0], (False, "_late_kernel"), *wrong[1:]] and loaded == ["_late_kernel"], parsed
    loaded.clear()
    os.sched_getaffinity = cores

    # Each is compiled once, by one of the processes, and so is its launcher; and loaded once, here.
    assert soon(lambda: threading.active_count() == 1)
    descriptors = open_descriptors()
    module._COMPILES_LAUNCHERS = True
    os.fork = warned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(runs * 2)
    assert sorted(loaded) == sorted(kernels) and not launched and no_children_left(), (loaded, launched)
    assert bars[-1].n == bars[-1].total == len(kernels)
    parsed, launchers = notes("parsed", "launcher")
    assert sorted(name for _, name in parsed) == sorted(kernels), parsed
    workers = {pid for pid, _ in parsed}
    assert (len(workers) > 1) == (len(cores(0)) > 1) and parent not in workers, parsed
    assert sorted(name for pid, name in launchers if pid in workers) == sorted(kernels), launchers
    for run in runs:
        run()
    assert launched == kernels and sorted(loaded) == sorted(kernels), (loaded, launched)
    assert open_descriptors() == descriptors

    # What processes do not do for being killed, or for standing still, is done here.
    os.fork, module._PATIENCE_SECONDS = fork, 0.2
    for number, (name, does) in enumerate([("_work", stop), ("_work", stand_still), ("_serve", stand_still)]):
        setattr(module, name, does)
        with Compilers() as compilers:
            compile_ahead(device, [late(number)], compilers)
            assert compilers._server is None
        assert loaded.count("_late_kernel") == number + 1 and no_children_left()
        module._serve, module._work = serve, work
    assert all(soon(lambda: has_ended(pid)) for pid, _ in notes("still")[0])
    module._PATIENCE_SECONDS = patience

    # Where there are fewer processes than cores they do it all, and where there are none it is done here.
    os.sched_getaffinity = lambda pid: range(3)
    for number, allowed in ((3, 2), (5, 1), (7, 0)):
        forks = iter([fork] * allowed + [no_more] * 3)
        os.fork = lambda: next(forks)()
        start([late(number), late(number + 1)])
        assert bars[-1].n == bars[-1].total == 2
        workers = {pid for pid, _ in notes("parsed")[0]}
        assert len(workers) == 1 and (parent in workers) == (allowed < 2), workers
    assert loaded.count("_late_kernel") == 9 and no_children_left()

    # An interrupt leaves no process, while they are forked and while they compile.
    os.fork = interrupted
    assert fails(KeyboardInterrupt, [late(9)]) and no_children_left()
    os.fork, module._work = fork, interrupt
    assert fails(KeyboardInterrupt, [late(9)]) and no_children_left()
    ((worker, _),) = soon(lambda: notes("still")[0])
    assert soon(lambda: has_ended(worker))
    assert loaded.count("_late_kernel") == 9 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    module._work = work

    # A kernel's key in Triton's cache is the one that this process has found.
    def with_key():
        _late_kernel.hash = "a key"
        late(9)()

    notes()
    key = _late_kernel.hash
    start([with_key])
    assert [pid == parent for pid, _ in notes("parsed")[0]] == [False]
    _late_kernel.hash = key

    # What another process cannot know is compiled here, and none of the others runs a handler of signals.
    signal.signal(signal.SIGCHLD, lambda *args: note("handler", "SIGCHLD"))
    start([local, new, late(10)])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parsed, handlers = notes("parsed", "handler")
    assert {pid for pid, _ in handlers} == {parent}
    parsed = dict(map(reversed, parsed))
    assert parsed.pop("_late_kernel") != parent and parsed == {"_local_kernel": parent, "_new_kernel": parent}

    # Nor do many descriptors hinder, or children that nobody is told of; and none is left open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    told = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    start([late(11), late(12)])
    assert parent not in {pid for pid, _ in notes("parsed")[0]} and loaded.count("_late_kernel") == 13
    signal.signal(signal.SIGCHLD, told)
    assert open_descriptors() == descriptors | set(many)

    # Neither the processes that wait for kernels nor those that compile outlive an engine that is killed, and none
    # hears of Ctrl-C.
    module._work = stand_still
    for runs_now in ([], [late(13)]):
        engine = os.fork()
        if not engine:
            if not runs_now:
                # The end of the engine's end of the pipe suffices.
                module._PR_SET_PDEATHSIG = -1
            with Compilers() as compilers:
                compile_ahead(device, runs_now, compilers)
                note("idle", compilers._server)
                stand_still()
        (worker, server), = soon(lambda: notes("still" if runs_now else "idle")[0])
        processes = [int(server), *([worker] if runs_now else [])]
        for pid in processes:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
        assert not any(map(has_ended, processes))
        os.kill(engine, 9)
        os.waitpid(engine, 0)
        assert soon(lambda: all(map(has_ended, processes)))
    module._work = work

    # Ranks compile other kernels first, and all of them about once.
    module.compile_kernel, both_ranks = slow, multiprocessing.get_context("fork").Barrier(2)
    os.sched_getaffinity = lambda pid: range(2)
    notes()
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if not ranks[-1]:
            start([late(number) for number in range(13, 23)], rank, 2)
            os._exit(len(loaded) - 15 - len(kernels))
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks] == [10, 10]
    parsed = [pid for pid, _ in notes("parsed")[0]]
    assert len(set(parsed)) == 2 and not set(ranks) & set(parsed), parsed
    assert 10 <= len(parsed) <= 12 and min(map(parsed.count, parsed)) >= 2, parsed
    module.compile_kernel = compile_kernel

    # With another thread in the process, or CUDA, or without a GPU to use, nothing is forked: threads compile.
    os.fork = no_fork
    for owner, name, value in (
        (torch.cuda, "is_initialized", lambda: True), (torch.cuda, "device_count", lambda: 0),
        (module, "HAS_TRITON", False), (module.sys, "platform", "win32"),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        Compilers()
        setattr(owner, name, before)
    Compilers("cpu")
    ended = threading.Event()
    other = threading.Thread(target=ended.wait, daemon=True)
    other.start()
    notes()
    start([late(23), late(24), late(25)])
    threads, launchers = notes("thread", "launcher")
    assert len(threads) == 3 and len(set(threads)) == 2 and "MainThread" not in dict(threads).values(), threads
    assert {pid for pid, _ in threads} == {parent} and len(launchers) == 6, launchers

    # Engines that are made in two threads compile a kernel once.
    engines = [threading.Thread(target=start, args=([late(26)],)) for _ in range(2)]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join()
    assert [name for _, name in notes("parsed")[0]] == ["_late_kernel"]
    ended.set()
    other.join()

    # What was compiled before is loaded, by no process and no other thread.
    os.fork, loads, Compilers.compile, ahead.compile_kernel = fork, len(loaded), None, None
    start([*runs, late(0), late(1)])
    assert launched == kernels and len(loaded) == loads
    _late_kernel.device_caches.clear()
    start([late(0), late(1)])
    assert len(loaded) == loads + 2 and launched == kernels and no_children_left()
    print("passed")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes the place of the GPU's driver")
def test_kernels_are_compiled_and_loaded_once_and_not_launched(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PROGRAM))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "passed\n", done.stdout + done.stderr


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_begin_with_their_own_kernels_and_end_with_the_others(size: int) -> None:
    jobs = list(range(10))
    orders = [_shared_out(jobs, rank, size) for rank in range(size)]
    assert all(sorted(order) == jobs for order in orders)
    # Those that take long, which come first, are among the first of some rank; an equal share of each is all.
    assert {order[0] for order in orders} == set(range(size))
    shares = [order[: len(range(rank, 10, size))] for rank, order in enumerate(orders)]
    assert sorted(job for share in shares for job in share) == jobs and all(share == sorted(share) for share in shares)
    # What others do last is taken from them first.
    if size == 2:
        assert orders == [[0, 2, 4, 6, 8, 9, 7, 5, 3, 1], [1, 3, 5, 7, 9, 8, 6, 4, 2, 0]]


def test_an_engine_makes_its_compilers_first_and_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order = MagicMock()

    @contextmanager
    def start_ranks(config: Config) -> Iterator[None]:
        order.start_ranks()
        yield

    def make_runner(*args: object, compilers: object, **settings: object) -> None:
        assert compilers is order.Compilers.return_value.__enter__.return_value
        raise KeyError("the runner's own")

    order.Compilers.return_value.__exit__.return_value = False
    monkeypatch.setattr(loading, "Compilers", order.Compilers)
    monkeypatch.setattr(loading, "start_ranks", start_ranks)
    monkeypatch.setattr(loading, "ModelRunner", make_runner)
    with pytest.raises(KeyError, match="the runner's own"):
        LLM(BUNDLED_MODEL, device="cpu")
    names = [name for name, _, _ in order.mock_calls]
    assert order.mock_calls[0] == call.Compilers("cpu") and names.index("start_ranks") < len(names) - 1
    assert names[-1] == "Compilers().__exit__"


def test_a_rank_makes_its_compilers_before_its_threads_and_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    order = MagicMock()
    replaced = (
        "Compilers",
        "Connection",
        "Receiver",
        "ModelRunner",
        "connect",
        "find_store",
        "step_limits",
        "end_with_parent",
    )
    for name in replaced:
        monkeypatch.setattr(rank, name, getattr(order, name))
    # It would end this process.
    monkeypatch.setattr(rank, "os", SimpleNamespace(_exit=order.exit_process))
    plan = rank.WorkerPlan(Config("none", device="cpu"), MagicMock(), "none", 1, 0)
    order.Receiver.return_value.receive.side_effect = [plan, None]
    rank.run_worker(1, 2, 0, 0, 0)
    names = [name for name, _, _ in order.mock_calls]
    assert names.index("Compilers") < names.index("end_with_parent")
    assert order.ModelRunner.call_args.kwargs["compilers"] is order.Compilers.return_value
    assert names.index("ModelRunner") < names.index("Compilers().__exit__") < names.index("ModelRunner().exit")
    assert names[-1] == "exit_process" and order.exit_process.call_args == call(0)
