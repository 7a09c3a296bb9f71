"""`nanovllm convert`: writes the model of a GGUF file as a folder in the Hub's layout, read by transformers.

The weights of the file are dequantised, so that the folder is several times as large, and the model takes as much
memory as it would from its original.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.config import Dtype
from nanovllm.models.stored_tensors import shown
from nanovllm.utils.extras import install_hint
from nanovllm.utils.flags import CommandParser, user_errors
from nanovllm.utils.folder_faults import refuse_pointer

_PART = re.compile(r"(?P<name>.+)-\d+-of-(?P<count>\d+)\.gguf")
_ARCHITECTURE = "general.architecture"
_MOST_START = 64
"""Bytes that tell a GGUF file from others."""


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser("nanovllm convert", description=__doc__.split("\n\n", 1)[1])
    parser.add_argument("file", type=Path, help="the GGUF file; of several parts, any")
    parser.add_argument("folder", type=Path, help="gets config, weights and tokenizer; made if it is not there")
    dtypes = [name for name in get_args(Dtype) if name != "auto"]
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of the weights in the folder")
    options = parser.parse_args(arguments)
    with user_errors(parser):
        convert_gguf(options.file, options.folder, getattr(torch, options.dtype))
    print(f"{options.folder} has the model of {options.file}: nanovllm chat {options.folder}")
    return 0


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model of a GGUF file to a folder.

    Args:
        file: the GGUF file; of several parts, any.
        folder: empty, or not there yet; stays so if the model is refused.
        dtype: of the weights in the folder.

    Raises:
        ValueError: the file is none, a part or a tensor is missing, transformers cannot read its architecture, or the
            folder has files.

    Example:
        >>> convert_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("smollm2"), torch.bfloat16)  # doctest: +SKIP
    """
    if find_spec("gguf") is None:
        raise ValueError(f"GGUF files are read by the package gguf, which is not installed: {install_hint('gguf')}")
    with open(file, "rb") as opened:
        start = opened.read(_MOST_START)
    refuse_pointer(os.fspath(file), start)
    if not start.startswith(b"GGUF"):
        raise ValueError(f"{os.fspath(file)!r} is no GGUF file")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{os.fspath(folder)!r} is not empty")
    parts = _parts(file)
    with _filled(folder):
        with TemporaryDirectory(dir=folder) as joined:
            model, tokenizer = _read(_join(parts, Path(joined, "model.gguf")) if len(parts) > 1 else file, file, dtype)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


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


def _read(path: Path, file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the model and the tokenizer that are in `path`; messages name `file`."""
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
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
