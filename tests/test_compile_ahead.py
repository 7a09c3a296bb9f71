"""Kernels compiled in threads before their first launch, for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

PROGRAM = """
    import gc
    import sys
    import time
    from functools import partial
    import torch
    from triton._C.libtriton import llvm
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.errors import CompilationError
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime import driver

    launched, loaded, begun = [], [], set()

    class Launcher:
        def __init__(self, source, metadata):
            self.name = source.fn.__name__
            # Others would find what the first leaves in Triton's cache.
            assert self.name not in begun
            begun.add(self.name)
            time.sleep(0.5)
            begun.remove(self.name)

        def __call__(self, *args, **kwargs):
            launched.append(self.name)

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
            return gc.isenabled() and sys.getswitchinterval() == interval
        return False

    def fail():
        raise KeyError("a run's own")

    @jit
    def _wrong_kernel(x_ptr):
        tl.store(x_ptr, undefined)

    def fail_to_compile():
        _wrong_kernel[(1,)](x)

    parsing = []

    def counted(parse):
        def make_ir(*args):
            parsing.append(1)
            assert len(parsing) == 1
            try:
                time.sleep(0.01)
                return parse(*args)
            finally:
                parsing.clear()

        return make_ir

    def not_linked(*args):
        raise AssertionError("kernels of attention and norms do without the library of device functions")

    ASTSource.make_ir, GluonASTSource.make_ir = counted(ASTSource.make_ir), counted(GluonASTSource.make_ir)
    llvm.link_extern_libs = not_linked
    interval = sys.getswitchinterval()

    # A start that went wrong, a failing run, and a kernel that does not compile leave nothing behind.
    start, module._empty_kernel = module._empty_kernel, None
    assert fails(KeyError, [*runs, fail]) and not loaded
    assert fails(CompilationError, [fail_to_compile])
    module._empty_kernel = start
    compile_ahead(device, runs * 2)
    assert gc.isenabled() and sys.getswitchinterval() == interval
    assert sorted(loaded) == sorted(kernels) and not launched, (loaded, launched)
    for run in runs:
        run()
    assert launched == kernels and sorted(loaded) == sorted(kernels), (loaded, launched)
    # Compiled before is no obstacle.
    compile_ahead(device, runs)
    assert launched == kernels
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "passed\n", done.stdout + done.stderr
