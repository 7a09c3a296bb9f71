"""Random calls of all that a training loop does with an engine, against a model of its states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from tests.cache_checks import check_blocks
from tests.conftest import MakeCheckpoint
from tests.test_live_weights import SETTINGS, stored, two_models

PARAMS = SamplingParams(0, 6, ignore_eos=True)
PROMPT = [5, 9, 2]
HALVES = ("model.", "lm_head.")
TAGS = {"weights", "kv_cache"}

CALLS: list[tuple[str, Any]] = [
    *(("pause", mode) for mode in ("keep", "wait", "abort")),
    ("resume", None),
    *(("sleep", level) for level in (1, 2)),
    *(("wake_up", tags) for tags in (None, ["weights"], ["kv_cache"], [])),
    # Of each of two models the decoder or the head.
    *(("load", choice) for choice in product((0, 1), HALVES)),
    ("reset", None),
    ("add", None),
    ("step", None),
    ("generate", None),
]


class Model:
    """What an engine should be."""

    def __init__(self) -> None:
        self.paused = False
        self.asleep: set[str] = set()
        # Of each half the model that it is of; None once it is dropped.
        self.weights: dict[str, int | None] = dict.fromkeys(HALVES, 0)

    @property
    def can_run(self) -> bool:
        return not self.asleep and None not in self.weights.values()


class Engine:
    """A real one, with two models' weights and what each mixture of them says."""

    def __init__(self, llm: LLM, weights: list[dict[str, Any]]) -> None:
        self.llm, self.weights = llm, weights
        self.answers = {}
        for choice in product((0, 1), repeat=2):
            for half, number in zip(HALVES, choice, strict=True):
                self.load(number, half)
            self.answers[choice] = self.generate()
        assert len(set(map(tuple, self.answers.values()))) > 2

    def load(self, number: int, half: str) -> None:
        self.llm.load_weights({k: v for k, v in self.weights[number].items() if k.startswith(half)})

    def generate(self) -> list[int]:
        tokens: list[int] = self.llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        return tokens

    def restart(self) -> None:
        self.llm.pause("abort")
        self.llm.resume()
        self.llm.wake_up()
        for half in HALVES:
            self.load(0, half)
        while not self.llm.is_finished():
            self.llm.step()

    def check_finished(self, finished: list[tuple[int, Any]]) -> None:
        for _, output in finished:
            (item,) = output.outputs
            assert item.finish_reason == "abort" or len(item.token_ids) == 6


@pytest.fixture(scope="module")
def engine(make_checkpoint: MakeCheckpoint) -> Iterator[Engine]:
    old, new = two_models(make_checkpoint, "untied")
    with LLM(old, **SETTINGS) as llm:
        yield Engine(llm, [stored(old), stored(new)])


def expected_error(model: Model, name: str, engine: Engine) -> bool:
    """Whether a call is to be refused."""
    pending = engine.llm.llm_engine.request_ids and not model.paused
    if name == "load":
        return bool(pending) or "weights" in model.asleep
    if name == "sleep":
        return bool(pending)
    return (name in ("add", "generate") and not model.can_run) or (name == "generate" and model.paused)


def do(engine: Engine, model: Model, name: str, argument: Any) -> None:
    """Do a call that is not refused, in both."""
    llm = engine.llm
    if name == "pause":
        llm.pause(argument)
        model.paused = True
    elif name == "resume":
        llm.resume()
        model.paused = False
    elif name == "sleep":
        llm.sleep(argument)
        model.asleep = set(TAGS)
        if argument == 2:
            model.weights = dict.fromkeys(HALVES)
    elif name == "wake_up":
        llm.wake_up(argument)
        model.asleep -= TAGS if argument is None else set(argument)
    elif name == "load":
        engine.load(*argument)
        model.weights[argument[1]] = argument[0]
    elif name == "reset":
        llm.reset_prefix_cache()
    elif name == "add":
        llm.add_request(PROMPT, PARAMS)
    elif name == "step":
        engine.check_finished(llm.step().finished)
    else:
        choice = tuple(number for half in HALVES if (number := model.weights[half]) is not None)
        assert engine.generate() == engine.answers[choice]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=st.lists(st.sampled_from(CALLS), max_size=25))
def test_any_calls_in_any_order(engine: Engine, calls: list[tuple[str, Any]]) -> None:
    engine.restart()
    model, llm = Model(), engine.llm
    for name, argument in [*calls, ("generate", None)]:
        if expected_error(model, name, engine):
            with pytest.raises(RuntimeError, match=r"requests are pending|is asleep|are asleep|were dropped|is paused"):
                do(engine, model, name, argument)
        else:
            do(engine, model, name, argument)
        assert (llm.is_paused, llm.is_sleeping) == (model.paused, bool(model.asleep))
        check_blocks(llm.llm_engine.block_manager, llm.llm_engine.scheduler.sequences)
