"""Speculation: rows of several tokens, drafts, and their verification. The tokens are the ones without it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.attention import AttentionSetup, make_backend
from nanovllm.attention.kv_cache_spec import Paged
from nanovllm.config import Config
from nanovllm.configs.model import ModelConfig
from nanovllm.kernels import drafts
from nanovllm.kernels._triton import is_hopper
from nanovllm.kernels.policy import KernelPolicy, LinearKernel
from nanovllm.kernels.slot_tensors import (
    SlotTensors,
    gather_decode_rows,
    gather_decode_rows_ref,
    scatter_tokens,
    scatter_tokens_ref,
)
from nanovllm.outputs import RequestOutput
from nanovllm.runner import model_runner
from nanovllm.runner.batch import BatchBuilder, StepInputs
from nanovllm.runner.drafter import NgramDrafter
from nanovllm.runner.memory import most_extra_bytes
from nanovllm.runner.messages import Rows, ScheduledBatch
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.slot_state import SlotState
from nanovllm.runner.worker import step_limits
from tests.cache_checks import check_blocks
from tests.conftest import MakeCheckpoint
from tests.hybrid_models import make_model
from tests.reference import set_depth
from tests.test_kernels import DEVICE
from tests.test_kernels import by_triton as triton_form

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SETTINGS: dict[str, Any] = {
    "kvcache_block_size": 16, "num_kvcache_blocks": 200, "max_model_len": 512, "max_num_batched_tokens": 64,
    "max_num_seqs": 4, "seed": 0, "dtype": "float32",
}  # fmt: skip


def slot_tensors(num_slots: int, num_drafts: int, groups: int = 2) -> SlotTensors:
    """Random slots whose tables have room; the last slot is for padding."""
    state = SlotState(num_slots, 8, groups, torch.device(DEVICE), num_drafts).tensors
    generator = torch.Generator().manual_seed(0)
    for tensor, high in ((state.last_token, 99), (state.num_computed, 40), (state.drafts, 99)):
        tensor.copy_(torch.randint(high, tensor.shape, generator=generator))
    state.num_prompt.copy_(state.num_computed // 2)
    state.num_blocks.fill_(8)
    state.block_tables.copy_(
        torch.randperm(state.block_tables.numel(), generator=generator).view_as(state.block_tables)
    )
    return state


def test_rows_with_drafts_are_rows_one_after_another() -> None:
    """Each token of a row has what a row of one token has when the ones before it are computed."""
    state = slot_tensors(6, 3)
    slots = torch.tensor([4, 0, 6, 2], dtype=torch.int32, device=DEVICE)
    state.drafts[2, 1:] = -1
    num_new = torch.tensor([4, 2, 1, 4], dtype=torch.int32, device=DEVICE)
    rows = triton_form(gather_decode_rows)(state, slots, 8, num_new)
    for name, value in vars(gather_decode_rows_ref(state, slots, 8, num_new)).items():
        assert torch.equal(getattr(rows, name), value), name
    assert (rows.seq_lens - state.num_computed[slots.long()]).tolist() == [4, 2, 1, 2]
    for row, slot in enumerate(slots.tolist()):
        first, end = int(state.num_computed[slot]), int(rows.seq_lens[row])
        texts = [int(state.last_token[slot]), *state.drafts[slot].tolist()]
        for ahead in range(4):
            at = row * 4 + ahead
            if first + ahead >= end:
                assert (rows.slot_mapping[:, at] == -1).all() and rows.positions[at] == end - 1
                continue
            state.num_computed[slot], state.last_token[slot] = first + ahead, texts[ahead]
            one = gather_decode_rows_ref(state, slots[row : row + 1], 8)
            assert torch.equal(rows.block_tables[:, row], one.block_tables[:, 0])
            for name in ("token_ids", "positions", "output_index", "temperatures", "seeds"):
                assert slot == 6 or torch.equal(getattr(rows, name)[at], getattr(one, name)[0]), name
            assert torch.equal(rows.slot_mapping[:, at], one.slot_mapping[:, 0])
        state.num_computed[slot], state.last_token[slot] = first, texts[0]


@pytest.mark.parametrize("ahead", [-1, 0, 9])
def test_rows_of_drafts_have_no_place_beyond_their_blocks(ahead: int) -> None:
    state = slot_tensors(6, 3)
    state.num_computed[0] = 0
    state.num_blocks.copy_(torch.randint(1, 6, state.num_blocks.shape, generator=torch.Generator().manual_seed(0)))
    slots = torch.tensor([4, 0, 6, 2, 1], dtype=torch.int32, device=DEVICE)
    rows = triton_form(gather_decode_rows)(state, slots, 8, ahead=ahead)
    for name, value in vars(gather_decode_rows_ref(state, slots, 8, ahead=ahead)).items():
        assert torch.equal(getattr(rows, name), value), name
    assert rows.positions.tolist() == [max(0, int(state.num_computed[slot]) + ahead) for slot in slots]
    has_place = (rows.positions // 8 < state.num_blocks[slots.long()].T) & (slots != 6)
    assert torch.equal(rows.slot_mapping >= 0, has_place) and has_place.any() and not has_place.all()


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    """Then come a chunk that ends a prompt, and padding."""
    state = slot_tensors(6, 3)
    slots = torch.tensor([4, 0, 6, 2, 5, 6], dtype=torch.int32, device=DEVICE)
    rows, before = slots[:4].long(), state.num_computed.clone()
    state.drafts[rows] = torch.tensor([7, 7, 7], dtype=torch.int32, device=DEVICE)
    # The second is wrong; two tokens are new; padding; what follows a wrong one is right.
    state.drafts[4, 1] = state.drafts[2, 0] = 8
    token_ids = torch.tensor([7, 5, 7, 7, *(7, 7, 7, 7), *(7, 7, 7, 7), *(3, 7, 7, 7), 11, 12], device=DEVICE)
    seq_lens = torch.cat((before[rows] + torch.tensor([4, 2, 4, 4], device=DEVICE), before[:2])).int()
    plain = replace(state, **{name: getattr(state, name).clone() for name in ("last_token", "num_computed")})
    for scatter, slot_state in ((triton_form(scatter_tokens), state), (scatter_tokens_ref, plain)):
        sampled = torch.full((30,), -1, device=DEVICE)
        scatter(slot_state, slots, token_ids, 4, sampled, seq_lens)
        assert torch.equal(sampled[:18], token_ids)
        assert sampled[18:].tolist() == [2, 2, 4, 1, *[-1] * 8]
        assert slot_state.last_token[slots.long()[[0, 1, 3, 4]]].tolist() == [5, 7, 3, 11]
        assert (slot_state.num_computed - before)[slots.long()].tolist() == [2, 2, 0, 1, 0, 0]


@pytest.mark.parametrize("lookup", [(1, 1), (2, 5), (3, 3)])
def test_lookup_finds_the_longest_match_and_the_last_of_equal_ones(
    lookup: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "_LOOKUP_TOKENS", 32)
    state = slot_tensors(40, 3)
    generator = torch.Generator().manual_seed(1)
    history = torch.randint(4, (41, 128), generator=generator).to(DEVICE, torch.int32)
    state.num_computed.copy_(torch.randint(100, (48,), generator=generator)[: len(state.num_computed)])
    state.num_computed[:4] = torch.tensor([0, 1, 2, 3])
    # Nothing matches.
    history[5] = torch.arange(128)
    slots = torch.arange(40, dtype=torch.int32, device=DEVICE)
    drafts.ngram_drafts_ref(state, history, slots, lookup)
    wanted = state.drafts.clone()
    state.drafts.fill_(9)
    triton_form(drafts.ngram_drafts)(state, history, slots, lookup)
    assert torch.equal(state.drafts[:40], wanted[:40])
    assert (wanted[[0, 5]] == -1).all() and (wanted[:40] >= 0).all(1).sum() > 10


class OracleDrafter(NgramDrafter):
    """Drafts the right tokens of known texts, each with a probability, as the host sees them."""

    texts: list[list[int]]
    right: float
    rng: random.Random

    def propose(self, state: SlotTensors, inputs: StepInputs, sampled: torch.Tensor) -> None:
        super().propose(state, inputs, sampled)
        num_drafts = state.drafts.shape[1]
        for slot in inputs.sample_slots.tolist():
            end = int(state.num_computed[slot]) + 1
            begun = self.history[slot, :end].tolist()
            text = next((text for text in self.texts if text[:end] == begun), begun)
            # None, some or all; wrong ones anywhere.
            following = (text[end : end + num_drafts] + [3] * num_drafts)[:num_drafts]
            found = [token if self.rng.random() < self.right else (token + 1) % 300 for token in following]
            found[self.rng.randrange(2 * num_drafts) :] = []
            state.drafts[slot] = torch.tensor(found + [-1] * (num_drafts - len(found)))


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> type[OracleDrafter]:
    monkeypatch.setattr(model_runner, "NgramDrafter", OracleDrafter)
    OracleDrafter.texts, OracleDrafter.right, OracleDrafter.rng = [], 0.8, random.Random(0)
    return OracleDrafter


def ids(length: int, repeats: int, seed: int) -> list[int]:
    return torch.randint(4, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist() * repeats


def requests() -> Iterator[tuple[list[int] | str, SamplingParams]]:
    """Prompts that repeat themselves or not, with each kind of parameters."""
    yield ids(7, 6, 0), SamplingParams(0, max_tokens=25, ignore_eos=True, logprobs=2)
    yield ids(30, 3, 1), SamplingParams(0.8, seed=3, max_tokens=22, ignore_eos=True, logprobs=0)
    yield ids(50, 1, 2), SamplingParams(0, max_tokens=30, min_tokens=10, stop_token_ids=[5, 6, 7])
    yield ids(3, 20, 3), SamplingParams(1.0, seed=5, max_tokens=25, top_k=20, frequency_penalty=1.5, ignore_eos=True)
    yield ids(120, 2, 4), SamplingParams(0.7, seed=6, n=3, max_tokens=18, top_p=0.9, min_p=0.05, ignore_eos=True)
    yield ids(90, 1, 5), SamplingParams(0, max_tokens=20, prompt_logprobs=1, logprobs=1)
    yield "count to 9", SamplingParams(0, max_tokens=40, stop=[", 4"], bad_words=["ships with"])
    word = StructuredOutputsParams(regex="[a-z]{3,8}")
    yield "a word", SamplingParams(0.8, seed=1, max_tokens=30, structured_outputs=word)
    yield ids(16, 1, 6), SamplingParams(0, max_tokens=1)
    yield ids(17, 1, 7), SamplingParams(0.9, seed=9, max_tokens=2, logit_bias={5: 2.0, 9: -3.0}, logprobs=0)
    yield "list all prime numbers within 100", SamplingParams(0, max_tokens=60)


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [
        (list(item.token_ids), item.text, item.finish_reason, item.stop_reason)
        for output in outputs
        for item in output.outputs
    ]


def logprobs(outputs: list[RequestOutput]) -> torch.Tensor:
    rows = [row for output in outputs for item in output.outputs for row in item.logprobs or ()]
    rows += [row for output in outputs for row in output.prompt_logprobs or () if row]
    return torch.tensor([entry.logprob for row in rows for _, entry in sorted(row.items())])


def generate(depth: int, *, times: int = 2, **settings: Any) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Answer all requests twice, the second time from the prefix cache; return the engine's stats, too."""
    asked, params = zip(*requests(), strict=True)
    with LLM(BUNDLED_MODEL, **SETTINGS | settings) as llm:
        set_depth(llm, depth)
        if settings.get("tensor_parallel_size", 1) == 1:
            # No key is read that was not stored.
            runner = llm.llm_engine._runner
            assert isinstance(runner, ModelRunner)
            for layer in runner.attention_layers:
                for pages in (layer.layer.pages.k_cache, layer.layer.pages.v_cache):
                    pages.fill_(torch.nan)
        outputs = [output for _ in range(times) for output in llm.generate(list(asked), list(params), use_tqdm=False)]
        check_blocks(llm.llm_engine.block_manager)
        return outputs, llm.stats()


@cache
def plain_answers(device: str) -> tuple[list[RequestOutput], dict[str, Any]]:
    """Answer all requests without speculation."""
    return generate(1, device=device)


FEW_BLOCKS = {"num_kvcache_blocks": 20}


@pytest.mark.parametrize(
    ("right", "settings", "depth"),
    [(None, {}, 1), (0.8, {}, 1), (0.8, FEW_BLOCKS, 0), (1.0, {"enable_prefix_caching": False}, 1), (0.0, {}, 0)],
)
def test_tokens_are_the_ones_without_speculation(
    right: float | None, settings: dict[str, Any], depth: int, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With lookup, and with drafts that are right with some probability; also where sequences are preempted."""
    verified = []

    def scatter(*args: Any) -> None:
        state, slots, _, num_decodes, _, seq_lens = args
        if seq_lens is not None:
            rows = slots[:num_decodes].long()
            verified.append(int((seq_lens[:num_decodes] - state.num_computed[rows] - 1).sum()))
        scatter_tokens(*args)

    wanted, plain = plain_answers("auto")
    if right is not None:
        monkeypatch.setattr(model_runner, "scatter_tokens", scatter)
        known = request.getfixturevalue("oracle")
        known.texts = [[*one.prompt_token_ids, *item.token_ids] for one in wanted for item in one.outputs]
        known.right = right
    # A graph cannot hold what is done on the host here.
    outputs, stats = generate(depth, **settings, speculative_config=NGRAM, enforce_eager=right is not None)
    assert answers(outputs) == answers(wanted)
    torch.testing.assert_close(logprobs(outputs), logprobs(wanted), atol=1e-5, rtol=1e-4)
    if right in {0.8, 1.0}:
        assert settings or stats["num_steps"] < 0.9 * plain["num_steps"]
        assert sum(stats["num_accepted_per_position"]) == stats["num_accepted_tokens"] > 0.5 * stats["num_drafts"]
    # Of rows whose sequences have ended meanwhile none is counted.
    assert stats["num_draft_tokens"] > 0 and (right is None or stats["num_draft_tokens"] <= sum(verified))
    if right is None:
        # Matches are short: the plan must not wait until it knows of one.
        assert stats["num_accepted_tokens"] > 15
    if settings is FEW_BLOCKS:
        assert stats["num_preemptions"] > 0


def test_the_host_counts_as_the_engine_says() -> None:
    """A row computed four tokens and returned one; its next tokens come after five, not eight."""
    specs = [Paged(2, 32, 32, None, torch.float32)]
    backend = make_backend("sdpa", AttentionSetup(torch.device("cpu"), torch.float32, 16, 4, specs, 4))
    builder = BatchBuilder(4, 8, 16, 64, backend, torch.device("cpu"), num_groups=1, num_drafts=3)
    slots, steps = np.array([2], np.int32), []
    for num_computed in (4, 5):
        batch = ScheduledBatch(rows=Rows(slots, np.array([4], np.int32), np.array([num_computed], np.int32)))
        shape, array = builder.plan(batch)
        steps.append(builder.send(batch, shape, array))
    assert [step.seq_lens_host for step in steps] == [[8], [9]]


def test_memory_and_ranks_have_room_for_drafts() -> None:
    plain = Config(BUNDLED_MODEL, max_num_seqs=8)
    drafting = replace(plain, speculative_config=NGRAM | {"num_speculative_tokens": 15})
    num_drafts, vocab_size = 8 * 15, 10**7
    more = most_extra_bytes(drafting, vocab_size, 0) - most_extra_bytes(plain, vocab_size, 0)
    assert more == 4 * num_drafts * 4 * vocab_size
    limits = [step_limits(config, ModelConfig.from_folder(str(BUNDLED_MODEL))) for config in (plain, drafting)]
    before, after = (limit for limit in limits if limit is not None)
    assert after.max_candidates - before.max_candidates == num_drafts


def test_ranks_accept_the_same_drafts() -> None:
    wanted, _ = plain_answers("cpu")
    outputs, stats = generate(0, times=1, tensor_parallel_size=2, device="cpu", speculative_config=NGRAM)
    assert answers(outputs) == answers(wanted[: len(wanted) // 2])
    assert stats["num_accepted_tokens"] > 0


@pytest.mark.parametrize(("name", "depth"), [("next", 1), ("lfm2", 0), ("falcon", 1), ("nemotron-moe", 0)])
def test_states_are_kept_up_to_the_last_accepted_draft(
    name: str, depth: int, tmp_path: Path, oracle: type[OracleDrafter]
) -> None:
    """With right drafts and wrong ones, chunks, several outputs, and prefix hits."""
    make_model(name).save_pretrained(tmp_path)
    prompts = [ids(150, 1, 0), ids(96, 1, 1), ids(5, 4, 2), ids(70, 1, 3)]
    params = [SamplingParams(0, max_tokens=30, ignore_eos=True, logprobs=0)] * 3
    params.append(SamplingParams(0.9, seed=1, n=3, max_tokens=20, ignore_eos=True, logprobs=0))
    found = []
    for config in (None, NGRAM):
        with LLM(tmp_path, **SETTINGS, device="cpu", speculative_config=config) as llm:
            set_depth(llm, depth)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            # Answers go on, from states of prompts.
            longer = [[*out.prompt_token_ids, *out.outputs[0].token_ids, 9] for out in outputs]
            found.append(outputs + llm.generate(longer, params, use_tqdm=False))
            check_blocks(llm.llm_engine.block_manager)
            stats = llm.stats()
            oracle.texts = [[*one.prompt_token_ids, *item.token_ids] for one in found[0] for item in one.outputs]
    assert answers(found[1]) == answers(found[0])
    torch.testing.assert_close(logprobs(found[1]), logprobs(found[0]), atol=1e-5, rtol=1e-4)
    assert stats["num_accepted_tokens"] > 100 and stats["num_cached_tokens"] > 0


class BatchInvariant(KernelPolicy):
    """Chooses the same kernels and tiles for any number of rows and of tokens in a row.

    For 16-bit weights without biases on Hopper, with all prompts in one chunk, no windows, and at most 16 query heads
    of a KV head in all tokens of a row, to which `decode_attention` pads them.
    """

    uses_cascade = uses_hopper_decode = False

    def linear(self, *_: Any, **__: Any) -> LinearKernel:
        return LinearKernel.SPLITK_GEMM

    def branch_end(self, *_: Any) -> None:
        return None

    def projects_qkv(self, *_: Any) -> bool:
        return False

    def context_shares(self, *_: Any) -> int:
        return 1

    def has_few_seqs(self, *_: Any) -> bool:
        return True


@pytest.mark.gpu
def test_bits_are_the_ones_without_speculation(
    make_checkpoint: MakeCheckpoint, oracle: type[OracleDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, in batches of any size, by lookup and with drafts that are right with some probability."""
    if not is_hopper(torch.device(DEVICE)):
        pytest.skip("needs a Hopper GPU")
    folder = make_checkpoint(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, head_dim=128,
        initializer_range=0.05,
    )  # fmt: skip
    monkeypatch.setattr(ModelRunner, "policy", BatchInvariant())
    prompts = [ids(5 + 2 * i, 1 + i % 3, i) for i in range(80)]
    params = [SamplingParams(0.8 * (i % 2), seed=i, max_tokens=48, ignore_eos=True, logprobs=0) for i in range(80)]
    ngram = NGRAM | {"num_speculative_tokens": 3}
    found, accepted = [], []
    for max_num_seqs, config, drafter in (
        (80, None, None), (5, None, None), (20, ngram, NgramDrafter), (4, ngram, OracleDrafter)
    ):  # fmt: skip
        monkeypatch.setattr(model_runner, "NgramDrafter", drafter)
        with LLM(
            folder, dtype="bfloat16", max_model_len=1024, max_num_seqs=max_num_seqs, num_kvcache_blocks=240, seed=0,
            enable_prefix_caching=False, speculative_config=config, enforce_eager=drafter is OracleDrafter,
        ) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            accepted.append(llm.stats().get("num_accepted_tokens", 0))
        found.append((answers(outputs), logprobs(outputs)))
        oracle.texts = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]
    for wanted, (tokens, values) in zip([found[0]] * 3, found[1:], strict=True):
        assert tokens == wanted[0] and torch.equal(values, wanted[1])
    assert accepted[2] > 20 and accepted[3] > 200
