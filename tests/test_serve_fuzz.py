"""Requests that schemathesis makes of the server's own OpenAPI schema: no 500, no answer unlike the schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server_process import serving

pytest.importorskip("schemathesis")
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"


@pytest.mark.compat
def test_no_request_breaks_the_server(tmp_path: Path) -> None:
    limits = ("--max-output-tokens", "16", "--max-outputs", "8")
    # What uvicorn says of requests that are no HTTP.
    with serving(*limits) as server:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS]
        options = [
            "--max-examples",
            "25",
            "--phases",
            "fuzzing",
            "--request-timeout",
            "20",
            "--seed",
            "1",
            "--no-color",
        ]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert not done.returncode, done.stdout[-5000:] + done.stderr[-2000:]
        server.check_idle()
