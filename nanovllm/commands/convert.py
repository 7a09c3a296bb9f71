"""`nanovllm convert`: writes the model of a GGUF file as a folder in the Hub's layout, read by transformers.

The weights of the file are dequantised, so that the folder is several times as large, and the model takes as much
memory as it would from its original. Commands that take a model convert such a file themselves, into a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from nanovllm.config import Dtype
from nanovllm.utils.flags import CommandParser, user_errors
from nanovllm.utils.gguf import convert_gguf


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser("nanovllm convert", description=__doc__.split("\n\n", 1)[1])
    parser.add_argument("file", type=Path, help="the GGUF file; of several parts, any")
    parser.add_argument("folder", type=Path, help="gets config, weights and tokenizer; made if it is not there")
    dtypes = [name for name in get_args(Dtype) if name != "auto"]
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes, help="of the weights in the folder")
    options = parser.parse_args(arguments)
    with user_errors(parser):
        convert_gguf(options.file, options.folder, options.dtype)
    print(f"{options.folder} has the model of {options.file}: nanovllm chat {options.folder}")
    return 0
