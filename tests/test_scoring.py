"""Log-probabilities of prompts, scores, hidden states and beam search, against transformers."""

from __future__ import annotations

import copy
import math
import pickle
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper

from nanovllm import LLM, SamplingParams
from nanovllm import outputs as module
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.config import LogprobsMode, Pooling
from nanovllm.outputs import Logprob, Logprobs, RequestOutput, pack_records, record_bytes
from nanovllm.runner.messages import Chunk
from nanovllm.runner.step_outputs import prompt_outputs
from nanovllm.sampling_params import BeamSearchParams
from nanovllm.tasks.ranking import rank_method
from tests.hybrid_models import make_model
from tests.reference import check_position, prompt, reference_logits, reference_model

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "seed": 0}
EOS = 3


@pytest.fixture(scope="module")
def folder(make_checkpoint: Any) -> Path:
    path: Path = make_checkpoint(eos_token_id=EOS)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, num_kvcache_blocks=200, **SETTINGS)


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM(BUNDLED_MODEL, num_kvcache_blocks=200, **SETTINGS)


def check_prompt(folder: Path, output: RequestOutput, num_logprobs: int, start: int = 0) -> None:
    found, tokens = output.prompt_logprobs, output.prompt_token_ids
    want = reference_logits(folder, tokens).log_softmax(1)
    assert found is not None and len(found) == len(tokens)
    assert [at is None for at in found] == [i < max(1, start) for i in range(len(tokens))]
    for i, at in enumerate(found):
        if at is not None:
            check_position(at, tokens[i], want[i - 1], num_logprobs)


def test_prompt_logprobs_in_chunks_and_with_a_hot_cache(folder: Path) -> None:
    tokens = prompt(100, seed=1)
    with LLM(folder, num_kvcache_blocks=40, max_num_batched_tokens=24, **SETTINGS) as small:
        for k, start in ((0, 0), (4, 0), (3, 1), (2, 16), (2, 17), (2, 50), (20, 99), (1, 100)):
            params = SamplingParams(0, 2, prompt_logprobs=k, prompt_logprobs_start=start)
            (output,) = small.generate([tokens], params, use_tqdm=False)
            check_prompt(folder, output, k, start)
            # Whole blocks before the token that the first scored one follows from, of a prompt that is cached.
            assert output.num_cached_tokens == max(0, min(start - 1, 96)) // 16 * 16
        (one,) = small.generate([[5]], SamplingParams(0, 1, prompt_logprobs=1), use_tqdm=False)
        assert one.prompt_logprobs == [None]


def test_scores_of_texts_and_tokens(bundled: LLM) -> None:
    prompts = ["The capital of", "The capital of ", "one two three"]
    continuations = [" France is", "France is", " four"]
    scores = bundled.score(prompts, continuations, use_tqdm=False)
    assert scores[0] == scores[1]
    for text, more, score in zip(prompts, continuations, scores, strict=True):
        start = len(bundled.tokenizer(text.rstrip())["input_ids"])
        tokens = bundled.tokenizer(text + more)["input_ids"]
        want = reference_logits(BUNDLED_MODEL, tokens).log_softmax(1)[start - 1 : -1]
        assert score.token_ids == tokens[start:]
        expected = want[range(len(want)), tokens[start:]]
        torch.testing.assert_close(torch.tensor(score.token_logprobs), expected, rtol=1e-4, atol=1e-4)
        assert abs(score.logprob - expected.sum().item()) < 1e-3
        assert score.is_greedy == (want.argmax(1).tolist() == tokens[start:])
    tokens = bundled.tokenizer("introduce yourself")["input_ids"]
    (output,) = bundled.generate([tokens], SamplingParams(0, 5, ignore_eos=True), use_tqdm=False)
    greedy, *_ = bundled.score([tokens], [output.outputs[0].token_ids], use_tqdm=False)
    other, *_ = bundled.score([tokens], [[*output.outputs[0].token_ids[:4], 9]], use_tqdm=False)
    assert greedy.is_greedy and not other.is_greedy
    assert bundled.score([], []) == []


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        (["a"], [""], "continuation '' has no tokens"),
        ([[1]], [[]], r"continuation \[\] has no tokens"),
        ([""], ["a"], "has no tokens: at least one"),
        (["a"], ["b", "c"], "2 continuations for 1 prompts"),
        (["a"], [[1]], "both be strings, or both be a list of token ids"),
        ("a", "b", "must be lists"),
        ([1], [2], "list of token ids"),
        ([[1]], [None], "list of token ids"),
        ([[1]], [[600]], "token id 600 is outside the vocabulary"),
    ],
)
def test_what_cannot_be_scored(bundled: LLM, prompts: Any, continuations: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bundled.score(prompts, continuations, use_tqdm=False)
    assert bundled.is_finished()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_normalised_hidden_states(folder: Path, pooling: Pooling) -> None:
    prompts = [prompt(n, seed=n) for n in (1, 40, 40, 70)]
    with LLM(folder, num_kvcache_blocks=12, max_num_batched_tokens=24, **SETTINGS) as small:
        found = [small.embed(prompts, pooling, use_tqdm=False) for _ in range(2)]
        assert small.embed([], use_tqdm=False).shape == (0, 64)
        with pytest.raises(ValueError, match="'last' or 'mean', not 'max'"):
            small.embed(prompts, "max")  # type: ignore[arg-type]
    for row, tokens in enumerate(prompts):
        with torch.inference_mode():
            states = reference_model(folder).model(torch.tensor([tokens])).last_hidden_state[0]
        want = torch.nn.functional.normalize(states[-1] if pooling == "last" else states.mean(0), dim=0)
        # The second time with a hot cache.
        for vectors in found:
            torch.testing.assert_close(vectors[row], want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("family", "size"), [("qwen3", 2), ("olmo2", 2), ("next", 2), ("falcon", 1), ("nemotron", 1)])
def test_hidden_states_of_layers_are_those_of_transformers(
    family: str, size: int, make_checkpoint: Any, tmp_path: Path
) -> None:
    """In chunks, again with a hot cache, after preemption, and beside other outputs of the prompt."""
    if family in ("qwen3", "olmo2"):
        path = make_checkpoint(**({} if family == "qwen3" else {"architecture": "Olmo2", "pad_token_id": 0}))
        model = reference_model(path)
    else:
        path, model = tmp_path, make_model(family)
        model.save_pretrained(path)
    count, prompts = model.config.num_hidden_layers, [prompt(n, seed=n) for n in (33, 40, 70)]
    params = SamplingParams(0.7, 40, ignore_eos=True, n=2, hidden_states=[count, 0, count - 1])
    with_logprobs = replace(params, prompt_logprobs=0, prompt_logprobs_start=33)
    settings = SETTINGS | {"num_kvcache_blocks": 40, "max_num_batched_tokens": 24, "tensor_parallel_size": size}
    with LLM(path, **settings) as llm:
        outputs = [output for one in (params, with_logprobs) for output in llm.generate(prompts, one, use_tqdm=False)]
        plain = llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
        with pytest.raises(ValueError, match=f"no layer {count + 1}: it has 0 ... {count}"):
            llm.generate([1], SamplingParams(hidden_states=[count + 1]))
    assert plain[0].hidden_states == [] and outputs[-1].prompt_logprobs is not None
    for output, tokens in zip(outputs, prompts * 2, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        assert len(output.hidden_states) == 3
        for found, layer in zip(output.hidden_states, params.hidden_states or (), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), states[layer][0], rtol=1e-3, atol=1e-4)


def test_ranks_are_by_embeddings_or_by_the_probability_of_yes() -> None:
    bundled = LLM(BUNDLED_MODEL, num_kvcache_blocks=200, max_logprobs=512, **(SETTINGS | {"max_model_len": 512}))
    query, documents = "Monday", ["2, 3, 5, 7", "Tuesday", "Monday"]
    found = bundled.rank(query, documents, use_tqdm=False)
    vectors = bundled.embed([query, *documents], use_tqdm=False)
    assert [item.index for item in found] == [2, 1, 0]
    assert [(item.document, item.score) for item in found] == [
        (documents[item.index], pytest.approx(float(vectors[0] @ vectors[1 + item.index]), abs=1e-5)) for item in found
    ]
    judged = bundled.rank(query, documents, 2, by="judgement", instruction="Find days.", use_tqdm=False)
    prompt = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Find days.\n<Query>: Monday\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n"
    )
    scores = []
    answers = [bundled.tokenizer(word)["input_ids"][0] for word in ("yes", "no")]
    for document in documents:
        token_ids = bundled.tokenizer(prompt.format(document))["input_ids"]
        scores.append(reference_logits(BUNDLED_MODEL, token_ids)[-1, answers].softmax(0)[0].item())
    assert [item.index for item in judged] == sorted(range(3), key=lambda index: -scores[index])[:2]
    assert [item.score for item in judged] == pytest.approx(sorted(scores, reverse=True)[:2], abs=1e-5)
    assert rank_method(None, "Qwen/Qwen3-Reranker-0.6B") == "judgement"
    assert bundled.rank(query, [], use_tqdm=False) == []
    for wrong, message in (({"by": "name"}, "by must be 'embedding' or"), ({"documents": [[1]]}, r"not \[1\]")):
        with pytest.raises(ValueError, match=message):
            bundled.rank(**({"query": query, "documents": documents} | wrong))


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_beam_search_with_a_temperature(folder: Path, mode: LogprobsMode) -> None:
    tokens, temperature = prompt(20, seed=20), 3.0
    params = BeamSearchParams(4, 6, ignore_eos=True, temperature=temperature)
    with LLM(folder, num_kvcache_blocks=30, logprobs_mode=mode, **SETTINGS) as llm:
        found = llm.beam_search([tokens], params)[0].sequences
        assert [beam.token_ids for beam in llm.beam_search([tokens], params)[0].sequences] == [
            beam.token_ids for beam in found
        ]
    model = reference_model(folder)
    model.generation_config.eos_token_id = None
    warpers = [TemperatureLogitsWarper(temperature)] if mode != "raw_logprobs" else []
    want = model.generate(
        torch.tensor([tokens]), num_beams=4, num_return_sequences=4, do_sample=False, max_new_tokens=6, pad_token_id=1,
        output_scores=True, return_dict_in_generate=True, logits_processor=warpers, renormalize_logits=True,
    )  # fmt: skip
    assert [beam.token_ids for beam in found] == want.sequences[:, len(tokens) :].tolist()
    scores = torch.tensor([beam.score for beam in found])
    torch.testing.assert_close(scores, want.sequences_scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (2, 0.0), (2, 2.0), (5, 1.0), (5, -1.0)])
def test_beam_search_equals_transformers(llm: LLM, folder: Path, width: int, length_penalty: float) -> None:
    prompts = [prompt(n, seed=n) for n in (3, 40)]
    # With enough ends that searches are over at different lengths, with one, and without.
    for ends in ([EOS, *range(100, 160)], [EOS], []):
        params = BeamSearchParams(width, 8, ignore_eos=not ends, length_penalty=length_penalty)
        llm.eos_token_ids = frozenset(ends)
        found = llm.beam_search(prompts, params)
        for tokens, output in zip(prompts, found, strict=True):
            model = reference_model(folder)
            model.generation_config.eos_token_id = ends or None
            want = model.generate(
                torch.tensor([tokens]), num_beams=width, num_return_sequences=width, do_sample=False, max_new_tokens=8,
                length_penalty=length_penalty, pad_token_id=1, output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
            beams = [sequence[len(tokens) :].tolist() for sequence in want.sequences]
            for beam, sequence in zip(beams, output.sequences, strict=True):
                assert beam[: len(sequence.token_ids)] == sequence.token_ids
                assert set(beam[len(sequence.token_ids) :]) <= {1}
                assert (sequence.finish_reason == "stop") == (sequence.token_ids[-1] in ends)
            if width > 1:
                scores = torch.tensor([sequence.score for sequence in output.sequences])
                torch.testing.assert_close(scores, want.sequences_scores, rtol=1e-4, atol=1e-4)
    assert llm.stats()["num_used_blocks"] == 0


# The mean of a prompt's hidden states is of more than 16-bit floats can add up.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_of_many_hidden_states_is_float32(dtype: torch.dtype) -> None:
    # From 2048 on float16 has no odd numbers, and from 256 on bfloat16 has none.
    hidden = torch.ones(3001, 2, dtype=dtype)
    chunk = Chunk(0, 0, array("i", [0]) * 3001, False, True, pooling="mean")
    nothing: Any = None
    (total,) = prompt_outputs(nothing, nothing, [chunk], {0: hidden})
    assert isinstance(total, torch.Tensor) and total.dtype == torch.float32
    assert total.tolist() == [3001.0, 3001.0]


VALUES = np.array([[-1.5, -0.25, -math.inf], [-0.5, -0.5, -2.0], [math.nan, -1.0, -3.0]], dtype=np.float32)
IDS = np.array([[7, 3, 9], [2, 2, 5], [1, 4, 6]])
WANT: list[Any] = [
    None,
    {7: Logprob(-1.5, 4, "t7"), 3: Logprob(-0.25, 1, "t3")},
    {2: Logprob(-0.5, 1, "t2"), 5: Logprob(-2.0, 2, "t5")},
]


def decode(token_id: int) -> str:
    return f"t{token_id}"


def make(num_missing: int = 1, num_positions: int = 2) -> Logprobs[Any]:
    records = pack_records(VALUES, IDS, np.array([4, 1, 9]))[:num_positions]
    return Logprobs(records.tobytes(), 3, decode, num_missing)


def test_it_is_a_list_to_those_who_read_it() -> None:
    got = make()
    assert got == WANT and got == make() and list(got) == WANT and [*got] == WANT and repr(got) == repr(WANT)
    assert got != WANT[1:] and got != make(0) and (got == 3) is False
    assert len(got) == 3 and got[0] is None and got[-1] == got[2] == WANT[2]
    for part in (slice(1, None), slice(0, 1), slice(None, -1), slice(2, 1), slice(None, None, -1), slice(5, 9)):
        assert got[part] == WANT[part]
    with pytest.raises(IndexError):
        got[3]
    assert got + make(0) == WANT + WANT[1:] and got + WANT == WANT + WANT and [3].__add__([]) + got == [3, *WANT]
    # With positions missing in the middle it is a list.
    assert got + make() == WANT + WANT
    for copied in (pickle.loads(pickle.dumps(got)), copy.deepcopy(got)):
        assert copied == WANT


def test_its_arrays_are_those_of_the_tokens() -> None:
    got = make(num_positions=3)
    assert np.array_equal(got.token_logprobs, np.array([np.nan, -1.5, -0.5, np.nan], dtype=np.float32), equal_nan=True)
    assert got.ranks.tolist() == [0, 4, 1, 9]
    assert math.isnan(got[3][1].logprob) and set(got[3]) == {1, 4, 6}
    # A record of fewer tokens is the beginning of a longer one.
    packed = pack_records(VALUES, IDS, np.array([4, 1, 9])).tobytes()
    assert Logprobs(packed[: record_bytes(0)], 1, decode) == [{7: WANT[1][7]}]
    assert record_bytes(2) * 3 == len(packed) and record_bytes(None) == 0


def test_nothing_is_made_until_it_is_looked_at(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*values: Any) -> Logprob:
        made.append(values)
        return Logprob(*values)

    monkeypatch.setattr(module, "Logprob", counted)
    params = SamplingParams(0, 6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with LLM(checkpoint, device="cpu", max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=8) as llm:
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
        (item,) = output.outputs
        assert not made and item.logprobs is not None and output.prompt_logprobs is not None
        total = sum(at[token].logprob for at, token in zip(item.logprobs, item.token_ids, strict=True))
        assert len(made) == 2 * 6 and item.cumulative_logprob == pytest.approx(total)
        made.clear()
        assert output.prompt_logprobs[1] is not None and 1 <= len(made) <= 2
