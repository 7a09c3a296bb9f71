"""Runs of `nanovllm run` that go on: after kills, with a changed input, after failed lines, with other parameters.

`pytest tests/test_batch_resume.py -m compat` kills a run ten times instead of once.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest

from nanovllm.cli import main
from nanovllm.cli.batch_files import AnsweredRequests, ResultFile
from tests.batch_lines import ENGINE, RUN, answered_line, command, encode, lines_of_every_kind, results_of


def run(source: Path, output: Path, *flags: str) -> int:
    return main(["run", "-i", str(source), "-o", str(output), *ENGINE, "--temperature", "0", *flags])


def write_prompts(path: Path, *prompts: str) -> None:
    """Write a line for each prompt; an empty one is a blank line."""
    path.write_text("".join(json.dumps({"prompt": text, "max_tokens": 3}) * bool(text) + "\n" for text in prompts))


def test_what_a_kill_left_of_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = [answered_line(3, 5), b'{"line": 1, "error": 5}\n']
    for length in range(len(whole[1])):
        path.write_bytes(whole[0] + whole[1][:length])
        results = ResultFile(str(path))
        results.load(RUN)
        with results:
            assert len(results.answered) == 1 and results.answered.check(3, 5)
            results.write([whole[1]])
        assert path.read_bytes() == b"".join(whole)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my only copy", "something else than results, in line 1"),
        (b"a\nb\n", "something else than results"),
        (b'{"line": 1}\n{"prompt": 3}\n', "something else than results"),
        (b'{"line": x}\n', "something else than results"),
        (b'{"line": -1, "error": 5}\n', "something else than results"),
        (answered_line(1, 1) + b'{"prompt": 3}\n', "something else than results, in line 2"),
        (b'{"line": 1, "outputs": []}\n', "something else than results"),
        (b'{"line": 1, "id": "a", "response": {}, "error": null}\n', "something else than results"),
        (answered_line(1, 1, "f" * 16), "another model or with other parameters.*--overwrite"),
    ],
)
def test_other_files_are_not_touched(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        ResultFile(str(path)).load(RUN)
    assert path.read_bytes() == content


def test_an_output_has_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(str(path)), pytest.raises(ValueError, match="another run"):
        ResultFile(str(path))

    def replace_then_lock(*arguments: Any) -> None:
        path.with_suffix(".new").write_bytes(b"")
        os.replace(path.with_suffix(".new"), path)

    # The other run ends between this one's open and its lock.
    monkeypatch.setattr("fcntl.flock", replace_then_lock)
    with pytest.raises(ValueError, match="another run, which has replaced it"):
        ResultFile(str(path))


def test_one_result_of_each_line_is_left(tmp_path: Path) -> None:
    path, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    # A kill has left answers to a request and to the one after it, an error and the answer after it, an answer and the
    # error after it.
    old = [answered_line(1, 1), answered_line(2, 2), answered_line(1, 11), b'{"line": 3, "error": 5}\n']
    old += [answered_line(3, 3), answered_line(4, 4), b'{"line": 4, "error": 5}\n', answered_line(5, 5)]
    path.write_bytes(b"".join(old))
    path.chmod(0o640)
    link.symlink_to(path)
    results = ResultFile(str(link))
    results.load(RUN)
    checks = {number: results.answered.check(number, digest) for number, digest in enumerate([11, 2, 3, 4, 9], 1)}
    assert checks == {1: True, 2: True, 3: True, 4: False, 5: False}
    new = [b'{"line": 5, "error": 6}\n', answered_line(4, 4)]
    with results:
        results.write(new)
        results.finish()
    assert path.read_bytes() == b"".join([old[1], old[2], old[4], *new])
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640 and len(list(tmp_path.iterdir())) == 2


def test_digests_take_eight_bytes_a_line() -> None:
    answered = AnsweredRequests()
    for number in range(100_000, 0, -1):
        answered.add(number, number)
    assert len(answered) == 100_000 and answered._digests.buffer_info()[1] == 100_001
    assert answered._digests.itemsize == 8
    # No result says that a line is there, which failed.
    answered.add(10**14, 0)
    assert len(answered) == 100_000


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.compat)])
def test_a_killed_run_goes_on(num_kills: int, tmp_path: Path) -> None:
    source, clean, killed = (tmp_path / name for name in ("in.jsonl", "clean.jsonl", "killed.jsonl"))
    lines = lines_of_every_kind()
    arguments = ["run", "-i", str(source), *ENGINE, "--max-num-seqs", "4", "--seed", "1"]
    # It was begun with another input, half of whose lines are the same.
    source.write_bytes(b"".join(encode(lines[:20] + lines[:19:-1])))
    assert main([*arguments, "-o", str(killed)]) == 1
    source.write_bytes(b"".join(encode(lines)))
    assert main([*arguments, "-o", str(clean)]) == 1
    rng, begun = Random(num_kills), killed.stat().st_size
    for size in sorted(rng.randrange(clean.stat().st_size // 2) for _ in range(num_kills)):
        with command(*arguments, "-o", str(killed)) as process:
            while process.poll() is None and killed.stat().st_size < begun + size:
                time.sleep(0.002)
            time.sleep(rng.random() / 50)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        if killed.read_bytes()[-1:] == b"\n":
            # A kill within a write is rare, so its trace is made.
            with killed.open("ab") as file:
                file.write(clean.read_bytes().splitlines()[0][: rng.randrange(20)])
    assert main([*arguments, "-o", str(killed)]) == 1
    assert len(results_of(clean)) == sum(line != b"\n" for line in lines)
    assert results_of(killed) == results_of(clean)
    # Nothing is left to do but the lines that fail again.
    assert main([*arguments, "-o", str(killed)]) == 1
    assert results_of(killed) == results_of(clean)


def test_a_changed_input_is_answered_where_it_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, clean = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "clean.jsonl"))
    write_prompts(source, "1 2", "a b", "sort 3 1", "5 + 5", "x y z", "7 8 9")
    assert run(source, output) == 0
    capsys.readouterr()
    # The second is another one, the third and fourth are the other way round, the fifth and sixth are gone.
    write_prompts(source, "1 2", "what?", "5 + 5", "sort 3 1", "")
    assert run(source, output) == 0
    summary = capsys.readouterr().err.splitlines()[-1]
    assert summary == (
        f"3 lines answered, 0 failed, 1 skipped, which {output} has, 3 had changed since {output} was written, "
        "2 answers removed, whose lines are gone"
    )
    assert run(source, clean) == 0
    assert results_of(output) == results_of(clean) and sorted(results_of(clean)) == [1, 2, 3, 4]
    before = output.read_bytes()
    assert run(source, output) == 0 and output.read_bytes() == before


def test_an_interrupted_run_or_a_short_stream_keeps_earlier_answers(tmp_path: Path) -> None:
    source, output, fifo = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "fifo"
    write_prompts(source, "1 2", "a b", "5 + 5")
    assert run(source, output) == 0
    first, begun = results_of(output), output.stat().st_size
    with command("run", "-i", "-", "-o", str(output), *ENGINE, "--temperature", "0", stdin=-1) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"prompt": "x y z", "max_tokens": 3}\n')
        process.stdin.flush()
        while process.poll() is None and output.stat().st_size == begun:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
    interrupted = results_of(output)
    assert process.returncode == 130 and interrupted[1] != first[1]
    assert interrupted == {**first, 1: interrupted[1]}
    os.mkfifo(fifo)
    writer = Thread(target=fifo.write_bytes, args=[source.read_bytes().splitlines(keepends=True)[0]])
    writer.start()
    assert run(fifo, output) == 0
    writer.join()
    assert results_of(output) == first


def test_failed_lines_are_tried_again(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_prompts(source, "1 2", "x " * 100)
    short = ["--max-model-len", "64"]
    for flags, code in ((short, 1), (short, 1), ([], 0), ([], 0)):
        assert run(source, output, *flags) == code
        results = results_of(output)
        assert sorted(results) == [1, 2] and ("error" in results[2]) == bool(code)


def test_other_parameters_need_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, model = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "model"
    write_prompts(source, "1 2", "a b")
    assert run(source, output) == 0
    before = output.read_bytes()
    model.mkdir()
    changes = [["--model", str(model)], ["--dtype", "bfloat16"]]
    changes += [["--model-impl", "transformers"], ["--quantization", "fp8"]]
    for flags in (["--max-tokens", "5"], ["--seed", "1"], *changes):
        with pytest.raises(SystemExit) as exit_info:
            run(source, output, *flags)
        assert exit_info.value.code == 2 and "another model or with other parameters" in capsys.readouterr().err
        # A model that is not there takes no answers away.
        assert output.read_bytes() == before
    with pytest.raises(SystemExit):
        run(source, output, "--model", str(model), "--overwrite")
    assert output.read_bytes() == before
    # What only makes a run faster or slower may change.
    assert run(source, output, "--max-num-seqs", "2") == 0 and output.read_bytes() == before
    write_prompts(source, "1 2")
    assert run(source, output, "--top-k", "5", "--overwrite") == 0
    assert sorted(results_of(output)) == [1]
    with pytest.raises(SystemExit) as exit_info:
        run(source, source, "--overwrite")
    assert exit_info.value.code == 2 and "is the input" in capsys.readouterr().err
    assert source.stat().st_size
