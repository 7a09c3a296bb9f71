"""Every kernel of an engine's start, compiled for GPUs that are not there.

Each must fit into the device's shared memory, and no loop may spill its registers. `.ci/compat` tests two starts, of
20 s each; `pytest tests/test_portability.py -m all_devices` tests the others, a quarter of an hour. The kernels are
compiled by the installed Triton, or by each `--triton FOLDER`, unpacked by `pip install --no-deps --target
FOLDER triton==VERSION`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.fake_device import SHARED_KIB

ROOT = Path(__file__).parents[1]
MAX_SPILLED_BYTES = 64
SOME = [("90", "0.6B", "bfloat16"), ("86", "8B", "float16")]
DEVICES = [capability for capability in SHARED_KIB if capability != "75"]
EARLY = {"_rms_norm_kernel", "_gemv_kernel", "_hopper_decode_kernel", "_persistent_gated_kernel"}
"""Some of the kernels that start before the previous one ends, unless they are told to wait."""
ALL = [
    *product(DEVICES, ["0.6B", "8B"], ["bfloat16", "float16"]), *product(DEVICES, ["0.6B"], ["float32"]),
    *product(DEVICES, ["30B-A3B"], ["bfloat16", "float32"]), *product(["80", "90"], ["OLMo-7B"], ["bfloat16"]),
    *product(["80", "89", "90"], ["30B-A3B-fp8", "30B-A3B-fp8-block"], ["bfloat16", "float32"]),
    *product(["86"], ["heads-96", "heads-256", "heads-512"], ["bfloat16", "float32"]),
    *product(["90"], ["heads-256", "heads-512"], ["bfloat16"]),
]  # fmt: skip


def start(tmp_path: Path, *arguments: str, triton: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # What is in the cache is not compiled, and then ptxas says nothing.
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    # What Triton 3.10 assumes.
    environment |= {"TRITON_DEFAULT_FP_FUSION": "0"} | variables
    if triton:
        environment["PYTHONPATH"] = os.pathsep.join([triton, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.fake_device", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def read(done: subprocess.CompletedProcess[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return Triton's version and the kernels."""
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    return compiled["triton"], compiled["kernels"]


def check_fit(kernels: list[dict[str, Any]], capability: str) -> None:
    for kernel in kernels:
        assert kernel["shared_bytes"] <= 1024 * SHARED_KIB[capability], kernel
        assert kernel["fp_fusion"], kernel
        assert not kernel["loops"] or kernel["spilled_bytes"] <= MAX_SPILLED_BYTES, kernel


def skip_if_slow(triton: str, request: pytest.FixtureRequest) -> None:
    if not triton and not request.config.getoption("markexpr"):
        pytest.skip("takes 20 s; .ci/compat compiles this with a Triton that is allowed")


@pytest.mark.parametrize(
    ("capability", "size", "dtype"),
    [*SOME, *(pytest.param(*case, marks=pytest.mark.all_devices) for case in ALL if case not in SOME)],
)
def test_kernels_fit_the_device(
    capability: str, size: str, dtype: str, triton: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    skip_if_slow(triton, request)
    version, kernels = read(start(tmp_path, capability, size, dtype, triton=triton))
    # The installed one could take its place unnoticed.
    assert not triton or (Path(triton) / f"triton-{version}.dist-info").is_dir(), version
    is_usual = not size.startswith("heads-")
    is_hopper = is_usual and capability == "90" and dtype != "float32"
    needed = {"_hopper_prefill_kernel", "_hopper_decode_kernel"} if is_hopper else {"_prefill_kernel", "_decode_kernel"}
    if (capability, size, dtype) == ("90", "heads-256", "bfloat16"):
        needed = {"_hopper_prefill_kernel", "_decode_kernel"}
    needed |= {"_cascade_kernel", "_draw_kernel"} if is_usual else {"_draw_kernel"}
    assert needed <= {kernel["name"] for kernel in kernels} and len(kernels) >= (20 if is_usual else 16)
    mixture = {"_choose_experts_kernel", "_down_gemv_kernel", "_place_slots_kernel", "_grouped_gemm_kernel"}
    assert not size.startswith("30B-A3B") or mixture <= {kernel["name"] for kernel in kernels}
    assert not is_hopper or all(kernel["launch_pdl"] for kernel in kernels if kernel["name"] in EARLY)
    check_fit(kernels, capability)
    assert (capability, size, dtype) != SOME[0] or all(kernel["conflicts"] <= 1 for kernel in kernels), kernels


def test_experts_in_e4m3_fit_the_device_beside_rows_of_32_bits(
    triton: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    skip_if_slow(triton, request)
    names = {"_expert_gemm_kernel", "_grouped_gemm_kernel"}
    _, kernels = read(start(tmp_path, "86", "30B-A3B-fp8-block", "float32", "1", *names, triton=triton))
    assert {kernel["name"] for kernel in kernels} == names
    check_fit(kernels, "86")


@pytest.mark.compat
@pytest.mark.parametrize(
    ("size", "names"),
    [("8B-int4", {"_skinny_four_bit_kernel"}), ("30B-A3B-int4", {"_skinny_experts_kernel"})],
)
def test_products_with_weights_in_four_bits_fit_the_device(size: str, names: set[str], tmp_path: Path) -> None:
    """They also compile only if operands of the matrix instruction are where the loads put them."""
    for capability in ("86", "90"):
        names |= {"_hopper_four_bit_kernel"} if capability == "90" else set()
        _, kernels = read(start(tmp_path / capability, capability, size, "bfloat16", "1", *names))
        assert {kernel["name"] for kernel in kernels} == names
        check_fit(kernels, capability)


@pytest.mark.compat
def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, "90", "0.6B", "bfloat16", NANOVLLM_PDL="off")
    assert "ValueError: NANOVLLM_PDL must be 'wait' or not set, not 'off'" in done.stderr


@pytest.mark.compat
def test_kernels_wait_and_use_relaxed_accesses(tmp_path: Path) -> None:
    """A plain store may be taken apart, and races with the other GPU's load."""
    words = ["ld.relaxed.sys.global.v2.b64", "st.relaxed.sys.global.v2.b64"]
    signals, abort = ["ld.acquire.sys.global.u32", "st.release.sys.global.u32"], ["ld.volatile.global.b32"]
    wanted: dict[str, list[str]] = {
        "_one_shot_kernel": sorted(words + abort),
        "_all_reduce_argmax_kernel": sorted(words + abort),
        "_two_shot_kernel": sorted(signals + abort),
        "_gemv_kernel": [],
        "_persistent_gated_kernel": [],
    }
    assert set(wanted) & EARLY
    _, kernels = read(start(tmp_path, "90", "0.6B", "bfloat16", "2", *wanted, NANOVLLM_PDL="wait"))
    assert {kernel["name"] for kernel in kernels} == set(wanted)
    for kernel in kernels:
        assert kernel["accesses"] == wanted[kernel["name"]] and not kernel["launch_pdl"], kernel
        assert not kernel["accesses"] or not kernel["spilled_bytes"], kernel


@pytest.mark.compat
def test_norms_in_float32_compile_for_several_ranks(tmp_path: Path) -> None:
    names = {"_one_shot_kernel", "_two_shot_kernel", "_delta_rule_step_kernel"}
    _, kernels = read(start(tmp_path, "90", "3.5-4B", "bfloat16", "2", *names))
    assert {kernel["name"] for kernel in kernels} == names
