"""Inputs and outputs of `nanovllm run` beside plain files: compressed ones, streams, devices."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

from nanovllm.cli import main
from nanovllm.cli.batch_files import AnsweredRequests, InputFile, UnansweredLines, UnreadableInputError, request_digest
from tests.batch_lines import ENGINE

LINES = [b'{"prompt": "caf\xc3\xa9 \xe2\x80\xa8 1"}\n', b"\n", b"not JSON, but a line\n", b'{"prompt": "2"}\n']
PLAIN = b"".join(LINES)

READ: dict[str, tuple[bytes, list[bytes]]] = {
    "empty": (b"", []),
    "plain": (PLAIN, LINES),
    "no newline at the end": (PLAIN.rstrip(), [*LINES[:3], LINES[3].rstrip()]),
    "UTF-8 with a mark": (codecs.BOM_UTF8 + PLAIN, LINES),
    "gzip": (gzip.compress(PLAIN), LINES),
    "gzip of two members": (gzip.compress(LINES[0]) + gzip.compress(b"".join(LINES[1:])), LINES),
    "bz2": (bz2.compress(PLAIN), LINES),
    "xz": (lzma.compress(PLAIN), LINES),
    "more than a buffer": (b"\n" * 10_000 + PLAIN * 5000, [b"\n"] * 10_000 + LINES * 5000),
    "a long line": (b'{"prompt": "%s"}\n' % (b"x" * 100_000), [b'{"prompt": "%s"}\n' % (b"x" * 100_000)]),
}
REFUSED = {
    "zstd": (b"\x28\xb5\x2f\xfd\x24", "compressed, and this Python has no module compression.zstd: .*zstd -d"),
    "Parquet": (b"PAR1\x15\x04\0", "is not JSON Lines, one object a line: it begins with b'PAR1"),
    "UTF-16": ("{}".encode("utf-16"), "is not JSON Lines"),
    "an array": (b' [{"prompt": "1"},\n {"prompt": "2"}]\n', "is not JSON Lines"),
    "gzip of an array": (gzip.compress(b"[1]"), "is not JSON Lines"),
}


@pytest.mark.parametrize(("content", "lines"), READ.values(), ids=list(READ))
def test_what_is_read(content: bytes, lines: list[bytes], tmp_path: Path) -> None:
    # The name says nothing.
    path = tmp_path / "in.csv.gz"
    path.write_bytes(content)
    source = InputFile(str(path))
    assert list(source.lines) == lines and not source.is_stream


@pytest.mark.parametrize(("content", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_refused(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Newer Pythons have it.
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(UnreadableInputError, match=message):
        InputFile(str(path))
    # The same of a stream is seen when it is read.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = Thread(target=fifo.write_bytes, args=[content])
    writer.start()
    with pytest.raises(SystemExit) as exit_info:
        main(["run", "-i", str(fifo), "-o", str(tmp_path / "out.jsonl"), *ENGINE])
    writer.join()
    errors = capfd.readouterr().err
    assert exit_info.value.code == 2 and errors.count("\n") == 1 and errors.startswith("nanovllm run: error: ")


def test_zstd_is_read_where_python_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A stand-in of the same interface, which takes the magic number away and gzip's data after it.
    module = ModuleType("compression.zstd")

    def open_zstd(file: object) -> gzip.GzipFile:
        assert file.read(4) == b"\x28\xb5\x2f\xfd"  # type: ignore[attr-defined]
        return gzip.open(file)  # type: ignore[call-overload]

    module.open = open_zstd  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "compression", ModuleType("compression"))
    monkeypatch.setitem(sys.modules, "compression.zstd", module)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + gzip.compress(PLAIN))
    assert list(InputFile(str(path)).lines) == LINES


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_damaged_file_is_an_error(
    compress: Callable[[bytes], bytes], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    whole = compress(b"".join(b'{"prompt": "%d", "max_tokens": 1}\n' % (i * i) for i in range(200)))
    path.write_bytes(whole[:-5])
    with pytest.raises(OSError, match=r"in\.jsonl cannot be read: "):
        list(InputFile(str(path)).lines)
    # Those in front of the damage may be answered.
    try:
        code: object = main(["run", "-i", str(path), "-o", str(tmp_path / "out.jsonl"), *ENGINE])
    except SystemExit as exit_info:
        code = exit_info.code
    assert code in (1, 2) and "in.jsonl cannot be read: " in capfd.readouterr().err.splitlines()[-1]


def test_a_slow_stream_gives_each_line_when_it_is_there() -> None:
    read_end, write_end = os.pipe()
    lines = [b'{"prompt": "%d"}\n' % i for i in range(3)]
    source = UnansweredLines(InputFile(f"/dev/fd/{read_end}").lines, AnsweredRequests())
    reader = iter(source)
    for number, line in enumerate(lines, 1):
        # Byte by byte, so that each is a read of its own for some time.
        for byte in line:
            os.write(write_end, bytes([byte]))
        assert next(reader) == (number, request_digest(line), line)
    os.close(write_end)
    assert next(reader, None) is None and source.num_lines == 3
    os.close(read_end)


def test_an_output_that_is_no_file_gets_the_answers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, fifo = tmp_path / "in.jsonl", tmp_path / "fifo"
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
