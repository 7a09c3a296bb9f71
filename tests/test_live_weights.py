"""Weights that change while the engine lives: afterwards it is what a fresh engine of them would be."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.client.replicated_engine import ReplicatedEngine
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.weights.model_weights import ModelWeights
from nanovllm.weights.report import LoadFailedError, MissingWeights
from nanovllm.weights.slices import WeightSlice
from tests.conftest import MakeCheckpoint
from tests.mock_runner import run

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 40}
PREFIX = list(range(7, 57))
PROMPTS = [[5, 9, 2], [*PREFIX, 3], [*PREFIX, 8]]
GREEDY = SamplingParams(0, 6, logprobs=2, ignore_eos=True)
DRAWN = SamplingParams(1.0, 6, logprobs=0, seed=3, ignore_eos=True)

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3},
    "stacked": {"architecture": "phi3", "pad_token_id": 0},
    "mixture": {"architecture": "qwen3Moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "norms of 1 + weight": {"architecture": "gemma", "head_dim": 16, "tie_word_embeddings": True},
    "biases": {"architecture": "qwen2", "tie_word_embeddings": True},
    "norms of all heads": {"architecture": "Olmo2", "pad_token_id": 0},
}


def answers(llm: LLM) -> list[Any]:
    outputs = [o.outputs[0] for p in (GREEDY, DRAWN) for o in llm.generate(PROMPTS, p, use_tqdm=False)]
    return [(output.token_ids, output.logprobs) for output in outputs]


def two_models(make_checkpoint: MakeCheckpoint, model: str) -> tuple[Path, Path]:
    return make_checkpoint(seed=1, **MODELS[model]), make_checkpoint(seed=2, **MODELS[model])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return weights


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("untied", {}),
        ("untied", {"quantization": "fp8"}),
        ("tied", {}),
        ("stacked", {}),
        ("mixture", {}),
        ("norms of 1 + weight", {"model_impl": "transformers"}),
        ("norms of all heads", {"quantization": "fp8"}),
        # Each starts processes; `tests/test_tensor_parallel.py` has some anyway.
        *(
            pytest.param(model, {"tensor_parallel_size": 2} | settings, marks=pytest.mark.compat)
            for model, settings in (
                ("tied", {"tensor_parallel_size": 3}),
                ("untied", {"quantization": "fp8"}),
                ("mixture", {"enable_expert_parallel": True}),
                ("biases", {"model_impl": "transformers"}),
            )
        ),
    ],
)
def test_new_weights_are_those_of_a_fresh_engine(
    make_checkpoint: MakeCheckpoint, model: str, settings: dict[str, Any]
) -> None:
    old, new = two_models(make_checkpoint, model)
    with LLM(new, **SETTINGS, **settings) as fresh:
        want = answers(fresh)
    with LLM(old, **SETTINGS, **settings) as llm:
        before = answers(llm)
        assert before != want
        weights = stored(new)
        assert llm.load_weights(weights, strict=True) == len(weights)
        assert llm.reset_prefix_cache() and answers(llm) == want
        # From a folder, and then one by one, the last ones first.
        assert llm.load_weights(old, strict=True) == len(weights)
        assert llm.reset_prefix_cache() and answers(llm) == before
        assert sum(llm.load_weights([item]) for item in reversed(weights.items())) == len(weights)
        assert llm.reset_prefix_cache() and answers(llm) == want
        # After a sleep without them.
        llm.sleep(level=2)
        llm.wake_up()
        llm.load_weights((name, tensor.double()) for name, tensor in weights.items())
        assert answers(llm) == want


@pytest.mark.parametrize("settings", [{}, {"quantization": "fp8"}, {"enable_expert_parallel": True}])
def test_a_trainer_has_the_experts_of_a_mixture_in_one_tensor(
    make_checkpoint: MakeCheckpoint, settings: dict[str, Any]
) -> None:
    old, new = two_models(make_checkpoint, "mixture")
    with LLM(new, **SETTINGS, **settings) as fresh:
        want = answers(fresh)
    parameters = dict(AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).named_parameters())
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    assert parameters[stacked].dim() == 3
    with LLM(old, **SETTINGS, **settings) as llm:
        assert llm.load_weights(parameters, strict=True) == len(parameters)
        assert llm.reset_prefix_cache() and answers(llm) == want
        for wrong in (parameters[stacked][:3], parameters[stacked][:, :60], parameters[stacked][0]):
            with pytest.raises(ValueError, match=re.escape(f"{list(wrong.shape)}; the config asks for [4, 64,")):
                llm.load_weights({stacked: wrong})
        with pytest.raises(ValueError, match=r"it has 'model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight'"):
            llm.load_weights({"model.layers.0.mlp.experts.3.upp_proj.weight": torch.zeros(1)})


@pytest.fixture
def pair(make_checkpoint: MakeCheckpoint) -> tuple[Path, Path]:
    return two_models(make_checkpoint, "untied")


@pytest.fixture
def live(pair: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(pair[0], **SETTINGS) as llm:
        yield llm


def test_what_was_cached_stays_until_it_is_reset(live: LLM, pair: tuple[Path, Path]) -> None:
    with LLM(pair[1], **SETTINGS) as fresh:
        want = answers(fresh)
    answers(live)
    live.load_weights(pair[1])
    # Keys and values of the old weights.
    assert answers(live) != want
    assert live.reset_prefix_cache() and answers(live) == want


BAD: dict[str, tuple[Any, str]] = {
    "unknown": (("model.layers.7.mlp.up_proj.weight", torch.zeros(2, 2)), r"no tensor 'model.layers.7.mlp.up_pr"),
    "shape": (("model.layers.1.self_attn.k_proj.weight", torch.zeros(3, 64)), r"has shape \[3, 64\]; .*\[64, 64\]"),
    "dtype": (("model.norm.weight", torch.zeros(64, dtype=torch.int32)), "stored as torch.int32"),
    "no tensor": (("model.norm.weight", [0.0] * 64), "'model.norm.weight' is a list"),
    "no values": (("model.norm.weight", torch.zeros(64, device="meta")), "'model.norm.weight' has no values"),
    "no pair": ("model.norm.weight", "pairs of a name and a tensor, not 'model.norm.weight'"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_does_not_fit_is_refused_and_nothing_of_it_is_written(
    live: LLM, pair: tuple[Path, Path], bad: str
) -> None:
    item, message = BAD[bad]
    good = stored(pair[1])["model.embed_tokens.weight"]
    before = answers(live)
    with pytest.raises(ValueError, match=f"{message}.*; 1 tensors were written before"):
        live.load_weights([("model.embed_tokens.weight", good), item])
    live.load_weights(pair[0], strict=True)
    live.reset_prefix_cache()
    assert answers(live) == before


def test_other_errors_say_how_many_tensors_were_written(live: LLM) -> None:
    norm = ("model.norm.weight", torch.ones(64))

    def ending() -> Iterator[Any]:
        yield norm
        raise KeyError("next")

    with pytest.raises(RuntimeError, match="the weights end with KeyError: 'next'; 1 tensors were written") as raised:
        live.load_weights(ending())
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(ValueError, match=r"tensors are missing: .*; 1 tensors were written before"):
        live.load_weights([norm], strict=True)


def test_folders_that_do_not_fit_change_nothing(
    live: LLM, pair: tuple[Path, Path], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    before = answers(live)
    with pytest.raises(ValueError, match=r"has shape \[320, 32\]; the config asks for \[320, 64\]"):
        live.load_weights(make_checkpoint(hidden_size=32))
    copy = Path(shutil.copytree(pair[1], tmp_path / "copy"))
    weights = stored(copy)
    file = copy / "model.safetensors"
    del weights["model.norm.weight"]
    save_file(weights, file)
    with pytest.raises(ValueError, match=r"1 of \d+ tensors are missing: \['model.norm.weight'\]"):
        live.load_weights(copy, strict=True)
    # As long as it is being written: a part of the bytes, then one of several files.
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors' is damaged"):
        live.load_weights(copy)
    save_file(weights, copy / "model-00001-of-00002.safetensors")
    file.unlink()
    with pytest.raises(ValueError, match=r"has 1 of 2 files of weights and no model.safetensors.index.json"):
        live.load_weights(copy)
    with pytest.raises(ValueError, match=r"nowhere' is no folder"):
        live.load_weights(tmp_path / "nowhere")
    live.reset_prefix_cache()
    assert answers(live) == before


def test_a_warning_names_what_is_not_a_number(live: LLM) -> None:
    bad = torch.zeros(64, 64)
    bad[3, 5] = float("nan")
    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer, part in ((0, "v"), (1, "k"))]
    good = torch.full((64, 64), float("inf"))
    with pytest.warns(UserWarning, match=f"^1 tensors that were loaded have NaN, such as '{names[1]}'"):
        live.load_weights([(names[0], good), (names[1], bad)])


def test_requests_go_on_with_new_weights_where_they_were_paused(live: LLM, pair: tuple[Path, Path]) -> None:
    params = SamplingParams(0, 20, ignore_eos=True)
    prompts = [[*PREFIX[:16], number] for number in range(6)]
    with LLM(pair[1], **SETTINGS) as fresh:
        others = [o.outputs[0].token_ids for o in fresh.generate(prompts, params, use_tqdm=False)]
    want = [o.outputs[0].token_ids for o in live.generate(prompts, params, use_tqdm=False)]
    ids = [live.add_request(prompt, params) for prompt in prompts]
    for _ in range(8):
        live.step()
    live.pause()
    before = [list(seq.token_ids)[17:] for seq in live.llm_engine.scheduler.sequences]
    assert all(4 < len(tokens) < 20 for tokens in before) and not live.step().new_token_ids
    live.load_weights(pair[1])
    # They keep the keys and values by the old weights, which no other request finds.
    assert not live.reset_prefix_cache()
    live.resume()
    late = live.add_request(prompts[0], params)
    done = run(live)
    found = [done[i].outputs[0].token_ids for i in ids]
    assert all(tokens[: len(old)] == old for tokens, old in zip(found, before, strict=True))
    assert [len(tokens) for tokens in found] == [20] * 6 and found != want
    assert done[late].outputs[0].token_ids == others[0] and not done[late].num_cached_tokens


def test_requests_that_were_paused_leave_nothing_that_others_find(pair: tuple[Path, Path]) -> None:
    with LLM(pair[0], max_num_seqs=3, **SETTINGS) as llm:
        begun = llm.add_request(PREFIX[:10], SamplingParams(0, 20, ignore_eos=True))
        several = llm.add_request(PREFIX, SamplingParams(1.0, 20, n=3, seed=0, ignore_eos=True))
        for _ in range(3):
            llm.step()
        llm.pause()
        llm.load_weights(pair[1])
        assert not llm.reset_prefix_cache()
        llm.resume()
        # The last output begins while another one has blocks of their prompt, of the old weights.
        llm.llm_engine.stop([(several, 0)])
        done = run(llm)
        # The first block has keys of both weights.
        prompts = [PREFIX[:10] + done[begun].outputs[0].token_ids, [*PREFIX, 3]]
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(pair[1], **SETTINGS) as fresh:
        want = [output.outputs[0].token_ids for output in fresh.generate(prompts, GREEDY, use_tqdm=False)]
    assert [a == b for a, b in zip(found, want, strict=True)] == [True, True]


def save_adapter(folder: Path, base: dict[str, torch.Tensor], seed: int, **config: Any) -> dict[str, torch.Tensor]:
    """Write an adapter of rank 4; returns the weights that it makes of `base`."""
    tensors: dict[str, torch.Tensor] = {}
    generator, merged = torch.Generator().manual_seed(seed), dict(base)
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"):
        if f"{name}.weight" not in base:
            continue
        outputs, inputs = base[f"{name}.weight"].shape
        a = torch.randn(4, inputs, generator=generator)
        b = torch.randn(outputs, 4, generator=generator)
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        merged[f"{name}.weight"] = base[f"{name}.weight"] + 0.5 * (b @ a)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    return merged


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.compat)])
def test_an_adapter_is_merged_and_taken_out_again(
    pair: tuple[Path, Path], tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(pair[0], tensor_parallel_size=size, **SETTINGS) as llm:
        before, wanted = answers(llm), []
        for number in (1, 2):
            merged = save_adapter(tmp_path / str(number), stored(pair[0]), number)
            llm.load_weights(merged)
            llm.reset_prefix_cache()
            wanted.append(answers(llm))
        llm.load_weights(pair[0])
        for number, want in enumerate(wanted, 1):
            # One takes the place of the other.
            assert llm.load_weights(tmp_path / str(number)) == 3
            llm.reset_prefix_cache()
            found = answers(llm)
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in want] and want != before
        assert llm.unload_adapter() and not llm.unload_adapter()
        llm.reset_prefix_cache()
        assert answers(llm) == before
        llm.load_weights(tmp_path / "1")
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
            patch.setattr(WeightSlice, "store", Mock(side_effect=RuntimeError("no memory")))
            llm.unload_adapter()
        assert llm.unload_adapter()
        llm.reset_prefix_cache()
        assert answers(llm) == before
        # Other weights come without it.
        llm.load_weights(tmp_path / "1")
        llm.load_weights([("model.norm.weight", stored(pair[0])["model.norm.weight"])])
        llm.reset_prefix_cache()
        assert answers(llm) == before and not llm.unload_adapter()


def fail_stores(patch: pytest.MonkeyPatch, numbers: set[int]) -> None:
    """Let stores fail, by their numbers from here on."""
    store, count = WeightSlice.store, itertools.count(1)

    def store_or_fail(part: WeightSlice, name: str, values: torch.Tensor) -> None:
        if (number := next(count)) in numbers:
            raise RuntimeError(f"no memory for store {number}")
        store(part, name, values)

    patch.setattr(WeightSlice, "store", store_or_fail)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.compat)])
def test_a_half_merged_adapter_is_removed_or_blocks_requests(
    pair: tuple[Path, Path], tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tmp_path, stored(pair[0]), 1)
    norm = {"model.norm.weight": stored(pair[0])["model.norm.weight"]}
    with LLM(pair[0], tensor_parallel_size=size, **SETTINGS) as llm:

        def check_refused() -> None:
            with pytest.raises(RuntimeError, match=r"3 weights such as .* left undone .* or unload_adapter"):
                llm.add_request([1], GREEDY)

        def check_restored() -> None:
            llm.reset_prefix_cache()
            assert answers(llm) == before and not llm.unload_adapter()

        before = answers(llm)
        with (
            monkeypatch.context() as patch,
            pytest.raises(RuntimeError, match="store 2; the weights are those without"),
        ):
            fail_stores(patch, {2})
            llm.load_weights(tmp_path)
        check_restored()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"for store 2; .* for store 3"):
            fail_stores(patch, {2, 3})
            llm.load_weights(tmp_path)
        check_refused()
        llm.sleep()
        llm.wake_up()
        check_refused()
        assert llm.unload_adapter()
        check_restored()
        llm.load_weights(tmp_path)
        for change in (llm.unload_adapter, lambda: llm.load_weights(norm), lambda: llm.load_weights(pair[0])):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="for store 1"):
                fail_stores(patch, {1})
                change()
            check_refused()
        # Other weights come without it.
        llm.load_weights(norm)
        check_restored()


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.compat)])
def test_a_tensor_that_is_written_in_part_is_missing(
    pair: tuple[Path, Path], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [(f"model.layers.{layer}.self_attn.v_proj.weight", torch.zeros(64, 64)) for layer in range(2)]
    message = f"writing '{pairs[1][0]}' has failed in its middle: no .*; 1 tensors were written before"
    with LLM(pair[0], tensor_parallel_size=size, **SETTINGS) as llm:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=message):
            fail_stores(patch, {2})
            llm.load_weights(pairs)
        llm.sleep()
        llm.wake_up()
        with pytest.raises(RuntimeError, match=r"^1 weights such as .* left undone"):
            llm.add_request([1], GREEDY)
        # Or one rank would capture graphs without another.
        weights: Any = llm.llm_engine._weights
        assert [missing.count for missing in weights.call(ModelWeights.count_missing)] == [1] * size
        llm.load_weights(pairs[1:])
        assert answers(llm)


def test_a_replica_merges_no_adapter_that_has_failed_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Mock(side_effect=[LoadFailedError("no memory", MissingWeights()), [True, False]])
    monkeypatch.setattr(ReplicatedEngine, "call", call)
    with pytest.raises(LoadFailedError, match="no memory"):
        ReplicatedEngine.__new__(ReplicatedEngine).load_weights("folder", strict=False)
    assert [made.args[0] for made in call.call_args_list] == [LLMEngine.load_weights, LLMEngine.unload_adapter]


def test_a_warning_names_what_an_adapter_makes_no_number(live: LLM, pair: tuple[Path, Path], tmp_path: Path) -> None:
    save_adapter(tmp_path, stored(pair[0]), 1)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"][2, 3] = torch.nan
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.warns(UserWarning, match=r"^1 tensors that were loaded have NaN, such as 'model\.layers\.1\.mlp\.up_"):
        live.load_weights(tmp_path)


@pytest.mark.parametrize("had_one", [[True, False], [False, True], [False, False]])
def test_an_adapter_of_any_replica_is_one(had_one: list[bool]) -> None:
    control = LLM.__new__(LLM)
    control._engine = Mock()
    control._engine.call.return_value = had_one
    assert control.unload_adapter() == any(had_one)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"layer_replication": [[0, 2], [1, 2]]}, r"layer_replication=.* is not supported"),
        ({"lora_alpha": None}, "lora_alpha must be a finite number, not None"),
        ({"lora_alpha": "16"}, "lora_alpha must be a finite number, not '16'"),
        ({"r": 8}, "self_attn.q_proj.weight' have rank 4; the config has r=8"),
        ({"r": None}, "self_attn.q_proj.weight' have rank 4; the config has r=None"),
        ({"rank_pattern": [4]}, r"rank_pattern must be an object, not \[4\]"),
        ({"r": 8, "rank_pattern": {"down_proj": 2}}, "have rank 4; the config has r=8"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'. is not supported"),
    ],
)
def test_adapters_of_other_kinds_are_refused(
    live: LLM, pair: tuple[Path, Path], tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    save_adapter(tmp_path / "adapter", stored(pair[0]), 1, **config)
    with pytest.raises(ValueError, match=message):
        live.load_weights(tmp_path / "adapter")


def test_adapters_that_do_not_fit_are_refused(
    live: LLM, pair: tuple[Path, Path], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    before = answers(live)
    save_adapter(tmp_path / "other", stored(make_checkpoint(hidden_size=32)), 1)
    with pytest.raises(ValueError, match=r"q_proj.weight' has shape \[128, 32\]; the config asks for \[128, 64\]"):
        live.load_weights(tmp_path / "other")
    save_adapter(tmp_path / "half", stored(pair[0]), 1)
    tensors = load_file(tmp_path / "half" / "adapter_model.safetensors")
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, tmp_path / "half" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="do not fit each other"):
        live.load_weights(tmp_path / "half")
    save_adapter(pair[1], stored(pair[0]), 1)
    with pytest.raises(ValueError, match=r"both an adapter and other weights, \['model.safetensors'\]"):
        live.load_weights(pair[1])
    assert answers(live) == before
