"""EAGLE-3 and MTP: heads draft what a plain forward pass of theirs over the whole text does, and change no token."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.config import SpeculativeConfig
from nanovllm.engine import sequence
from nanovllm.kernels.slot_tensors import SlotTensors
from nanovllm.runner import model_runner
from nanovllm.runner.batch import DeviceStep, StepInputs
from nanovllm.runner.drafter import HeadDrafter, NgramDrafter
from nanovllm.runner.messages import DraftCosts
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.parallel_runner import ParallelRunner
from tests.cache_checks import check_blocks
from tests.draft_heads import (
    Tensors,
    eagle3_drafts,
    eagle3_tensors,
    mtp_drafts,
    mtp_tensors,
    of_layer,
    slots_of,
    write_eagle3,
)
from tests.hybrid_models import make_model
from tests.reference import reference_model, set_depth
from tests.test_fp8 import write
from tests.test_hybrid_fp8 import SIZES, blocks
from tests.test_speculation import FEW_BLOCKS, SETTINGS, answers, generate, ids, logprobs, plain_answers

NUM_DRAFTS = 3
Reference = Callable[[list[int]], list[tuple[int, float]]]


class ForcedDrafter(HeadDrafter):
    """Keeps what the head drafts after each text, and puts right tokens of known texts in place of some."""

    texts: list[list[int]]
    drafted: list[tuple[list[int], list[int], list[float]]]
    rng = random.Random(0)
    # Of each step, whether it drafts.
    steps: list[bool]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By the number of each draft, the sum of the states that it follows from.
        self.sums: list[torch.Tensor] = []
        advance = self.head.advance

        def noted(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            states, hidden = advance(*args)
            self.sums.append(states.sum(-1))
            return states, hidden

        self.head.advance = noted  # type: ignore[method-assign, assignment]
        config = SpeculativeConfig("ngram", NUM_DRAFTS)
        device = next(self.head.parameters()).device
        self.known = NgramDrafter(config, SETTINGS["max_num_seqs"], SETTINGS["max_model_len"], device)

    def add(self, slot: int, token_ids: array[int]) -> None:
        self.known.add(slot, token_ids)

    def propose(self, state: SlotTensors, inputs: StepInputs, sampled: torch.Tensor) -> None:
        self.sums.clear()
        super().propose(state, inputs, sampled)
        # In other steps the head stores keys, and runs nothing else.
        assert len(self.sums) == NUM_DRAFTS * inputs.drafts
        assert all(len(sums) == len(inputs.sample_slots) for sums in self.sums)
        self.steps.append(inputs.drafts)
        own = state.drafts.clone()
        self.known.propose(state, inputs, sampled)
        state.drafts.copy_(own)
        slots = inputs.sample_slots.tolist()
        for row, slot in enumerate(slots):
            if slot == len(state.last_token) - 1 or not inputs.drafts:
                continue
            end = int(state.num_computed[slot]) + 1
            begun = self.known.history[slot, :end].tolist()
            self.drafted.append((begun, own[slot].tolist(), [float(sums[row]) for sums in self.sums]))
            text = next((text for text in self.texts if text[:end] == begun), begun)
            for place, token in enumerate(text[end : end + NUM_DRAFTS]):
                if self.rng.random() < 0.7:
                    state.drafts[slot, place] = token


def force(monkeypatch: pytest.MonkeyPatch) -> type[ForcedDrafter]:
    """Let engines have a `ForcedDrafter` from now on."""
    monkeypatch.setattr(model_runner, "HeadDrafter", ForcedDrafter)
    ForcedDrafter.texts, ForcedDrafter.drafted, ForcedDrafter.steps = [], [], []
    ForcedDrafter.rng = random.Random(0)
    return ForcedDrafter


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> type[ForcedDrafter]:
    return force(monkeypatch)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Reference]:
    """A head for the bundled model, which drafts a part of the vocabulary, and its chains."""
    model = reference_model(BUNDLED_MODEL)
    tensors = eagle3_tensors(model.config, 300)
    folder = write_eagle3(tmp_path_factory.mktemp("eagle3"), model.config, tensors)
    config = {"method": "eagle3", "model": folder, "num_speculative_tokens": NUM_DRAFTS}
    return config, lambda text: eagle3_drafts(model, tensors, text, NUM_DRAFTS, [2, 3, 3])


@pytest.fixture(scope="module", params=["attention", "states", "e4m3"])
def mtp(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    """A Qwen3.5 that attends in all layers, or has states in most, with its own head, and the head's chains.

    In e4m3 as it is published, with all linear layers of the head but one.
    """
    folder = tmp_path_factory.mktemp("mtp")
    kinds = {"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3} if request.param == "attention" else {}
    model = make_model("dense", **(SIZES if request.param == "e4m3" else kinds))
    model.save_pretrained(folder / "base")
    tensors = mtp_tensors(model.config)
    save_file(load_file(folder / "base" / "model.safetensors") | tensors, folder / "base" / "model.safetensors")
    if request.param != "e4m3":
        folder /= "base"
    else:
        folder, meant = write(folder / "base", blocks("model"), folder)
        stored, wide = (load_file(path / "model.safetensors") for path in (folder, meant))
        assert sum(name.startswith("mtp.") and "_scale" in name for name in stored) == 7
        model = type(model).from_pretrained(meant, dtype=torch.float32).eval()
        tensors = {name: wide[name] for name in tensors}
    return folder, lambda text: mtp_drafts(model, tensors, text, NUM_DRAFTS)


def check_drafts(drafted: list[tuple[list[int], list[int], list[float]]], reference: Reference) -> None:
    """Compare what a head drafted after texts with its chains; what a sequence has no block for, it does not draft."""
    chains = {tuple(text): reference(text) for text, *_ in drafted}
    counts = []
    for text, drafts, sums in drafted:
        count = sum(draft >= 0 for draft in drafts)
        wanted = chains[tuple(text)][:count]
        assert drafts[:count] == [token for token, _ in wanted], f"after {len(text)} tokens"
        # A wrong key may leave the likeliest tokens as they are.
        assert sums[:count] == pytest.approx([total for _, total in wanted], abs=2e-3), f"after {len(text)} tokens"
        counts.append(count)
    assert min(counts) >= 1 and sum(counts) > 0.8 * NUM_DRAFTS * len(counts)


# A prompt of several chunks, one of whole blocks, one that begins like another.
PROMPTS = [ids(150, 1, 0), ids(96, 1, 1), ids(96, 1, 1)[:41], ids(5, 4, 2)]


@pytest.mark.parametrize(
    ("settings", "depth", "ratio"), [({}, 1, 1.25), ({"enable_prefix_caching": False}, 0, 2.4), (FEW_BLOCKS, 1, 2.4)]
)
def test_eagle3_drafts_what_it_does_over_the_whole_text(
    settings: dict[str, Any], depth: int, ratio: float, eagle3: tuple[dict[str, Any], Reference],
    forced: type[ForcedDrafter], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After chunks, accepted and rejected drafts, prefix hits and preemption, and where drafts pay now and then."""
    monkeypatch.setattr(model_runner, "_CPU_DRAFT_RATIO", ratio)
    monkeypatch.setattr(sequence, "_TRIAL_SHARE", 0.5)
    speculative_config, reference = eagle3
    check_greedy(Path(BUNDLED_MODEL), speculative_config, SETTINGS | settings, depth, forced)
    check_drafts(forced.drafted, reference)
    # With enough blocks only the step that ends a prompt may lack one for drafts.
    firsts = {len(prompt) + 1 for prompt in PROMPTS}
    later = [drafts for text, drafts, _ in forced.drafted if len(text) not in firsts]
    assert settings is FEW_BLOCKS or all(min(drafts) >= 0 for drafts in later)
    changes = sum(one != other for one, other in pairwise(forced.steps))
    assert (changes > 20) == (ratio > 2) and forced.steps.count(True) > 10


def test_mtp_drafts_what_it_does_over_the_whole_text(mtp: tuple[Path, Reference], forced: type[ForcedDrafter]) -> None:
    folder, reference = mtp
    speculative_config = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    check_greedy(folder, speculative_config, SETTINGS, 0, forced)
    check_drafts(forced.drafted, reference)


def greedy_texts(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(0, max_tokens=24, ignore_eos=True, logprobs=0), use_tqdm=False)
    return [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in outputs]


@cache
def plain_texts(model: Path, device: str) -> list[list[int]]:
    with LLM(model, **SETTINGS, device=device) as llm:
        return greedy_texts(llm)


def check_greedy(
    model: Path, speculative_config: dict[str, Any], settings: dict[str, Any], depth: int, forced: type[ForcedDrafter]
) -> None:
    """Assert that greedy answers after a sleep are the ones without speculation, computed, then with prefix hits."""
    forced.texts = plain_texts(model, settings.get("device", "cpu"))
    with LLM(model, **{"device": "cpu"} | settings, speculative_config=speculative_config) as llm:
        set_depth(llm, depth)
        llm.sleep()
        llm.wake_up()
        for _ in range(2):
            assert greedy_texts(llm) == forced.texts
        check_blocks(llm.llm_engine.block_manager)
        stats = llm.stats()
    assert stats["num_accepted_tokens"] > 50
    if settings["num_kvcache_blocks"] == FEW_BLOCKS["num_kvcache_blocks"]:
        assert stats["num_preemptions"] > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_are_the_ones_without_a_head(
    depth: int, eagle3: tuple[dict[str, Any], Reference], forced: type[ForcedDrafter]
) -> None:
    """With all kinds of parameters, several outputs, masks and stops."""
    wanted, plain = plain_answers("cpu")
    forced.texts = [[*one.prompt_token_ids, *item.token_ids] for one in wanted for item in one.outputs]
    outputs, stats = generate(depth, device="cpu", speculative_config=eagle3[0])
    assert answers(outputs) == answers(wanted)
    torch.testing.assert_close(logprobs(outputs), logprobs(wanted), atol=1e-5, rtol=1e-4)
    assert stats["num_steps"] < 0.9 * plain["num_steps"]


@pytest.mark.gpu
def test_a_gpu_drafts_what_a_plain_pass_does(
    eagle3: tuple[dict[str, Any], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs what is drafted is compared; with them, how often it is right."""
    config, reference = eagle3
    # What is measured may say that a tiny model need not draft.
    monkeypatch.setattr(ModelRunner, "_step_seconds", lambda _, rows, drafts: 1.25 if drafts else 1.0)
    wanted, _ = plain_answers("cuda")
    counts = []
    for settings in ({"enforce_eager": True}, {}):
        outputs, stats = generate(1, device="cuda", speculative_config=config, **settings)
        assert answers(outputs) == answers(wanted)
        torch.testing.assert_close(logprobs(outputs), logprobs(wanted), atol=1e-5, rtol=1e-4)
        counts.append((stats["num_draft_tokens"], stats["num_accepted_tokens"]))
    assert counts[0] == counts[1] and counts[0][0] > 100
    forced = force(monkeypatch)
    check_greedy(Path(BUNDLED_MODEL), config, SETTINGS | {"device": "cuda", "enforce_eager": True}, 1, forced)
    check_drafts(forced.drafted, reference)


def with_experts(stored: Tensors, mtp: Tensors) -> Tensors:
    """Return the tensors of a head whose layer is the model's fourth."""
    layer = of_layer(stored, "model.layers.3.")
    rest = {name: tensor for name, tensor in mtp.items() if not name.startswith("mtp.layers")}
    return rest | {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in layer.items()}


def test_mixtures_have_heads_with_mixtures(tmp_path: Path, forced: type[ForcedDrafter]) -> None:
    model = make_model("next")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | with_experts(stored, mtp_tensors(model.config)), tmp_path / "model.safetensors")
    check_greedy(tmp_path, {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}, SETTINGS, 1, forced)
    assert len({tuple(drafts) for _, drafts, _ in forced.drafted}) > 20
    check_ranks(tmp_path, {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}, 2)


def run_ranks(
    model: Path, config: dict[str, Any], size: int, drafter: type[HeadDrafter] = ForcedDrafter, **settings: Any
) -> Any:
    """Generate with drafts in all steps; return tokens, counts, and what rank 0 drafted. All ranks have the same."""
    ForcedDrafter.drafted, ForcedDrafter.texts, ForcedDrafter.steps = [], [], []
    settings = SETTINGS | {"device": "cpu"} | settings
    with (
        patch.object(model_runner, "HeadDrafter", drafter),
        LLM(model, **settings, speculative_config=config, tensor_parallel_size=size) as llm,
    ):
        llm.llm_engine.scheduler.steady.costs = DraftCosts((4,), (1.0,), are_free=False)
        # What a GPU's start measured, with tokens at random.
        ForcedDrafter.drafted.clear()
        params = SamplingParams(0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        stats, runner = llm.stats(), llm.llm_engine._runner
        if isinstance(runner, ParallelRunner):
            slots = runner.call(slots_of)
            assert len(slots) == size and all(slot == slots[0] for slot in slots)
    counts = [stats[name] for name in ("num_steps", "num_draft_tokens", "num_accepted_tokens")]
    assert counts[1] > 150
    return ([out.outputs[0].token_ids for out in outputs], counts), ForcedDrafter.drafted


def check_ranks(model: Path, config: dict[str, Any], size: int, error: float = 2e-3, **settings: Any) -> Any:
    """Assert that ranks draft and accept what one does; return their tokens and counts."""
    (found, drafted), (others, also_drafted) = (run_ranks(model, config, ranks, **settings) for ranks in (1, size))
    assert others == found
    assert [item[:2] for item in also_drafted] == [item[:2] for item in drafted]
    for (*_, sums), (*_, wanted) in zip(also_drafted, drafted, strict=True):
        assert sums == pytest.approx(wanted, abs=error)
    return found


def likely_eagle3(folder: Path) -> dict[str, Any]:
    """Make a head for the bundled model that prefers its usual tokens, and so is right now and then."""
    model_config = reference_model(BUNDLED_MODEL).config
    tensors = eagle3_tensors(model_config, 300)
    with LLM(BUNDLED_MODEL, **SETTINGS, device="cpu") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    usual = Counter(token for out in outputs for token in out.outputs[0].token_ids).most_common(3)
    kept = (tensors["d2t"] + torch.arange(300)).tolist()
    tensors["lm_head.weight"][[kept.index(token) for token, _ in usual if token in kept]] *= 9
    config = {"method": "eagle3", "model": str(write_eagle3(folder, model_config, tensors))}
    return config | {"num_speculative_tokens": NUM_DRAFTS}


@pytest.mark.parametrize(("size", "settings"), [(2, {"quantization": "fp8"}), (3, {"max_model_len": 190})])
def test_ranks_draft_alike(size: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """With three ranks the last has few of the tokens that are drafted, and one more heads; a text reaches the end."""
    _, counts = check_ranks(Path(BUNDLED_MODEL), likely_eagle3(tmp_path), size, **settings)
    assert counts[2] > 3


# A sum that is rounded otherwise may be on the other side of a boundary of e4m3.
@pytest.mark.parametrize(("mtp", "error"), [("states", 2e-3), ("e4m3", 0.2)], indirect=["mtp"])
def test_ranks_draft_alike_by_their_models_own_head(mtp: tuple[Path, Reference], error: float) -> None:
    check_ranks(mtp[0], {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}, 2, error)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mtp", ["states"], indirect=True)
def test_gpus_draft_alike(mtp: tuple[Path, Reference], tmp_path: Path) -> None:
    """Without graphs what is drafted is compared; with them, and with NCCL, how often it is right."""
    config = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS}
    for model, settings in ((Path(BUNDLED_MODEL), likely_eagle3(tmp_path)), (mtp[0], config)):
        found = check_ranks(model, settings, 2, device="cuda", enforce_eager=True)
        assert run_ranks(model, settings, 2, HeadDrafter, device="cuda")[0] == found
        with patch("torch.cuda.can_device_access_peer", lambda a, b: False):
            assert run_ranks(model, settings, 2, HeadDrafter, device="cuda")[0] == found


def test_heads_may_be_pickled_and_have_other_names_and_an_embedding(
    tmp_path: Path, forced: type[ForcedDrafter]
) -> None:
    """The form of the first ones that were published; the embedding is the head's own."""
    model = reference_model(BUNDLED_MODEL)
    tensors = eagle3_tensors(model.config, model.config.vocab_size, num_states=2)
    embedding = torch.randn(model.config.vocab_size, model.config.hidden_size)
    folder = write_eagle3(tmp_path, model.config, tensors, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4]})
    (folder / "model.safetensors").unlink()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items() if name != "d2t"}
    torch.save(renamed | {"embed_tokens.weight": embedding}, folder / "pytorch_model.bin")
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS}
    check_greedy(Path(BUNDLED_MODEL), config, SETTINGS, 0, forced)
    own = nn.Embedding.from_pretrained(embedding)
    some = forced.drafted[::9]
    check_drafts(some, lambda text: eagle3_drafts(model, tensors, text, NUM_DRAFTS, [1, 5], own))


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"method": "medusa"}, {}, "method of speculative_config must be one of ngram, eagle3, mtp, not 'medusa'"),
        ({"model": None}, {}, "'eagle3' of speculative_config needs model"),
        ({"method": "ngram"}, {}, "other methods take none"),
        ({"num_speculative_tokens": 16}, {}, "num_speculative_tokens"),
        ({"method": "mtp", "model": None}, {}, "needs a model of a family with mtp.* tensors"),
        ({}, {"hidden_size": 128, "head_dim": 32}, "has hidden_size=128, the model 256"),
        ({}, {"architectures": ["LlamaForCausalLMEagle"]}, "architecture 'LlamaForCausalLMEagle' .* is not supported"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "eagle_aux_hidden_state_layer_ids of the head"),
        ({}, {"tensor_parallel_size": 3, "num_key_value_heads": 2}, "has 2 KV heads, the model 4: tensor_parallel"),
        ({}, {"without": "fc.weight"}, r"the head in .* missing \['fc.weight'\], left over \[\]; give a folder"),
        ({}, {"without": "d2t"}, r"missing \['d2t'\]"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changes = dict(changes)
    settings = {"tensor_parallel_size": changes.pop("tensor_parallel_size", 1)}
    model_config = reference_model(BUNDLED_MODEL).config
    tensors = eagle3_tensors(model_config, 300)
    tensors.pop(changes.pop("without", ""), None)
    folder = write_eagle3(tmp_path, model_config, tensors, **changes)
    config = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": NUM_DRAFTS} | config
    with pytest.raises(ValueError, match=message):
        LLM(BUNDLED_MODEL, **SETTINGS, **settings, device="cpu", speculative_config=config)


def test_a_model_without_its_own_head_is_refused(tmp_path: Path) -> None:
    make_model("dense").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the head in .*: tensors missing \['fc.weight', .*give a folder"):
        LLM(tmp_path, **SETTINGS, device="cpu", speculative_config={"method": "mtp", "num_speculative_tokens": 1})


def test_steps_are_timed_in_slots_that_are_left_as_they_were(
    eagle3: tuple[dict[str, Any], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU times them at its start."""
    with LLM(BUNDLED_MODEL, **SETTINGS, device="cpu", speculative_config=eagle3[0]) as llm:
        runner = llm.llm_engine._runner
        assert isinstance(runner, ModelRunner)
        slots = runner.batch_builder.slots
        before, shapes = slots._flat.clone(), list[tuple[int, int, bool]]()
        gather = runner.batch_builder.gather

        def noted(step: DeviceStep) -> StepInputs:
            shapes.append((step.shape.num_decodes, step.shape.num_drafts, step.shape.drafts))
            inputs = gather(step)
            # All drafts are there to be verified.
            assert (inputs.metadata.slot_mappings[0] >= 0).all()
            return inputs

        runner.batch_builder.gather = noted  # type: ignore[method-assign]
        runner.is_cuda, runner.synchronize = True, lambda: None  # type: ignore[method-assign]
        runner._device_guard = nullcontext  # type: ignore[method-assign]
        random_state = torch.get_rng_state()
        # A step with drafts takes four seconds, others one.
        seconds = lambda: float(sum(1 + num_drafts for _, num_drafts, _ in shapes))  # noqa: E731
        monkeypatch.setattr(model_runner, "time", SimpleNamespace(perf_counter=seconds))
        costs = runner._measure_drafts()
        assert torch.equal(torch.get_rng_state(), random_state)
        assert costs.rows == (1, 4) and costs.ratios == (4.0, 4.0)
        assert {*shapes} == {(rows, *kind) for rows in (1, 4) for kind in ((0, False), (NUM_DRAFTS, True))}
        assert torch.equal(slots._flat, before)
