"""Inputs and outputs of `nanovllm run` beside plain files: compressed ones, streams, devices."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

from nanovllm.cli import main
from nanovllm.cli.batch_files import AnsweredRequests, InputFile, UnreadableInputError, request_digest
from tests.batch_lines import ENGINE

LINES = [b'{"prompt": "caf\xc3\xa9 \xe2\x80\xa8 1"}\n', b"\n", b"not JSON, but a line\n", b'{"prompt": "2"}\n']
PLAIN = b"".join(LINES)

# By the name of the file.
READ: dict[str, tuple[bytes, list[bytes]]] = {
    "empty": (b"", []),
    "plain.csv": (PLAIN, LINES),
    "no newline at the end": (PLAIN.rstrip(), [*LINES[:3], LINES[3].rstrip()]),
    "UTF-8 with a mark": (codecs.BOM_UTF8 + PLAIN, LINES),
    "in.jsonl.gz": (gzip.compress(PLAIN), LINES),
    "of two members.GZ": (gzip.compress(LINES[0]) + gzip.compress(b"".join(LINES[1:])), LINES),
    "in.bz2": (bz2.compress(PLAIN), LINES),
    "in.xz": (lzma.compress(PLAIN), LINES),
    "more than a buffer": (b"\n" * 10_000 + PLAIN * 5000, [b"\n"] * 10_000 + LINES * 5000),
    "a long line": (b'{"prompt": "%s"}\n' % (b"x" * 100_000), [b'{"prompt": "%s"}\n' % (b"x" * 100_000)]),
}
REFUSED = {
    "zstd": (b"\x28\xb5\x2f\xfd\x24", "is not JSON Lines"),
    "gzip without its name": (gzip.compress(PLAIN), "is not JSON Lines"),
    "Parquet": (b"PAR1\x15\x04\0", "is not JSON Lines, one object a line: it begins with b'PAR1"),
    "UTF-16": ("{}".encode("utf-16"), "is not JSON Lines"),
    "an array": (b' [{"prompt": "1"},\n {"prompt": "2"}]\n', "is not JSON Lines"),
    "an array.gz": (gzip.compress(b"[1]"), "is not JSON Lines"),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name: str, tmp_path: Path) -> None:
    content, lines = READ[name]
    path = tmp_path / name
    path.write_bytes(content)
    source = InputFile(str(path))
    assert list(source.lines) == lines and not source.is_stream


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnreadableInputError, match=message):
        InputFile(str(tmp_path / name))


def test_what_a_stream_has_is_seen_when_it_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = Thread(target=fifo.write_bytes, args=[gzip.compress(PLAIN)])
    writer.start()
    with pytest.raises(SystemExit) as exit_info:
        main(["run", "-i", str(fifo), "-o", str(tmp_path / "out.jsonl"), *ENGINE])
    writer.join()
    errors = capfd.readouterr().err
    assert exit_info.value.code == 2 and errors.count("\n") == 1 and errors.startswith("nanovllm run: error: ")


@pytest.mark.parametrize(("compress", "suffix"), [(gzip.compress, "gz"), (bz2.compress, "bz2"), (lzma.compress, "xz")])
def test_a_damaged_file_is_an_error(
    compress: Callable[[bytes], bytes], suffix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"in.jsonl.{suffix}"
    whole = compress(b"".join(b'{"prompt": "%d", "max_tokens": 1}\n' % (i * i) for i in range(200)))
    path.write_bytes(whole[:-5])
    with pytest.raises(OSError, match=r"in\.jsonl\.\w+ cannot be read: "):
        list(InputFile(str(path)).lines)
    # Those in front of the damage may be answered.
    try:
        code: object = main(["run", "-i", str(path), "-o", str(tmp_path / "out.jsonl"), *ENGINE])
    except SystemExit as exit_info:
        code = exit_info.code
    assert code in (1, 2) and f"in.jsonl.{suffix} cannot be read: " in capfd.readouterr().err.splitlines()[-1]


def test_a_slow_stream_gives_each_line_when_it_is_there() -> None:
    read_end, write_end = os.pipe()
    lines = [b'{"prompt": "%d"}\n' % i for i in range(3)]
    answered = AnsweredRequests()
    reader = answered.unanswered(InputFile(f"/dev/fd/{read_end}").lines)
    for number, line in enumerate(lines, 1):
        # Byte by byte, so that each is a read of its own for some time.
        for byte in line:
            os.write(write_end, bytes([byte]))
        assert next(reader) == (number, request_digest(line), line)
    os.close(write_end)
    assert next(reader, None) is None and answered.num_lines == 3
    os.close(read_end)


def test_an_output_that_is_no_file_gets_the_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, fifo = tmp_path / "in.jsonl.gz", tmp_path / "fifo"
    source.write_bytes(gzip.compress(b'{"prompt": "1", "max_tokens": 2}\n' * 3))
    os.mkfifo(fifo)
    with ThreadPoolExecutor(1) as executor:
        answers = executor.submit(fifo.read_bytes)
        assert main(["run", "-i", str(source), "-o", str(fifo), *ENGINE]) == 0
    assert sorted(json.loads(line)["line"] for line in answers.result().splitlines()) == [1, 2, 3]
    capfd.readouterr()
    for flags in ([], ["--overwrite"]):
        assert main(["run", "-i", str(source), "-o", "/dev/full", *ENGINE, *flags]) == 1
        errors = capfd.readouterr().err.splitlines()
        assert errors == ["nanovllm run: error: [Errno 28] No space left on device: '/dev/full'"]
        assert main(["run", "-i", str(source), "-o", "/dev/null", *ENGINE, *flags]) == 0
        capfd.readouterr()
