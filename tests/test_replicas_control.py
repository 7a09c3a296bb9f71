"""What a training loop does with replicas: afterwards they are what a fresh engine would be."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from tests.rank_processes import engine_pids

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "kvcache_block_size": 16, "num_kvcache_blocks": 40}
GREEDY = SamplingParams(0, 8, ignore_eos=True)
PROMPTS = [[number, 9, 2, 5] for number in range(6)]
ENDLESS = SamplingParams(0, 120, ignore_eos=True)


def answers(llm: LLM) -> list[Any]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def old() -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_file(Path(BUNDLED_MODEL, "model.safetensors"))
    return weights


@pytest.fixture(scope="module")
def new(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Other weights, of the same magnitudes."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor if tensor.ndim == 1 else tensor[:, torch.randperm(tensor.shape[1], generator=generator)]
        for name, tensor in old.items()
    }


@pytest.fixture(scope="module")
def wanted(new: dict[str, torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """What fresh engines of the two say."""
    with LLM(BUNDLED_MODEL, **SETTINGS) as llm:
        before = answers(llm)
        llm.load_weights(new, strict=True)
        llm.reset_prefix_cache()
        return before, answers(llm)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(BUNDLED_MODEL, data_parallel_size=2, swap_space=0.01, **SETTINGS) as llm:
        yield llm


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_new_weights_are_those_of_a_fresh_engine(
    llm: LLM, old: dict[str, Any], new: dict[str, Any], wanted: tuple[list[Any], list[Any]], tmp_path: Path
) -> None:
    before, after = wanted
    assert before != after and answers(llm) == before
    assert llm.load_weights(new, strict=True) == len(new)
    assert llm.reset_prefix_cache() and answers(llm) == after
    assert llm.load_weights(BUNDLED_MODEL) == len(old)
    assert llm.reset_prefix_cache() and answers(llm) == before
    # After a sleep without them; a name may come twice, and tensors may share memory.
    llm.sleep(level=2)
    assert llm.is_sleeping
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        llm.generate([[1]], GREEDY)
    llm.wake_up()
    with pytest.raises(RuntimeError, match="were dropped by sleep"):
        llm.add_request([1], GREEDY)
    first = next(iter(new))
    assert llm.load_weights([(first, old[first]), *new.items()]) == len(new) + 1
    assert not llm.is_sleeping and answers(llm) == after
    save_file(old, tmp_path / "model.safetensors")
    llm.load_weights(tmp_path, strict=True)
    assert llm.load_weights({}) == 0 and llm.reset_prefix_cache() and answers(llm) == before


def test_an_abort_between_steps_loses_no_new_token(llm: LLM) -> None:
    request_id = llm.add_request("one", SamplingParams(0, 40, ignore_eos=True))
    streamed: list[int] = []
    finished: list[tuple[int, Any]] = []
    while not finished:
        result = llm.step()
        streamed += result.new_token_ids.get(request_id, [])
        finished += result.finished
        for other in ("two", "three"):
            llm.abort([llm.add_request(other)])
            time.sleep(0.005)
    assert [i for i, _ in finished] == [request_id] and streamed == finished[0][1].outputs[0].token_ids


def test_mistakes_are_those_of_one_engine(llm: LLM, old: dict[str, Any], wanted: tuple[list[Any], Any]) -> None:
    for weights, message in (
        ({"model.norm.weight": torch.zeros(3)}, r"'model.norm.weight' has shape \[3\]"),
        ([("model.norm.weight", [0.0])], "'model.norm.weight' is a list; 0 tensors were written"),
        ("nowhere", "'nowhere' is no folder"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.load_weights(weights)
    with pytest.raises(ValueError, match="tensors are missing"):
        llm.load_weights({"model.norm.weight": old["model.norm.weight"]}, strict=True)
    with pytest.warns(UserWarning, match="^1 tensors that were loaded have NaN, such as 'model.norm.weight'"):
        llm.load_weights({"model.norm.weight": torch.full_like(old["model.norm.weight"], torch.nan)})
    llm.load_weights(old)
    request_id = llm.add_request([1, 2], ENDLESS)
    for change in (lambda: llm.load_weights(old), llm.sleep, llm.unload_adapter):
        with pytest.raises(RuntimeError, match="1 requests are pending"):
            change()
    llm.abort([request_id])
    assert not llm.unload_adapter() and answers(llm) == wanted[0]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_another_thread_pauses_a_generate(llm: LLM, old: dict[str, Any], mode: Any) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS, ENDLESS, use_tqdm=False)))
    num_before = llm.stats()["num_output_tokens"]
    thread.start()
    wait_until(lambda: llm.stats()["num_output_tokens"] > num_before + 12)
    llm.pause(mode)
    assert llm.is_paused
    if mode == "keep":
        num_steps = llm.stats()["num_steps"]
        llm.load_weights(old)
        llm.sleep()
        with pytest.raises(RuntimeError, match="the engine is asleep"):
            llm.require_awake()
        llm.wake_up()
        assert llm.stats()["num_steps"] == num_steps and thread.is_alive()
        llm.resume()
    thread.join()
    lengths = [len(output.outputs[0].token_ids) for output in found]
    reasons = {output.outputs[0].finish_reason for output in found}
    if mode == "abort":
        assert max(lengths) < 120 and reasons == {"abort"}
    else:
        assert lengths == [120] * 6 and reasons == {"length"}
    with pytest.raises(RuntimeError, match="the engine is paused") if mode != "keep" else pytest.MonkeyPatch.context():
        llm.generate([[3]], GREEDY, use_tqdm=False)
    llm.resume()
    assert not llm.is_paused


def test_a_replica_that_dies_at_rest_holds_nobody_up(
    llm: LLM, old: dict[str, Any], wanted: tuple[list[Any], Any]
) -> None:
    llm.load_weights(old)
    llm.reset_prefix_cache()
    llm.pause()
    llm.sleep()
    rate = llm.stats()["host_bytes_per_second"]
    os.kill(engine_pids()[0], signal.SIGKILL)
    wait_until(lambda: 0 not in engine_pids())
    with suppress(RuntimeError):
        # It may not have been missed yet.
        llm.wake_up()
    llm.wake_up()
    llm.resume()
    assert not llm.is_sleeping and not llm.is_paused
    with pytest.warns(UserWarning, match="replica 0 of 2 was killed by SIGKILL; its"):
        assert answers(llm) == wanted[0]
    assert 0 < llm.stats()["host_bytes_per_second"] < rate
