"""Families with states: configs, weights by their names, layers, and tokens, against transformers."""

from __future__ import annotations

import copy
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from nanovllm import LLM, SamplingParams
from nanovllm.attention.kv_cache_spec import StateLayout
from nanovllm.cli.bench import WeightCounts, shape_folder
from nanovllm.config import Config
from nanovllm.configs.model import DeltaNetConfig, ModelConfig
from nanovllm.configs.quantization import QuantizationConfig
from nanovllm.configs.rope import RopeConfig
from nanovllm.kernels import gates, qkv_rope_store
from nanovllm.kernels.e4m3 import dequantize_ref
from nanovllm.kernels.qkv_rope_store import NormRope
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models import count_parameters, load_model, make_model
from nanovllm.models.base import CausalLM
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import shard_of
from nanovllm.quantization.fp8 import Fp8Weight
from nanovllm.utils.checks import UnsupportedError
from nanovllm.weights.slices import WeightTarget
from tests.hybrid_models import NAMES, VOCAB, complete, randomize, wrap
from tests.hybrid_models import make_model as make_reference
from tests.test_host_cache import save_all_blocks
from tests.test_kernels import DEVICE, DTYPES, check_error, check_rope_store, randn
from tests.test_kernels import by_triton as triton_form
from tests.test_live_weights import save_adapter

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 400, "max_num_seqs": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Folders with models, and transformers' models of them."""
    transformers.logging.disable_progress_bar()
    made = {}
    for name in NAMES:
        model, folder = make_reference(name), tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        made[name] = folder, model
    return made


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> CausalLM:
    config = ModelConfig.from_folder(str(folder))
    return load_model(config, Communicator(), Config(str(folder), **changes), str(folder), 256, dtype, CPU)[0]


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


# Each kind of mixer meets whole prompts, and chunks.
@pytest.mark.parametrize(("name", "chunk"), [(name, (256, 19)[i % 2]) for i, name in enumerate(NAMES)])
def test_tokens_equal_transformers(references: dict[str, tuple[Path, Any]], name: str, chunk: int) -> None:
    folder, model = references[name]
    asked = prompts((1, 2, 17, 70, 33))
    wanted = [complete(model, prompt, 8) for prompt in asked]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    with LLM(str(folder), max_num_batched_tokens=chunk, **SETTINGS) as llm:
        outputs = llm.generate(asked, params, use_tqdm=False)
        # The same again, from kept states.
        outputs += llm.generate(asked, params, use_tqdm=False)
    assert sum(output.num_cached_tokens for output in outputs) >= 16 + 64 + 32
    for output, (tokens, logprobs) in zip(outputs, wanted * 2, strict=True):
        (completion,) = output.outputs
        assert list(completion.token_ids) == tokens
        assert completion.logprobs is not None
        for found, row in zip(completion.logprobs, logprobs, strict=True):
            assert all(abs(item.logprob - row[token].item()) < 1e-4 for token, item in found.items())


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "size"), [*((name, 1) for name in NAMES), ("dense", 2), ("next", 2)])
def test_bf16_engines_are_as_near_to_float32_as_transformers(
    references: dict[str, tuple[Path, Any]], name: str, size: int
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip("needs two GPUs")
    folder, model = references[name]
    rough = copy.deepcopy(model).bfloat16()
    asked = prompts((1, 17, 70, 200, 33))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    settings = SETTINGS | {"device": "cuda", "dtype": "bfloat16", "num_kvcache_blocks": 1000}
    settings["tensor_parallel_size"] = size
    outputs = []
    for chunk in (256, 19):
        with LLM(str(folder), max_num_batched_tokens=chunk, **settings) as llm:
            # The second time from kept states, in captured graphs.
            outputs += [llm.generate(asked, params, use_tqdm=False) for _ in range(2)]
    assert sum(output.num_cached_tokens for output in outputs[-1]) >= 16 + 64 + 192 + 32
    errors = []
    for output in (output for outputs_of_run in outputs for output in outputs_of_run):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        chosen, text = completion.token_ids, torch.tensor([[*output.prompt_token_ids, *completion.token_ids]])
        found = torch.tensor([row[token].logprob for token, row in zip(chosen, completion.logprobs, strict=True)])
        with torch.inference_mode():
            exact, theirs = (
                each(text).logits[0, -len(chosen) - 1 : -1].float().log_softmax(1)[range(len(chosen)), chosen]
                for each in (model, rough)
            )
        errors.append(torch.stack((found - exact, theirs - exact)))
    ours, others = torch.cat(errors, 1).norm(dim=1)
    assert ours < 2 * others


@pytest.mark.parametrize("name", ["dense", "lfm2-moe"])
def test_preempted_sequences_begin_anew(references: dict[str, tuple[Path, Any]], name: str) -> None:
    folder, model = references[name]
    asked = prompts((40, 70, 33, 50))
    with LLM(str(folder), max_num_batched_tokens=64, **SETTINGS | {"num_kvcache_blocks": 20}) as llm:
        outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
        assert llm.stats()["num_preemptions"] > 0
    for prompt, output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == complete(model, prompt, 40)[0]


@pytest.mark.parametrize(("name", "size"), [("dense", 1), ("dense", 2), ("lfm2", 1)])
def test_states_come_back_from_host_memory(references: dict[str, tuple[Path, Any]], name: str, size: int) -> None:
    """Prompts whose keys and states fill the cache several times."""
    folder, model = references[name]
    heads = prompts((80, 64, 97))
    asked = [head + tail for tail in prompts((5, 18)) for head in heads]
    wanted = [complete(model, prompt, 6)[0] for prompt in asked]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    settings = SETTINGS | {"num_kvcache_blocks": 14, "tensor_parallel_size": size, "swap_space": 2**-7}
    with LLM(str(folder), max_num_batched_tokens=64, **settings) as llm:
        save_all_blocks(llm)
        loaded = set[int]()
        # One by one, and all at once.
        for batches in ([[prompt] for prompt in asked], [asked]):
            outputs = []
            for batch in batches:
                outputs += llm.generate(batch, params, use_tqdm=False)
                loaded.add(int(llm.stats()["num_loaded_blocks"]))
            assert [list(output.outputs[0].token_ids) for output in outputs] == wanted
        assert outputs[-1].num_cached_tokens >= 96 and len(loaded) > 4


RANKS = [
    ("next", {}),
    ("next", {"enable_expert_parallel": True}),
    ("dense-odd", {}),
    ("lfm2-moe", {}),
    ("bamba", {}),
    ("nemotron", {}),
    ("nemotron-odd", {}),
    ("nemotron-moe", {"enable_expert_parallel": True}),
    ("falcon", {}),
]


@pytest.mark.parametrize(("name", "settings"), RANKS)
def test_ranks_say_the_same(references: dict[str, tuple[Path, Any]], name: str, settings: dict[str, Any]) -> None:
    """Ranks divide key heads and share one KV head; value heads equal key heads, or not."""
    folder, model = references[name]
    asked = prompts((40, 3, 17))
    with LLM(str(folder), tensor_parallel_size=2, max_num_batched_tokens=32, **SETTINGS, **settings) as llm:
        outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    for prompt, output in zip(asked, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == complete(model, prompt, 8)[0]


def test_rows_of_states_begin_at_multiples_of_their_size(references: dict[str, tuple[Path, Any]]) -> None:
    """In parts of blocks that are such multiples, no row that a kernel reads lies in two; also beside float32 rings."""
    with torch.device("meta"):
        model = make_model(ModelConfig.from_folder(str(references["dense-odd"][0])), Communicator())
    for layer in model.state_layers:
        layer.num_drafts = 3
    layout = StateLayout.of([layer.state_spec(torch.float32) for layer in model.state_layers])
    for layer, places in zip(model.state_layers, layout.places, strict=True):
        assert places["recurrent"] % layer.slice_size == 0


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_wrappers_are_read(references: dict[str, tuple[Path, Any]], name: str, tmp_path: Path) -> None:
    folder, wrapped = references[name][0], tmp_path / "wrapped"
    shutil.copytree(folder, wrapped)
    wrap(wrapped, eos_token_id=[7])
    config, text = ModelConfig.from_folder(str(wrapped)), ModelConfig.from_folder(str(folder))
    assert config.eos_token_ids == {2, 7} and config.layers == text.layers and config.experts == text.experts
    read, expected = load(wrapped).state_dict(), load(folder).state_dict()
    assert read.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(read[key], value), key


def test_norms_and_decays_stay_float32(references: dict[str, tuple[Path, Any]]) -> None:
    """Loaded, updated and drawn weights are float32; checkpoints store w of 1 + w."""
    folder, _ = references["next"]
    stored = load_file(folder / "model.safetensors")
    model = load(folder, torch.bfloat16)
    own = model.state_dict()
    for key in ("model.norm.weight", "model.layers.3.self_attn.q_norm.weight", "model.layers.0.input_layernorm.weight"):
        assert torch.equal(own[key], 1 + stored[key])
    for key in ("A_log", "dt_bias"):
        assert torch.equal(own[f"model.layers.0.self_attn.{key}"], stored[f"model.layers.0.linear_attn.{key}"])
    assert own["model.layers.0.self_attn.norm.weight"].dtype == torch.bfloat16
    for name, key, there in (
        ("lfm2-moe", "mlp.gate.expert_bias", "feed_forward.expert_bias"), ("bamba", "self_attn.D", "mamba.D"),
    ):  # fmt: skip
        values = references[name][1].state_dict()[f"model.layers.2.{there}"]
        part = load(references[name][0], torch.bfloat16).weight_slices()[WeightTarget(f"model.layers.2.{key}")]
        assert torch.equal(part.region, values) and not part.has_model_dtype
    drawn = load(folder, torch.bfloat16, load_format="dummy").state_dict()
    assert all((value == 1).all() for key, value in drawn.items() if "norm" in key)
    assert {value.dtype for key, value in drawn.items() if "norm" in key} == {torch.float32, torch.bfloat16}


def test_factors_become_part_of_weights(references: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    """Weights as they are stored, quantised ones, and an adapter's updates, which are taken out again."""
    folder, model = references["falcon"]
    stored = model.state_dict()["model.layers.1.feed_forward.down_proj.weight"]
    weight = load_model(
        ModelConfig.from_folder(str(folder)).with_quantization("fp8"), Communicator(), Config(str(folder)), str(folder),
        256, torch.float32, CPU,
    )[0].model.get_submodule("layers.1.mlp.down_proj.weight")  # fmt: skip
    assert isinstance(weight, Fp8Weight)
    torch.testing.assert_close(dequantize_ref(weight.matrix, torch.float32), 0.5 * stored, rtol=0.07, atol=1e-3)
    base = {key.replace("feed_forward", "mlp"): value for key, value in model.state_dict().items()}
    changed = {key.replace("mlp", "feed_forward"): value for key, value in save_adapter(tmp_path, base, 1).items()}
    merged = copy.deepcopy(model)
    merged.load_state_dict(changed)
    prompt, params = prompts((30,))[0], SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True)
    with LLM(str(folder), **SETTINGS) as llm:
        for reference in (merged, model):
            if reference is merged:
                llm.load_weights(str(tmp_path))
            else:
                assert llm.unload_adapter()
            assert llm.reset_prefix_cache()
            completion = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]
            (token,), logprobs = complete(reference, prompt, 1)
            assert completion.logprobs is not None
            assert abs(completion.logprobs[0][token].logprob - logprobs[0, token].item()) < 1e-4


@pytest.mark.parametrize("name", ["next-odd", "nemotron-moe"])
def test_update_of_weights(references: dict[str, tuple[Path, Any]], name: str) -> None:
    """Weights by the names of transformers' modules, as trainers send them."""
    folder, model = references[name]
    prompt = prompts((30,))
    changed = make_reference(name)
    torch.manual_seed(5)
    randomize(changed)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(str(folder), **SETTINGS) as llm:
        for reference in (changed, model):
            llm.load_weights(reference.state_dict(), strict=True)
            assert llm.reset_prefix_cache()
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == complete(reference, prompt[0], 6)[0]


def test_activations_keep_their_dtype(references: dict[str, tuple[Path, Any]]) -> None:
    """Beside norms in float32, of a dense model and of one with experts, whose outputs are parts of sums."""
    for name in ("dense", "moe"):
        with LLM(str(references[name][0]), dtype="bfloat16", **SETTINGS) as llm:
            outputs = llm.generate(prompts((40, 3)), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
        assert all(output.outputs[0].token_ids for output in outputs)


def hf_config(**changes: Any) -> Any:
    return transformers.Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], **changes)


def test_configs() -> None:
    config = ModelConfig.from_hf(hf_config())
    assert [layer.is_linear for layer in config.layers] == [True, True, True, False] * 12
    assert config.layers[3].rope == RopeConfig(10000.0, share=0.25)
    assert config.delta_net == DeltaNetConfig(16, 32, 128, 128, 4)
    assert config.experts is not None and config.experts.shared_size == 512
    moe = ModelConfig.from_hf(transformers.Qwen3_5MoeTextConfig(architectures=["Qwen3_5MoeForCausalLM"]))
    assert moe.intermediate_size == 0 and moe.experts is not None and moe.experts.intermediate_size == 512
    # transformers ties by the config of the whole.
    whole = transformers.Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"], tie_word_embeddings=True)
    assert ModelConfig.from_hf(whole).tie_word_embeddings
    for changes, message in (
        ({"linear_num_value_heads": 24}, "no multiple"),
        ({"linear_key_head_dim": 48}, "linear_key_head_dim=48"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types"),
    ):
        with pytest.raises((UnsupportedError, ValueError), match=message):
            ModelConfig.from_hf(hf_config(**changes))
    for family, given, message in (
        ("Lfm2", {"conv_bias": True}, "conv_bias"),
        ("Bamba", {"mamba_d_state": 48}, "mamba_d_state=48"),
        ("NemotronH", {"n_group": 2}, "n_group"),
        ("NemotronH", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("FalconH1", {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
        ("FalconH1", {"projectors_bias": True}, "projectors_bias"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            ModelConfig.from_hf(getattr(transformers, f"{family}Config")(**given))
    # Some of Granite 4 attend in all layers, and none has a state.
    granite = transformers.GraniteMoeHybridConfig(
        layer_types=["full_attention"] * 2, num_hidden_layers=2, hidden_size=2560, num_attention_heads=40,
        num_local_experts=0,
    )  # fmt: skip
    attending = ModelConfig.from_hf(granite)
    assert attending.mamba is None and attending.experts is None and attending.layers[0].rope is None
    with pytest.raises(ValueError, match="1 groups of Mamba's heads"):
        shard_of(ModelConfig.from_hf(transformers.BambaConfig(num_hidden_layers=1)), 0, 2)
    with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
        ModelConfig.from_hf(transformers.Qwen3Config(architectures=["Qwen3ForCausalLM"], partial_rotary_factor=0.5))


def test_partial_rotary_embedding_stretches_as_transformers_does() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144, "rope_theta": 1e7,
            "partial_rotary_factor": 0.25}  # fmt: skip
    hf = hf_config(rope_parameters=yarn, max_position_embeddings=262144)
    config, positions = ModelConfig.from_hf(hf), torch.tensor([0, 1, 900, 4000])
    assert config.max_position == 2**20
    cos, sin = Qwen3NextRotaryEmbedding(hf)(torch.zeros(1), positions[None])
    rotary = RotaryEmbedding(config.head_dim, config.layers[3].rope)
    rotary.tabulate(4001, CPU)
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), 1)
    torch.testing.assert_close(rotary.cos_sin[positions], expected, rtol=1e-5, atol=1e-5)


def test_ignored_layers_go_by_their_names_in_checkpoints() -> None:
    parent = "model.layers.0.linear_attn"

    def config(*names: str) -> QuantizationConfig:
        return QuantizationConfig("block", True, ignored=names)

    wrapped = "model.language_model.layers.0.linear_attn"
    quant_config = config(f"{wrapped}.in_proj_a", f"{wrapped}.in_proj_b")
    assert quant_config.ignores(f"{parent}.in_proj_ba", ["b", "a"])
    assert not quant_config.ignores(f"{parent}.in_proj_qkvz", ["q", "k", "v", "z"])
    assert config("re:.*linear_attn.*").ignores(f"{parent}.in_proj_qkvz", ["q", "k", "v", "z"])
    assert config("linear_attn.in_proj_ba").ignores(f"{parent}.in_proj_ba", ["b.0", "a.0", "b.1", "a.1"])
    assert config("in_proj_qkv", "in_proj_z").ignores(f"{parent}.in_proj_qkvz", ["q", "k", "v", "z"])
    with pytest.raises(ValueError, match="but not all"):
        config("in_proj_z").ignores(f"{parent}.in_proj_qkvz", ["q", "k", "v", "z"])


def test_names_that_are_near(references: dict[str, tuple[Path, Any]]) -> None:
    model = make_model(ModelConfig.from_folder(str(references["next"][0])), Communicator())
    assert {model.stored_name(target).rpartition(".")[2] for target in model.weight_slices()} >= {"A_log", "weight"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary"), [(32, 8), (48, 16), (64, 64), (256, 64)])
def test_gated_queries_and_partial_rotation(head_dim: int, rotary: int, dtype: torch.dtype) -> None:
    """The kernel agrees with plain torch, which rotates part of a head as if it were a head."""
    num_heads, kv_heads = 5, 2
    weights = 1 + 0.2 * randn(head_dim), 1 + 0.2 * randn(head_dim)
    rope = NormRope(weights, 0.1, torch.rand(64, rotary, device=DEVICE), has_gates=True)
    qkv = randn(9, 2 * num_heads + 2 * kv_heads, head_dim, dtype=dtype)
    kernel = partial(triton_form(qkv_rope_store.qkv_rope_store), qkv)
    positions, _, exact, *_ = check_rope_store(kernel, qkv, qkv.float(), rope, kv_heads)
    x = qkv.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)
    own = x[:, : 2 * num_heads : 2] * weights[0]
    cos, sin = rope.cos_sin[positions].unsqueeze(1).chunk(2, -1)
    first, second, rest = own.split([rotary // 2, rotary // 2, head_dim - rotary], -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    torch.testing.assert_close(exact, turned, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype) -> None:
    tokens, num_heads, size = 7, 5, 48
    heads = randn(tokens, 2 * num_heads + 4, size, dtype=dtype)
    x = randn(tokens, num_heads, size, dtype=dtype)
    exact = x.float() * heads.float()[:, : 2 * num_heads].unflatten(1, (num_heads, 2))[:, :, 1].sigmoid()
    same = gates.gate_heads_ref(x, heads)
    check_error(same, exact.to(dtype), exact)
    check_error(triton_form(gates.gate_heads)(x, heads), same, exact)
    weight, branch, x = randn(1, size, dtype=dtype), randn(tokens, size, dtype=dtype), randn(tokens, size, dtype=dtype)
    for out in (randn(tokens, size, dtype=dtype), randn(tokens, 3, size, dtype=dtype).transpose(0, 1)):
        total = out.float() if out.dim() == 2 else out.float().sum(0)
        exact = total + branch.float() * (x.float() @ weight.float().T).sigmoid()
        same = gates.add_gated_ref(x, weight, branch, out)
        check_error(same, exact.to(dtype), exact)
        check_error(triton_form(gates.add_gated)(x, weight, branch, out), same, exact)


@pytest.mark.parametrize(("shape", "billions"), [("3.5-4B", 4.2), ("3.5-27B", 26.9), ("3.5-35B-A3B", 34.7)])
def test_shapes_of_the_benchmark(shape: str, billions: float) -> None:
    assert round(count_parameters(ModelConfig.from_folder(shape_folder(shape))) / 1e9, 1) == billions


def test_weights_of_experts_without_gates_are_counted(references: dict[str, tuple[Path, Any]]) -> None:
    """Two matrices of one expert, in two layers."""
    assert WeightCounts.of(ModelConfig.from_folder(str(references["nemotron-moe"][0]))).expert == 2 * 2 * 64 * 48
    assert WeightCounts.of(ModelConfig.from_folder(str(references["nemotron-odd"][0]))).expert == 2 * 32 * 48


@pytest.mark.parametrize("name", ["dense", "bamba"])
def test_slices_of_states_lie_in_one_part_of_a_block(references: dict[str, tuple[Path, Any]], name: str) -> None:
    """A GPU's kernels compute an address for each slice; a part of 24 elements ends within one of 16."""
    with torch.device("meta"):
        layer = make_model(ModelConfig.from_folder(str(references[name][0])), Communicator()).state_layers[0]
    pool: Any = SimpleNamespace(is_cuda=True, view=lambda dtype: torch.empty(1, 1, 24))
    with pytest.raises(ValueError, match="kvcache_block_size is too small"):
        layer.bind(pool, {})
