"""GGUF files: their models as folders in the Hub's layout, read by transformers.

The weights of a file are dequantised, so that the folder is several times as large, and the model takes as much memory
as it would from its original.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub.utils import WeakFileLock
from safetensors import SafetensorError
from xxhash import xxh3_64

from nanovllm.utils.extras import install_hint
from nanovllm.utils.flags import user_errors
from nanovllm.utils.folder_faults import refuse_pointer
from nanovllm.utils.units import shown

_PART = re.compile(r"(?P<name>.+)-\d+-of-(?P<count>\d+)\.gguf")
_ARCHITECTURE = "general.architecture"
_MAGIC = b"GGUF"
_MOST_START = 64
"""Bytes that tell a GGUF file from others."""


def gguf_file(path: str) -> Path | None:
    """Return the GGUF file that a path is, whatever its name, or that a folder has, of one model; else None.

    Raises:
        ValueError: a folder has files of several models.
    """
    if not os.path.isdir(path):
        with open(path, "rb") as opened:
            return Path(path) if path.endswith(".gguf") or opened.read(len(_MAGIC)) == _MAGIC else None
    names = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
    # The parts of one model count once.
    if len({_PART.sub(r"\g<name> \g<count>", name) for name in names}) > 1:
        raise ValueError(f"{path!r} has GGUF files of several models: give the path of one of {shown(names)}")
    return Path(path, names[0]) if names else None


def cached_folder(file: Path) -> str:
    """Return the folder of a GGUF file's model in the cache, in bfloat16; it is written unless it is there already.

    The cache is `nanovllm` in `$XDG_CACHE_HOME`, or in `~/.cache`. A model's place follows from the file's path, its
    folder from the size and the time of the file, or of all parts. Folders of an older content are removed.

    Args:
        file: the GGUF file; of several parts, any.

    Raises:
        ValueError: see `convert_gguf`; or the cache cannot be written.
    """
    parts = _parts(file)
    place = _cache() / f"{parts[0].stem}-{_digest(os.fspath(parts[0].resolve()))}"
    stats = [part.stat() for part in parts]
    folder = place / _digest([(stat.st_size, stat.st_mtime_ns) for stat in stats])
    if folder.is_dir():
        return os.fspath(folder)
    check_gguf(file)
    print(f"nanovllm: {os.fspath(file)} is converted, once, to {folder}", file=sys.stderr)
    try:
        place.mkdir(parents=True, exist_ok=True)
        # Others that want the same model wait, instead of converting it beside this process.
        with WeakFileLock(place / ".lock"):
            if not folder.is_dir():
                _renew(place, folder, file)
    except OSError as error:
        raise ValueError(f"the cache of GGUF files cannot be written: {error}; XDG_CACHE_HOME moves it") from error
    return os.fspath(folder)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nanovllm" / "gguf"


def _digest(value: object) -> str:
    return xxh3_64(repr(value).encode()).hexdigest()


def _renew(place: Path, folder: Path, file: Path) -> None:
    """Write a model's folder, which is there in whole or not at all, in place of all others of this file."""
    for other in place.iterdir():
        # Of an older content, or what a conversion that was killed has left.
        if other.is_dir():
            shutil.rmtree(other)
    unfinished = place / "unfinished"
    convert_gguf(file, unfinished, "bfloat16")
    unfinished.rename(folder)


def convert_gguf(file: Path, folder: Path, dtype: str) -> None:
    """Write the model of a GGUF file to a folder.

    Args:
        file: the GGUF file; of several parts, any.
        folder: empty, or not there yet; stays so if the model is refused.
        dtype: of the weights in the folder, by its name in torch.

    Raises:
        ValueError: the file is not in GGUF, a part or a tensor is missing, transformers cannot read its architecture,
            or the folder has files.
        OSError: the folder cannot be written.

    Example:
        >>> convert_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("smollm2"), "bfloat16")  # doctest: +SKIP
    """
    check_gguf(file)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{os.fspath(folder)!r} is not empty")
    parts = _parts(file)
    with _filled(folder):
        with TemporaryDirectory(dir=folder) as joined:
            model, tokenizer = _read(_join(parts, Path(joined, "model.gguf")) if len(parts) > 1 else file, file, dtype)
        try:
            model.save_pretrained(folder)
        except SafetensorError as error:
            # A full disk is one.
            raise OSError(f"{os.fspath(folder)!r}: {error}") from error
        tokenizer.save_pretrained(folder)


def convert(options: Namespace, parser: ArgumentParser) -> int:
    """Run the command `nanovllm convert` and return its exit code."""
    with user_errors(parser):
        convert_gguf(options.file, options.folder, options.dtype)
    print(f"{options.folder} has the model of {options.file}: nanovllm chat {options.folder}")
    return 0


def check_gguf(file: Path) -> None:
    """Raise a `ValueError` if a file is no GGUF file, or the package that reads these is not installed."""
    if find_spec("gguf") is None:
        raise ValueError(f"GGUF files are read by the package gguf, which is not installed: {install_hint('gguf')}")
    with open(file, "rb") as opened:
        start = opened.read(_MOST_START)
    refuse_pointer(os.fspath(file), start)
    if not start.startswith(_MAGIC):
        raise ValueError(f"{os.fspath(file)!r} is no GGUF file")


@contextmanager
def _filled(folder: Path) -> Iterator[None]:
    """Make a folder if need be, and leave it as it was, empty or not there, if the `with` block raises."""
    was_there = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            path.unlink()
        if not was_there:
            folder.rmdir()
        raise


def _parts(file: Path) -> list[Path]:
    """Return the parts of the model that a file is one of, in order; the file alone if it is in one.

    Raises:
        ValueError: one is missing.
    """
    if (found := _PART.fullmatch(file.name)) is None:
        return [file]
    count, width = int(found["count"]), len(found["count"])
    parts = [file.with_name(f"{found['name']}-{i:0{width}}-of-{found['count']}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ValueError(f"{os.fspath(file)!r} is one of {count} parts, which are read together: {missing} not found")
    return parts


def _join(parts: list[Path], path: Path) -> Path:
    """Write the tensors of all parts, and the rest of the first, to one file, as transformers reads it."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter  # noqa: PLC0415

    readers = [_opened(part, GGUFReader) for part in parts]
    fields = readers[0].fields
    writer = GGUFWriter(path, fields[_ARCHITECTURE].contents())
    for key, field in fields.items():
        if key != _ARCHITECTURE and not key.startswith(("GGUF.", "split.")):
            kind = field.types[0]
            writer.add_key_value(
                key, field.contents(), kind, sub_type=field.types[-1] if kind == GGUFValueType.ARRAY else None
            )
    for tensor in (tensor for reader in readers for tensor in reader.tensors):
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _opened(part: Path, reader: Any) -> Any:
    try:
        return reader(part)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{os.fspath(part)!r} is damaged: {error}") from error


def _read(path: Path, file: Path, dtype: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer that are in `path`; messages name `file`."""
    # They take seconds to import, and a model in the cache needs neither.
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        with _errors_alone():
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model, info = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, output_loading_info=True)
    except Exception as error:  # transformers has one for each way in which a file can be unknown to it
        raise ValueError(f"transformers cannot read {os.fspath(file)!r}: {error}") from error
    # transformers draws these at random.
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{os.fspath(file)!r} has not all of the model: tensors missing {shown(missing)}")
    # The weights are plain floats by now, which the model does not know of itself.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Keep warnings of transformers back, which are of how a GGUF model would run in transformers itself."""
    import transformers  # noqa: PLC0415

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
