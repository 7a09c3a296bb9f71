"""`LLM` as a user sees it: arguments, outputs, errors, and an engine that survives them."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.assets import BUNDLED_MODEL
from nanovllm.outputs import StepError
from nanovllm.runner.messages import BlockTransfer, NewRequest, ScheduledBatch
from nanovllm.text.input_processor import work_of
from tests.conftest import MakeCheckpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_llm(folder: Path | str, **kwargs: Any) -> LLM:
    settings: dict[str, Any] = {
        "device": "cpu",
        "max_model_len": 128,
        "kvcache_block_size": 16,
        "num_kvcache_blocks": 20,
        "seed": 0,
    }
    return LLM(folder, **(settings | kwargs))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return make_llm(checkpoint)


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return make_llm(BUNDLED_MODEL)


def test_an_eos_outside_the_vocabulary_is_ignored(make_checkpoint: MakeCheckpoint) -> None:
    with make_llm(make_checkpoint(eos_token_id=[2, 99_999])) as llm:
        assert llm.eos_token_ids == {2}
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(0, max_tokens=4, min_tokens=4), use_tqdm=False)
    assert len(output["token_ids"]) == 4


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_of_sampled_tokens_are_part_of_the_step(checkpoint: Path, mode: str) -> None:
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]

    def params(count: int | None) -> list[SamplingParams]:
        # The second asks for none.
        counts = [count, None, count]
        return [SamplingParams(0.7 * i, 8, seed=i, ignore_eos=True, logprobs=n) for i, n in enumerate(counts)]

    with make_llm(checkpoint, logprobs_mode=mode) as fresh:
        want = fresh.generate(prompts, params(1), use_tqdm=False)
        runner: Any = fresh.llm_engine._runner
        replay, parts = runner._run_or_replay, []

        def recorded_replay(step: Any, part: Any) -> Any:
            parts.append(part.name)
            return replay(step, part)

        runner._run_or_replay = recorded_replay
        got = fresh.generate(prompts, params(0), use_tqdm=False)
    assert set(parts) == {"SAMPLED_WITH_LOGPROBS"}
    for output, other in zip(got, want, strict=True):
        item, expected = output.outputs[0], other.outputs[0]
        assert item.token_ids == expected.token_ids and (item.logprobs is None) == (expected.logprobs is None)
        for token_id, at, also in zip(item.token_ids, item.logprobs or [], expected.logprobs or [], strict=False):
            assert set(at) == {token_id} and at[token_id].rank == also[token_id].rank
            assert at[token_id].logprob == pytest.approx(also[token_id].logprob, abs=1e-5)


def test_a_block_is_copied_before_it_is_the_copy_of_another(checkpoint: Path) -> None:
    with make_llm(checkpoint) as fresh:
        runner: Any = fresh.llm_engine._runner
        (group,) = runner.kv_cache.tensors.values()
        for pages in (group.keys, group.values):
            pages.copy_(torch.arange(runner.num_kvcache_blocks).view(1, -1, 1, 1, 1))
        transfers = [BlockTransfer("copy", 1, 2), BlockTransfer("copy", 3, 1)]
        runner.prepare(ScheduledBatch(transfers=transfers, new_requests=[NewRequest(0, [[1]], 1, 0.0, 0)]))
        assert group.keys[0, :5, 0, 0, 0].tolist() == [0, 3, 1, 3, 4]
        assert torch.equal(group.values[-1, 2], group.keys[0, 2])


def test_what_holds_a_device_stays_in_its_process(bundled: LLM) -> None:
    for held in (bundled, bundled.llm_engine):
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"^LLM\w* holds a device and cannot be pickled or copied"):
                call(held)
    for cause, kind in (MemoryError(open), MemoryError), (MemoryError(lambda: 0), type(None)):
        error = pickle.loads(pickle.dumps(StepError("no room", [3, 4], cause)))
        assert (str(error), error.request_ids, type(error)) == ("no room", [3, 4], StepError)
        assert type(error.__cause__) is kind
    (output,) = bundled.generate("a", SamplingParams(0, 3, logprobs=1), use_tqdm=False)
    assert pickle.loads(pickle.dumps(output)) == output == copy.deepcopy(output)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ("", "empty"),
        ([1] * 129, "129 tokens, over max_model_len=128"),
        ([1, 512], r"token id 512 is outside the vocabulary, 0 \.\.\. 511"),
        ([-1], "token id -1"),
        ([1, 2**40], f"token id {2**40} is outside"),
        ([1.5], "list of token ids"),
        ([7, None, 2**40], "list of token ids"),
        ([5, True], "list of token ids"),
        ([False, 600], "list of token ids"),
        ({"text": "x"}, "a prompt as a dict is"),
        ({"prompt": 5}, "a prompt as a dict is"),
        ({"prompt": "x", "more": 1}, "a prompt as a dict is"),
        ({"prompt_token_ids": "abc"}, "a prompt as a dict is"),
        ("a\ud83d", r"has a lone surrogate \(U\+D83D\), which is not valid Unicode"),
    ],
)
def test_bad_prompts(bundled: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^prompts\[1\]: .*{message}"):
        bundled.generate([[1, 2, 3], prompt], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=rf"^(?!prompts).*{message}"):
        bundled.add_request(prompt, GREEDY)
    assert bundled.is_finished()
    assert len(bundled.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0]["token_ids"]) == 8


def test_request_over_the_cache(checkpoint: Path) -> None:
    with make_llm(checkpoint, num_kvcache_blocks=2) as llm:
        with pytest.raises(ValueError, match="over the cache's 32"):
            llm.generate([[1] * 40], GREEDY)
        with pytest.raises(ValueError, match="need 33 KV slots"):
            llm.generate([[1] * 26], GREEDY)
        (output,) = llm.generate([[1] * 25], GREEDY, use_tqdm=False)
        assert len(output["token_ids"]) == 8


def test_a_tokenizer_of_another_folder(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    folder = make_checkpoint(vocab_size=600)
    with LLM(folder, tokenizer=str(BUNDLED_MODEL), device="cpu", max_model_len=64) as llm:
        output = llm.generate("two plus two", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
        assert output.prompt_token_ids == llm.get_tokenizer().encode("two plus two")
        assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids)
    for wrong, message in (
        (str(tmp_path), "no tokenizer's files"),
        ("/none", "^tokenizer=.*does not exist"),
        (1, "must be a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(folder, tokenizer=wrong, device="cpu")  # type: ignore[arg-type]


def test_a_prompt_as_text_or_dict_is_truncated_alike(bundled: LLM) -> None:
    text, processor = "1, 2, 3, " * 30_000, bundled.input_processor
    whole: list[Any] = [text, {"prompt": text}, [7] * 70_000, {"prompt_token_ids": [7] * 70_000}]
    assert [work_of([prompt], None) for prompt in whole] == ["long"] * 4
    as_text, as_dict = (processor.encode([prompt], max_tokens=5)[0] for prompt in whole[:2])
    assert as_text == as_dict and len(as_text["prompt_token_ids"]) == 5


def test_strings_need_a_tokenizer(llm: LLM) -> None:
    assert llm.tokenizer is None
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("hello")


def test_an_engine_refuses_what_needs_text(llm: LLM) -> None:
    with pytest.raises(ValueError, match="stop needs text: give the request to an LLM, not to its engine"):
        llm.llm_engine.add_request([1], SamplingParams(stop="x"))
    assert llm.is_finished()


def test_numpy_numbers_are_numbers(llm: LLM) -> None:
    params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3), seed=np.int64(1), ignore_eos=True)
    (output,) = llm.generate([list(np.array([1, 2]))], params, use_tqdm=False)
    assert len(output["token_ids"]) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seq": 4}, "unknown argument max_num_seq; Config takes model, tokenizer, device"),
        ({"kvcache_block_size": 24}, "multiple of 16, not 24"),
        ({"kvcache_block_size": 0}, "kvcache_block_size must be >= 16, not 0"),
        ({"num_kvcache_blocks": 0}, "num_kvcache_blocks"),
        ({"tensor_parallel_size": 5}, "tensor_parallel_size=5 is over the model's 4 heads"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be >= 1, not 0"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": -5}, "max_num_batched_tokens"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"dtype": "float8"}, "dtype must be one of"),
        ({"device": "tpu"}, "device must be"),
        ({"attention_backend": "magic"}, "attention_backend must be one of"),
        ({"attention_backend": "triton", "device": "cpu"}, "need a CUDA device, not 'cpu'"),
        ({"load_format": "gguf"}, "load_format must be one of"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"max_model_len": None}, "max_model_len must be an integer"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization"),
        ({"trust_remote_code": "False"}, "trust_remote_code must be True or False, not 'False'"),
        ({"device": None}, "device must be a string"),
    ],
)
def test_bad_settings(checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(checkpoint, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="device='cuda', but there are 0 CUDA devices"):
        make_llm(checkpoint, device="cuda")


def test_max_model_len_is_capped_with_a_warning(checkpoint: Path) -> None:
    with (
        pytest.warns(UserWarning, match="max_model_len=4096 is capped: the model has 1024"),
        LLM(checkpoint, device="cpu") as llm,
    ):
        assert llm.llm_engine.limits.max_model_len == 1024
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_llm(checkpoint).exit()


def test_the_default_cache_on_the_cpu_is_small(checkpoint: Path, llm: LLM) -> None:
    prompts = [[i] * 119 + [i + 1] for i in range(1, 10)]
    want = [llm.generate([prompt], GREEDY, use_tqdm=False)[0]["token_ids"] for prompt in prompts]
    with make_llm(checkpoint, num_kvcache_blocks=-1, max_num_seqs=4) as small:
        # As much as 4 sequences of 128 tokens can use, though a tenth of the memory would hold far more.
        assert small.stats()["num_free_blocks"] == 32
        got = [output["token_ids"] for output in small.generate(prompts, GREEDY, use_tqdm=False)]
        # All four at their longest fit into the blocks that the device has.
        assert small.stats()["num_preemptions"] == 0
        runner: Any = small.llm_engine._runner
        (group,) = runner.kv_cache.tensors.values()
        assert group.keys.shape[1:3] == group.values.shape[1:3] == (32, 16)
    assert got == want


def test_dummy_weights_need_a_config_alone(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    runs = []
    for seed in (1, 1, 2):
        with make_llm(tmp_path, load_format="dummy", seed=seed) as llm:
            runs.append([output["token_ids"] for output in llm.generate([[1, 2, 3]] * 3, GREEDY, use_tqdm=False)])
    assert runs[0] == runs[1] != runs[2]
    with pytest.raises(ValueError, match=r"no \*\.safetensors"):
        make_llm(tmp_path)


def test_ctrl_c_while_decoding_is_a_keyboard_interrupt(llm: LLM) -> None:
    class Interrupted:
        def decode(self, token_ids: list[int], **_: Any) -> str:
            signal.raise_signal(signal.SIGINT)
            return "text"

    processor = llm.output_processor
    before, processor.tokenizer = processor.tokenizer, Interrupted()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]], SamplingParams(max_tokens=1), use_tqdm=False)
    finally:
        processor.tokenizer = before
    assert llm.is_finished() and llm.stats()["num_used_blocks"] == 0


def test_del_frees_the_model(checkpoint: Path) -> None:
    llm = make_llm(checkpoint)
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    runner: Any = llm.llm_engine._runner
    freed = weakref.ref(runner.model.model.embed_tokens.weight.values)
    del runner, llm
    assert freed() is None


def test_engines_live_side_by_side_also_in_threads(checkpoint: Path) -> None:
    with make_llm(checkpoint) as first, make_llm(checkpoint, kvcache_block_size=32) as second:
        want = [output["token_ids"] for output in first.generate([[1] * 50, [2]], GREEDY, use_tqdm=False)]
        results: list[list[list[int]]] = []

        def work() -> None:
            outputs = second.generate([[1] * 50, [2]], GREEDY, use_tqdm=False)
            results.append([output["token_ids"] for output in outputs])

        thread = threading.Thread(target=work)
        thread.start()
        again = [output["token_ids"] for output in first.generate([[1] * 50, [2]], GREEDY, use_tqdm=False)]
        thread.join()
    assert results == [want] and again == want


def test_what_a_session_shows(llm: LLM) -> None:
    expected = (
        f"LLM(model={llm.config.model!r}, num_parameters=127k, device=cpu, dtype=torch.float32, "
        "tensor_parallel_size=1, max_model_len=128, max_num_seqs=512, num_kv_slots>=320)"
    )
    assert repr(llm) == expected
    llm.exit()
    assert repr(llm) == expected
    # Names that are imported when they are asked for.
    assert {"LLM", "SamplingParams", "AsyncLLM", "__version__"} <= set(dir(nanovllm))
