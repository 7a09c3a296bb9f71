"""What e4m3 does to a real model's answers, and whether the engine does what is said: `... FOLDER [--tokens 3000]`.

Run with `python -m tests.tools.fp8_divergence FOLDER`; the folder has SmolLM2-135M-Instruct in float32, which
`tests/test_smollm2.py` makes of a package. On two cores 3,000 tokens take a quarter of an hour. Prints for each variant
the mean KL divergence (nats) of next-token distributions, over tokens of English:

- of the emulation from the model in float32: transformers' model with the rule in plain torch;
- of the engine from the emulation, which must be at most twice that of the emulation in bfloat16 from it in float32.

The last rows are faults, which must not pass as the engine does.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import qkv_rope_store
from nanovllm.kernels.linear import norm_linear
from nanovllm.kernels.linear.quantize_rows import quantize_rows_ref
from nanovllm.kernels.policy import KernelPolicy
from nanovllm.kernels.qkv_rope_store import KVPages
from nanovllm.runner.kv_cache import KVCache
from tests.test_fp8 import FORMATS, quantizes, write

LENGTH = 500
E4M3, LARGEST = torch.float8_e4m3fn, 448.0
_CHANNEL, _BLOCK = FORMATS["compressed-channel"], FORMATS["fp8-block"]
KINDS = {
    "channel": replace(
        _CHANNEL, config=_CHANNEL.config | {"ignore": ["lm_head"]}, dtype=torch.float32, ignored="nothing"
    ),
    "block": replace(_BLOCK, config=_BLOCK.config | {"modules_to_not_convert": ["lm_head"]}, ignored="nothing"),
}


@dataclass(frozen=True)
class Variant:
    """What is rounded.

    Attributes:
        weights: one of `KINDS`, or None.
        rounds_rows: whether rows are, as more than 16 are on a GPU.
        kv_scale: of a cache in e4m3; None for one in floats.
    """

    weights: str | None = None
    rounds_rows: bool = False
    kv_scale: float | None = None


VARIANTS = {
    "one scale an output, rows in 16 bits": Variant("channel"),
    "blocks of 128x128, rows in 16 bits": Variant("block"),
    "one scale an output, one a row": Variant("channel", rounds_rows=True),
    "blocks of 128x128, groups of 128": Variant("block", rounds_rows=True),
    "cache": Variant(kv_scale=1.0),
    "one scale an output, one a row, and cache": Variant("channel", rounds_rows=True, kv_scale=1.0),
    "cache with a scale of 1/64, which clips": Variant(kv_scale=1 / 64),
}


def in_e4m3(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Round x, whose scale is given, and return what the values mean."""
    return ((x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale).to(x.dtype)


def rounded_rows(group: int | None, _: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Round a linear layer's input, each row or its groups."""
    (x,) = args
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % (group or 1)))
    groups = padded.unflatten(-1, (-1, group or x.shape[-1]))
    largest = groups.float().abs().amax(-1, keepdim=True)
    return (in_e4m3(groups, torch.where(largest > 0, largest / LARGEST, 1.0)).flatten(-2)[..., : x.shape[-1]],)


def cached_attention(
    kv_scale: float, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Attend to rounded keys and values."""
    return sdpa_attention_forward(module, query, in_e4m3(key, kv_scale), in_e4m3(value, kv_scale), *args, **kwargs)


@torch.inference_mode()
def emulate(folder: Path, variant: Variant, prompts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """Return the logits at all places but the prompts' last ones, [places, vocabulary], of transformers' model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if variant.kv_scale is not None:
        ALL_ATTENTION_FUNCTIONS.register("e4m3", partial(cached_attention, variant.kv_scale))
        ALL_MASK_ATTENTION_FUNCTIONS.register("e4m3", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation("e4m3")
    for name, layer in model.named_modules():
        if variant.rounds_rows and name.endswith("_proj"):
            layer.register_forward_pre_hook(partial(rounded_rows, 128 if variant.weights == "block" else None))
    return torch.cat([model(torch.tensor([prompt])).logits[0, :-1].float() for prompt in prompts])


def run_engine(folder: Path, variant: Variant, prompts: list[list[int]]) -> tuple[torch.Tensor, int]:
    """Return the same of the engine, all prompts in one step, and how many keys and values were clipped."""
    logits: list[torch.Tensor] = []
    settings: dict[str, Any] = {"kv_cache_dtype": "auto" if variant.kv_scale is None else "fp8"}
    with ExitStack() as stack:
        if variant.rounds_rows:
            stack.enter_context(patch.object(KernelPolicy, "rounds_rows", quantizes))
        stack.enter_context(patch.object(KVCache, "_scales", scaled(KVCache._scales, variant.kv_scale or 1.0)))
        llm = stack.enter_context(LLM(str(folder), device="cpu", max_model_len=1024, **settings))
        model = llm.llm_engine._runner.model  # type: ignore[union-attr]
        project = model.project_logits

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            logits.append(project(hidden))
            return logits[-1]

        model.project_logits = recorded
        llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False, schedule="arrival")
        # The first is of the tokens to sample after the prompts.
        return torch.cat(logits[1:]), llm.stats()["num_clipped_kv"]


def scaled(scales_of: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Return `KVCache._scales` with other scales than 1."""

    def scales(cache: KVCache, layer: Any) -> Any:
        made = scales_of(cache, layer)
        if made is not None:
            made.keys, made.values = made.keys * factor, made.values * factor
        return made

    return scales


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean KL divergence in nats."""
    total = 0.0
    for p, q in zip(exact.split(LENGTH), other.split(LENGTH), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum().item()
    return total / len(exact)


def change_scales(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Write the checkpoint of blocks with other scales."""
    to.mkdir()
    for file in folder.iterdir():
        if file.name != "model.safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def double_one(tensors: dict[str, torch.Tensor]) -> None:
    """Double the scale of one block."""
    tensors["model.layers.15.mlp.gate_proj.weight_scale_inv"][3, 2] *= 2


def swap_gate_and_up(tensors: dict[str, torch.Tensor]) -> None:
    """Give each of gate and up the other's scales."""
    for name in [name for name in tensors if name.endswith("gate_proj.weight_scale_inv")]:
        other = name.replace("gate_proj", "up_proj")
        tensors[name], tensors[other] = tensors[other], tensors[name]


@contextmanager
def no_saturation() -> Iterator[None]:
    """Store NaN for what is too large, as a conversion to e4m3 that does not saturate does."""
    store = qkv_rope_store.store_kv_ref

    def overflowing(key: torch.Tensor, value: torch.Tensor, pages: KVPages, slot_mapping: torch.Tensor) -> None:
        assert pages.scales is not None
        for x, scale in ((key, pages.scales.keys), (value, pages.scales.values)):
            x.masked_fill_(x.abs() > LARGEST * scale[:, None], math.nan)
        store(key, value, pages, slot_mapping)

    with patch.object(qkv_rope_store, "store_kv_ref", overflowing):
        yield


@contextmanager
def shifted_groups() -> Iterator[None]:
    """Give each group of a row the scale of the one before."""

    def shifted(*args: Any, **settings: Any) -> Any:
        rows, total = quantize_rows_ref(*args, **settings)
        return rows._replace(scales=rows.scales.roll(1, 1)), total

    with patch.object(norm_linear, "quantize_rows", shifted):
        yield


class Fault(NamedTuple):
    """What must not pass for a variant: a folder with wrong weights, or what the engine does wrong with right ones."""

    name: str
    variant: str
    make_folder: Callable[[], Path]
    broken: AbstractContextManager[Any] = nullcontext()


def faults(stored: dict[str | None, Path], made: Path) -> list[Fault]:
    """Return the faults, given the folders of the kinds of weights, and one to write to."""
    # A wrong scale of a weight shows best where rows are not rounded as well.
    blocks, groups = "blocks of 128x128, rows in 16 bits", "blocks of 128x128, groups of 128"
    cache = "cache with a scale of 1/64, which clips"
    doubled, swapped = (
        partial(change_scales, stored["block"], made / name, change)
        for name, change in (("doubled", double_one), ("swapped", swap_gate_and_up))
    )
    return [
        Fault("one block's scale doubled", blocks, doubled),
        Fault("scales of gate and up swapped", blocks, swapped),
        Fault("groups shifted by one", groups, lambda: stored["block"], shifted_groups()),
        Fault("no saturation", cache, lambda: stored[None], no_saturation()),
    ]


def write_kinds(folder: Path, made: Path) -> tuple[dict[str | None, Path], dict[str | None, Path]]:
    """Write a checkpoint with each kind of weights, and what they mean in float32; return both by `Variant.weights`."""
    stored: dict[str | None, Path] = {None: folder}
    meant = dict(stored)
    for name, kind in KINDS.items():
        (made / name).mkdir()
        stored[name], meant[name] = write(folder, kind, made / name)
    return stored, meant


def english(folder: Path, num_tokens: int) -> list[list[int]]:
    """Return a text in prompts of `LENGTH` tokens and one more."""
    text = "\n".join(topics[name] for name in ("compound", "execmodel", "objects"))
    ids, size = AutoTokenizer.from_pretrained(folder)(text)["input_ids"], LENGTH + 1
    return [ids[start : start + size] for start in range(0, num_tokens // LENGTH * size, size)]


def main() -> int:
    """Print the table; return 1 if the engine is too far from the rule, or a fault is not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=3000)
    options = parser.parse_args()
    prompts, status = english(options.folder, options.tokens), 0
    exact = emulate(options.folder, Variant(), prompts, torch.float32)
    with tempfile.TemporaryDirectory() as made:
        stored, meant = write_kinds(options.folder, Path(made))
        print(f"{'variant':45} {'from float32':>12} {'engine':>9} {'bfloat16':>9}  clipped", flush=True)
        emulated, allowed = {}, {}
        for name, variant in VARIANTS.items():
            emulated[name] = emulate(meant[variant.weights], variant, prompts, torch.float32)
            allowed[name] = divergence(
                emulated[name], emulate(meant[variant.weights], variant, prompts, torch.bfloat16)
            )
            logits, clipped = run_engine(stored[variant.weights], variant, prompts)
            error = divergence(emulated[name], logits)
            figures = f"{divergence(exact, emulated[name]):12.1e} {error:9.1e} {allowed[name]:9.1e}"
            is_near = error <= 2 * allowed[name]
            print(f"{name:45} {figures}  {clipped}{'' if is_near else '  TOO FAR'}", flush=True)
            status |= not is_near
        for fault in faults(stored, Path(made)):
            with fault.broken:
                logits, _ = run_engine(fault.make_folder(), VARIANTS[fault.variant], prompts)
            error, most = divergence(emulated[fault.variant], logits), allowed[fault.variant]
            # NaN compares false, and counts as found.
            passes = error <= 2 * most
            print(f"{fault.name:45} {'':12} {error:9.1e} {most:9.1e}  {'PASSES' if passes else 'found'}", flush=True)
            status |= passes
    return status


if __name__ == "__main__":
    sys.exit(main())
