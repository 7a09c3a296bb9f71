"""Keys and values in e4m3, and outputs of attention: what is stored, what attention makes of it, which scales fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanovllm import LLM
from nanovllm.attention.backend import AttentionLayer, AttentionSetup
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.attention.metadata import StepMetadata
from nanovllm.attention.triton import DecodeVariant, TritonBackend
from nanovllm.config import Config, KVCacheDtype
from nanovllm.kernels import qkv_rope_store
from nanovllm.kernels._triton import converts_e4m3, jit, tl
from nanovllm.kernels.attention.widen_pages import plan_wide_tables, widen_pages
from nanovllm.kernels.e4m3 import from_e4m3, to_e4m3
from nanovllm.kernels.qkv_rope_store import KVPages, NormRope
from tests.conftest import MakeCheckpoint
from tests.test_fp8 import (
    FORMATS,
    GREEDY,
    SETTINGS,
    SHAPE,
    change,
    compressed,
    run_engine,
    tokens_of,
    weights_of,
    write,
)
from tests.test_kernels import (
    DEVICE,
    DTYPES,
    E4M3,
    GPU,
    by_triton,
    check_attention,
    chunk_rows,
    in_e4m3,
    make_scales,
    needs_hopper,
    new_slots,
    paged,
    planned,
    randn,
    unfilled,
)


@jit
def _round_kernel(x_ptr, out_ptr, NATIVE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + offsets, to_e4m3(tl.load(x_ptr + offsets), NATIVE))


@jit
def _widen_kernel(bytes_ptr, out_ptr, NATIVE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + offsets, from_e4m3(tl.load(bytes_ptr + offsets), out_ptr.dtype.element_ty, NATIVE))


BOTH_WAYS = pytest.mark.parametrize("native", [False, *([True] if GPU and converts_e4m3(torch.device("cuda")) else [])])


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_value_is_widened_exactly(native: bool, dtype: torch.dtype) -> None:
    values = torch.arange(1024, device=DEVICE).to(torch.uint8)
    out = torch.empty(1024, dtype=dtype, device=DEVICE)
    _widen_kernel[(4,)](values, out, native, 256)
    # NaN need not stay one.
    is_number = values % 128 != 127
    assert torch.equal(out[is_number], values.view(E4M3).to(dtype)[is_number])


@BOTH_WAYS
def test_floats_are_rounded_to_the_nearest(native: bool) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = values[values.isfinite()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    near = torch.cat([values, middles, middles.nextafter(values[1:]), middles.nextafter(values[:-1])])
    others = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-30, 449, -465, 1e30, 2**-10])
    x = torch.cat([near, torch.randn(500) * 100, torch.randn(500) / 100, others])
    x = torch.nn.functional.pad(x, (0, -len(x) % 256)).to(DEVICE)
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _round_kernel[(len(x) // 256,)](x, out, native, 256)
    want = x.clamp(-448, 448).to(E4M3)
    assert torch.equal(out.view(E4M3).float().nan_to_num(999), want.float().nan_to_num(999))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stores_saturate_and_count(dtype: torch.dtype) -> None:
    tokens, num_heads, kv_heads, head_dim = 11, 6, 3, 32
    qkv = randn(tokens, num_heads + 2 * kv_heads, head_dim, dtype=dtype) * 200
    slots = torch.randperm(64, device=DEVICE)[:tokens].int()
    slots[::5] = -1
    rope = NormRope(None, 1e-6, torch.rand(64, head_dim, device=DEVICE))
    positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
    made = []
    key, value = qkv[:, num_heads : num_heads + kv_heads], qkv[:, num_heads + kv_heads :]
    ops: list[tuple[Any, Any]] = [
        (by_triton(qkv_rope_store.qkv_rope_store), (qkv, rope, positions)),
        (qkv_rope_store.qkv_rope_store_ref, (qkv, rope, positions)),
        (by_triton(qkv_rope_store.store_kv), (key, value)),
        (qkv_rope_store.store_kv_ref, (key, value)),
    ]
    for op, args in ops:
        caches = torch.zeros(2, 4, 16, kv_heads, head_dim, dtype=torch.uint8, device=DEVICE).view(E4M3)
        pages = KVPages(caches[0], caches[1], make_scales(kv_heads, 0.5))
        op(*args, pages, slots)
        made.append((caches.float(), pages.scales.num_clipped.item() if pages.scales is not None else 0))
    for (mine, my_count), (theirs, their_count) in (made[:2], made[2:]):
        # The GPU divides a little otherwise than torch, which may change the rounding of what lies in the middle.
        assert (mine != theirs).float().mean() < (1e-3 if GPU else 1e-9) and mine.isfinite().all()
        assert abs(my_count - their_count) <= (2 if GPU else 0) and mine.abs().max() == 448
        assert 0.05 < their_count / (mine != 0).sum().item() < 0.5


@pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[-1:])
@pytest.mark.parametrize(("kv_heads", "block_size"), [(2, 256), (3, 16)])
def test_widened_contexts(kv_heads: int, block_size: int, dtype: torch.dtype) -> None:
    lens = [1, 128, 300, 17, *([2999, 1000] if GPU else [])]
    cache, tables, seq_lens = paged(lens, block_size, kv_heads, 64, dtype)
    pages, meant = in_e4m3(cache)
    wide = plan_wide_tables(seq_lens, lens)
    made = widen_pages(pages, tables, seq_lens, wide, dtype)
    assert made.scales is None and made.k_cache.shape == (wide.num_blocks, 128, kv_heads, 64)
    for new, old in zip((made.k_cache, made.v_cache), meant, strict=True):
        for i, length in enumerate(lens):
            got = new[wide.block_tables[i].clamp(max=len(new) - 1).long()].flatten(0, 1)[:length]
            assert torch.equal(got, old[tables[i].long()].flatten(0, 1)[:length].to(dtype))


@needs_hopper
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_are_widened_for_hopper(dtype: torch.dtype) -> None:
    query_lens, lens = [1, 900, 130, 300], [600, 999, 130, 412]
    cache, tables, seq_lens = paged(lens, 256, 2, 128, dtype)
    pages, meant = in_e4m3(cache)
    spec = Paged(2, 128, 128, None, E4M3)
    backend = TritonBackend(AttentionSetup(torch.device(DEVICE), dtype, 256, 8, [spec], num_slots=1))
    chunks = chunk_rows(tables, seq_lens, query_lens[1:])
    metadata = StepMetadata(
        num_decodes=1, slot_mappings=[new_slots(tables, lens, 256)], block_tables=[tables], seq_lens=seq_lens,
        cu_seqlens_q=chunks.cu_seqlens_q, query_tiles=chunks.tiles, sample_tiles=chunks.tiles, seq_lens_host=lens,
        query_lens_host=query_lens[1:], variant=DecodeVariant(),
    )  # fmt: skip
    backend.plan(metadata)
    assert (metadata.plan.wide is not None) == (dtype != torch.float32)
    query = randn(sum(query_lens), 8, 128, dtype=dtype)
    out = backend.run(query, AttentionLayer(pages, 0.1 * 128**-0.5), metadata)
    assert isinstance(out, torch.Tensor)
    check_attention(out, query, meant, tables, query_lens, lens, share=0.1)


@needs_hopper
@pytest.mark.parametrize(("head_dim", "group", "block_size"), [(128, 2, 256), (128, 8, 64), (64, 7, 128), (64, 1, 64)])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("shares", "repeats"), [(1, 1), (1, 20), (33, 1), (3000, 1)])
def test_hopper_decode(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype, shares: int, repeats: int
) -> None:
    """Tokens that the kernel rotates, rounds and stores in the cache itself; others: `test_hopper_decode`."""
    from nanovllm.kernels.attention.hopper_decode import hopper_decode_attention  # noqa: PLC0415

    lens = [1, 2, 16, 17, 18, 63, 64, 65, 66, 129, 257, 700, 4100] * repeats
    cache, tables, seq_lens = paged(lens, block_size, 2, head_dim, dtype)
    pages, _ = in_e4m3(cache)
    heads, slots = 2 * group, new_slots(tables, lens, block_size)
    # Some beyond 448 times the scale.
    qkv = randn(len(lens), heads + 4, head_dim, dtype=dtype)
    qkv[:, heads + 2 :] *= 200
    weights = randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype)
    rope = NormRope(weights, 1e-6, torch.rand(4200, head_dim, device=DEVICE))
    other = KVPages(pages.k_cache.clone(), pages.v_cache.clone(), make_scales(2))
    query = qkv_rope_store.qkv_rope_store_ref(qkv, rope, seq_lens - 1, other, slots)
    plan, out = planned(seq_lens, heads, 2, head_dim, 64, shares), unfilled(query)
    hopper_decode_attention(qkv, pages, out, tables, slots, plan, 0.1 * head_dim**-0.5, rope=rope)
    assert pages.scales is not None and other.scales is not None
    assert (pages.k_cache.view(torch.uint8) != other.k_cache.view(torch.uint8)).float().mean() < 1e-3
    new = [part.view(torch.uint8).flatten(0, 1)[slots.long()] for part in (pages.v_cache, other.v_cache)]
    assert (new[0] != new[1]).float().mean() < 0.01
    counts = pages.scales.num_clipped.item(), other.scales.num_clipped.item()
    assert abs(counts[0] - counts[1]) <= 0.01 * counts[1] and counts[1] > 0
    scales = pages.scales.keys, pages.scales.values
    meant = [part.float() * scale[:, None] for part, scale in zip((pages.k_cache, pages.v_cache), scales, strict=True)]
    check_attention(out, query, meant, tables, [1] * len(lens), lens, share=0.1)


PROMPT = list(range(40))


def with_scales(folder: Path, to: Path, k_scale: list[float], strategy: str) -> tuple[Path, Path]:
    """Write a checkpoint in e4m3 with scales for its cache, half of a key's for a value, and what its weights mean."""
    stored, meant = write(folder, FORMATS["compressed-channel"], to)
    scheme = weights_of(strategy=strategy)
    config = compressed(weights_of(strategy="token", dynamic=True), strategy="channel") | {"kv_cache_scheme": scheme}
    change(stored, quantization_config=config)
    tensors = load_file(stored / "model.safetensors")
    scale = torch.tensor(k_scale)
    for layer in range(2):
        for name, factor in (("k_scale", 1.0), ("v_scale", 0.5)):
            shaped = scale if strategy == "tensor" else scale.view(-1, 1, 1)
            # Two names in use.
            path = f"{name[0]}_proj.output_scale" if layer else name
            tensors[f"model.layers.{layer}.self_attn.{path}"] = (shaped * factor).clone()
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    return stored, meant


@torch.inference_mode()
def logits_by_the_rule(folder: Path, scale: float) -> torch.Tensor:
    """The logits after the prompt of transformers' model, whose keys and values are rounded before attention."""

    def attend(module: Any, query: Any, *states: torch.Tensor, **kwargs: Any) -> Any:
        key, value = (
            (state / own).clamp(-448, 448).to(E4M3).float() * own
            for state, own in zip(states, (scale, scale / 2), strict=False)
        )
        return sdpa_attention_forward(module, query, key, value, *states[2:], **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("e4m3", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("e4m3", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="e4m3").eval()
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return logits


def test_an_engine_clips_only_what_scales_do_not_fit(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", **SHAPE)
    big = Path(shutil.copytree(folder, tmp_path / "big"))
    tensors = load_file(folder / "model.safetensors")
    for name in ("weight", "bias"):
        tensors[f"model.layers.0.self_attn.v_proj.{name}"] *= 200
    save_file(tensors, big / "model.safetensors", metadata={"format": "pt"})
    assert run_engine(big, [PROMPT])[2]["num_clipped_kv"] == 0
    for scale, least, most in ((32.0, 0, 0), (1.0, 1000, 10**6)):
        plain, meant = with_scales(big, tmp_path / str(scale), [scale], "tensor")
        _, (logits, *_), stats = run_engine(plain, [PROMPT], kv_cache_dtype="fp8")
        assert least <= stats["num_clipped_kv"] <= most
        rule = logits_by_the_rule(meant, scale)
        assert (logits - rule).abs().max() < 1e-4 * rule.abs().max()
    with LLM(plain, **SETTINGS, kv_cache_dtype="fp8") as llm:
        runner: Any = llm.llm_engine._runner
        scales = runner.model.model.layers[1].self_attn.attn.layer.pages.scales
        assert scales.keys.tolist() == [1.0] * 5 and scales.values.tolist() == [0.5] * 5
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
        once = llm.stats()["num_clipped_kv"]
        # It counts on with the cache after a sleep.
        llm.sleep()
        llm.wake_up()
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert llm.stats()["num_clipped_kv"] == 2 * once > 0


def test_scales_of_heads_go_to_their_ranks(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", **SHAPE)
    stored, _ = with_scales(folder, tmp_path, [0.01, 0.02, 0.04, 0.08, 0.05], "attn_head")
    tokens, _, stats = run_engine(stored, kv_cache_dtype="fp8")
    assert stats["num_clipped_kv"] > 0
    assert tokens_of(stored, kv_cache_dtype="fp8", tensor_parallel_size=2) == tokens
    # Of no use to a cache of floats.
    assert tokens_of(stored) != tokens


def test_a_block_takes_half_the_bytes(checkpoint: Path) -> None:
    sizes = []
    kinds: tuple[KVCacheDtype, ...] = "auto", "fp8"
    for dtype in kinds:
        with LLM(checkpoint, **SETTINGS, dtype="float16", kv_cache_dtype=dtype) as llm:
            cache = llm.llm_engine._runner.kv_cache  # type: ignore[union-attr]
            sizes.append(cache.block_bytes)
    assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be one of auto, fp8, not 'int8'"),
        ({"attention_backend": "flash_attn"}, "'flash_attn' does not support kv_cache_dtype='fp8'"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config("none", **({"kv_cache_dtype": "fp8"} | changes))


def test_scales_that_do_not_fit(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", **SHAPE)
    stored, _ = with_scales(folder, tmp_path, [0.0], "tensor")
    with pytest.raises(ValueError, match=r"scales 'model.layers.0.self_attn.k_scale' must be finite and positive"):
        LLM(stored, **SETTINGS)
    config = json.loads((stored / "config.json").read_text())["quantization_config"]
    for strategy, dynamic in (("channel", False), ("tensor", True)):
        scheme = weights_of(strategy=strategy) | {"dynamic": dynamic}
        change(stored, quantization_config=config | {"kv_cache_scheme": scheme})
        with pytest.raises(ValueError, match=r"kv_cache_scheme=.* is not supported: only static scales"):
            LLM(stored, **SETTINGS)
