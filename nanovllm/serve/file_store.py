"""The files of clients: what `/v1/files` takes and gives, kept in a folder."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from nanovllm.serve.errors import ApiError

_ID = re.compile(r"file-[0-9a-f]{32}")


class FileStore:
    """Files by id, each with what the API says about it.

    Args:
        folder: of the files; made if there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def create(self, name: str, purpose: str) -> str:
        """Return the id of a new, empty file."""
        file_id = f"file-{uuid4().hex}"
        self.path(file_id).touch()
        described = {"id": file_id, "object": "file", "filename": name, "purpose": purpose, "status": "processed"}
        write_json(self._description(file_id), {**described, "created_at": int(time.time())})
        return file_id

    def describe(self, file_id: str) -> dict[str, Any]:
        """Return what the API says of a file.

        Raises:
            ApiError: there is none.
        """
        self._check(file_id)
        return {**read_json(self._description(file_id)), "bytes": self.path(file_id).stat().st_size}

    def list(self) -> list[dict[str, Any]]:
        """Return what the API says of all files, the newest first."""
        found = [self.describe(path.stem) for path in self._folder.glob("file-*.json")]
        return sorted(found, key=lambda described: -described["created_at"])

    def delete(self, file_id: str) -> None:
        """Forget a file."""
        self._check(file_id)
        self._description(file_id).unlink()
        self.path(file_id).unlink()

    def path(self, file_id: str) -> Path:
        """Return where the content of a file is."""
        return self._folder / f"{file_id}.jsonl"

    def _description(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def _check(self, file_id: str) -> None:
        # An id comes from a client, and becomes a path.
        if not _ID.fullmatch(file_id) or not self._description(file_id).exists():
            raise ApiError(404, f"there is no file {file_id!r:.80}", "file_id")


def write_json(path: Path, value: Any) -> None:
    """Write a file that is never seen half-written."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    os.replace(part, path)


def read_json(path: Path) -> Any:
    """Return what `write_json` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
