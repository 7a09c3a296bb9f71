"""The engine's logits in each dtype, against those of transformers in float32, of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.sampling.sampler import Sampled
from tests.conftest import MakeCheckpoint
from tests.test_greedy import prompts
from tests.test_kernels import check_error

MAX_TOKENS = 6


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "Olmo2"])
def folder(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> Path:
    # An epsilon so large changes the logits wherever another is taken.
    return make_checkpoint(request.param, rms_norm_eps=0.05, pad_token_id=0)


def rounded(folder: Path, dtype: torch.dtype) -> Any:
    """The model of transformers with weights in `dtype`; its table of rotary frequencies stays in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for param in model.parameters():
        param.data = param.data.to(dtype)
    return model


@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)]
)
def test_logits_are_as_near_to_float32_as_transformers_are(folder: Path, name: Any, dtype: torch.dtype) -> None:
    logits: list[torch.Tensor] = []
    batch = prompts((1, 17, 40))
    with LLM(folder, device="cpu", dtype=name, max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=20) as llm:
        runner: Any = llm.llm_engine._runner
        assert (
            {param.dtype for param in runner.model.parameters()}
            == {spec.dtype for spec in runner.kv_cache.tensors}
            == {dtype}
        )
        sample = runner.sampler.sample

        def recorder(x: torch.Tensor, *args: Any) -> Sampled:
            logits.append(x.clone())
            return sample(x, *args)

        runner.sampler.sample = recorder
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        outputs = llm.generate(batch, params, use_tqdm=False, schedule="arrival")
    # A step each token, all three in each: [sequence, token, vocab_size].
    got = torch.stack(logits, 1)
    same, exact_model = rounded(folder, dtype), rounded(folder, dtype).float()
    texts = [torch.tensor([prompt + output["token_ids"][:-1]]) for prompt, output in zip(batch, outputs, strict=True)]
    with torch.inference_mode():
        same_logits, exact = (
            torch.stack([model(text).logits[0, -MAX_TOKENS:] for text in texts]) for model in (same, exact_model)
        )
    check_error(got, same_logits, exact)
    assert [output["token_ids"] for output in outputs] == got.argmax(-1).tolist()
