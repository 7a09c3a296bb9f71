"""Ray Data over the bundled model: an actor is killed in mid-batch, and no row is lost, doubled or different."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL

pytest.importorskip("ray.data")
import ray

from nanovllm.integrations.ray import EngineActor, ProcessorConfig, build_processor, row_seed
from tests.ray_actors import actor_times, inherited_environment, kill_computing_actor, wait_for_actors

ENGINE: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 32}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in inherited_environment().items():
            patch.setenv(name, value)
        # Of 3 CPUs the actors have two; the third reads.
        ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()


def config(**changes: Any) -> ProcessorConfig:
    settings: dict[str, Any] = {"batch_size": 8, "should_continue_on_error": True, **changes}
    params = {"temperature": 0.8, "max_tokens": 24}
    return ProcessorConfig(str(BUNDLED_MODEL), ENGINE, params, **settings)


def test_no_row_is_lost_when_an_actor_is_killed() -> None:
    rows = [{"id": i, "prompt": f"{i} + {i * 7 % 90} ="} for i in range(600)]
    # One block, as of one file: rows come in tasks all the same.
    dataset = ray.data.from_items(rows, override_num_blocks=1)

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 0:
            # Else one actor could be done with all rows before the other has started.
            wait_for_actors(2)
        return {}

    with ThreadPoolExecutor() as threads:
        killed = threads.submit(kill_computing_actor, 2)
        answers = list(build_processor(config(concurrency=2, seed=3), ask)(dataset).iter_rows())
        assert killed.result(timeout=60) not in actor_times()
    assert sorted(row["id"] for row in answers) == list(range(600))
    with LLM(BUNDLED_MODEL, **ENGINE) as llm:
        params = [SamplingParams(temperature=0.8, max_tokens=24, seed=row_seed(3, row)) for row in rows]
        expected = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
    for row in answers:
        output = expected[row["id"]]
        assert list(row["generated_tokens"]) == list(output.outputs[0].token_ids)
        assert row["num_input_tokens"] == len(output.prompt_token_ids) and row["__inference_error__"] == ""


def test_a_bad_row_has_an_error_or_ends_the_job() -> None:
    questions = ["2 + 3", "x " * 1000, "", "4 + 4", "bad"]
    dataset = ray.data.from_items([{"id": i, "question": text} for i, text in enumerate(questions)])

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        content = [{"role": "user", "content": row["question"]}] if row["question"] else None
        params = {"temperature": 0, "max_tokens": 4 + row["id"]} if row["question"] != "bad" else "greedy"
        return {"messages": content, "sampling_params": params}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"id": row["id"], "answer": row["generated_text"], "__inference_error__": ""}

    rows = sorted(
        build_processor(config(sort_by_prefix=True), ask, answer)(dataset).take_all(), key=lambda row: row["id"]
    )
    assert [row.get("answer") for row in rows] == ["5", None, None, "8", None]
    assert "max_model_len=256" in rows[1]["__inference_error__"]
    assert "either a prompt or messages" in rows[2]["__inference_error__"]
    assert rows[4]["__inference_error__"] == "sampling_params is a dict, not 'greedy'"
    with pytest.raises(Exception, match=r"prompt or messages|max_model_len=256|is a dict"):
        build_processor(config(should_continue_on_error=False), ask)(dataset).take_all()


def test_rows_beyond_those_that_an_actor_should_have_wait() -> None:
    """Ray may put the rest of one block and rows of the next into a task."""

    async def answers() -> list[dict[str, Any]]:
        actor = EngineActor(config(batch_size=2, max_concurrent_batches=1))
        batch = {"row": [pickle.dumps({"prompt": f"{i} + 1 ="}) for i in range(5)]}
        return [pickle.loads(row) async for done in actor(batch) for row in done["row"]]

    assert [row["__inference_error__"] for row in asyncio.run(answers())] == [""] * 5


def test_what_would_wait_for_ever_or_is_no_parameter_is_refused() -> None:
    dataset = ray.data.from_items([{"prompt": "1"}])
    with pytest.raises(ValueError, match="3 actors of 1 CPUs leave none of 3"):
        build_processor(config(concurrency=3))(dataset)
    with pytest.raises(ValueError, match="need 1 GPUs, and the cluster has 0"):
        build_processor(ProcessorConfig(str(BUNDLED_MODEL)))(dataset)
    with pytest.raises(ValueError, match=r"must be 1 to 40, 1\.25 max_num_seqs, not 48"):
        config(max_concurrent_batches=6)
    for concurrency in (0, (4, 1), (1,), "2", 2.5):
        with pytest.raises(ValueError, match="concurrency"):
            config(concurrency=concurrency)
    for wrong in ({"max_num_sequences": 3}, {"max_num_seqs": 0}):
        with pytest.raises(ValueError, match="max_num_seq"):
            ProcessorConfig("model", wrong)
    ProcessorConfig("model", sampling_params={"structured_outputs": {"regex": "[0-9]+"}})
    replicas = ProcessorConfig("model", {"data_parallel_size": 2, "max_num_seqs": 32})
    assert (replicas.num_gpus, replicas.batch_size, replicas.max_rows) == (2, 16, 80)
    for params in ({"temprature": 1}, {"n": 2}, {"temperature": -1}):
        with pytest.raises(ValueError, match=r"temprature|n must be 1|temperature"):
            ProcessorConfig("model", sampling_params=params)


def test_a_driver_needs_no_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import nanovllm.integrations.ray"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
