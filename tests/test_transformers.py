"""Models that transformers' code runs over the paged cache: right, or refused at load by name."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama

from nanovllm import SamplingParams
from nanovllm.configs import model as model_config
from nanovllm.configs.model import MODELS, TRANSFORMERS, ModelConfig
from nanovllm.models import fuse
from nanovllm.models.transformers_shard import shard_model
from nanovllm.outputs import RequestOutput
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import shard_of
from nanovllm.runner.model_runner import ModelRunner
from tests.conftest import MakeCheckpoint
from tests.test_tokens import BY_TRANSFORMERS
from tests.tools.sweep_models import (
    CAUSAL,
    NUM_NEW,
    TABLE,
    WRAPPERS,
    compare,
    complete,
    make_llm,
    make_model,
    prompts,
    run,
    tiny_config,
)

REFUSED = {
    "recurrent_gemma": "1 of 4 layers attend",
    "zaya": "a state that is no KV cache",
    "deepseek_v4": "129 keys for 128 tokens",
    "llama4": "neither causal nor a sliding window",
    "bert": "neither causal nor a sliding window",
    "bloom": "0 of 4 layers attend",
    "falcon": "attention classes of its own",
    "gpt_neo": "attention classes of its own",
    "diffllama": "attends twice with one set of weights",
    "doge": "not one of transformers' masking_utils",
    "deepseek_v32": r"asks attention for \['indices'\]",
    "moshi": "its cache keeps 12 tokens, its mask shows all",
}
Method = Callable[..., Any]


@pytest.fixture
def llama(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint("Llama", num_hidden_layers=2)


@pytest.mark.parametrize(
    ("model_type", "fused", "linears"),
    [
        ("qwen3", {"FusedAttention": 4, "FusedMLP": 4, "FusedNorm": 17}, 1),
        # Stacked projections.
        ("phi3", {"FusedAttention": 4, "FusedMLP": 4, "FusedNorm": 9}, 1),
        # Norms that add one to their weights; GELU instead of SiLU.
        ("gemma2", {"FusedAttention": 4, "FusedNorm": 17}, 13),
        # RoPE of neighbours; layer norms.
        ("cohere2", {"FusedMLP": 4}, 17),
        # Norms of all heads at once.
        ("olmo2", {"FusedMLP": 4, "FusedNorm": 17}, 17),
    ],
)
def test_modules_that_compute_what_ours_do_are_found(
    model_type: str, fused: dict[str, int], linears: int, tmp_path: Path
) -> None:
    make_model(model_type, tiny_config(model_type)).save_pretrained(tmp_path)
    with make_llm(tmp_path) as llm:
        model = cast("ModelRunner", llm.llm_engine._runner).model
        classes = Counter(type(module).__name__ for module in model.modules())
        # transformers' code may read what a module says of itself.
        layers: Any = model.model.layers
        assert [layer.self_attn.layer_idx for layer in layers] == [0, 1, 2, 3]
    assert {name: count for name, count in classes.items() if name.startswith("Fused")} == fused | {
        "FusedLinear": linears
    }


def _clamped(module: type, limit: float, *, is_input: bool) -> Method:
    """Return what a module computes whose input, or output, is clamped."""
    method: Method = module.forward  # type: ignore[attr-defined]

    def clamp(x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-limit, limit)

    return (lambda self, x: method(self, clamp(x))) if is_input else (lambda self, x: clamp(method(self, x)))


def _swiglu_of_limit(self: Any, x: torch.Tensor) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=12)) * self.up_proj(x).clamp(-12, 12))


def _attention_of_limit(method: Method) -> Method:
    def attend(self: Any, **kwargs: Any) -> Any:
        out, weights = method(self, **kwargs)
        return out.clamp(-12, 12), weights

    return attend


@pytest.mark.parametrize(
    ("module", "forward"),
    [
        ("LlamaMLP", _swiglu_of_limit),
        ("LlamaRMSNorm", _clamped(modeling_llama.LlamaRMSNorm, 8, is_input=True)),
        ("LlamaRMSNorm", _clamped(modeling_llama.LlamaRMSNorm, 5, is_input=False)),
        ("LlamaAttention", _attention_of_limit(modeling_llama.LlamaAttention.forward)),
        # Queries, keys and values are clamped.
        ("OlmoAttention", None),
    ],
)
def test_a_module_that_clamps_is_not_ours(
    module: str, forward: Method | None, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forward is not None:
        monkeypatch.setattr(getattr(modeling_llama, module), "forward", forward)
    folder = make_checkpoint("Llama") if forward else make_checkpoint("Olmo", clip_qkv=8.0, pad_token_id=0)
    with make_llm(folder) as llm:
        found = Counter(type(part).__name__ for part in cast("ModelRunner", llm.llm_engine._runner).model.modules())
    kinds = {"MLP": "FusedMLP", "RMSNorm": "FusedNorm", "Attention": "FusedAttention"}
    (ours,) = (ours for name, ours in kinds.items() if module.endswith(name))
    assert module in found and ours not in found and set(found) & set(kinds.values())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # As OPT-350m: states that are narrower before and after the layers.
        ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False, "init_std": 0.2}),
        # Attention's two linear layers have the sizes of a SwiGLU MLP.
        ("Phi3", {"partial_rotary_factor": 0.5, "num_key_value_heads": 2, "pad_token_id": 0}),
    ],
)
def test_layers_of_unusual_sizes_run(family: str, changes: dict[str, Any], make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(family, **changes)
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    prompt, params = prompts()[-1], SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with make_llm(folder) as llm, torch.inference_mode():
        assert llm.generate([prompt], params, use_tqdm=False)[0]["token_ids"] == complete(reference, prompt)
        state = reference.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1]
        (found,) = llm.embed([prompt], use_tqdm=False)
    assert torch.allclose(found, state / state.norm(), rtol=0, atol=1e-5)


class _ByName(torch.nn.Module):
    """Gives a module its input by name."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> Any:
        return self.mlp(states=x)


def test_a_module_that_is_called_otherwise_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(hidden_size=8, intermediate_size=12, num_attention_heads=1)
    mlp, x = modeling_llama.LlamaMLP(config), torch.randn(1, 8, 8)
    expected, method = mlp(x), modeling_llama.LlamaMLP.forward

    def named(self: Any, states: torch.Tensor) -> Any:
        return method(self, states)

    assert fuse._as_mlp(mlp) is not None
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x, other: method(self, x))
    assert fuse._as_mlp(mlp) is None
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", named)
    model = _ByName(mlp)
    assert "FusedMLP" not in fuse.fuse(model, lambda: model(x), 8)
    torch.testing.assert_close(model(x), expected)


def test_biases_go_into_the_product(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("Llama", num_hidden_layers=2, attention_bias=True, mlp_bias=True)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(param)
    model.save_pretrained(folder)
    assert compare(folder, model).verdict == "equal"
    # Gated products take none.
    assert fuse._as_mlp(model.model.layers[0].mlp) is None
    linears = [torch.nn.Linear(8, 4, bias=bias) for bias in (True, False)]
    x = torch.randn(3, 8)
    torch.testing.assert_close(fuse.merged(linears).multiply(x)[0], torch.cat([f(x) for f in linears], dim=1))


def test_attention_that_depends_on_positions_otherwise_is_not_ours(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = modeling_llama.LlamaAttention.forward

    def attend(self: Any, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        out, weights = method(self, position_ids=position_ids, **kwargs)
        return out * (1 + 1.5 * (position_ids > 60)[..., None]), weights

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", attend)
    assert compare(llama, AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")).verdict == "equal"


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_attends_otherwise_is_refused_by_name(model_type: str) -> None:
    result = run(model_type)
    assert result.verdict == "refused" and re.search(REFUSED[model_type], result.cause), result


def test_the_table_says_what_the_tests_do() -> None:
    runs, refused = TABLE.read_text(encoding="utf-8").split("| refused, since |")
    assert all(name in runs for name in MODELS)
    for model_type in set(BY_TRANSFORMERS) - set(WRAPPERS):
        assert f" {CAUSAL[model_type]}" in runs, model_type
    for model_type in REFUSED:
        assert CAUSAL[model_type] in refused and f" {CAUSAL[model_type]}," not in runs, model_type


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """Add a little of the token before to each."""
    return x + 0.05 * torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))


def _with_shift(method: Method) -> Method:
    return lambda self, hidden_states, **kwargs: method(self, hidden_states=_shifted(hidden_states), **kwargs)


def _shift_first(method: Method) -> Method:
    return lambda self, x: method(self, _shifted(x))


def _with_own_positions(method: Method) -> Method:
    def rotate(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return method(self, x, torch.arange(x.shape[1])[None])

    return rotate


def _shift_outputs(method: Method) -> Method:
    def attend(self: Any, **kwargs: Any) -> Any:
        out, weights = method(self, **kwargs)
        return _shifted(out), weights

    return attend


def _with_running_maximum(method: Method) -> Method:
    def attend(self: Any, **kwargs: Any) -> Any:
        out, weights = method(self, **kwargs)
        return out + 0.3 * torch.cummax(out, 1).values, weights

    return attend


def _shift_logits(method: Method) -> Method:
    def head(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = method(self, *args, **kwargs)
        out.logits = _shifted(out.logits)
        return out

    return head


def _with_scale_of_length(method: Method) -> Method:
    def attend(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        self.scaling = 0.25 + 0.01 * hidden_states.shape[1]
        return method(self, hidden_states=hidden_states, **kwargs)

    return attend


def _times_length(method: Method) -> Method:
    return lambda self, x: method(self, x) * (1 + 0.01 * x.shape[1])


@pytest.mark.parametrize(
    ("module", "change", "cause"),
    [
        ("LlamaAttention", _with_shift, "a state that is no KV cache"),
        ("LlamaMLP", _shift_first, "a state that is no KV cache"),
        ("LlamaRMSNorm", _shift_first, "a state that is no KV cache"),
        ("LlamaAttention", _shift_outputs, "mixes tokens outside attention"),
        ("LlamaAttention", _with_running_maximum, "mixes tokens outside attention"),
        ("LlamaForCausalLM", _shift_logits, "its head mixes tokens"),
        ("LlamaAttention", _with_scale_of_length, "asks attention for another scale"),
        ("LlamaMLP", _times_length, "counts positions or tokens by itself"),
        ("LlamaRotaryEmbedding", _with_own_positions, "counts positions or tokens by itself"),
    ],
)
def test_a_llama_with_a_change_is_refused(
    module: str, change: Callable[[Method], Method], cause: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = getattr(modeling_llama, module)
    monkeypatch.setattr(changed, "forward", change(changed.forward))
    with pytest.raises(ValueError, match=f"LlamaForCausalLM cannot run over a paged KV cache: .*{cause}"):
        make_llm(llama)


def _logprobs(output: RequestOutput) -> list[float]:
    """The log-probabilities of a prompt's tokens, and of those that follow."""
    found = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return [at[token].logprob for at, token in zip(found, tokens, strict=True) if at is not None]


def test_auto_is_native_where_a_row_of_the_table_takes_the_config(make_checkpoint: MakeCheckpoint) -> None:
    for changes, is_native in (({}, True), ({"hidden_act": "gelu"}, False), ({"mlp_bias": True}, False)):
        folder = make_checkpoint("Llama", **changes)
        with make_llm(folder, model_impl="auto") as llm:
            assert (llm.model_config.architecture is not TRANSFORMERS) == is_native
            reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            output = llm.generate([prompts()[-1]], SamplingParams(temperature=0, max_tokens=NUM_NEW), use_tqdm=False)
            assert output[0]["token_ids"] == complete(reference, prompts()[-1])
    with pytest.raises(ValueError, match="hidden_act='gelu' is not supported"):
        make_llm(make_checkpoint("Llama", hidden_act="gelu"), model_impl="native")


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "yarn"])
def test_angles_do_not_depend_on_the_longest_sequence_of_a_step(kind: str, make_checkpoint: MakeCheckpoint) -> None:
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 32, "factor": 4.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    # YaRN alone lengthens a model by itself.
    length = 32 if kind == "yarn" else 32 * 4
    folder = make_checkpoint("Llama", head_dim=16, max_position_embeddings=length, rope_scaling=scaling)
    short, long, params = prompts()[3], prompts()[-1], SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=0)
    with make_llm(folder, max_model_len=120) as llm:
        assert llm.max_model_len == 120
        alone = llm.generate([short], params, use_tqdm=False)[0]
        together = llm.generate([long, short], params, use_tqdm=False)[1]
    size = len(short) - 1
    pairs = zip(_logprobs(alone)[:size], _logprobs(together)[:size], strict=True)
    assert max(abs(one - two) for one, two in pairs) < 1e-5


def test_weights_are_loaded_strictly(llama: Path) -> None:
    file = llama / "model.safetensors"
    weights, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    rest = {key: value for key, value in weights.items() if key != name}
    extra = {"model.extra.weight": torch.zeros(2)}
    for content, message in (
        (rest | extra, rf"tensors missing \['{name}'\], left over \['model.extra.weight'\]"),
        (weights | {name: weights[name][1:].clone()}, f"of another shape .*{name}"),
    ):
        save_file(content, file, {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            make_llm(llama)
    state = torch.random.get_rng_state()
    found = []
    for seed in (1, 1, 2):
        with make_llm(llama, load_format="dummy", seed=seed) as llm:
            found.append(llm.embed([[5, 6]], use_tqdm=False))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCasualLM"]}, "'LlamaForCasualLM' is not supported.*did you mean LlamaForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "transformers has no such decoder"),
        ({"hidden_act": "no_such"}, "cannot make LlamaForCausalLM: it does not know hidden_act='no_such'"),
        ({"rope_parameters": {"rope_type": "no_such"}}, "it does not know rope_type='no_such'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config=.*bits.* is not supported"),
        ({"architectures": ["Own"], "auto_map": {"AutoModelForCausalLM": "own.Own"}}, "trust_remote_code=True"),
    ],
)
def test_a_bad_config_is_named_before_weights_are_read(changes: dict[str, Any], message: str, llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | changes))
    (llama / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        make_llm(llama)


OWN = """
from transformers import LlamaForCausalLM
class Own(LlamaForCausalLM):
    pass
"""


def test_code_of_a_folder_runs_where_it_is_trusted(llama: Path) -> None:
    with make_llm(llama) as llm:
        expected = llm.generate(prompts(), SamplingParams(temperature=0), use_tqdm=False)
    config = json.loads((llama / "config.json").read_text())
    own = {"architectures": ["Own"], "auto_map": {"AutoModelForCausalLM": "own.Own"}}
    (llama / "config.json").write_text(json.dumps(config | own))
    (llama / "own.py").write_text(OWN)
    with make_llm(llama, trust_remote_code=True, model_impl="auto") as llm:
        outputs = llm.generate(prompts(), SamplingParams(temperature=0), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]


@pytest.mark.parametrize(
    ("family", "size", "changes"),
    [
        # Uneven shares of the MLP; logits are capped after the head.
        ("Gemma2", 3, {"num_attention_heads": 6, "head_dim": 16, "sliding_window": 12, "intermediate_size": 104,
                       "tie_word_embeddings": True, "pad_token_id": 0}),
        # Uneven shares of the heads, whose queries, keys and values come after one another; all layers have biases.
        pytest.param("GPTNeoX", 2, {"num_attention_heads": 3}, marks=pytest.mark.compat),
    ],
)  # fmt: skip
def test_ranks_say_the_same_as_one(
    family: str, size: int, changes: dict[str, Any], make_checkpoint: MakeCheckpoint
) -> None:
    folder = make_checkpoint(family, hidden_size=96, num_key_value_heads=3, **changes)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    with make_llm(folder) as one, make_llm(folder, tensor_parallel_size=size, num_kvcache_blocks=5) as several:
        expected, outputs = (llm.generate(prompts()[1:7], params, use_tqdm=False) for llm in (one, several))
        assert several.stats()["num_preemptions"] > 0
    for output, want in zip(outputs, expected, strict=True):
        assert output["token_ids"] == want["token_ids"]
        pairs = zip(_logprobs(output), _logprobs(want), strict=True)
        assert max(abs(first - second) for first, second in pairs) < 1e-4
    assert len({token for output in expected for token in output["token_ids"]}) > 5


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("qwen3_moe", "its base_model_tp_plan has styles that are not supported: moe_tp_experts, packed_colwise"),
        ("gpt_oss", "it has no base_model_tp_plan that divides its layers"),
        ("gemma", "tensor_parallel_size=2 is over the model's 1 KV heads"),
    ],
)
def test_a_model_without_a_plan_has_one_rank(model_type: str, message: str) -> None:
    config = tiny_config(model_type)
    if model_type == "gemma":
        config.num_key_value_heads = 1
    with pytest.raises(ValueError, match=message):
        shard_model(
            make_model(model_type, config), shard_of(ModelConfig.for_transformers(config), 0, 2), Communicator()
        )


def test_a_transformers_without_mask_functions_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "_LEAST_TRANSFORMERS", (99, 1))
    with pytest.raises(ValueError, match=r"needs transformers 99\.1 or newer, not \d"):
        make_llm(llama)
    make_llm(llama, model_impl="auto").exit()


def test_a_mixture_of_no_experts_is_left_to_transformers(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelConfig.from_folder(str(tmp_path), model_impl="auto").architecture is TRANSFORMERS
