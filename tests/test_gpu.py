"""The engine on a CUDA device. Run with `pytest -m gpu`."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.attention import cascade as shared_prefix
from nanovllm.attention.cascade import CascadePlanner
from nanovllm.attention.triton import TritonBackend
from nanovllm.kernels._triton import is_hopper
from nanovllm.kernels.compile_ahead import compile_ahead
from nanovllm.kernels.slot_tensors import SlotTensors, scatter_tokens
from nanovllm.runner.cuda_graph import CaptureSizes
from nanovllm.runner.messages import BlockTransfer, ScheduledBatch
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling.sampler import Sampled
from tests.cache_checks import check_blocks
from tests.conftest import MakeCheckpoint
from tests.tools import sweep_models

pytestmark = pytest.mark.gpu

BACKENDS = ["sdpa", "triton", "flash_attn"]
SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.05,
}


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint) -> Path:
    return make_checkpoint(**SHAPE)


def make_llm(folder: Path, **kwargs: Any) -> LLM:
    settings: dict[str, Any] = {
        "device": "cuda",
        "max_model_len": 512,
        "max_num_seqs": 256,
        "num_kvcache_blocks": 600,
        "seed": 0,
        "dtype": "bfloat16",
    }
    settings |= kwargs
    if settings.get("attention_backend") == "flash_attn":
        pytest.importorskip("flash_attn")
    return LLM(folder, **settings)


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(SHAPE["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def runner_of(llm: LLM) -> ModelRunner:
    assert isinstance(llm.llm_engine._runner, ModelRunner)
    return llm.llm_engine._runner


def cascade_of(llm: LLM) -> CascadePlanner:
    backend = runner_of(llm).backend
    assert isinstance(backend, TritonBackend)
    return backend.cascade


def force_tokens(llm: LLM, forced: list[list[int]]) -> list[torch.Tensor]:
    """Make an eager engine take these tokens, step by step, whatever it computes; returns its logits as they come."""
    runner, recorded, device = runner_of(llm), [], runner_of(llm).device

    def sample(logits: torch.Tensor, *_: Any) -> Sampled:
        recorded.append(logits.float().clone())
        return Sampled(torch.tensor(forced[len(recorded) - 1], device=device))

    runner.sampler.sample = sample  # type: ignore[method-assign, assignment]
    # No padding, so that rows are what was asked for.
    runner.capture_sizes = CaptureSizes([])
    return recorded


@pytest.fixture
def hopper_roads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Hopper's kernels take whatever they can, however few the rows."""
    if not is_hopper(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    from nanovllm.kernels import policy  # noqa: PLC0415

    monkeypatch.setattr(policy.KernelPolicy, "uses_persistent", lambda *args: True)


@pytest.mark.parametrize("backend", [*BACKENDS, "hopper"])
def test_bf16_logits_are_as_near_to_float32_as_transformers(
    folder: Path, backend: str, request: pytest.FixtureRequest
) -> None:
    if backend == "hopper":
        backend = "triton"
        request.getfixturevalue("hopper_roads")
    (prompt,) = prompts((202,))
    model = AutoModelForCausalLM.from_pretrained(folder).float().cuda().eval()
    with torch.inference_mode():
        exact = model(torch.tensor([prompt], device="cuda")).logits[0]
        theirs = model.bfloat16()(torch.tensor([prompt], device="cuda")).logits[0].float()
    ends = [20, 63, 64, 65, 150, 198]
    steps = 4
    with make_llm(folder, attention_backend=backend, enforce_eager=True, enable_prefix_caching=False) as llm:
        recorded = force_tokens(llm, [[prompt[n + i] for n in ends] for i in range(steps)])
        llm.generate([prompt[:n] for n in ends], greedy(steps), use_tqdm=False)
    assert len(recorded) == steps
    for i, logits in enumerate(recorded):
        places = [n - 1 + i for n in ends]
        assert (logits - exact[places]).abs().max() <= 2 * (theirs - exact).abs().max(), f"step {i}"
        assert (logits - exact[places]).norm() <= 2 * (theirs - exact)[places].norm(), f"step {i}"


@pytest.mark.parametrize("backend", [*BACKENDS, "hopper"])
@pytest.mark.parametrize("eager", [True, False])
def test_float32_and_bf16_tokens_agree_with_transformers(
    folder: Path, backend: str, eager: bool, request: pytest.FixtureRequest
) -> None:
    dtype = "bfloat16" if backend in {"flash_attn", "hopper"} else "float32"
    if backend == "hopper":
        backend = "triton"
        request.getfixturevalue("hopper_roads")
    batch = prompts((1, 5, 64, 100, 255, 256, 257, 300), seed=1)
    model = AutoModelForCausalLM.from_pretrained(folder).float().cuda().eval()
    with make_llm(
        folder, attention_backend=backend, enforce_eager=eager, dtype=dtype, max_num_batched_tokens=300
    ) as llm:
        outputs = llm.generate(batch, greedy(40), use_tqdm=False)
        warm = llm.generate(batch, greedy(40), use_tqdm=False)
        check_blocks(llm.llm_engine.block_manager)
    rough = deepcopy(model).bfloat16()
    for prompt, output in zip(batch, outputs, strict=True):
        token_ids = torch.tensor([prompt], device="cuda")
        if dtype == "float32":
            want = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=40,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            assert output["token_ids"] == want[0, len(prompt) :].tolist()
            continue
        # In bf16 a near tie may fall the other way; after it texts differ, but each token is one of the best in its.
        got = torch.tensor([prompt + output["token_ids"]], device="cuda")
        with torch.inference_mode():
            exact, theirs = (form(got).logits[0, len(prompt) - 1 : -1].float() for form in (model, rough))
        missing = exact.amax(1) - exact.gather(1, got[0, len(prompt) :, None])[:, 0]
        assert missing.max() <= 2 * (theirs - exact).abs().max()
    if dtype == "float32":
        assert [output["token_ids"] for output in warm] == [output["token_ids"] for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_and_eager_steps_give_the_same_tokens(folder: Path, dtype: str) -> None:
    """Both are padded to the same capture_sizes; one prefix is shared by many, so that steps share it."""
    (prefix,) = prompts((256,), seed=5)
    batch = [prefix + prompt for prompt in prompts((1, 3, 40) * 20, seed=6)] + prompts((1, 17, 300), seed=7)
    params = [SamplingParams(0.7 * (i % 2), max_tokens=20 + i % 9, ignore_eos=True, seed=i) for i in range(len(batch))]
    tokens = []
    for eager in (False, True):
        with make_llm(folder, dtype=dtype, enforce_eager=eager, max_num_batched_tokens=1024) as llm:
            outputs = llm.generate(batch, params, use_tqdm=False)
            assert cascade_of(llm).buffer.any()
            assert (runner_of(llm).graphs is None) == eager
        tokens.append([output["token_ids"] for output in outputs])
    assert tokens[0] == tokens[1]


def test_log_probabilities_of_sampled_tokens_are_in_the_steps_graph(folder: Path) -> None:
    batch = prompts((1, 3, 40) * 12, seed=8)

    def params(count: int) -> list[SamplingParams]:
        return [SamplingParams(0.7 * (i % 2), 20, True, i, logprobs=count) for i in range(len(batch))]

    with make_llm(folder) as llm:
        want = llm.generate(batch, params(1), use_tqdm=False)
        for _ in range(3):
            got = llm.generate(batch, params(0), use_tqdm=False)
            assert [output["token_ids"] for output in got] == [output["token_ids"] for output in want]
            for item, other in ((a.outputs[0], b.outputs[0]) for a, b in zip(got, want, strict=True)):
                for token_id, top, also in zip(item.token_ids, item.logprobs or (), other.logprobs or (), strict=True):
                    assert set(top) == {token_id} and top[token_id].rank == also[token_id].rank
                    assert top[token_id].logprob == pytest.approx(also[token_id].logprob, abs=1e-5)
        graphs: Any = runner_of(llm).graphs
        assert {part.name for part, _ in graphs._graphs} == {"SAMPLED", "FORWARD", "SAMPLED_WITH_LOGPROBS"}


def test_blocks_are_copied_layer_by_layer(folder: Path) -> None:
    with make_llm(folder) as llm:
        runner = runner_of(llm)
        copies = ScheduledBatch(transfers=[BlockTransfer("copy", i, 300 + i) for i in range(200)])
        one_layer = 200 * runner.kv_cache.most_copied_bytes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.inference_mode():
            runner.prepare(copies)
        assert torch.cuda.max_memory_allocated() - before < 1.1 * one_layer


def test_what_requests_may_ask_for_fits_into_the_engines_share(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 151_936}
    (tmp_path / "config.json").write_text(json.dumps(config))
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    params = [
        SamplingParams(
            1.0, 8, True, i, n=2, logit_bias={i: 1.0}, presence_penalty=1.0, top_p=0.9, logprobs=20, prompt_logprobs=20
        )
        for i in range(256)
    ]
    settings: dict[str, Any] = {"num_kvcache_blocks": -1, "load_format": "dummy", "max_num_batched_tokens": 8192}
    with make_llm(tmp_path, gpu_memory_utilization=0.2, **settings) as llm:
        llm.generate(prompts((300,) * 256, seed=4), params, use_tqdm=False)
        assert free - torch.cuda.mem_get_info()[0] < 0.205 * total


def test_a_shared_prefix_changes_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (prefix,) = prompts((256,), seed=5)
    batch = [prefix + prompt for prompt in prompts((1, 3, 40) * 20, seed=6)]
    with make_llm(folder, dtype="float32") as llm:
        got = llm.generate(batch, greedy(20), use_tqdm=False)
        assert cascade_of(llm).buffer.any()
    monkeypatch.setattr(shared_prefix, "_MIN_SAVED_TOKENS", 10**9)
    with make_llm(folder, dtype="float32") as llm:
        want = llm.generate(batch, greedy(20), use_tqdm=False)
        assert not cascade_of(llm).buffer.any()
    assert got == want


def test_overlapped_steps_with_preemption_and_eos(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint(**(SHAPE | {"eos_token_id": list(range(0, 1000, 25))}))
    batch = prompts(tuple(range(1, 200, 3)), seed=3)
    params = SamplingParams(temperature=1.0, max_tokens=100, seed=7)
    with make_llm(folder, dtype="float32") as llm:
        want = [output["token_ids"] for output in llm.generate(batch, params, use_tqdm=False)]
        assert llm.stats()["num_preemptions"] == 0
    with make_llm(folder, dtype="float32", num_kvcache_blocks=40, kvcache_block_size=16, max_num_seqs=19) as llm:
        got = [output["token_ids"] for output in llm.generate(batch, params, use_tqdm=False)]
        assert llm.stats()["num_preemptions"] > 0
        check_blocks(llm.llm_engine.block_manager)
    assert got == want
    assert any(len(tokens) < 100 for tokens in want)


def test_memory_is_sized_used_and_freed(folder: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    llm = make_llm(folder, num_kvcache_blocks=-1, gpu_memory_utilization=0.5, max_num_seqs=512)
    llm.generate(prompts((300,) * 600, seed=4), greedy(10), use_tqdm=False)
    used = free - torch.cuda.mem_get_info()[0]
    assert 0.45 * total < used < 0.51 * total
    del llm
    gc.collect()
    assert free - torch.cuda.mem_get_info()[0] < 2**30
    with pytest.raises(ValueError, match="KV cache"):
        make_llm(folder, num_kvcache_blocks=-1, gpu_memory_utilization=0.001)


def test_memory_of_other_processes_is_not_charged(folder: Path) -> None:
    with make_llm(folder, num_kvcache_blocks=-1, gpu_memory_utilization=0.3) as llm:
        alone = runner_of(llm).num_kvcache_blocks
    total = torch.cuda.mem_get_info()[1]
    hold = f"import torch; x = torch.empty({total // 4}, dtype=torch.uint8, device='cuda'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        with make_llm(folder, num_kvcache_blocks=-1, gpu_memory_utilization=0.3) as llm:
            beside = runner_of(llm).num_kvcache_blocks
        other.stdin.write(b"\n")
    assert abs(beside - alone) <= 0.01 * alone


def test_sdpa_does_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
tokens, params = [], [SamplingParams(temperature=t, max_tokens=40, ignore_eos=True, seed=1) for t in (0, 1)]
for settings in ({"device": "cuda", "attention_backend": "sdpa"}, {"device": "cpu"}):
    with LLM(BUNDLED_MODEL, dtype="float32", num_kvcache_blocks=9, **settings) as llm:
        tokens.append([output["token_ids"] for output in llm.generate(["1 + 1 =", "sort 3 1 2"], params)])
print(tokens[0] == tokens[1])
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "True\n", done.stdout + done.stderr


def test_steps_are_in_order_whichever_stream_is_current(folder: Path) -> None:
    batch = prompts((40, 3, 100), seed=8)
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.stream(streams[0]), make_llm(folder) as llm:
        want = [output["token_ids"] for output in llm.generate(batch, greedy(20), use_tqdm=False)]
        ids = [llm.add_request(prompt, greedy(20)) for prompt in batch]
        outputs: dict[int, Any] = {}
        for step in range(100):
            if llm.is_finished():
                break
            # What is queued on the current stream keeps it busy, and the next step has the other one.
            with torch.cuda.stream(streams[step % 2]):
                torch.cuda._sleep(10**7)
                outputs.update(llm.step().finished)
    assert [outputs[i]["token_ids"] for i in ids] == want


def test_what_is_compiled_ahead_is_not_launched() -> None:
    def scatter(state: SlotTensors) -> None:
        slots, token_ids = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.full((1,), 7, device="cuda")
        scatter_tokens(state, slots, token_ids, 1, torch.zeros_like(token_ids))

    state = SlotTensors(*(torch.zeros(2, 8, dtype=torch.int32, device="cuda")[:, i].contiguous() for i in range(8)))
    compile_ahead(torch.device("cuda", 0), [partial(scatter, state)] * 2)
    assert not state.last_token.any() and not state.num_computed.any()
    scatter(state)
    assert state.last_token.tolist() == [7, 0] and state.num_computed.tolist() == [1, 0]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    "model_type",
    [
        "mistral",
        "qwen3",
        "gemma2",
        "gpt_oss",
        "cohere2",
        "olmo2",
        "qwen3_moe",
        "deepseek_v3",
        "gemma4_text",
        "seed_oss",
    ],
)
def test_windows_softcaps_and_transformers_models(model_type: str, eager: bool, tmp_path: Path) -> None:
    model = sweep_models.make_model(model_type, sweep_models.tiny_config(model_type))
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    batch = sweep_models.prompts()
    expected = [sweep_models.complete(model, prompt) for prompt in batch]
    for impl in ("auto", "transformers"):
        settings = {"device": "cuda", "model_impl": impl, "enforce_eager": eager, "dtype": "float32"}
        with warnings.catch_warnings(), sweep_models.make_llm(tmp_path, **settings) as llm:
            # Graphs or a warning.
            warnings.simplefilter("error")
            # A size is captured when it comes again; the second time prompts are found in the cache.
            for _ in range(3):
                outputs = llm.generate(batch, greedy(sweep_models.NUM_NEW), use_tqdm=False)
                assert [output["token_ids"] for output in outputs] == expected, impl


def test_weights_change_under_graphs_and_memory_comes_and_goes(folder: Path, make_checkpoint: MakeCheckpoint) -> None:
    new = make_checkpoint(seed=1, **SHAPE)
    asked = prompts((5, 40, 300) * 10)

    def answers(llm: LLM) -> list[list[int]]:
        return [o["token_ids"] for _ in range(2) for o in llm.generate(asked, greedy(16), use_tqdm=False)]

    with make_llm(new) as fresh:
        want = answers(fresh)
    with make_llm(folder) as llm:
        before = answers(llm)
        runner: Any = llm.llm_engine._runner
        graphs = dict(runner.graphs._graphs)
        weights = {
            name: tensor.to("cuda", torch.bfloat16)
            for name, tensor in AutoModelForCausalLM.from_pretrained(new).state_dict().items()
        }
        assert llm.load_weights(weights, strict=True) == len(weights) and llm.reset_prefix_cache()
        assert answers(llm) == want != before
        assert graphs and graphs.items() <= runner.graphs._graphs.items()
        awake = torch.cuda.mem_get_info()[0]
        held = runner.kv_cache.block_bytes * runner.num_kvcache_blocks + sum(
            x.nbytes for x in runner.model.parameters()
        )
        for level in (1, 2, 1):
            llm.sleep(level)
            assert torch.cuda.mem_get_info()[0] - awake > 0.9 * held
            llm.wake_up()
            if level == 2:
                assert runner.graphs is None
                llm.load_weights(weights)
            assert runner.graphs is not None and answers(llm) == want
            assert awake - torch.cuda.mem_get_info()[0] < 2**27


PDL_PROGRAM = """
import sys
import torch
from nanovllm import LLM, SamplingParams

generator = torch.Generator().manual_seed(0)
def prompts(*lengths):
    return [torch.randint(5000, (n,), generator=generator).tolist() for n in lengths]

batches = [prompts(5), prompts(300), prompts(*[40] * 8), prompts(*range(3, 203, 4)), prompts(*[20] * 200, 1000)]
shared = prompts(512)[0]
batches.append([shared + prompt for prompt in prompts(*[9] * 64)])
with LLM(sys.argv[1], device="cuda", dtype="bfloat16", max_model_len=2048, num_kvcache_blocks=500, seed=0) as llm:
    for batch in batches:
        for asked in ({}, {"logprobs": 2}):
            params = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, **asked)
            for output in llm.generate(batch, params, use_tqdm=False):
                print(output["token_ids"], output.outputs[0].logprobs)
"""


@pytest.fixture(scope="module", params=["qwen3", "Qwen3Moe"])
def wide_folder(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> Path:
    """A model of Qwen3-0.6B's sizes, for which most kernels of few and of many rows are chosen."""
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768, "norm_topk_prob": True}
    return make_checkpoint(
        request.param, vocab_size=5000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        initializer_range=0.05, **(experts if request.param == "Qwen3Moe" else {}),
    )  # fmt: skip


def run_program(folder: Path, setting: dict[str, str]) -> str:
    command = [sys.executable, "-c", PDL_PROGRAM, str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "NANOVLLM_PDL"} | setting
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_bits_are_the_same_with_and_without_early_starts(wide_folder: Path) -> None:
    early, late = run_program(wide_folder, {}), run_program(wide_folder, {"NANOVLLM_PDL": "wait"})
    assert len(early.splitlines()) == 2 * (1 + 1 + 8 + 50 + 201 + 64)
    assert early == late
