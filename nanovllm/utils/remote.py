"""Accesses paths through fsspec: `s3://`, `gs://`, `memory://` and others."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from huggingface_hub.utils import WeakFileLock
from xxhash import xxh3_64

from nanovllm.utils.display import install_hint

_PREFIX = "nanovllm-model-"
_POINTER = "weights.url"
"""File in a local copy of a remote model's small files that holds the URL of its weights."""


def is_url(path: str) -> bool:
    """Return whether a path is opened by fsspec instead of Python."""
    return "://" in path


def absolute_folder(path: str) -> str:
    """Return an existing folder's absolute path, for other processes of this host; a URL is returned unchanged."""
    if is_url(path):
        return path
    if not os.path.isdir(path):
        raise ValueError(f"{path!r} is no folder")
    return os.path.abspath(path)


def filesystem(path: str) -> tuple[Any, str]:
    """Return fsspec's file system for a path, and the path within it; ValueError for an unknown scheme or package."""
    try:
        from fsspec.core import url_to_fs  # noqa: PLC0415
        from fsspec.implementations.local import LocalFileSystem  # noqa: PLC0415

        # fsspec would interpret `::`, which has no meaning in a local name.
        found: tuple[Any, str] = url_to_fs(path) if is_url(path) else (LocalFileSystem(), os.path.abspath(path))
    except (ImportError, ValueError) as error:
        raise ValueError(f"{path} cannot be opened: {error}; {install_hint('remote')}") from error
    return found


class StorageError(OSError):
    """Access to a path failed; the message names the path."""


@contextmanager
def storage_errors(path: str, kind: type[Exception] = StorageError) -> Iterator[None]:
    """Re-raise any error of a file system, such as an object store's own, as `kind`, with the path in the message."""
    try:
        yield
    # Raised for another path, inside this block.
    except StorageError:
        raise
    except FileExistsError as error:
        raise FileExistsError(f"{path!r} is there already") from error
    except Exception as error:
        raise kind(f"access to {path!r} failed: {str(error) or repr(error)}") from error


def fetch_small_files(url: str, patterns: list[str]) -> str:
    """Copy a remote folder's files that match patterns to a folder, removed when this process exits; return the folder.

    Other processes of this host may read it, and get the location of the weights from `weights_place`. ValueError if
    the remote folder does not exist, or cannot be read.
    """
    source, path = filesystem(url)
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    # Unlike atexit, this also works in processes started by multiprocessing.
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=0)
    names = [name for name in list_names(url) if any(fnmatch(name, pattern) for pattern in patterns)]
    with storage_errors(url, ValueError):
        for pattern in filter(lambda pattern: "/" in pattern, patterns):
            names += ["/".join(str(found).rsplit("/", 2)[1:]) for found in source.glob(f"{path}/{pattern}")]
        for name in names:
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            source.get_file(f"{path}/{name}", os.path.join(folder, name))
    Path(folder, _POINTER).write_text(url, encoding="utf-8")
    return folder


def cached_copy(path: str) -> str:
    """Return a path's local file: the path itself, or a URL's cached copy, updated if it changed."""
    if not is_url(path):
        return path
    source, found = filesystem(path)
    with storage_errors(path, ValueError):
        version = f"{path} {source.ukey(found)}"
    copy = cache_folder("remote") / digest(path) / f"{digest(version)}-{Path(path).name}"

    def fetch(unfinished: Path) -> None:
        with storage_errors(path, ValueError):
            source.get_file(found, os.fspath(unfinished))

    return make_cached(copy, fetch, "remote weights")


def cache_folder(kind: str) -> Path:
    """Return the folder of a cache, which `XDG_CACHE_HOME` moves."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanovllm" / kind


def digest(text: str) -> str:
    """Return a hash for a name in a cache."""
    return xxh3_64(text.encode()).hexdigest()


def make_cached(path: Path, make: Callable[[Path], object], content: str) -> str:
    """Return a file or folder of a cache, in place of older ones in the same parent folder; ValueError if that fails.

    If it is missing, `make` makes it at a temporary path. `content` describes the cache in an error.
    """
    if path.exists():
        return os.fspath(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes that need the same wait for it.
        with WeakFileLock(path.parent / ".lock"):
            if not path.exists():
                # Older content, or left by a process that was killed.
                for other in path.parent.iterdir():
                    if other.is_dir():
                        shutil.rmtree(other)
                    elif other.name != ".lock":
                        other.unlink()
                make(unfinished := path.with_name("unfinished"))
                unfinished.replace(path)
    except OSError as error:
        raise ValueError(f"the cache of {content} cannot be written: {error}; XDG_CACHE_HOME moves it") from error
    return os.fspath(path)


def list_names(url: str) -> list[str]:
    """Return the names in a local or remote folder; a ValueError if it cannot be read."""
    source, path = filesystem(url)
    with storage_errors(url, ValueError):
        found = source.ls(path, detail=False)
    return [str(name).rstrip("/").rsplit("/", 1)[-1] for name in found]


def weights_place(folder: str) -> str:
    """Return the location of a folder's weights: the folder, or its URL if `fetch_small_files` made it."""
    pointer = Path(folder, _POINTER)
    is_copy = pointer.parent.name.startswith(_PREFIX) and pointer.is_file()
    return pointer.read_text(encoding="utf-8") if is_copy else folder
