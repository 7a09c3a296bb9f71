"""Tells models apart whose keys and values differ, where these leave the process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from xxhash import xxh3_128

from nanovllm.config import Config
from nanovllm.model_config import ModelConfig
from nanovllm.models.remote_tensors import SafetensorsFile
from nanovllm.models.stored_tensors import weight_files

_READ_BYTES = 2**26
"""Read and hashed at a time."""
_NUM_READERS = 8
"""Threads that do it: files have gigabytes."""


def model_digest(config: Config, model_config: ModelConfig, folder: str, dtype: str, max_model_len: int) -> bytes:
    """Return 128 bits that follow from a model's config, its weights, and how it is run.

    It reads all weights, since a model that was tuned or pruned may differ from the original in a few elements only.
    Where the model's folder is does not matter.

    Args:
        config, model_config: the engine's settings, and the model's shape.
        folder: has the model's files.
        dtype: of what is computed.
        max_model_len: some of transformers' rotary embeddings depend on it.
    """
    digest = xxh3_128(Path(folder, "config.json").read_bytes())
    is_dummy, is_native = config.load_format == "dummy", model_config.hf is None
    settings = config.revision, config.quantization, config.kv_cache_dtype, dtype, is_native
    others = None if is_native else max_model_len, config.seed or 0 if is_dummy else None
    digest.update(json.dumps([*settings, *others]).encode())
    for file in [] if is_dummy else weight_files(folder):
        digest.update(_file_digest(SafetensorsFile(file)))
    return digest.digest()


def _file_digest(stored: SafetensorsFile) -> bytes:
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        return b"".join(readers.map(partial(_part_digest, stored), range(0, stored.size, _READ_BYTES)))


def _part_digest(stored: SafetensorsFile, start: int) -> bytes:
    return xxh3_128(stored.read(start, min(stored.size, start + _READ_BYTES))).digest()
