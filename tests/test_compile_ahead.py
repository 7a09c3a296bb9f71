"""Kernels compiled by threads before their first launch, for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.compile_ahead import _shared_out

PROGRAM = """
    import os
    import threading
    from functools import partial
    import torch
    from triton._C.libtriton import llvm
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime import driver
    from tests.fake_device import Driver

    launched, loaded, notes = [], [], []

    class Launcher:
        def __init__(self, source, metadata):
            self.name = source.fn.__name__
            notes.append(("launcher", threading.current_thread().name, self.name))

        def __call__(self, *args, **kwargs):
            launched.append(self.name)

    class Utils:
        def load_binary(self, name, *args):
            loaded.append(name)
            return 1, 2, 32, 0, 1024

        def get_device_properties(self, device):
            return {"max_shared_mem": 232448}

    class LaunchingDriver(Driver):
        launcher_cls, utils = Launcher, Utils()

        def get_active_torch_device(self):
            return torch.device("cpu")

    def noted(*kinds):
        "Take the notes: for each kind, the threads and the kernels."
        taken = [[note[1:] for note in notes if note[0] == kind] for kind in kinds]
        notes.clear()
        return taken

    driver.set_active(LaunchingDriver(90))
    torch.cuda.set_device = lambda device: None

    import nanovllm.kernels.compile_ahead as ahead
    from nanovllm.kernels._triton import jit, tl
    from nanovllm.kernels.compile_ahead import compile_ahead
    from nanovllm.kernels.linear.splitk_gemm import splitk_gemm
    from nanovllm.kernels.attention.decode_attention import plan_decode
    from nanovllm.kernels.attention.hopper_decode import hopper_decode_attention
    from nanovllm.kernels.attention.cascade_attention import CascadeGroups
    from nanovllm.kernels import gates, rms_norm
    from nanovllm.kernels.qkv_rope_store import KVPages

    rms_norm.uses_triton = gates.uses_triton = lambda device: True
    x, device = torch.zeros(4, 64), torch.device("cpu")
    half = torch.zeros(256, 128, dtype=torch.bfloat16)
    heads, cache, ints = half.view(128, 4, 64), half.view(1, 256, 2, 64), torch.zeros(1, 2, dtype=torch.int32)
    whole = plan_decode(ints[0] + 1, 4, 2, 64, 64, 1)
    shared = CascadeGroups(torch.zeros(1, 4, dtype=torch.int32), ints[0], torch.zeros(3, 2, dtype=torch.int32))
    after_prefix = plan_decode(ints[0] + 1, 4, 2, 64, 64, 2, shared=shared)
    pages = KVPages(cache, cache)
    # Plans have launched kernels of their own.
    for seen in (launched, loaded, notes):
        seen.clear()
    runs = [
        partial(splitk_gemm, half, half, True),
        partial(hopper_decode_attention, heads, pages, heads, ints, ints[0], whole, 1.0),
        partial(hopper_decode_attention, heads, pages, heads, ints, ints[0], after_prefix, 1.0),
        partial(rms_norm.rms_norm, x, x[0], 1e-6, x),
        partial(gates.silu_and_mul, x),
        partial(gates.silu_and_mul, half),
    ]
    kernels = [
        "_splitk_gemm_kernel", "_hopper_decode_kernel", "_cascade_kernel", "_hopper_decode_kernel",
        "_merge_splits_kernel", "_rms_norm_kernel", "_silu_and_mul_kernel", "_silu_and_mul_kernel",
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

    start = partial(compile_ahead, device)

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

    def noting(parse):
        def make_ir(source, *args):
            notes.append(("parsed", threading.current_thread().name, source.fn.__name__))
            return parse(source, *args)

        return make_ir

    def not_linked(*args):
        raise AssertionError("kernels of attention and norms do without the library of device functions")

    ASTSource.make_ir, GluonASTSource.make_ir = noting(ASTSource.make_ir), noting(GluonASTSource.make_ir)
    llvm.link_extern_libs = not_linked
    os.sched_getaffinity = lambda pid: range(2)

    # Triton's failing start, a failing run, and a kernel that does not compile, which the caller compiles again.
    empty, ahead.empty_kernel = ahead.empty_kernel, None
    assert fails(KeyError, [late(-1), fail]) and not loaded
    assert fails(CompilationError, [late(-1), fail_to_compile]) and loaded == ["_late_kernel"], loaded
    assert sorted(name for _, name in noted("parsed")[0]) == ["_late_kernel", "_wrong_kernel", "_wrong_kernel"]
    ahead.empty_kernel = empty
    ahead.compiler_ready.cache_clear()
    loaded.clear()

    # Each kernel and its launcher is compiled once, by a thread, and loaded once.
    ahead._COMPILES_LAUNCHERS = True
    start(runs * 2)
    assert sorted(loaded) == sorted(kernels) and not launched, (loaded, launched)
    assert bars[-1].n == bars[-1].total == len(kernels)
    parsed, launchers = noted("parsed", "launcher")
    parsed = [note for note in parsed if note[1] != "empty_kernel"]
    assert sorted(name for _, name in parsed) == sorted(kernels), parsed
    assert len({thread for thread, _ in parsed}) == 2 and "MainThread" not in dict(parsed), parsed
    compiled = [name for thread, name in launchers if thread != "MainThread"]
    assert sorted(compiled) == sorted(kernels), launchers
    for run in runs:
        run()
    assert launched == kernels and sorted(loaded) == sorted(kernels), (loaded, launched)

    # What a kernel would have written is zeros, since torch's kernels read at such indices.
    def write_zeros():
        written = torch.full((64,), 9)
        del written
        written = torch.empty(64, dtype=torch.int64)
        late(0)()
        notes.append(("written", int(written.abs().max())))

    start([write_zeros])
    assert noted("written") == [[(0,)]]

    # Engines that are made in two threads compile a kernel once.
    engines = [threading.Thread(target=start, args=([late(26)],)) for _ in range(2)]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join()
    assert [name for _, name in noted("parsed")[0]] == ["_late_kernel"]

    # Kernels in Triton's cache are loaded, and no thread starts.
    ahead.ThreadPoolExecutor, loads = None, len(loaded)
    start([*runs, late(26)])
    assert launched == kernels and len(loaded) == loads
    _late_kernel.device_caches.clear()
    start([late(26)])
    assert len(loaded) == loads + 1 and launched == kernels
    print("passed")
"""


@pytest.mark.compat
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
