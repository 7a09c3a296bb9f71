"""Linear layers of few rows with weights in four bits, which become operands of the tensor cores in registers.

Reading the weights bounds them. A program requests the weights of several steps of each warp before `gdc_wait`; its
warps have other inputs each. A thread loads 16 bytes, 32 inputs, of an output, and the same inputs of a row: the four
threads of an output have other inputs than `mma_v2` says, but in weights and rows alike. Outputs are the rows of the
instruction, 16, and rows its columns, 8. One scale for 128 inputs or more multiplies sums; others multiply values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm.kernels._gluon import async_copy, async_load, barrier, gl, gluon, kernel, mma_v2, reinterpret
from nanovllm.kernels._triton import device_limits, pdl_options, triton, wait_for_previous
from nanovllm.kernels.fast_math import pack_pair, round_to, rsqrt
from nanovllm.kernels.four_bits import RUN, FourBitMatrix, from_e2m1, from_int4, widen_scales
from nanovllm.kernels.policy import MAX_SKINNY_ROWS
from nanovllm.kernels.rms_norm import Norm, rms_norm

_RUN = gl.constexpr(RUN)
_RUN_WORDS = gl.constexpr(RUN // 8)
_STEP_RUNS = gl.constexpr(4)
"""Runs of inputs of a warp and step: one for each of the four threads of an output."""
_STEP_INS = 4 * RUN

_REGISTERS = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r")
_INT4_TO_BF16 = gl.constexpr(from_int4("bf16x2", "0x3f803f80", "0x43004300", "$5"))
_INT4_TO_F16 = gl.constexpr(from_int4("f16x2", "0x3c003c00", "0x64006400", "$5"))
_SCALED_INT4_TO_BF16 = gl.constexpr(from_int4("bf16x2", "0x3f803f80", "0x43004300", "$5", "$6"))
_SCALED_INT4_TO_F16 = gl.constexpr(from_int4("f16x2", "0x3c003c00", "0x64006400", "$5", "$6"))
_E2M1_TO_BF16 = gl.constexpr(from_e2m1("bf16x2", 6, "0x81c081c0", "$5", "$6"))
_E2M1_TO_F16 = gl.constexpr(from_e2m1("f16x2", 9, "0x0e000e00", "$5", "$6"))


@gluon.constexpr_function
def _layout_of(warps, size):
    """Return the layout of [warps, outputs or rows, runs, a run's elements], `size` of them in a thread."""
    return gl.BlockedLayout([1, 1, 1, size], [1, 8, 4, 1], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def mma_layout(warps):
    """Return the layout of sums, [warps, outputs, rows]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def row_layout(warps):
    """Return the layout of `row_ptrs`' rows."""
    return gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, _layout_of(warps, RUN))))


@gluon.constexpr_function
def _is_summed(scale_ins, number_format):
    return number_format == "int4" and scale_ins >= 128


@gluon.jit
def _runs(WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the runs of the first step, [WARPS, 1, 4], in a slice of the layout."""
    RUNS: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    warps = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, RUNS)))
    own = gl.arange(0, _STEP_RUNS, gl.SliceLayout(0, gl.SliceLayout(1, RUNS)))
    warps = gl.expand_dims(gl.expand_dims(warps * _STEP_RUNS, 1), 2)
    return warps + gl.expand_dims(gl.expand_dims(own, 0), 1)


@gluon.jit
def _second_index(NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    index = gl.arange(0, NUMBER, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    return gl.expand_dims(gl.expand_dims(index, 0), 2)


@gluon.jit
def _with_elements(offsets, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    index = gl.arange(0, NUMBER, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    return gl.expand_dims(offsets, 3) + gl.expand_dims(gl.expand_dims(gl.expand_dims(index, 0), 1), 2)


@gluon.jit
def _outputs_of(index, first_row, first_out, out_features, OUTS: gl.constexpr, GATED: gl.constexpr):
    """Return the rows of a tile's outputs, an expert's from `first_row` on; if gated, the second half is up's."""
    # Outputs beyond the end repeat the last.
    HALF: gl.constexpr = OUTS // 2 if GATED else OUTS
    outs = gl.minimum(first_out + index % HALF, out_features - 1)
    return (outs + index // HALF * out_features).to(gl.int64) + first_row


@gluon.jit
def _load_step(
    sources, step, num_runs, WARPS: gl.constexpr, HAS_ZEROS: gl.constexpr, SCALE_INS: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Load a step's words, [WARPS, OUTS, 4, 4], scales, scales of bytes' high halves, and zeros.

    High scales and zeros are the words where a format has none. sources: pointers to the first word, scale and zero of
    outputs, and the runs, and the groups, of the first step; num_runs: runs that are loaded, zeros are the others.
    """
    word_ptrs, scale_ptrs, zero_ptrs, runs, groups = sources
    run = step * (WARPS * _STEP_RUNS)
    is_run = run + runs < num_runs
    # Integers that are zero.
    nothing: gl.constexpr = -0x77777778 if FORMAT == "int4" else 0
    is_word = gl.expand_dims(is_run, 3)
    words = gl.load(word_ptrs + run * _RUN_WORDS, mask=is_word, other=nothing, eviction_policy="evict_first")
    high_scales = words
    zeros = words
    if _is_summed(SCALE_INS, FORMAT):
        group = step * WARPS + groups
        is_group = group * _STEP_RUNS < num_runs
        scales = gl.load(scale_ptrs + group * 128 // SCALE_INS, mask=is_group, other=0)
    elif SCALE_INS == 16:
        scales = gl.load(scale_ptrs + (run + runs) * 2, mask=is_run, other=0)
        high_scales = gl.load(scale_ptrs + (run + runs) * 2 + 1, mask=is_run, other=0)
    else:
        scales = gl.load(scale_ptrs + (run + runs) * _RUN // SCALE_INS, mask=is_run, other=0)
    if HAS_ZEROS:
        zeros = gl.load(zero_ptrs + (run + runs) * _RUN // SCALE_INS, mask=is_run, other=8)
    return words, scales, high_scales, zeros


@gluon.jit
def _pairs_of_scales(scales, words, dtype: gl.constexpr, FORMAT: gl.constexpr):
    """Return scales twice in a register beside words; of e2m1 times what its exponents lack but `sum_factor`."""
    if FORMAT != "int4":
        scales = widen_scales(scales, FORMAT) * (2.0**94 if dtype == gl.bfloat16 else 2.0**6)
    else:
        scales = scales.to(gl.float32)
    _, pairs = gl.broadcast(words, gl.expand_dims(pack_pair(scales, scales, dtype), len(scales.shape)))
    return pairs


@gluon.constexpr_function
def sum_factor(dtype, number_format):
    """Return what multiplies sums: scales of e2m1 were smaller, so as not to overflow."""
    if number_format == "int4":
        return 1.0
    return 2.0**32 if dtype == gl.bfloat16 else 2.0**8


@gluon.jit
def _assemble(to_bf16: gl.constexpr, to_f16: gl.constexpr, words, first, second, dtype: gl.constexpr):
    """Return values of words, [WARPS, OUTS, 4, 4], as `dtype`, [..., halves of bytes, pairs, 2], by assembly for it."""
    asm: gl.constexpr = to_bf16 if dtype == gl.bfloat16 else to_f16
    low, low_next, high, high_next = gl.inline_asm_elementwise(
        asm, _REGISTERS, [words, first, second], (gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    pairs = gl.join(gl.join(low, high), gl.join(low_next, high_next))
    first = pairs.to(gl.int16).to(dtype, bitcast=True)
    return gl.join(first, (pairs >> 16).to(gl.int16).to(dtype, bitcast=True))


@gluon.jit
def widen_words(
    loaded, dtype: gl.constexpr, IS_SCALED: gl.constexpr, HAS_ZEROS: gl.constexpr, SCALE_INS: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Return values of words, [..., a run's words], as `dtype`, [..., words, halves, pairs, 2]: integers minus zeros.

    loaded: see `_load_step`, scales and zeros without the last dimension; IS_SCALED: whether values of integers are.
    """
    words, scales, high_scales, zeros = loaded
    if FORMAT == "int4":
        # The number's sign and exponent, with the zero as its last bits, twice.
        BASE: gl.constexpr = -0x3CFF3D00 if dtype == gl.bfloat16 else -0x1BFF1C00
        if HAS_ZEROS:
            _, minus = gl.broadcast(words, gl.expand_dims(zeros.to(gl.int32) * 0x10001 + BASE, len(zeros.shape)))
        else:
            minus = gl.full(words.shape, 8 * 0x10001 + BASE, gl.int32, words.type.layout)
        if IS_SCALED:
            pairs = _pairs_of_scales(scales, words, dtype, FORMAT)
            values = _assemble(_SCALED_INT4_TO_BF16, _SCALED_INT4_TO_F16, words, minus, pairs, dtype)
        else:
            values = _assemble(_INT4_TO_BF16, _INT4_TO_F16, words, minus, minus, dtype)
    else:
        pairs = _pairs_of_scales(scales, words, dtype, FORMAT)
        high_pairs = pairs
        if SCALE_INS == 16:
            high_pairs = _pairs_of_scales(high_scales, words, dtype, FORMAT)
        values = _assemble(_E2M1_TO_BF16, _E2M1_TO_F16, words, pairs, high_pairs, dtype)
    return values


@gluon.jit
def _weight_operand(values, MMA: gl.constexpr):
    """Return values of `widen_words` as the first operand, [WARPS, OUTS, 128]; threads keep theirs."""
    # A thread of `mma_v2` has elements 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 of each 16: here four next ones of its run.
    ordered = gl.reshape(gl.permute(values, (0, 1, 4, 3, 5, 2, 6)), [values.shape[0], values.shape[1], 128])
    return gl.convert_layout(ordered, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _row_operand(x, MMA: gl.constexpr):
    """Return inputs of rows, [WARPS, ROWS, 4, 32], as the second operand, [WARPS, 128, ROWS], in the same order."""
    WARPS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    parts = gl.reshape(x, [WARPS, ROWS, 4, 2, 4, 2, 2])
    ordered = gl.reshape(gl.permute(parts, (0, 3, 4, 5, 2, 6, 1)), [WARPS, 128, ROWS])
    return gl.convert_layout(ordered, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def _multiply_step(acc, loaded, x, HAS_ZEROS: gl.constexpr, SCALE_INS: gl.constexpr, FORMAT: gl.constexpr):
    MMA: gl.constexpr = acc.type.layout
    IS_SUMMED: gl.constexpr = _is_summed(SCALE_INS, FORMAT)
    values = widen_words(loaded, x.dtype, not IS_SUMMED, HAS_ZEROS, SCALE_INS, FORMAT)
    weight, rows = _weight_operand(values, MMA), _row_operand(x, MMA)
    if IS_SUMMED:
        _words, scales, _high_scales, _zeros = loaded
        part = mma_v2(weight, rows, gl.zeros(acc.shape, gl.float32, MMA))
        acc += part * gl.expand_dims(scales.to(gl.float32), 2)
    else:
        acc = mma_v2(weight, rows, acc)
    return acc


@gluon.jit
def row_ptrs(x_ptr, rows, IN: gl.constexpr):
    """Return pointers to rows, [1, ROWS, 1, 1]."""
    offsets = gl.expand_dims(gl.expand_dims(rows.to(gl.int64) * IN, 0), 2)
    return x_ptr + gl.expand_dims(offsets, 3)


@gluon.jit
def _load_rows(x_ptrs, step, IN: gl.constexpr, WARPS: gl.constexpr):
    """Load a step's inputs of rows, [WARPS, ROWS, 4, 32]; beyond the end the last run, times zero weights."""
    LAYOUT: gl.constexpr = _layout_of(WARPS, _RUN)
    runs = gl.minimum(step * (WARPS * _STEP_RUNS) + _runs(WARPS, LAYOUT), IN // _RUN - 1)
    return gl.load(x_ptrs + _with_elements(runs * _RUN, _RUN, LAYOUT))


@gluon.jit
def _share_row(
    x_ptr, residual_ptr, norm_weight_ptr, total_ptr, eps,
    IN: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Bring one row into shared memory, [STEPS, WARPS, 4, 32], after residual and norm, if there are."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ins = gl.arange(0, STEPS * WARPS * _STEP_RUNS * _RUN, gl.BlockedLayout([8], [32], [WARPS], [0]))
    is_in = ins < IN
    if norm_weight_ptr is not None:
        norm_weight = gl.load(norm_weight_ptr + ins, mask=is_in, other=0.0)
    wait_for_previous(PDL)
    x = gl.load(x_ptr + ins, mask=is_in, other=0.0)
    if residual_ptr is not None:
        # Every intermediate value is rounded as by separate ops.
        residual = gl.load(residual_ptr + ins, mask=is_in, other=0.0)
        x = (x.to(gl.float32) + residual.to(gl.float32)).to(dtype)
        if gl.program_id(0) == 0:
            gl.store(total_ptr + ins, x, mask=is_in)
    if norm_weight_ptr is not None:
        wide = x.to(gl.float32)
        x = (wide * rsqrt(gl.sum(wide * wide, axis=0) / IN + eps) * norm_weight.to(gl.float32)).to(dtype)
    shared = gl.allocate_shared_memory(dtype, x.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]), x)
    shape: gl.constexpr = [STEPS, WARPS, _STEP_RUNS, _RUN]
    return reinterpret(shared, dtype, shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@gluon.constexpr_function
def _shared_rows_layout(warps, rows):
    """Return the layout of a step's inputs in shared memory, [warps * rows * 2, 64], as threads of `_load_rows` do."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]] + ([[16, 0]] if rows == 16 else [])
    lanes = [[0, 32], [1, 0], [2, 0], [4, 0], [8, 0]]
    others = [[rows * 2 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, others, [], [warps * rows * 2, 64])


@gluon.jit
def _share_rows(
    x_ptr, num_rows, stride, IN: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Bring rows into shared memory, [STEPS, WARPS * ROWS * 2, 64], without bank conflicts where they are read."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    halves = gl.arange(0, WARPS * ROWS * 2, gl.SliceLayout(1, LAYOUT))
    rows = gl.minimum(halves // 2 % ROWS, num_rows - 1)
    first = (halves // (2 * ROWS) * 2 + halves % 2) * 64
    ins = first[:, None] + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    ptrs = x_ptr + (rows * stride)[:, None] + ins
    shape: gl.constexpr = [STEPS, WARPS * ROWS * 2, 64]
    shared = gl.allocate_shared_memory(x_ptr.dtype.element_ty, shape, gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    for step in gl.static_range(STEPS):
        start = step * (WARPS * _STEP_RUNS * _RUN)
        async_load(shared.index(step), ptrs + start, mask=start + ins < IN)
    async_copy.commit_group()
    async_copy.wait_group(0)
    return shared


@gluon.jit
def _load_x(x, step, IN: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, SHARED_STEPS: gl.constexpr):
    """Load a step's inputs of rows, [WARPS, ROWS, 4, 32]; beyond the end of shared memory the last step."""
    if not SHARED_STEPS:
        rows = _load_rows(x, step, IN, WARPS)
    elif len(x.shape) == 3:
        shared = x.index(gl.minimum(step, SHARED_STEPS - 1)).load(_shared_rows_layout(WARPS, ROWS))
        rows = gl.reshape(shared, [WARPS, ROWS, _STEP_RUNS, _RUN])
    else:
        LAYOUT: gl.constexpr = _layout_of(WARPS, _RUN)
        one = gl.expand_dims(x.index(gl.minimum(step, SHARED_STEPS - 1)).load(gl.SliceLayout(1, LAYOUT)), 1)
        rows, _ = gl.broadcast(one, gl.zeros([WARPS, ROWS, _STEP_RUNS, _RUN], one.dtype, LAYOUT))
    return rows


@gluon.jit
def weight_sources(
    words_ptr, scale_ptr, zero_ptr, first_row, first_out, out_features,
    IN: gl.constexpr, WARPS: gl.constexpr, OUTS: gl.constexpr, GATED: gl.constexpr, SCALE_INS: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Return the sources of `_load_step` for the outputs from `first_out` on; see `_outputs_of`."""
    WORDS: gl.constexpr = _layout_of(WARPS, _RUN_WORDS)
    NUM_GROUPS: gl.constexpr = (IN + SCALE_INS - 1) // SCALE_INS
    outs = _outputs_of(_second_index(OUTS, WORDS), first_row, first_out, out_features, OUTS, GATED)
    runs = _runs(WARPS, WORDS)
    word_ptrs = words_ptr + _with_elements(outs * (IN // 8) + runs * _RUN_WORDS, _RUN_WORDS, WORDS)
    scale_ptrs = scale_ptr + outs * NUM_GROUPS
    zero_ptrs = scale_ptrs
    groups = runs
    if zero_ptr is not None:
        zero_ptrs = zero_ptr + outs * NUM_GROUPS
    if _is_summed(SCALE_INS, FORMAT):
        SUMS: gl.constexpr = gl.SliceLayout(2, mma_layout(WARPS))
        own = gl.expand_dims(gl.arange(0, OUTS, gl.SliceLayout(0, SUMS)), 0)
        scale_ptrs = scale_ptr + _outputs_of(own, first_row, first_out, out_features, OUTS, GATED) * NUM_GROUPS
        groups = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, SUMS)), 1)
    return word_ptrs, scale_ptrs, zero_ptrs, runs, groups


@gluon.jit
def load_steps(
    sources, first, num_runs, STEPS: gl.constexpr, WARPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    SCALE_INS: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Load the steps from `first` on, a tuple of what `_load_step` returns."""
    steps = ()
    for step in gl.static_range(STEPS):
        loaded = _load_step(sources, first + step, num_runs, WARPS, HAS_ZEROS, SCALE_INS, FORMAT)
        steps = steps + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
    return steps


@gluon.jit
def _multiply_loaded(
    acc, loaded, x, first, sources, next_step, num_runs, IN: gl.constexpr, SHARED_STEPS: gl.constexpr,
    HAS_NEXT: gl.constexpr, EARLY: gl.constexpr, HAS_ZEROS: gl.constexpr, SCALE_INS: gl.constexpr,
    FORMAT: gl.constexpr,
):  # fmt: skip
    """Return sums, [WARPS, OUTS, ROWS], plus the product of loaded steps, from `first` on, and the steps after them.

    These, from `next_step` on of `sources`, are requested where registers of the former become free, or EARLY: before
    all products, beyond which the compiler would move them but for a barrier.
    """
    STEPS: gl.constexpr = len(loaded)
    WARPS: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[2]
    following = ()
    if HAS_NEXT and EARLY:
        following = load_steps(sources, next_step, num_runs, STEPS, WARPS, HAS_ZEROS, SCALE_INS, FORMAT)
        barrier()
    rows = _load_x(x, first, IN, WARPS, ROWS, SHARED_STEPS)
    for step in gl.static_range(STEPS):
        # One step ahead.
        next_rows = _load_x(x, first + step + 1, IN, WARPS, ROWS, SHARED_STEPS)
        acc = _multiply_step(acc, loaded[step], rows, HAS_ZEROS, SCALE_INS, FORMAT)
        rows = next_rows
        if HAS_NEXT and not EARLY:
            one = _load_step(sources, next_step + step, num_runs, WARPS, HAS_ZEROS, SCALE_INS, FORMAT)
            following = following + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return acc, following if HAS_NEXT else loaded


@gluon.jit
def multiply_tile(
    sources, next_sources, next_runs, loaded, x, OUTS: gl.constexpr, ROWS: gl.constexpr, IN: gl.constexpr,
    WARPS: gl.constexpr, SHARED_STEPS: gl.constexpr, LOOPS: gl.constexpr, HAS_ZEROS: gl.constexpr,
    SCALE_INS: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """Return the product of a tile, [WARPS, OUTS, ROWS], and the first steps of the next one.

    loaded: the tile's first steps; x: `row_ptrs`, or shared memory; next_runs: 0 if there is no
    other tile; LOOPS: whether there may be one.
    """
    STEPS: gl.constexpr = len(loaded)
    CHUNKS: gl.constexpr = (IN + WARPS * STEPS * 128 - 1) // (WARPS * STEPS * 128)
    acc = gl.zeros([WARPS, OUTS, ROWS], gl.float32, mma_layout(WARPS))
    for chunk in range(CHUNKS - 1):
        first = chunk * STEPS
        acc, loaded = _multiply_loaded(
            acc, loaded, x, first, sources, first + STEPS, IN // _RUN, IN, SHARED_STEPS, True, LOOPS, HAS_ZEROS,
            SCALE_INS, FORMAT,
        )  # fmt: skip
    LAST: gl.constexpr = (CHUNKS - 1) * STEPS
    return _multiply_loaded(
        acc, loaded, x, LAST, next_sources, 0, next_runs, IN, SHARED_STEPS, LOOPS, LOOPS, HAS_ZEROS, SCALE_INS, FORMAT
    )


@gluon.jit
def load_of_outputs(
    ptr, other: gl.constexpr, first_row, first_out, out_features,
    WARPS: gl.constexpr, OUTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Load numbers of a tile's outputs, [OUTS] float32; early, since sums wait for them. `other` if there are none."""
    OUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, mma_layout(WARPS)))
    if ptr is None:
        values = gl.full([OUTS], other, gl.float32, OUT)
    else:
        own = _outputs_of(gl.arange(0, OUTS, OUT), first_row, first_out, out_features, OUTS, GATED)
        values = gl.load(ptr + own).to(gl.float32)
    return values


@gluon.jit
def outputs_and_ups(acc, factors, biases, dtype: gl.constexpr, GATED: gl.constexpr, FORMAT: gl.constexpr):
    """Return the sum over warps, [OUTS, ROWS], with factors and biases; if gated, the gate's half and up's."""
    out = gl.sum(acc, axis=0) * (factors * sum_factor(dtype, FORMAT))[:, None] + biases[:, None]
    up = out
    if GATED:
        out, up = gl.split(gl.permute(gl.reshape(out, [2, out.shape[0] // 2, out.shape[1]]), (1, 2, 0)))
    return out, up


@gluon.jit
def _store(out, up, out_ptr, first_out, num_rows, out_features, dtype: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        gate = round_to(out, dtype)
        out = gate / (1 + gl.exp(-gate)) * round_to(up, dtype)
    outs = first_out + gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
    rows = gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
    mask = (outs < out_features)[:, None] & (rows < num_rows)[None, :]
    gl.store(out_ptr + rows[None, :] * out_features + outs[:, None], out.to(out_ptr.dtype.element_ty), mask=mask)


@kernel(do_not_specialize=["num_rows", "num_tiles"])
def _skinny_four_bit_kernel(
    x_ptr, residual_ptr, norm_weight_ptr, words_ptr, bias_ptr, out_ptr, total_ptr, eps, num_rows, out_features,
    num_tiles, scale_ptr, zero_ptr, factor_ptr,
    IN: gl.constexpr, PARTS: gl.constexpr, WARPS: gl.constexpr, STEPS: gl.constexpr, OUTS: gl.constexpr,
    ROWS: gl.constexpr, ONE: gl.constexpr, SHARED_STEPS: gl.constexpr, LOOPS: gl.constexpr, GATED: gl.constexpr,
    SCALE_INS: gl.constexpr, FORMAT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    HAS_ZEROS: gl.constexpr = zero_ptr is not None
    TILE: gl.constexpr = OUTS // 2 if GATED else OUTS
    OWN_IN: gl.constexpr = IN // PARTS
    RUNS: gl.constexpr = OWN_IN // _RUN
    first_out, part = gl.program_id(0) * TILE, gl.program_id(1)
    words_ptr += part * (OWN_IN // 8)
    scale_ptr += part * (OWN_IN // SCALE_INS)
    if HAS_ZEROS:
        zero_ptr += part * (OWN_IN // SCALE_INS)
    sources = weight_sources(
        words_ptr, scale_ptr, zero_ptr, 0, first_out, out_features, IN, WARPS, OUTS, GATED, SCALE_INS, FORMAT
    )
    loaded = load_steps(sources, 0, RUNS, STEPS, WARPS, HAS_ZEROS, SCALE_INS, FORMAT)
    factors = load_of_outputs(factor_ptr, 1.0, 0, first_out, out_features, WARPS, OUTS, GATED)
    biases = load_of_outputs(bias_ptr, 0.0, 0, first_out, out_features, WARPS, OUTS, GATED)
    if ONE:
        x = _share_row(x_ptr, residual_ptr, norm_weight_ptr, total_ptr, eps, IN, SHARED_STEPS, WARPS, PDL)
    elif SHARED_STEPS:
        wait_for_previous(PDL)
        x = _share_rows(x_ptr + part * OWN_IN, num_rows, IN, OWN_IN, SHARED_STEPS, WARPS, ROWS)
    else:
        wait_for_previous(PDL)
        rows = gl.minimum(gl.arange(0, ROWS, row_layout(WARPS)), num_rows - 1)
        x = row_ptrs(x_ptr + part * OWN_IN, rows, IN)
    out_ptr += part.to(gl.int64) * num_rows * out_features
    if LOOPS:
        for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
            own_out = tile * TILE
            next_tile = tile + gl.num_programs(0)
            next_runs = gl.where(next_tile < num_tiles, RUNS, 0)
            own = weight_sources(
                words_ptr, scale_ptr, zero_ptr, 0, own_out, out_features, IN, WARPS, OUTS, GATED, SCALE_INS, FORMAT
            )
            next_sources = weight_sources(
                words_ptr, scale_ptr, zero_ptr, 0, next_tile * TILE, out_features,
                IN, WARPS, OUTS, GATED, SCALE_INS, FORMAT,
            )  # fmt: skip
            factors = load_of_outputs(factor_ptr, 1.0, 0, own_out, out_features, WARPS, OUTS, GATED)
            biases = load_of_outputs(bias_ptr, 0.0, 0, own_out, out_features, WARPS, OUTS, GATED)
            acc, loaded = multiply_tile(
                own, next_sources, next_runs, loaded, x, OUTS, ROWS, OWN_IN, WARPS, SHARED_STEPS, True, HAS_ZEROS,
                SCALE_INS, FORMAT,
            )  # fmt: skip
            out, up = outputs_and_ups(acc, factors, biases, dtype, GATED, FORMAT)
            _store(out, up, out_ptr, own_out, num_rows, out_features, dtype, GATED)
    else:
        acc, _loaded = multiply_tile(
            sources, sources, 0, loaded, x, OUTS, ROWS, OWN_IN, WARPS, SHARED_STEPS, False, HAS_ZEROS, SCALE_INS, FORMAT
        )
        out, up = outputs_and_ups(acc, factors, biases, dtype, GATED, FORMAT)
        _store(out, up, out_ptr, first_out, num_rows, out_features, dtype, GATED)


class SkinnyTile(NamedTuple):
    """Outputs of a tile (if gated, half of them up's), warps, and steps of a warp that are requested at once.

    programs: of a multiprocessor, which take several tiles each; 0 for one of each tile. registers: of a thread, at
    most. shares: whether warps share the inputs of several rows; one row's they do.
    """

    outs: int
    num_warps: int
    steps: int
    programs: int = 0
    registers: int | None = None
    shares: bool = False


_SHARED_BYTES = 96 * 1024
"""Shared inputs of a program, at most, so that two fit on a multiprocessor."""


def _tile(num_rows: int, own_ins: int, out_features: int, parts: int, device: torch.device) -> SkinnyTile:
    num_processors, shared_bytes = device_limits(device)
    steps = triton.cdiv(own_ins, 4 * _STEP_INS)
    has_few_tiles = out_features <= 3 * 16 * num_processors
    if num_rows > 1:
        is_narrow = num_rows <= 8
        shares = 2 * own_ins * (8 if is_narrow else MAX_SKINNY_ROWS) <= min(_SHARED_BYTES, shared_bytes)
        if parts > 1:
            return SkinnyTile(32, 4, min(2, steps), shares=shares)
        if is_narrow and shares and has_few_tiles:
            return SkinnyTile(16, 4, min(4, steps), registers=168, shares=True)
        return SkinnyTile(32, 4, min(4 if is_narrow else 2, steps))
    if own_ins > 4096:
        # Where each program normalises the inputs, their values must fit into registers beside the weights.
        return SkinnyTile(16, 8, min(4, triton.cdiv(steps, 2)), registers=128)
    # A program of several tiles normalises the inputs once.
    return SkinnyTile(16, 4, steps) if has_few_tiles else SkinnyTile(32, 4, min(2, steps), programs=3, registers=168)


def skinny_four_bit_gemm(
    x: torch.Tensor, weight: FourBitMatrix, bias: torch.Tensor | None = None, norm: Norm | None = None,
    residual: torch.Tensor | None = None, gated: bool = False,
    *, parts: int = 1, tile: SkinnyTile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `norm_linear` of up to MAX_SKINNY_ROWS rows of 16 bits; of more than one the norm is a kernel of its own.

    The inputs must be a multiple of RUN. With parts, which have whole steps and groups of inputs, outputs are the parts
    of a sum, [parts, num_rows, out_features] float32, without bias, gate or norm.
    """
    num_rows, in_features = x.shape
    values, scaling, total = weight.values, weight.scaling, x
    out_features = len(values) // 2 if gated else len(values)
    assert num_rows <= MAX_SKINNY_ROWS and in_features % RUN == 0
    assert x.is_contiguous() and values.is_contiguous() and weight.scales.is_contiguous()
    assert residual is None or (norm is not None and residual.is_contiguous())
    if norm is not None and num_rows > 1:
        x, total = rms_norm(x, norm.weight, norm.eps, residual)
        norm = residual = None
    elif residual is not None:
        total = torch.empty_like(x)
    norm_weight, eps = norm or (None, 0.0)
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    if parts > 1:
        assert norm is None and bias is None and not gated and in_features % (parts * weight.unit(_STEP_INS)) == 0
        out = torch.empty(parts, num_rows, out_features, dtype=torch.float32, device=x.device)
    tile = tile or _tile(num_rows, in_features // parts, len(values), parts, x.device)
    num_tiles = triton.cdiv(out_features, tile.outs // 2 if gated else tile.outs)
    num_programs = tile.programs * device_limits(x.device)[0] or num_tiles
    total_steps = triton.cdiv(in_features // parts, tile.num_warps * _STEP_INS)
    shared_steps = triton.next_power_of_2(total_steps) if num_rows == 1 else total_steps if tile.shares else 0
    _skinny_four_bit_kernel[(min(num_programs, num_tiles), parts)](
        x, residual, norm_weight, values.view(torch.int32), bias, out, total, eps, num_rows, out_features, num_tiles,
        IN=in_features, PARTS=parts, WARPS=tile.num_warps, STEPS=tile.steps, OUTS=tile.outs,
        ROWS=8 if num_rows <= 8 else MAX_SKINNY_ROWS, ONE=num_rows == 1, SHARED_STEPS=shared_steps,
        LOOPS=num_programs < num_tiles,
        GATED=gated, num_warps=tile.num_warps, maxnreg=tile.registers, **pdl_options(x.device), **scaling,
    )  # fmt: skip
    return out, total
