"""The examples of the server's README run as they are written, against a server with the bundled model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from nanovllm.serve.metrics import Metrics
from nanovllm.serve.protocol import ChatBody, CompletionBody
from nanovllm.serve.settings import ServeSettings
from tests.server_process import ServerProcess, serving

README = (Path(__file__).parents[1] / "nanovllm" / "serve" / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
PACKAGES = ("openai", "langchain_openai")


def examples(language: str) -> list[str]:
    return [block.split("```")[0] for block in README.split(f"```{language}\n")[1:]]


CURL = [f"curl {command}" for block in examples("bash") for command in block.split("curl ")[1:]]
PYTHON = examples("python")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None or shutil.which("bash") is None, reason="needs curl and bash")
@pytest.mark.parametrize("command", CURL)
def test_a_curl_example_is_answered(server: ServerProcess, command: str, tmp_path: Path) -> None:
    assert ADDRESS in command
    # Makes curl fail where the status is an error.
    (tmp_path / ".curlrc").write_text("fail\n")
    done = subprocess.run(
        ["bash", "-ec", command.replace(ADDRESS, server.url)],
        env=os.environ | {"CURL_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    answer = done.stdout
    assert done.returncode == 0 and '"error"' not in answer, answer + done.stderr
    assert '"choices":[{' in answer or '"tokens":[' in answer
    # A stream is complete.
    assert ('"stream": true' in command) == answer.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("program", PYTHON)
def test_a_python_example_runs(server: ServerProcess, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    for package in PACKAGES:
        if f"from {package} " in program and find_spec(package) is None:
            pytest.skip(f"needs {package}")
    assert ADDRESS in program or "AsyncLLM" in program
    # In this process, which has imported most of what they need.
    code = compile(program.replace(ADDRESS, server.url), "README.md", "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.strip()
    # The model's answer, where one is asked for without chance.
    assert "temperature" not in program or "Hello! I am Nano" in printed


def test_every_setting_field_and_metric_is_there() -> None:
    limits = README.split("## Limits")[1].split("## Metrics")[0]
    rows = [line.split("|")[1:3] for line in limits.splitlines() if line.startswith("| `")]
    pairs = [pair for names, values in rows for pair in zip(names.split(","), values.split(","), strict=True)]
    defaults = {name.strip("` "): value.strip("` ") for name, value in pairs}
    expected = {item.name: item.default for item in fields(ServeSettings)}
    assert defaults == {
        name: str(value).removesuffix(".0") if name != "host" else value for name, value in expected.items()
    }
    metrics = Metrics(lambda: defaultdict(int), "m", {}).render()[0].decode()
    names = {
        *ChatBody.model_fields,
        *CompletionBody.model_fields,
        *re.findall(r"^# TYPE ((?:nanovllm_|vllm:)\w+)", metrics, re.M),
    }
    assert [name for name in sorted(names) if f"`{name}" not in README and not name.endswith("_created")] == []
    assert len(CURL) >= 5 and len(PYTHON) >= 4
