"""Log-probabilities as arrays that look like lists of dicts."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm import outputs as module
from nanovllm.outputs import Logprob, Logprobs, pack_records, record_bytes

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
