"""Outputs of attention in e4m3: what rounding the others makes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention.triton import TritonBackend
from nanovllm.kernels._triton import is_hopper
from nanovllm.kernels.attention.decode_attention import decode_attention, plan_decode
from nanovllm.kernels.attention.prefill_attention import QUERY_TILE, ChunkRows, prefill_attention
from nanovllm.kernels.linear.quantize_rows import Fp8Rows, Rounding, quantize_rows_ref
from nanovllm.kernels.policy import KernelPolicy
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope
from nanovllm.runner import model_runner
from tests.conftest import MakeCheckpoint
from tests.test_fp8 import FORMATS, SETTINGS, quantizes, write
from tests.test_kernels import DEVICE, DTYPES, GPU, paged, randn

HEADS, KV_HEADS, SIZE = 6, 2, 128


def compare(attend: Any, num_rows: int, dtype: torch.dtype, for_scaled_mm: bool) -> None:
    """attend: takes outputs to be filled."""
    out = torch.full((num_rows, HEADS, SIZE), float("nan"), dtype=dtype, device=DEVICE)
    attend(out)
    rounding = Rounding(SIZE, for_scaled_mm)
    rows = rounding.empty_rows(num_rows, HEADS * SIZE, dtype, torch.device(DEVICE))
    attend(rows)
    want, _ = quantize_rows_ref(out.flatten(1), rounding)

    def meant(rows: Fp8Rows) -> torch.Tensor:
        return (rows.values.float().unflatten(1, (HEADS, SIZE)) * rows.scales[..., None])[:num_rows]

    assert rows.scales.stride() == want.scales.stride() and out.isfinite().all()
    torch.testing.assert_close(rows.scales[:num_rows], want.scales[:num_rows], rtol=1e-6, atol=0)
    # A GPU divides a little otherwise than torch, which may change the rounding of what lies in the middle.
    assert ((meant(rows) - meant(want)).abs() > 1e-6).float().mean() <= (1e-3 if GPU else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shares", "for_scaled_mm"), [(1, False), (7, True)])
@pytest.mark.parametrize("projected", [None, False, *([True] if GPU else [])])
def test_decode_rows(shares: int, for_scaled_mm: bool, dtype: torch.dtype, projected: bool | None) -> None:
    """projected: by Hopper's kernel, of the projection or of queries; None by the general one."""
    torch.manual_seed(0)
    if projected is not None and not (GPU and is_hopper(torch.device(DEVICE)) and dtype.itemsize == 2):
        pytest.skip("needs a Hopper GPU and 16 bits")
    lens = [1, 17, 300, 129, 70, *([4100] if GPU else [])]
    cache, tables, seq_lens = paged(lens, 256, KV_HEADS, SIZE, dtype)
    pages = KVPages(cache[0], cache[1])
    plan = plan_decode(seq_lens, HEADS, KV_HEADS, SIZE, 64, shares)
    query = randn(len(lens), HEADS + (2 * KV_HEADS if projected else 0), SIZE, dtype=dtype)
    if projected is None:
        compare(
            lambda out: decode_attention(query, pages, out, tables, plan, SIZE**-0.5), len(lens), dtype, for_scaled_mm
        )
        return
    from nanovllm.kernels.attention.hopper_decode import hopper_decode_attention  # noqa: PLC0415

    last = seq_lens.long() - 1
    slots = (tables[torch.arange(len(lens), device=DEVICE), last // 256] * 256 + last % 256).int()
    rope = NormRope(None, 1e-6, torch.rand(8192, SIZE, device=DEVICE)) if projected else None
    attend = partial(hopper_decode_attention, query, pages)
    compare(lambda out: attend(out, tables, slots, plan, SIZE**-0.5, rope=rope), len(lens), dtype, for_scaled_mm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("for_scaled_mm", [False, True])
@pytest.mark.parametrize("by_hopper", [False, *([True] if GPU else [])])
def test_prompts(for_scaled_mm: bool, dtype: torch.dtype, by_hopper: bool) -> None:
    torch.manual_seed(0)
    if by_hopper and not (is_hopper(torch.device(DEVICE)) and dtype.itemsize == 2):
        pytest.skip("needs a Hopper GPU and 16 bits")
    pairs = [(1, 1), (17, 40), (133, 200), *([(999, 2999)] if GPU else [])]
    query_lens, lens = [q for q, _ in pairs], [n for _, n in pairs]
    cache, tables, seq_lens = paged(lens, 256, KV_HEADS, SIZE, dtype)
    work = [(i, n) for i, q in enumerate(query_lens) for n in range(-(-q // QUERY_TILE))]
    tiles = torch.tensor(work, dtype=torch.int32, device=DEVICE).T.flatten()
    chunks = ChunkRows(tables, seq_lens, torch.tensor([0, *query_lens], device=DEVICE).cumsum(0).int(), tiles)
    query, pages = randn(sum(query_lens), HEADS, SIZE, dtype=dtype), KVPages(cache[0], cache[1])
    if by_hopper:
        from nanovllm.kernels.attention.hopper_prefill import hopper_prefill_attention  # noqa: PLC0415

        attend: Any = partial(hopper_prefill_attention, num_programs=132)
    else:
        attend = prefill_attention
    compare(lambda out: attend(query, pages, out, chunks, SIZE**-0.5), sum(query_lens), dtype, for_scaled_mm)


@pytest.mark.skipif(GPU, reason="has the interpreter run the kernels on the CPU's tensors")
def test_a_model_says_what_it_says_with_rows_rounded_apart(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, decode rows, and in the last layer those to sample from."""
    shape = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    stored, _ = write(make_checkpoint(head_dim=SIZE, **shape), FORMATS["fp8-block"], tmp_path)
    monkeypatch.setattr(KernelPolicy, "rounds_rows", quantizes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=8))
    monkeypatch.setattr(model_runner, "make_backend", lambda name, *args, **kwargs: TritonBackend(*args, **kwargs))
    run, made = TritonBackend.run, list[bool]()

    def watched(self: TritonBackend, query: Any, layer: Any, step: Any, rounding: Any) -> Any:
        # Without a rounding the product that follows rounds them itself.
        out = run(self, query, layer, step, rounding if rounds else None)
        made.append(isinstance(out, Fp8Rows))
        return out

    monkeypatch.setattr(TritonBackend, "run", watched)
    said = []
    for rounds in (True, False):
        made.clear()
        with LLM(stored, **SETTINGS | {"num_kvcache_blocks": 60}) as llm:
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
            outputs = llm.generate([list(range(i, i + 3)) for i in range(20)], params, use_tqdm=False)
        assert any(made) == rounds and not all(made)
        said.append([output.outputs[0] for output in outputs])
    for mine, apart in zip(*said, strict=True):
        assert mine.token_ids == apart.token_ids
        assert mine.cumulative_logprob == pytest.approx(apart.cumulative_logprob, abs=1e-5)
