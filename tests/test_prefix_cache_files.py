"""Blocks of the prefix cache in files: what is loaded equals what was computed, and what is not right is not used."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from nanovllm import LLM, SamplingParams, StepError
from nanovllm.engine.sequence import Sequence
from nanovllm.models import model_digest
from nanovllm.models.remote_tensors import SafetensorsFile
from tests.conftest import MakeCheckpoint
from tests.mock_runner import MockRunner, complete, make_engine
from tests.test_host_cache import saves_every_step

SETTINGS: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "kvcache_block_size": 16, "num_kvcache_blocks": 20}
PROMPT = [(7 * i) % 300 + 3 for i in range(100)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(make_checkpoint: MakeCheckpoint) -> Path:
    """A model that one rank holds, or three."""
    return make_checkpoint(num_attention_heads=6, num_key_value_heads=3)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """What follows the prompt where there are no files."""
    with LLM(model, **SETTINGS) as llm:
        return answer(llm)[0]


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the prompt's six full blocks; tests do not write to it."""
    folder = tmp_path_factory.mktemp("saved")
    with LLM(model, **SETTINGS) as llm:
        assert llm.save_prefix_cache(folder, [PROMPT, PROMPT[:40]], use_tqdm=False) == 6
    return folder


def answer(llm: LLM, prompt: Any = PROMPT) -> tuple[list[int], int]:
    """The tokens that follow a prompt, and how many of it were cached."""
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    llm.llm_engine.block_manager.check_integrity([])
    assert output.num_cached_tokens is not None
    return output.outputs[0].token_ids, output.num_cached_tokens


def fill(llm: LLM) -> None:
    """Evict whatever the device's cache has."""
    llm.generate([[1 + i] * 240 for i in range(2)], GREEDY, use_tqdm=False)


def copied(saved: Path, folder: Path) -> list[Path]:
    """Copy the files of the prompt's blocks, and return them in the order of the blocks, which is that of writing."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    return sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)


def test_an_engine_loads_what_another_has_saved(model: Path, saved: Path, expected: list[int]) -> None:
    # The prompt's tokens are few a step, and its last block is computed.
    with LLM(model, prefix_cache=str(saved), max_num_batched_tokens=16, **SETTINGS) as llm:
        first, second = llm.generate([PROMPT, PROMPT[:72]], GREEDY, use_tqdm=False, schedule="arrival")
        assert (first.outputs[0].token_ids, first.num_cached_tokens, second.num_cached_tokens) == (expected, 96, 64)
        source = llm.llm_engine.block_manager.source
        fill(llm)
        # All blocks are there, and the last token is computed alone.
        assert answer(llm, PROMPT[:96])[1] == 95
        assert answer(llm) == (expected, 96)
        llm.llm_engine.block_manager.source = None
        # They are in the device's cache now.
        assert answer(llm) == (expected, 96)
        llm.llm_engine.block_manager.source = source
        # Those that another salt's prompt has computed are not there.
        assert answer(llm, {"prompt_token_ids": PROMPT, "cache_salt": "salt"}) == (expected, 0)
        # Log-probabilities of the prompt need it computed, up to where they begin.
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, prompt_logprobs_start=50)
        fill(llm)
        assert llm.generate([PROMPT], params, use_tqdm=False)[0].num_cached_tokens == 48


def test_files_have_what_the_hosts_memory_has_not(
    model: Path, saved: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(model, prefix_cache=str(saved), swap_space=2**-7, **SETTINGS) as llm:
        assert answer(llm) == (expected, 96) and not llm.stats()["num_loaded_blocks"]
        saves_every_step(llm, monkeypatch)
        fill(llm)
        assert answer(llm) == (expected, 96) and llm.stats()["num_loaded_blocks"] == 6


def test_prompts_of_one_step_and_their_salts(model: Path, tmp_path: Path, expected: list[int]) -> None:
    salted = {"prompt_token_ids": PROMPT, "cache_salt": "salt"}
    with LLM(model, prefix_cache=str(tmp_path), **SETTINGS) as llm:
        other = answer(llm, PROMPT[::-1])[0]
        assert llm.save_prefix_cache(tmp_path, [salted, PROMPT[::-1], PROMPT[:15]], use_tqdm=False) == 12
        fill(llm)
        assert answer(llm)[1] == 0
        fill(llm)
        outputs = llm.generate([salted, PROMPT[::-1]], GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [96, 96]
        assert [output.outputs[0].token_ids for output in outputs] == [expected, other]


def test_three_ranks_read_and_write_their_own_heads(model: Path, tmp_path: Path, expected: list[int]) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    with LLM(model, prefix_cache=str(folder), tensor_parallel_size=3, **SETTINGS) as llm:
        assert answer(llm) == (expected, 0)
        assert llm.save_prefix_cache(folder, [PROMPT[:48]], use_tqdm=False) == 3
        files = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
        assert len(files) == 9
        fill(llm)
        assert answer(llm) == (expected, 48)
        # The ranks use what all of them have. Each block's files are there in the order of blocks, not of ranks.
        by_time = sorted(files, key=lambda file: files[file])
        damaged = by_time[-1]
        damaged.write_bytes(damaged.read_bytes()[:-1])
        fill(llm)
        with pytest.warns(UserWarning, match=damaged.name):
            assert answer(llm) == (expected, 32)
        fill(llm)
        assert answer(llm) == (expected, 32)
        assert llm.save_prefix_cache(folder, [PROMPT[:48]], use_tqdm=False) == 3
        fill(llm)
        assert answer(llm) == (expected, 48)


PROGRAM = """
import sys
from nanovllm import LLM
from tests.test_prefix_cache_files import PROMPT, SETTINGS, save_block_by_block
with LLM(sys.argv[1], **SETTINGS) as llm:
    llm.save_prefix_cache(sys.argv[2], [[9] * 40], use_tqdm=False)
    print(flush=True)
    sys.stdin.readline()
    save_block_by_block(llm, sys.argv[2])
"""


def save_block_by_block(llm: LLM, folder: Any) -> None:
    for length in range(16, len(PROMPT), 16):
        llm.save_prefix_cache(folder, [PROMPT[:length]], use_tqdm=False)


def test_two_processes_write_to_one_folder_at_once(model: Path, tmp_path: Path, expected: list[int]) -> None:
    command = [sys.executable, "-c", PROGRAM, str(model), str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        LLM(model, **SETTINGS) as llm,
        subprocess.Popen(command, cwd=Path(__file__).parents[1], **pipes) as other,
    ):
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "\n"
        other.stdin.write("\n")
        other.stdin.flush()
        save_block_by_block(llm, tmp_path)
    assert other.returncode == 0 and len(list(tmp_path.iterdir())) == 8
    with LLM(model, prefix_cache=str(tmp_path), **SETTINGS) as llm:
        assert answer(llm) == (expected, 96)
        # Of what only the other one has written.
        assert answer(llm, [9] * 40)[1] == 32


def test_files_that_are_not_right_are_refused_by_name(
    model: Path, saved: Path, expected: list[int], tmp_path: Path
) -> None:
    files = copied(saved, tmp_path)
    file, good = files[2], files[2].read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 1
    wrong: dict[str, bytes] = {
        "damaged (": good[: len(good) // 2],
        "truncated": b"",
        "its checksum does not fit": bytes(flipped),
        "or another block's": files[3].read_bytes(),
        "foreign": next(model.glob("*.safetensors")).read_bytes(),
        "foreign: it has a tensor of dtype 'F8_E8M0'": save({"00000": torch.ones(8).to(torch.float8_e8m0fnu)}),
    }
    # What a kill in mid-write leaves: one long ago, another just now.
    abandoned, recent = (tmp_path / f".block-{number}" for number in (1, 2))
    for temporary in (abandoned, recent):
        temporary.write_bytes(good[:100])
    os.utime(abandoned, (0, time.time() - 4000))
    with LLM(model, prefix_cache=str(tmp_path), **SETTINGS) as llm:
        for cause, content in wrong.items():
            file.write_bytes(content)
            llm.llm_engine.block_manager.source._warned.clear()  # type: ignore[union-attr]
            with pytest.warns(UserWarning, match=file.name) as warned:
                assert answer(llm) == (expected, 32)
            assert len(warned) == 1 and cause in str(warned[0].message)
            fill(llm)
        with warnings.catch_warnings():
            # It has been named.
            warnings.simplefilter("error")
            assert answer(llm) == (expected, 32)
        llm.save_prefix_cache(tmp_path, [PROMPT[:48]], use_tqdm=False)
        assert file.read_bytes() == good and recent.exists() and not abandoned.exists()
        fill(llm)
        assert answer(llm) == (expected, 96)


def test_a_kill_in_mid_write_leaves_no_file_of_a_block(
    model: Path, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def killed(path: Path, data: bytes) -> None:
        write(path, data[: len(data) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, LLM(model, **SETTINGS) as llm, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_bytes", killed)
        llm.save_prefix_cache(tmp_path, [PROMPT], use_tqdm=False)
    assert [file.name[:7] for file in tmp_path.iterdir()] == [".block-"]
    with LLM(model, prefix_cache=str(tmp_path), **SETTINGS) as llm:
        assert answer(llm) == (expected, 0)


def test_another_models_blocks_are_not_taken(make_checkpoint: MakeCheckpoint, model: Path, saved: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    last_token = make_checkpoint(**heads)
    last_value = make_checkpoint(**heads)
    for changed, name in ((last_token, "embed_tokens.weight"), (last_value, "layers.1.self_attn.v_proj.weight")):
        tensors = load_file(changed / "model.safetensors")
        tensors[f"model.{name}"][-1] += 1
        save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    others: list[tuple[Path, dict[str, Any]]] = [
        (make_checkpoint(seed=1, **heads), {}),
        (last_token, {}),
        (last_value, {}),
        (make_checkpoint(rope_theta=20000.0, **heads), {}),
        (model, {"dtype": "bfloat16"}),
        (model, {"kvcache_block_size": 32}),
        (model, {"quantization": "fp8"}),
        (model, {"load_format": "dummy"}),
        (model, {"revision": "another"}),
    ]
    for folder, changes in others:
        with LLM(folder, prefix_cache=str(saved), **SETTINGS | changes) as llm:
            assert answer(llm)[1] == 0, (folder, changes)
    # Another place is no other model.
    with tempfile.TemporaryDirectory() as moved:
        shutil.copytree(model, moved, dirs_exist_ok=True)
        with LLM(moved, prefix_cache=str(saved), **SETTINGS) as llm:
            assert answer(llm)[1] == 96


def test_a_digest_is_of_all_parts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_digest, "_READ_BYTES", 1000)
    file, values = tmp_path / "model.safetensors", torch.arange(1200.0)
    digests = set()
    for changed in (None, 0, 599, 1199):
        tensor = values.clone()
        if changed is not None:
            tensor[changed] += 1
        save_file({"weight": tensor}, file)
        digests.add(model_digest._file_digest(SafetensorsFile(str(file))))
    assert len(digests) == 4


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system with room for a few blocks."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_an_error_and_leaves_no_half_file(model: Path, tmp_path: Path, expected: list[int]) -> None:
    with small_disk(tmp_path):
        with LLM(model, **SETTINGS) as llm:
            with pytest.raises(OSError, match=r"a block of the prefix cache was not saved: No space left.*safetensors"):
                llm.save_prefix_cache(tmp_path, [PROMPT], use_tqdm=False)
            assert answer(llm)[0] == expected
        files = list(tmp_path.iterdir())
        assert files and {file.suffix for file in files} == {".safetensors"}
        # Of a writer that was killed.
        abandoned = tmp_path / ".block-abandoned"
        abandoned.touch()
        os.utime(abandoned, (0, 0))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with LLM(model, prefix_cache=str(tmp_path), **SETTINGS) as llm:
            assert answer(llm) == (expected, 16 * len(files))
            with pytest.raises(OSError, match=f"not saved: Read-only file system: '{tmp_path}.*safetensors'"):
                llm.save_prefix_cache(tmp_path, [PROMPT], use_tqdm=False)


def test_a_folder_that_cannot_be_written_to_can_be_read(model: Path, saved: Path, expected: list[int]) -> None:
    with tempfile.TemporaryDirectory() as top:
        folder = shutil.copytree(saved, Path(top, "saved"))
        # Of a writer that was killed, and that was another user's.
        abandoned = folder / ".block-abandoned"
        abandoned.touch()
        os.utime(abandoned, (0, 0))
        with LLM(shutil.copytree(model, Path(top, "model")), prefix_cache=str(folder), **SETTINGS) as llm:
            for path in (Path(top), *Path(top).rglob("*")):
                path.chmod(0o555)
            # Root may write anywhere.
            user = os.geteuid()
            if user == 0:
                os.seteuid(65534)
            try:
                assert answer(llm) == (expected, 96)
                with pytest.raises(PermissionError, match=f"not saved: Permission denied: '{folder}"):
                    llm.save_prefix_cache(folder, [[5] * 32], use_tqdm=False)
            finally:
                os.seteuid(user)
                for path in (Path(top), *Path(top).iterdir()):
                    path.chmod(0o755)


def test_mistakes_are_named(model: Path, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prefix_cache must be a folder that exists, not 'nowhere'"):
        LLM(model, prefix_cache="nowhere", **SETTINGS)
    with pytest.raises(ValueError, match=r"needs enable_prefix_caching=True"):
        LLM(model, prefix_cache=str(tmp_path), enable_prefix_caching=False, **SETTINGS)
    windows = make_checkpoint("mistral", sliding_window=24, head_dim=32)
    with pytest.raises(ValueError, match=r"sliding windows \(of 24 tokens\)"):
        LLM(windows, prefix_cache=str(tmp_path), **SETTINGS)
    with LLM(model, **SETTINGS) as llm:
        for folder in (5, next(model.iterdir())):
            message = f"folder must be a path, of a folder if it exists, not {folder!r}"
            with pytest.raises(ValueError, match=re.escape(message)):
                llm.save_prefix_cache(folder, [PROMPT], use_tqdm=False)  # type: ignore[arg-type]
        llm.add_request([1, 2, 3], GREEDY)
        with pytest.raises(RuntimeError, match="unfinished requests"):
            llm.save_prefix_cache(tmp_path, [PROMPT], use_tqdm=False)


class StoredPrefixes:
    """Has some of the first blocks of every sequence."""

    def __init__(self, runner: MockRunner, rng: random.Random) -> None:
        self.runner, self.rng, self.next_slot, self.num_fetched = runner, rng, 0, 0

    def fetch(self, seq: Sequence, first: int, end: int) -> range:
        if self.rng.random() < 0.03:
            raise RuntimeError("a rank cannot read")
        size, count = self.runner.block_size, self.rng.randrange(end - first + 1)
        slots = range(self.next_slot, self.next_slot + count)
        for index, slot in enumerate(slots, first):
            self.runner.host[slot] = seq.token_ids[index * size : (index + 1) * size].tolist()
        self.next_slot = slots.stop
        self.num_fetched += count
        return slots


@pytest.mark.parametrize("pipeline_depth", [0, 1])
def test_loads_beside_preemption_forks_and_failing_steps(pipeline_depth: int) -> None:
    engine, runner = make_engine(pipeline_depth=pipeline_depth, num_blocks=20, block_size=4)
    rng = random.Random(pipeline_depth)
    source = engine.block_manager.source = StoredPrefixes(runner, rng)
    prompts: dict[int, list[int]] = {}
    num_right, causes = 0, set[str]()
    prefixes = [[rng.randrange(50) for _ in range(24)] for _ in range(4)]
    while num_right < 150:
        if len(prompts) < 6:
            prompt = rng.choice(prefixes)[: rng.randrange(1, 25)] + [rng.randrange(50)] * rng.randrange(3)
            params = SamplingParams(max_tokens=8, n=rng.choice([1, 1, 2]))
            prompts[engine.add_request(prompt, params)] = prompt
        runner.fail_launch, runner.fail_result = rng.random() < 0.03, rng.random() < 0.03
        try:
            finished = engine.step().finished
        except StepError as error:
            # Whose blocks could not be read has failed as well.
            assert error.request_ids
            causes.add(str(error.__cause__))
            for request_id in error.request_ids:
                prompts.pop(request_id, None)
            finished = []
        engine.block_manager.check_integrity(engine.scheduler.sequences)
        for request_id, output in finished:
            prompt = prompts.pop(request_id)
            for completion in output.outputs:
                assert completion.token_ids == complete(prompt, 8, frozenset(), 128)
            num_right += 1
    assert causes == {"launch failed", "step failed", "a rank cannot read"}
    assert source.num_fetched > 50 and engine.stats()["num_preemptions"]
    assert any({move.kind for move in batch.transfers} == {"copy", "load"} for batch in runner.batches)
