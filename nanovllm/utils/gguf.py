"""Converts models in GGUF files to folders in the Hub's layout, by transformers.

The weights are dequantised, so the folder is several times as large as the file, and the model takes the memory of its
unquantised original.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from nanovllm.utils.display import install_hint, shown
from nanovllm.utils.flags import user_errors
from nanovllm.utils.folder_faults import refuse_pointer
from nanovllm.utils.remote import cache_folder, digest, make_cached

_PART = re.compile(r"(?P<name>.+)-\d+-of-(?P<count>\d+)\.gguf")
_ARCHITECTURE = "general.architecture"
_MAGIC = b"GGUF"
_MOST_START = 64
"""Bytes read to recognise a file."""


def gguf_file(path: str) -> Path | None:
    """Return the path if it is a GGUF file, by any name, or the GGUF file (of one model) in a folder; else None."""
    if not os.path.isdir(path):
        with open(path, "rb") as opened:
            return Path(path) if path.endswith(".gguf") or opened.read(len(_MAGIC)) == _MAGIC else None
    names = sorted(name for name in os.listdir(path) if name.endswith(".gguf"))
    # Count the parts of one model once.
    if len({_PART.sub(r"\g<name> \g<count>", name) for name in names}) > 1:
        raise ValueError(f"{path!r} has GGUF files of several models: give the path of one of {shown(names)}")
    return Path(path, names[0]) if names else None


def cached_folder(file: Path) -> str:
    """Return the cached folder of a GGUF file's model, in bfloat16; written if necessary, else a ValueError.

    Its parent follows from the file's path, and its name from the size and modification time of all parts.
    """
    parts = _parts(file)
    place = cache_folder("gguf") / f"{parts[0].stem}-{digest(repr(os.fspath(parts[0].resolve())))}"
    stats = [part.stat() for part in parts]
    folder = place / digest(repr([(stat.st_size, stat.st_mtime_ns) for stat in stats]))
    if not folder.is_dir():
        check_gguf(file)
        print(f"nanovllm: {os.fspath(file)} is converted, once, to weights in 16 bits, in {folder}", file=sys.stderr)
    return make_cached(folder, partial(convert_gguf, file, dtype="bfloat16"), "GGUF files")


def convert_gguf(file: Path, folder: Path, dtype: str) -> None:
    """Write the model of a GGUF file to a folder.

    Args:
        file: the GGUF file, or any part of several.
        folder: an empty or missing folder; unchanged if the model is refused.
        dtype: dtype of the folder's weights, by its name in torch.

    Raises:
        ValueError: the file is not in GGUF, a part or a tensor is missing, transformers does not support the
            architecture, or the folder is not empty.
        OSError: the folder cannot be written.
    """
    check_gguf(file)
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{os.fspath(folder)!r} is not empty")
    parts, was_there = _parts(file), folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(dir=folder) as joined:
            model, tokenizer = _read(_join(parts, Path(joined, "model.gguf")) if len(parts) > 1 else file, file, dtype)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except BaseException as error:
        # A folder of the user's may be a link, or a mount point.
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not was_there:
            folder.rmdir()
        if isinstance(error, SafetensorError):
            # Such as a full disk.
            raise OSError(f"{os.fspath(folder)!r}: {error}") from error
        raise


def convert(options: Namespace, parser: ArgumentParser) -> int:
    """Run the command `nanovllm convert` and return its exit code."""
    with user_errors(parser):
        convert_gguf(options.file, options.folder, options.dtype)
    print(f"{options.folder} has the model of {options.file}: nanovllm chat {options.folder}")
    return 0


def check_gguf(file: Path) -> None:
    """Raise a `ValueError` if a file is not a GGUF file, or the package that reads GGUF is not installed."""
    if find_spec("gguf") is None:
        raise ValueError(f"GGUF files are read by the package gguf, which is not installed: {install_hint('gguf')}")
    if file.is_dir():
        raise ValueError(f"{os.fspath(file)!r} is a folder, not a GGUF file; one with safetensors needs no conversion")
    with open(file, "rb") as opened:
        start = opened.read(_MOST_START)
    refuse_pointer(os.fspath(file), start)
    if not start.startswith(_MAGIC):
        raise ValueError(f"{os.fspath(file)!r} is no GGUF file")


def _parts(file: Path) -> list[Path]:
    """Return all parts of a file's model, in order, or the file alone if the model is not split."""
    if (found := _PART.fullmatch(file.name)) is None:
        return [file]
    count, width = int(found["count"]), len(found["count"])
    parts = [file.with_name(f"{found['name']}-{i:0{width}}-of-{found['count']}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ValueError(f"{os.fspath(file)!r} is one of {count} parts, which are read together: {missing} not found")
    return parts


def _join(parts: list[Path], path: Path) -> Path:
    """Write the tensors of all parts and the first part's metadata to one file, as transformers expects."""
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
    """Return the model and the tokenizer in `path`; messages name `file`."""
    # Slow imports, which a cached model does not need.
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging  # noqa: PLC0415

    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # transformers warns about running a GGUF model in transformers itself.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model, info = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, output_loading_info=True)
    except Exception as error:  # transformers has one for each way in which a file can be unknown to it
        raise ValueError(f"transformers cannot read {os.fspath(file)!r}: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    # transformers initialises these randomly.
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{os.fspath(file)!r} has not all of the model: tensors missing {shown(missing)}")
    # The weights are dequantised, but the model's config still says otherwise.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer
