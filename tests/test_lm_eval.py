"""The model for lm-evaluation-harness scores and says what the harness's own does, and sooner."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.assets import BUNDLED_MODEL

pytest.importorskip("lm_eval")

import lm_eval.models
import lm_eval.tasks
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from nanovllm.integrations.lm_eval import NanoVLLM, main

# One more than the other's: the last token of a text is no input.
ARGS = f"pretrained={BUNDLED_MODEL},dtype=float32,max_model_len=161,kvcache_block_size=16,num_kvcache_blocks=400,seed=0"
HF_ARGS = f"pretrained={BUNDLED_MODEL},dtype=float32,max_length=160"
WORDS = ["count", "from", "3", "to", "9", "please,", "list", "the", "primes", "below", "30", "and", "sort", "numbers"]
COMMON: dict[str, Any] = {"dataset_path": "json", "test_split": "test"}


def sentence(seed: int, length: int) -> str:
    picked = torch.randint(len(WORDS), (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(WORDS[i] for i in picked)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A task of each type of request, whose documents are in files."""
    folder = tmp_path_factory.mktemp("tasks")
    rules = "Answer as the examples do. " + sentence(7, 30)
    # A space at its end belongs to the choices, and a context may be empty.
    questions = ["", "A: ", *(f"{rules}\nQ: {sentence(i, 6)}\nA:" for i in range(14))]
    choices = [
        {"text": question, "choices": [sentence(100 * i + j, 2) for j in range(4)], "gold": i % 4}
        for i, question in enumerate(questions)
    ]
    documents = [{"text": sentence(i, 4 + 30 * i)} for i in range(6)]
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [
        "introduce yourself",
        "count from 3 to 9",
        "list primes below 30",
        sentence(1, 90),
        "sort 5 2 8",
        "hello",
    ]
    asked = [{"text": chat.format(text)} for text in prompts]

    def config(name: str, rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        path = folder / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        kwargs = {"data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")}
        return {**COMMON, "task": name, "dataset_kwargs": kwargs, "doc_to_text": "{{text}}", **fields}

    perplexity = [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]
    until = {"until": ["5", "vllm", "<|endoftext|>"], "max_gen_toks": 24}
    return {
        "choices": config(
            "choices", choices, output_type="multiple_choice", doc_to_choice="choices", doc_to_target="gold",
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
        "rolling": config(
            "rolling", documents, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
            metric_list=perplexity,
        ),
        "generation": config(
            "generation", asked, output_type="generate_until", doc_to_target="x", generation_kwargs=until,
            metric_list=[{"metric": "exact_match"}],
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    model = get_model("nanovllm").create_from_arg_string(ARGS, {"batch_size": 1, "device": "cpu"})
    yield model
    model.llm.exit()


@pytest.fixture(scope="module")
def theirs() -> Any:
    pytest.importorskip("accelerate")
    return get_model("hf").create_from_arg_string(HF_ARGS, {"batch_size": 8, "device": "cpu"})


def run(model: Any, config: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    task = ConfigurableTask(config=dict(config))
    name = config["task"]
    found = evaluate(lm=model, task_dict={name: task}, bootstrap_iters=0, log_samples=True)
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return found["results"][name], [sample["resps"] for sample in samples]


def flat(answers: Any) -> list[Any]:
    return [leaf for item in answers for leaf in flat(item)] if isinstance(answers, (list, tuple)) else [answers]


@pytest.mark.parametrize("name", ["choices", "rolling", "generation"])
def test_scores_are_those_of_the_harness(tasks: dict[str, dict[str, Any]], ours: Any, theirs: Any, name: str) -> None:
    (got, answers), (want, expected) = run(ours, tasks[name]), run(theirs, tasks[name])
    assert len(answers) == len(expected) and len(flat(answers)) == len(flat(expected)) > 5
    for answer, other in zip(flat(answers), flat(expected), strict=True):
        # Numbers may come as text.
        number, other_number = as_number(answer), as_number(other)
        assert number == pytest.approx(other_number, rel=1e-4, abs=1e-3) if number is not None else answer == other
    metrics = {key for key, value in want.items() if isinstance(value, float)}
    assert metrics and all(got[key] == pytest.approx(want[key], rel=1e-4) for key in metrics)
    assert ours.llm.stats()["num_used_blocks"] == 0


def as_number(answer: Any) -> float | None:
    try:
        return float(answer)
    except ValueError:
        return None


def request(*args: Any) -> Instance:
    return Instance("generate_until", {}, args, 0)


def test_generation_options(ours: NanoVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = ours._sampling_params({"until": "x", "do_sample": False, "temperature": 0.7})
    assert (greedy.temperature, greedy.stop, greedy.max_tokens) == (0, ["x"], 256)
    drawn = ours._sampling_params({"do_sample": True, "max_new_tokens": 9, "top_p": 0.5, "until": ["<|im_end|>", ""]})
    assert (drawn.temperature, drawn.max_tokens, drawn.top_p) == (1, 9, 0.5)
    assert (drawn.stop, drawn.stop_token_ids) == (None, [2])
    assert ours._sampling_params({"temperature": 0.3}).temperature == 0.3
    with pytest.raises(ValueError, match="unknown argument num_beams"):
        ours._sampling_params({"num_beams": 4})
    with pytest.raises(ValueError, match="no room for a context in max_model_len=161"):
        ours.generate_until([request("x", {"max_gen_toks": 161})])
    with pytest.warns(UserWarning, match="truncated to its last 60"):
        ours.generate_until([request(sentence(1, 200), {"max_gen_toks": 100})], disable_tqdm=True)
    assert ours.tok_encode("") == []


def test_the_command_runs_the_harnesss_own(
    tmp_path: Path, tasks: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {key: value for key, value in tasks["generation"].items() if key != "task"} | {"task": "local_generation"}
    (tmp_path / "task.yaml").write_text(json.dumps(config))
    arguments = ["--tasks", "local_generation", "--include_path", str(tmp_path)]

    def result(folder: str) -> float:
        (results,) = (tmp_path / folder).rglob("results*.json")
        value: float = json.loads(results.read_text())["results"]["local_generation"]["exact_match,none"]
        return value

    # As its users type it: the harness says device="cuda:0", also where there is no GPU.
    with monkeypatch.context() as patch:
        # Reading the harness's own tasks takes a while.
        patch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
        main([*arguments, "--model_args", ARGS, "--output_path", str(tmp_path / "ours")])
    assert result("ours") == 0
    # The harness's own models stay what they are; in a process of its own, where nothing has registered them.
    command = [sys.executable, "-m", "nanovllm", "eval", "--model", "hf", *arguments, "--model_args", HF_ARGS]
    run_path = ["--output_path", str(tmp_path / "theirs")]
    done = subprocess.run([*command, *run_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert result("theirs") == 0
