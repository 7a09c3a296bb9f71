"""Checkpoints in e4m3 of families with states, as they are published, against transformers' model of what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from tests.hybrid_models import complete, make_model, wrap
from tests.test_fp8 import FP8, Format, compressed, e4m3, weights_of, write
from tests.test_hybrid import SETTINGS, prompts

SIZES = {
    "hidden_size": 128, "head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "intermediate_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "mamba_d_state": 128, "mamba_n_groups": 1,
}  # fmt: skip
LINEAR = r"(_proj|in_proj_qkvz?|in_proj_z)\.weight$"
KEPT = (
    "input_layernorm", "linear_attn.A_log", "linear_attn.conv1d", "linear_attn.dt_bias", "linear_attn.in_proj_a",
    "linear_attn.in_proj_b", "linear_attn.norm", "mlp.gate", "mlp.shared_expert_gate",
)  # fmt: skip
"""What Qwen's checkpoints keep of a layer."""


def blocks(prefix: str, *others: str, dtype: torch.dtype = torch.bfloat16) -> Format:
    """Qwen's own: blocks with scales in bfloat16; others: kept, too."""
    kept = [f"{prefix}.layers.{layer}.{name}" for layer in range(4) for name in (*KEPT, *others)]
    ignored = ["lm_head", f"{prefix}.embed_tokens", "model.visual.merger.linear_fc1", "mtp.fc", *kept]
    config = FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": ignored}
    return Format(config, e4m3((128, 128), "weight_scale_inv", dtype=dtype), layers=LINEAR)


PATTERNS = ["re:.*lm_head", "re:visual.*", "re:model.visual.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]


def channels(ignored: str) -> Format:
    """llm-compressor's FP8_DYNAMIC, without what a pattern names."""
    config = compressed(weights_of(strategy="token", dynamic=True), strategy="channel")
    config["ignore"] = [*PATTERNS, f"re:{ignored}"]
    return Format(config, e4m3((1, None), dtype=torch.bfloat16), ignored, r"_proj(_\w+)?\.weight$")


NEMOTRON = Format(
    {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.29.0"},
     "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "ignore": [
         "lm_head", "backbone.layers.0.mixer.in_proj", "backbone.layers.1.mixer.shared_experts.up_proj",
         *(f"backbone.layers.2.mixer.{name}_proj" for name in "qkvo"), "backbone.layers.3.mixer.gate",
     ]},
    e4m3((None, None), shape=(), input_scale="input_scale"),
    ignored=r"layers\.(0\.mixer\.in_proj|1\.mixer\.shared_experts\.up_proj|2)", layers=r"(_proj)\.weight$",
)  # fmt: skip


Tensors = dict[str, torch.Tensor]


def stacked(folder: Path) -> None:
    """Have all experts of a layer in one tensor, as transformers' modules have them."""
    tensors = load_file(folder / "model.safetensors")
    experts = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    for name in [name for name in experts if ".experts.0." in name and ".up_proj." not in name]:
        every = [name.replace(".experts.0.", f".experts.{number}.") for number in range(6)]
        made = [experts[one] for one in every]
        if ".gate_proj." in name:
            made = [torch.cat((experts[one], experts[one.replace("gate", "up")])) for one in every]
        new = name.replace(".0.gate_proj", ".gate_up_proj").replace(".0.down_proj", ".down_proj")
        tensors[new.replace(".weight_scale_inv", "_scale_inv").removesuffix(".weight")] = torch.stack(made)
    save_file(tensors, folder / "model.safetensors")


def with_cache_scales(folder: Path) -> None:
    """Add modelopt's scales of keys and values."""
    scales = {f"backbone.layers.2.mixer.{name}_proj.{name}_scale": torch.tensor(0.5) for name in "kv"}
    save_file(load_file(folder / "model.safetensors") | scales, folder / "model.safetensors")


CASES: dict[str, tuple[str, Format, Callable[[Path], None] | None]] = {
    "next": ("next", blocks("model", "linear_attn.in_proj_ba"), None),
    "dense": ("dense", blocks("model.language_model"), wrap),
    "moe": ("moe", blocks("model.language_model"), wrap),
    "stacked experts": ("moe", blocks("model"), stacked),
    "no linear attention": ("moe", channels(r".*linear_attn.*"), wrap),
    "all linear layers": ("dense", channels(r".*no_such_layer.*"), wrap),
    "modelopt": ("nemotron-moe", NEMOTRON, with_cache_scales),
    "factors": ("falcon", blocks("model", dtype=torch.float32), None),
}


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_in_e4m3(case: str, tmp_path: Path) -> None:
    name, kind, changed = CASES[case]
    model = make_model(name, **SIZES)
    model.save_pretrained(tmp_path / "base")
    stored, meant = write(tmp_path / "base", kind, tmp_path)
    has_scales = any(re.search(r"\.in_proj.*_scale", key) for key in load_file(stored / "model.safetensors"))
    assert has_scales != (case in ("no linear attention", "modelopt"))
    reference = type(model).from_pretrained(meant, dtype=torch.float32).eval()
    if changed is not None:
        changed(stored)
    asked, params = prompts((30, 5)), SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    wanted = [complete(reference, prompt, 6) for prompt in asked]
    for size in (1, 2) if name not in ("falcon", "nemotron-moe") else (1,):
        with LLM(str(stored), tensor_parallel_size=size, **SETTINGS) as llm:
            outputs = llm.generate(asked, params, use_tqdm=False)
        for output, (tokens, logprobs) in zip(outputs, wanted, strict=True):
            completion: Any = output.outputs[0]
            assert list(completion.token_ids) == tokens
            found = [row[token].logprob for row, token in zip(completion.logprobs, tokens, strict=True)]
            expected = logprobs.gather(1, torch.tensor(tokens)[:, None]).flatten()
            torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-4)
