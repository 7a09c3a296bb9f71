"""Runs that share an input, outputs in object stores, and `nanovllm merge`."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.cli import main
from nanovllm.cli.batch_files import (
    AnsweredRequests,
    InputFile,
    LineShard,
    ResultFile,
    request_digest,
    whole_file,
)
from tests.batch_lines import ENGINE, RUN, answered_line, results_of

memory = pytest.importorskip("fsspec.implementations.memory")
local = pytest.importorskip("fsspec.implementations.local")
PROMPTS = ["1 2", "a b", "", "sort 3 1", "x " * 500, "5 + 5", "7 8 9"]
LINES = [json.dumps({"prompt": text, "max_tokens": 3}) * bool(text) + "\n" for text in PROMPTS]


def answered(number: int, text: str, run: str = RUN) -> bytes:
    return answered_line(number, request_digest(text.encode()), run)


def run(source: Path | str, output: Path | str, *flags: str) -> int:
    return main(["run", "-i", str(source), "-o", str(output), *ENGINE, "--seed", "1", "--max-model-len", "64", *flags])


def test_shards_are_joined_to_what_one_run_writes(tmp_path: Path) -> None:
    source, whole, merged = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "merged.jsonl"
    source.write_text("".join(LINES))
    assert run(source, whole) == 1
    files = [tmp_path / f"shard-{index}.jsonl" for index in range(2)]
    codes = [run(source, file, "--shard", f"{index}/2") for index, file in enumerate(files)]
    assert sorted(codes) == [0, 1] and [sorted(results_of(file)) for file in files] == [[1, 5, 7], [2, 4, 6]]
    merge = ["merge", "-i", str(source), "-o", str(merged)]
    assert main([*merge, *map(str, files)]) == 1
    assert results_of(merged) == results_of(whole)
    # The same in an object store, where the first shard goes on with what is there.
    memory.MemoryFileSystem.store.clear()
    with memory.MemoryFileSystem().open("/in.jsonl.gz", "wb") as file:
        file.write(gzip.compress(source.read_bytes()))
    outputs = [f"memory://answers-{index}.jsonl.gz" for index in range(2)]
    for index in (0, 0, 1):
        run("memory://in.jsonl.gz", outputs[index], "--shard", f"{index}/2", "--contiguous")
    with pytest.raises(SystemExit):
        main([*merge, outputs[0]])
    assert main(["merge", "-i", str(source), "-o", "memory://merged.jsonl", *outputs]) == 1
    merged.write_bytes(memory.MemoryFileSystem().cat_file("/merged.jsonl"))
    assert results_of(merged) == results_of(whole)


@pytest.mark.parametrize("path", ["memory://out.jsonl", "memory://out.jsonl.gz", "{}/out.xz", "{}/out.bz2"])
def test_stored_or_compressed_outputs_are_written_at_the_end(path: str, tmp_path: Path) -> None:
    memory.MemoryFileSystem.store.clear()
    path = path.format(tmp_path)
    lines = [answered(number, "a") for number in range(1, 4)]
    for number, line in enumerate(lines):
        with ResultFile(path) as results:
            results.load(RUN)
            assert len(results.answered) == number
            results.write([line])
            results.finish()
    assert list(InputFile(path).lines) == lines
    with ResultFile(path) as results:
        results.clear()
        results.finish()
    assert not list(InputFile(path).lines)


@pytest.mark.parametrize("num_lines", [None, 10, 3, 1])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_each_line_is_in_one_shard(count: int, num_lines: int | None) -> None:
    shards = [LineShard(index, count, num_lines) for index in range(count)]
    for number in range(1, (num_lines or 20) + 1):
        assert sum(shard.takes(number) for shard in shards) == 1
    sizes = [sum(shard.takes(number) for number in range(1, (num_lines or 21) + 1)) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard", "4/4"], "4/4 is out of range: the first of 4 is 0, and the last 3"),
        (["--shard", "0/0"], "out of range"),
        (["--shard", "1"], "such as 0/4, not '1'"),
        (["--contiguous"], "give --shard too"),
        (["-o", "s4://bucket/answers"], "s4://bucket/answers cannot be opened"),
        (["-i", "-", "--shard", "0/2", "--contiguous"], "a stream, which cannot be read twice"),
    ],
)
def test_wrong_flags(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text(LINES[0])
    with pytest.raises(SystemExit):
        main(["run", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), *flags])
    assert message in capsys.readouterr().err


Change = Callable[[list[bytes]], list[bytes]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [*lines, lines[0]], "line 1 is answered twice"),
        (lambda lines: lines[1:], "line 1 of .* has no result"),
        (lambda lines: [answered(1, "other"), *lines[1:]], "line 1 of .* has changed"),
        (lambda lines: [*lines, answered(9, "9")], "results of 1 lines that are blank or gone"),
        (lambda lines: [*lines[:3], answered(4, "d", "f" * 16)], "another model"),
        (lambda lines: [*lines, b"my only copy\n"], "something else than results"),
    ],
)
def test_what_is_not_joined(change: Change, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").write_text("a\nb\nc\nd\n")
    whole = [answered(number, text) for number, text in enumerate("abcd", 1)]
    for output, lines in (("good", whole), ("bad", change(whole))):
        (tmp_path / output).write_bytes(b"".join(lines))
    with pytest.raises(SystemExit):
        main(["merge", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), str(tmp_path / "bad")])
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()
    assert main(["merge", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), str(tmp_path / "good")]) == 0
    assert (tmp_path / "out").read_bytes() == b"".join(whole)


def test_an_output_of_another_shard_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(LINES[:4]))
    assert run(source, output, "--shard", "0/2") == 0
    before = output.read_bytes()
    for flags in (["--shard", "1/2"], ["--shard", "1/2", "--contiguous"]):
        with pytest.raises(SystemExit):
            run(source, output, *flags)
        assert "answers of another shard" in capsys.readouterr().err and output.read_bytes() == before
    # A line that has changed is answered again, and what another shard answers may change.
    source.write_text("".join([*LINES[4:6], LINES[2], LINES[3]]))
    assert run(source, output, "--shard", "0/2") == 1
    assert sorted(results_of(output)) == [1] and "error" in results_of(output)[1]


@pytest.mark.parametrize("method", ["exists", "open"])
def test_errors_of_a_stores_client_name_the_path(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.MemoryFileSystem().pipe("/failing/out", answered(1, "a"))

    # Lacking credentials is no OSError of S3's client.
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Unable to locate credentials")

    monkeypatch.setattr(memory.MemoryFileSystem, method, fail)
    for use in (ResultFile, *([InputFile] if method == "open" else [])):
        with pytest.raises(OSError, match=r"memory://failing/out.* failed: Unable to locate credentials"):
            use("memory://failing/out")


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zip", "zst"])
def test_a_compressed_file_is_read_as_it_was_written(suffix: str, tmp_path: Path) -> None:
    if suffix == "zst":
        pytest.importorskip("zstandard")
    for path in (str(tmp_path / f"out.{suffix}"), f"memory://out.{suffix}"):
        with whole_file(path) as file:
            file.write(b"a\nb\n")
        assert list(InputFile(path).lines) == [b"a\n", b"b\n"]


def test_a_file_that_cannot_be_written_in_whole_is_not_there(tmp_path: Path) -> None:
    for path in (str(tmp_path / "out"), str(tmp_path / "out.gz"), "memory://out", "memory://out.gz"):
        with pytest.raises(OSError, match=f"access to '{path}' failed: gone"), whole_file(path) as file:
            file.write(b"{}\n")
            raise RuntimeError("gone")
    assert not list(tmp_path.iterdir()) and not memory.MemoryFileSystem().exists("/out")


def test_no_file_of_an_input_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_text("a\nb\n")
    files, opened = local.LocalFileSystem, list[Any]()
    plain_open = files.open

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(plain_open(self, *args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(files, "open", watched)
    source = InputFile(f"file://{tmp_path}/in")
    assert list(source.lines) == [b"a\n", b"b\n"]
    # Some read ahead in threads until they are closed.
    assert opened and all(file.closed for file in opened)


def test_reading_takes_no_more_memory_for_a_longer_input() -> None:
    with memory.MemoryFileSystem().open("/long.gz", "wb") as file:
        file.write(gzip.compress(b'{"prompt": "%s"}\n' % (b"x" * 1000) * 20_000, 1))
    lines = AnsweredRequests().unanswered(InputFile("memory://long.gz").lines)
    tracemalloc.start()
    assert sum(1 for _ in lines) == 20_000
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
