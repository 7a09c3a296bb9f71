"""Record what engines answer, bit for bit, and compare: `python -m tests.golden write FOLDER`, then `check FOLDER`.

A change of structure must leave the record as it was. The folder holds the models (tiny, random, of each native family
and of eight that run transformers' code) and a JSON file for each device: tokens, and log-probabilities as 32-bit
patterns, of each case; on a GPU in bfloat16, and the kernels of published shapes, with their grids. A record is
compared on the machine, with the torch, that wrote it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanovllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.outputs import RequestOutput
from tests.conftest import write_checkpoint
from tests.reference import prompts
from tests.test_tokens import FAMILIES, LENGTHS
from tests.tools.sweep_models import make_model, tiny_config

BY_TRANSFORMERS = ("gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "granite", "deepseek_v3", "phi", "stablelm")
WITH_RANKS = {"LlamaForCausalLM": 2, "three heads": 3, "Qwen3MoeForCausalLM": 2}
WITH_FP8 = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
SETTINGS: dict[str, Any] = {
    "max_model_len": 512, "kvcache_block_size": 16, "num_kvcache_blocks": 200, "max_num_batched_tokens": 48,
    "max_num_seqs": 4, "seed": 0,
}  # fmt: skip
Record = dict[str, list[Any]]


def bits(values: Any) -> list[int]:
    """Return the 32-bit patterns of floats."""
    found: list[int] = np.asarray(values, np.float32).view(np.int32).ravel().tolist()
    return found


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """Return the tokens and log-probabilities of outputs, and of their prompts."""
    found: list[Any] = []
    for output in outputs:
        for item in output.outputs:
            rows = [sorted((i, *bits(entry.logprob)) for i, entry in row.items()) for row in item.logprobs or ()]
            found.append([item.token_ids, item.finish_reason, rows])
        prompt_rows = [row for row in output.prompt_logprobs or () if row]
        found.append([sorted((i, *bits(entry.logprob)) for i, entry in row.items()) for row in prompt_rows])
    return found


def mixed() -> list[SamplingParams]:
    """Return parameters of five requests that share a batch."""
    return [
        SamplingParams(0, 24, ignore_eos=True, logprobs=3),
        SamplingParams(0.8, 24, seed=1, top_p=0.9, top_k=40, logprobs=1),
        SamplingParams(1.0, 24, seed=2, min_p=0.05, presence_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(0.7, 24, seed=3, logit_bias={5: 2.0, 9: -3.0}, min_tokens=8, stop_token_ids=[7, 8]),
        SamplingParams(0, 16, allowed_token_ids=list(range(40, 90)), prompt_logprobs=2),
    ]


def cases(llm: LLM) -> Iterator[tuple[str, list[Any]]]:
    """Yield the answers of an engine to what it is asked, by name."""
    batch = prompts(LENGTHS, seed=5)
    for name in ("chunked", "out of the cache"):
        yield name, answers(llm.generate(batch, mixed(), use_tqdm=False))
    several = [SamplingParams(1.0, 12, seed=4, n=3, logprobs=0), SamplingParams(1.0, 12, seed=5, n=2)]
    yield "n", answers(llm.generate(batch[1:3], several, use_tqdm=False))
    (beams,) = llm.beam_search([batch[2]], BeamSearchParams(beam_width=3, max_tokens=8))
    yield "beams", [[beam.token_ids, bits(beam.cumulative_logprob)] for beam in beams.sequences]
    yield "hidden states", bits(llm.embed(batch[:3], pooling="mean", use_tqdm=False).float().cpu())
    priorities = [2, 0, 1, 1, 0]
    yield "priorities", answers(llm.generate(batch, mixed(), use_tqdm=False, priority=priorities))


def record_model(folder: Path, **settings: Any) -> Record:
    """Return the answers of a model, with room, and where sequences are preempted."""
    record: Record = {}
    with LLM(folder, **(SETTINGS | settings)) as llm:
        record |= dict(cases(llm))
    with LLM(folder, **(SETTINGS | settings | {"num_kvcache_blocks": 24, "swap_space": 0})) as llm:
        long = [SamplingParams(0.9, 60, seed=i, ignore_eos=True) for i in range(len(LENGTHS))]
        record["preempted"] = answers(llm.generate(prompts(LENGTHS, seed=6), long, use_tqdm=False))
        record["preemptions"] = [llm.stats()["num_preemptions"]]
    return record


def record_texts(device: str) -> Record:
    """Return the answers of the bundled model that need a tokenizer: stop strings, masks, thoughts, conversations."""
    with LLM(BUNDLED_MODEL, **(SETTINGS | {"device": device})) as llm:
        word = StructuredOutputsParams(regex="[a-z]{3,8}")
        params = [
            SamplingParams(0.8, 30, seed=1, stop=[", 4"]),
            SamplingParams(0.8, 30, seed=2, structured_outputs=word),
            SamplingParams(0, 30, bad_words=["ships with"]),
        ]
        outputs = llm.generate(["count to 9", "a word", "introduce yourself"], params, use_tqdm=False)
        messages = [{"role": "user", "content": "list all prime numbers within 100"}]
        outputs += llm.chat([messages], SamplingParams(0), use_tqdm=False)
        return {"texts": [[item.text for item in output.outputs] for output in outputs]}


KERNEL_SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    "30B-A3B": {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip


def write_shape(shape: str) -> Path:
    """Write the config of a published shape of Qwen3, with four layers, to a new folder."""
    folder = Path(tempfile.mkdtemp())
    family = "qwen3_moe" if "num_experts" in KERNEL_SHAPES[shape] else "qwen3"
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if family == "qwen3_moe" else "Qwen3ForCausalLM"],
        "model_type": family, "head_dim": 128, "num_hidden_layers": 4, "num_key_value_heads": 8, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "rope_theta": 1000000, "torch_dtype": "bfloat16",
        "intermediate_size": 6144, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | KERNEL_SHAPES[shape]))
    return folder


def launched(run: Callable[[], object]) -> list[list[Any]]:
    """Return the name and the grid of each kernel that a call launches, in the device's order."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with torch.profiler.profile(activities=activities) as profile:
            run()
            torch.cuda.synchronize()
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    return [[event["name"], event["args"]["grid"], event["args"]["block"]] for event in kernels]


def record_kernels(shape: str, **settings: Any) -> Record:
    """Return the kernels of prompt steps and of captured decode steps, and their tokens, of 1, 8 and 256 rows."""
    record: Record = {}
    with LLM(write_shape(shape), load_format="dummy", seed=0, max_model_len=4096, **settings) as llm:
        for rows, length in ((1, 20), (8, 20), (256, 20), (1, 3000), (64, 600)):
            params = SamplingParams(0.8, 5, ignore_eos=True, seed=0)

            def run(seed: int, rows: int = rows, length: int = length, params: SamplingParams = params) -> Any:
                return llm.generate(prompts((length,) * rows, seed=seed), params, use_tqdm=False)

            # The second run of a size captures it.
            for seed in range(3):
                outputs = run(seed)
            record[f"tokens of {rows} x {length}"] = [output.outputs[0].token_ids for output in outputs]
            record[f"kernels of {rows} x {length}"] = launched(lambda: run(9))
        shared = prompts((1024,), seed=7)[0]
        together = [shared + tail for tail in prompts((30,) * 128, seed=8)]
        for _ in range(3):
            outputs = llm.generate(together, SamplingParams(0.8, 6, ignore_eos=True, seed=0), use_tqdm=False)
        record["tokens of a shared prefix"] = [output.outputs[0].token_ids for output in outputs]
    return record


def write_models(folder: Path) -> None:
    """Write the models that the record is of."""
    three = FAMILIES["Olmo3ForCausalLM"] | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    for name, changes in FAMILIES.items():
        family = name.removesuffix("ForCausalLM")
        write_checkpoint(folder / name, family, seed=3, **({"eos_token_id": 2} | changes))
    write_checkpoint(folder / "three heads", "Olmo3", seed=3, **({"eos_token_id": 2} | three))
    for model_type in BY_TRANSFORMERS:
        make_model(model_type, tiny_config(model_type)).save_pretrained(folder / model_type)


def records(models: Path, device: str) -> dict[str, Callable[[], Record]]:
    """Return what makes the record of each engine, by its name."""
    rounded = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    dtype = "float32" if device == "cpu" else "bfloat16"
    usual = {"device": device, "dtype": dtype}
    found: dict[str, Callable[[], Record]] = {
        name: partial(record_model, models / name, **usual) for name in (*FAMILIES, *BY_TRANSFORMERS)
    }
    for name in WITH_FP8:
        found[f"{name} fp8"] = partial(record_model, models / name, **usual, **rounded)
    if device != "cpu":
        for shape in KERNEL_SHAPES:
            found[f"kernels {shape}"] = partial(record_kernels, shape)
        found["kernels 0.6B fp8"] = partial(record_kernels, "0.6B", **rounded)
    if device == "cpu":
        for name, size in WITH_RANKS.items():
            found[f"{name} on {size} ranks"] = partial(
                record_model, models / name, device=device, tensor_parallel_size=size
            )
    found["texts"] = partial(record_texts, device)
    return found


def differences(before: Record, now: Record) -> list[str]:
    """Return the cases that are not equal."""
    return [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]


def main() -> None:
    """Write the record, or check that it is what engines answer now."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["write", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="a part of the engines' names")
    parser.add_argument("--differences", type=Path, help="a folder for the cases that differ")
    options = parser.parse_args()
    torch.set_num_threads(1)
    models, file = options.folder / "models", options.folder / f"{options.device.partition(':')[0]}.json"
    if not models.exists():
        write_models(models)
    known: dict[str, Record] = json.loads(file.read_text()) if file.exists() else {}
    num_different = 0
    for name, make in records(models, options.device).items():
        if options.only not in name:
            continue
        try:
            record = json.loads(json.dumps(make()))
        except Exception as error:  # recorded like an answer: a model that fails must go on failing so
            record = {"failure": [type(error).__name__, str(error)[:200]]}
        if options.action == "check":
            found = differences(known.get(name, {}), record)
            num_different += len(found)
            print(f"{name}: {'equal' if not found else 'DIFFERENT: ' + ', '.join(found)}", flush=True)
            if found and options.differences:
                changed = {case: [known.get(name, {}).get(case), record.get(case)] for case in found}
                (options.differences / f"{name}.json".replace(" ", "_")).write_text(json.dumps(changed))
        else:
            known[name] = record
            print(f"{name}: {len(json.dumps(record))} characters", flush=True)
            file.write_text(json.dumps(known))
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main()
