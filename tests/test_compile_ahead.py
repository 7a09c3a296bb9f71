"""Kernels compiled by processes before their first launch, for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

PROGRAM = """
    import os
    import resource
    import signal
    import sys
    import threading
    import time
    from functools import partial
    import torch
    from triton._C.libtriton import llvm
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime import driver

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

    driver.set_active(Driver())
    torch.cuda.set_device = lambda device: None

    import nanovllm.kernels.compile_ahead as module
    from nanovllm.kernels._triton import jit, tl
    from nanovllm.kernels.compile_ahead import compile_ahead
    from nanovllm.kernels.hopper_attention import hopper_prefill_attention
    from nanovllm.kernels.hopper_batch_linear import batch_linear
    from nanovllm.kernels.hopper_decode import hopper_decode_attention, plan_hopper_decode
    from nanovllm.kernels.hopper_linear import hopper_gated_linear, hopper_qkv_rope_store
    from nanovllm.kernels.prefix_attention import SharedPrefixes
    from nanovllm.kernels.rms_norm import rms_norm_triton
    from nanovllm.kernels.silu_mul import silu_mul_triton

    x, device = torch.zeros(4, 64), torch.device("cpu")
    half = torch.zeros(256, 128, dtype=torch.bfloat16)
    heads, cache, ints = half.view(128, 4, 64), half.view(1, 256, 2, 64), torch.zeros(1, 2, dtype=torch.int32)
    whole = plan_hopper_decode(ints[0] + 1, 4, 2, 64, 1)
    shared = SharedPrefixes(torch.zeros(1, 4, dtype=torch.int32), ints[0], torch.zeros(3, 2, dtype=torch.int32))
    behind = plan_hopper_decode(ints[0] + 1, 4, 2, 64, 2, shared)
    runs = [
        partial(hopper_gated_linear, half, half, 132),
        partial(batch_linear, half, half, True),
        partial(hopper_prefill_attention, heads, cache, cache, heads, ints, ints[0], ints[0], ints[0], 1.0, 132),
        partial(hopper_decode_attention, heads, cache, cache, heads, ints, ints[0], whole, 1.0),
        partial(
            hopper_decode_attention, half.view(64, 8, 64), cache, cache, heads[:64], ints, ints[0], whole, 1.0,
            ((half[0], half[0]), 1e-6, x),
        ),
        partial(hopper_decode_attention, heads, cache, cache, heads, ints, ints[0], behind, 1.0),
        partial(
            hopper_qkv_rope_store, half, torch.zeros(512, 128, dtype=torch.bfloat16), (half[0], half[0]), 1e-6, x,
            ints[0], cache.view(1, 256, 1, 128), cache.view(1, 256, 1, 128), ints[0], 132,
        ),
        partial(rms_norm_triton, x, x[0], 1e-6, x),
        partial(silu_mul_triton, x),
        partial(silu_mul_triton, half),
    ]
    kernels = [
        "_gated_linear_kernel", "_batch_linear_kernel", "_hopper_prefill_kernel", "_hopper_decode_kernel",
        "_hopper_decode_kernel", "_prefix_kernel", "_hopper_decode_kernel", "_merge_splits_kernel", "_qkv_kernel",
        "_rms_norm_kernel", "_silu_mul_kernel", "_silu_mul_kernel",
    ]

    def fails(error, runs):
        try:
            compile_ahead(device, runs)
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

    def noted(parse):
        def make_ir(source, *args):
            note("parsed", source.fn.__name__)
            return parse(source, *args)

        return make_ir

    def not_linked(*args):
        raise AssertionError("kernels of attention and norms do without the library of device functions")

    def stop(*args):
        os.kill(os.getpid(), 9)

    def stand_still(*args):
        time.sleep(100)

    def noted_and_still(*args):
        note("still", "_")
        stand_still()

    def soon(ask):
        end = time.monotonic() + 20
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

    def no_fork():
        raise AssertionError("all is compiled")

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

    # A start that went wrong, a failing run, and a kernel that does not compile leave nothing behind.
    start, module._empty_kernel = module._empty_kernel, None
    assert fails(KeyError, [*runs, fail]) and not loaded
    assert fails(CompilationError, [fail_to_compile]) and no_children_left()
    assert [pid == parent for pid, name in notes("parsed")[0]] == [False, True]
    module._empty_kernel = start

    descriptors = open_descriptors()

    # Each is compiled once, by one of the processes, and so is its launcher; and loaded once, here.
    compile_ahead(device, runs * 2)
    assert sorted(loaded) == sorted(kernels) and not launched and no_children_left(), (loaded, launched)
    parsed, launchers = notes("parsed", "launcher")
    assert sorted(name for _, name in parsed) == sorted(kernels), parsed
    workers = {pid for pid, _ in parsed}
    assert (len(workers) > 1) == (len(os.sched_getaffinity(0)) > 1) and parent not in workers, parsed
    assert sorted(name for pid, name in launchers if pid in workers) == sorted(kernels), launchers
    for run in runs:
        run()
    assert launched == kernels and sorted(loaded) == sorted(kernels), (loaded, launched)

    # What processes do not do for being killed, or for standing still, is done here.
    compile_some, patience, module._PATIENCE_SECONDS = module._compile_some, module._PATIENCE_SECONDS, 1.0
    for number, module._compile_some in enumerate((stop, stand_still)):
        compile_ahead(device, [late(number)])
        assert loaded.count("_late_kernel") == number + 1 and no_children_left()
    module._compile_some, module._PATIENCE_SECONDS = compile_some, patience

    # Where there are fewer processes than cores they do it all, and where there are none it is done here.
    fork, module.os.sched_getaffinity = os.fork, lambda pid: range(3)
    forks = iter([fork, no_more, no_more])
    os.fork = lambda: next(forks)()
    notes()
    for number in (2, 4):
        compile_ahead(device, [late(number), late(number + 1)])
        workers = {pid for pid, _ in notes("parsed")[0]}
        assert len(workers) == 1 and (parent in workers) == (number == 4), workers
    assert loaded.count("_late_kernel") == 6 and no_children_left()

    # An interrupt while processes are forked leaves none.
    os.fork = interrupted
    assert fails(KeyboardInterrupt, [late(6)]) and no_children_left()
    assert loaded.count("_late_kernel") == 6 and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    # Nor do many descriptors hinder, or children that nobody is told of; and none is left open.
    os.fork = fork
    resource.setrlimit(resource.RLIMIT_NOFILE, (1500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    told = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    notes()
    compile_ahead(device, [late(6), late(7)])
    assert parent not in {pid for pid, _ in notes("parsed")[0]} and loaded.count("_late_kernel") == 8
    signal.signal(signal.SIGCHLD, told)
    assert open_descriptors() == descriptors | set(many)

    # Engines that are made in two threads compile a kernel once, in a process.
    threads = [threading.Thread(target=compile_ahead, args=(device, [late(8)])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (worker, name), = notes("parsed")[0]
    assert worker != parent and name == "_late_kernel" and loaded.count(name) == 9

    # A process does not outlive an engine that is killed.
    module._compile_some = noted_and_still
    engine = os.fork()
    if not engine:
        compile_ahead(device, [late(9)])
        os._exit(0)
    still = soon(lambda: notes("still")[0])
    os.kill(engine, 9)
    os.waitpid(engine, 0)
    assert soon(lambda: has_ended(still[0][0]))
    module._compile_some = compile_some

    # What was compiled before is loaded, by no process.
    os.fork = no_fork
    compile_ahead(device, [*runs, late(0), late(1)])
    assert launched == kernels
    _late_kernel.device_caches.clear()
    compile_ahead(device, [late(0), late(1)])
    assert loaded.count("_late_kernel") == 11 and launched == kernels
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
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "passed\n", done.stdout + done.stderr
