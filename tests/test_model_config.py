"""Reading configs: published ones, YaRN, and the tokens that end a text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.config import ModelImpl
from nanovllm.configs.model import MODELS, LayerConfig, ModelConfig
from nanovllm.configs.rope import RopeConfig, YarnScaling, read_rope
from nanovllm.layers.rotary_embedding import RotaryEmbedding

# As transformers 4.x wrote them.
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
OLMO3_7B: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "max_position_embeddings": 65536,
    "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0", "use_cache": True, "vocab_size": 100278,
}  # fmt: skip


def read(
    folder: Path, config: dict[str, Any], generation: dict[str, Any], model_impl: ModelImpl = "native"
) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(str(folder), model_impl=model_impl)


def test_qwen3_06b(tmp_path: Path) -> None:
    # Neither file's EOS is in the other one, and each ends a text.
    assert read(tmp_path, QWEN3_06B, {"eos_token_id": 151643}) == ModelConfig(
        architecture=MODELS["Qwen3ForCausalLM"],
        vocab_size=151936, hidden_size=1024,
        intermediate_size=3072, layers=(LayerConfig(rope=RopeConfig(1e6)),) * 28, num_heads=16, num_kv_heads=8,
        head_dim=128, rms_norm_eps=1e-6, tie_word_embeddings=True, max_position=40960, initializer_range=0.02,
        dtype="bfloat16", eos_token_ids=frozenset([151643, 151645]),
    )  # fmt: skip


@pytest.mark.skipif("olmo3" not in CONFIG_MAPPING, reason="transformers is older than the model")
@pytest.mark.parametrize("form", ["4.x", "5.0"])
def test_olmo3_7b(form: str, tmp_path: Path) -> None:
    """YaRN is for layers without a window; files of transformers 4.x do not say so."""
    scaling = OLMO3_7B["rope_scaling"]
    if form == "5.0":
        ropes = {"full_attention": scaling | {"rope_theta": 500000}, "sliding_attention": {"rope_theta": 500000}}
        published = OLMO3_7B | {"rope_scaling": None, "rope_theta": None, "rope_parameters": ropes}
    else:
        published = OLMO3_7B
    plain, yarn = RopeConfig(500000), YarnScaling(8.0, 8192, 1.2079441541679836)
    layers = (*(LayerConfig(4096, plain),) * 3, LayerConfig(rope=RopeConfig(500000, yarn))) * 8
    assert read(tmp_path, published, {"eos_token_id": [100265, 100257]}) == ModelConfig(
        architecture=MODELS["Olmo3ForCausalLM"],
        vocab_size=100278, hidden_size=4096, intermediate_size=11008, layers=layers, num_heads=32, num_kv_heads=32,
        head_dim=128, rms_norm_eps=1e-6, tie_word_embeddings=False, max_position=65536, initializer_range=0.02,
        dtype="bfloat16", eos_token_ids=frozenset([100257, 100265]),
    )  # fmt: skip
    # transformers 4.x reads such files so.
    flat = SimpleNamespace(rope_scaling=scaling, rope_theta=500000, max_position_embeddings=65536)
    assert [read_rope(flat, kind) for kind in ("sliding_attention", "full_attention")] == [
        layers[0].rope,
        layers[3].rope,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be in 1 ... 4, not 0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok must be in 1 ... 4, not 9"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
    ],
)
def test_a_wrong_value_is_not_left_to_transformers(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    mixtral = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(ValueError, match=message):
        read(tmp_path, mixtral | sizes | changes, {}, "auto")


@pytest.mark.parametrize(
    ("factor", "original", "max_position"),
    # As the model card says; then one whose product is less than the model has without.
    [(4.0, 32768, 131072), (2.0, 8192, 40960)],
)
def test_yarn_lengthens_a_model_and_never_shortens_it(factor: float, original: int, max_position: int) -> None:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    hf = Qwen3Config(max_position_embeddings=40960, rope_theta=1000000, rope_scaling=rope)
    config = ModelConfig.from_hf(hf)
    assert {layer.rope for layer in config.layers} == {RopeConfig(1000000, YarnScaling(factor, original))}
    assert config.max_position == max_position
    if transformers.__version__ >= "4.56":
        assert ModelConfig.for_transformers(hf).max_position == max_position


@pytest.mark.parametrize(
    ("factor", "changes"),
    [
        (None, {}),
        (1.0, {}),
        (4.0, {}),
        (4.0, {"attention_factor": 1.7}),
        (4.0, {"beta_fast": 8.0}),
        (4.0, {"beta_slow": 3.0}),
    ],
)
def test_rotary_table_is_transformers(factor: float | None, changes: dict[str, float]) -> None:
    scaling = factor and {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 512, **changes}
    length = int(512 * (factor or 1))
    hf = Qwen3Config(head_dim=64, max_position_embeddings=length, rope_theta=10000.0, rope_scaling=scaling or None)
    config = ModelConfig.from_hf(hf)
    positions = torch.arange(2000)
    cos, sin = Qwen3RotaryEmbedding(hf)(torch.zeros(1), positions[None])
    rotary = RotaryEmbedding(64, config.layers[0].rope)
    rotary.tabulate(2000, torch.device("cpu"))
    table = rotary.cos_sin
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=1e-5, atol=2e-4)


def test_the_tokenizers_eos_ends_a_text_though_no_config_names_it(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "copy"))
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with LLM(folder, device="cpu", max_model_len=512, kvcache_block_size=32, num_kvcache_blocks=16) as llm:
        assert llm.model_config.eos_token_ids == frozenset()
        prompt = llm.tokenizer.apply_chat_template(
            [{"role": "user", "content": "introduce yourself"}], tokenize=False, add_generation_prompt=True
        )
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
        assert output["finish_reason"] == "stop" and output["token_ids"][-1] == llm.tokenizer.eos_token_id
