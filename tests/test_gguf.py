"""GGUF files as models: their conversion, and the cache of what was converted."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.utils.gguf import check_gguf, convert_gguf
from nanovllm.utils.hub import resolve_model
from tests.test_loading import POINTER

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanovllm" / "gguf"


def write_gguf(path: Path, left_out: tuple[str, ...] = (), **options: Any) -> None:
    """Write a tied Llama of one layer with the tokenizer of a few words."""
    gguf = pytest.importorskip("gguf")
    writer, size, generator = gguf.GGUFWriter(path, "llama", **options), 32, torch.Generator().manual_seed(0)
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(size)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(8)
    words = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(8)])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    squares = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (8, size), "output_norm.weight": (size,)}
    shapes |= {f"blk.0.{name}.weight": (size, size) for name in squares}
    shapes |= {f"blk.0.{name}.weight": (size,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).numpy()
        if name not in left_out:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_all_parts_are_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    write_gguf(tmp_path / "split.gguf", split_max_tensors=4)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert [part.name for part in parts] == [f"split-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for source, name in ((tmp_path / "whole.gguf", "whole"), (parts[1], "split")):
        convert_gguf(source, tmp_path / name, "float32")
    whole, split = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "split"))
    assert whole.keys() == split.keys() and all(torch.equal(whole[name], split[name]) for name in whole)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("whole", "split")]
    assert files[0] == files[1]
    parts[2].unlink()
    with pytest.raises(ValueError, match=r"one of 3 parts, .*\['split-00003-of-00003.gguf'\] not found"):
        convert_gguf(parts[0], tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()


def test_a_file_without_all_of_a_model_leaves_nothing_behind(tmp_path: Path) -> None:
    file, there = tmp_path / "model.gguf", tmp_path / "there"
    there.mkdir()
    write_gguf(file, ("blk.0.ffn_up.weight",))
    link = tmp_path / "link"
    link.symlink_to(there)
    for folder in (tmp_path / "new", there, link):
        with pytest.raises(ValueError, match=r"has not all of the model: tensors missing \['.*mlp.up_proj.weight'\]"):
            convert_gguf(file, folder, "float32")
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"cannot read .*model.gguf"):
        convert_gguf(file, there, "float32")
    file.write_text(POINTER)
    with pytest.raises(ValueError, match=r"model.gguf' is a Git LFS pointer"):
        convert_gguf(file, there, "float32")
    assert list(there.iterdir()) == list(link.iterdir()) == [] and not (tmp_path / "new").exists()


def converted(cache: Path) -> list[Path]:
    """The folders in the cache, whole or not."""
    return [folder for place in cache.iterdir() for folder in place.iterdir() if folder.is_dir()]


def test_a_file_is_a_model_that_is_converted_once(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    write_gguf(parts / "model.gguf", split_max_tensors=4)
    files = sorted(parts.iterdir())
    # A name says nothing.
    whole = tmp_path / "sha256-0123"
    write_gguf(whole)
    tokens = []
    for model in (whole, files[1], parts):
        with LLM(model, device="cpu", max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=8) as llm:
            tokens.append(llm.generate([[1, 4, 5]], GREEDY, use_tqdm=False)[0]["token_ids"])
    assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 4
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nanovllm: ")]
    places = converted(cache)
    assert len(told) == len(places) == 2 and {
        line.split(" once, to weights in 16 bits, in ")[1] for line in told
    } == set(map(str, places))


def test_a_changed_file_is_converted_anew_and_the_old_folder_goes(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", split_max_tensors=4)
    first, *_, last = sorted(tmp_path.glob("*.gguf"))
    before = Path(resolve_model(str(first), None))
    # Of the same names elsewhere.
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "other" / "model.gguf", split_max_tensors=4)
    kept = resolve_model(str(tmp_path / "other"), None)
    # What a conversion that was killed has left.
    (before.parent / "unfinished").mkdir()
    (before.parent / "unfinished" / "config.json").touch()
    os.utime(last, ns=(0, 0))
    after = resolve_model(str(first), None)
    assert {str(folder) for folder in converted(cache)} == {after, kept} and str(before) != after
    # Neither does one that fails leave anything.
    last.write_bytes(last.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"is damaged|cannot read"):
        resolve_model(str(first), None)
    assert {str(folder) for folder in converted(cache)} == {kept}


def test_who_wants_a_model_that_is_being_converted_waits(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    start, calls, folders = threading.Barrier(3), list[Path](), list[str]()

    def convert(file: Path, folder: Path, dtype: str) -> None:
        calls.append(folder)
        # Long enough for the others to begin, if nothing keeps them.
        time.sleep(0.5)
        folder.mkdir()

    def resolve() -> None:
        start.wait()
        folders.append(resolve_model(str(tmp_path / "model.gguf"), None))

    with patch("nanovllm.utils.gguf.convert_gguf", convert):
        threads = [threading.Thread(target=resolve) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(calls) == 1 and len(folders) == 3 and folders == [str(folder) for folder in converted(cache)] * 3


def test_what_keeps_a_file_from_being_a_model_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file)
    with pytest.raises(ValueError, match="is a folder, not a GGUF file"):
        check_gguf(tmp_path)
    with (
        patch("nanovllm.utils.gguf.find_spec", return_value=None),
        pytest.raises(ValueError, match=r"nanovllm\[gguf\]"),
    ):
        resolve_model(str(file), None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(ValueError, match=r"cache of GGUF files cannot be written: .*XDG_CACHE_HOME moves it"):
        resolve_model(str(file), None)
    with pytest.raises(ValueError, match="must be on a local disk"):
        resolve_model("memory://model.gguf", None)
