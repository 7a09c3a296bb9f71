"""`nanovllm convert`: writes the model of a GGUF file as a folder in the Hub's layout, read by transformers.

The weights of the file are dequantised, so that the folder is several times as large, and the model takes as much
memory as it would from its original.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanovllm.config import Dtype
from nanovllm.utils.extras import install_hint
from nanovllm.utils.flags import CommandParser, user_errors


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser("nanovllm convert", description=__doc__.split("\n\n", 1)[1])
    parser.add_argument("file", type=Path, help="the GGUF file")
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
        file: the GGUF file; of several, the first.
        folder: empty, or not there yet.
        dtype: of the weights in the folder.

    Raises:
        ValueError: the file is none, transformers cannot read its architecture, or the folder has files.

    Example:
        >>> convert_gguf(Path("SmolLM2-135M-Instruct.Q4_1.gguf"), Path("smollm2"), torch.bfloat16)  # doctest: +SKIP
    """
    if find_spec("gguf") is None:
        raise ValueError(f"GGUF files are read by the package gguf, which is not installed: {install_hint('gguf')}")
    with open(file, "rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ValueError(f"{os.fspath(file)!r} is no GGUF file")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{os.fspath(folder)!r} is not empty")
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    except Exception as error:  # transformers has one for each way in which a file can be unknown to it
        raise ValueError(f"transformers cannot read {os.fspath(file)!r}: {error}") from error
    # The weights are plain floats by now, which the model does not know of itself.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
