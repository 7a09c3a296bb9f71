"""Tells models apart whose keys and values differ, where these leave the process."""

from __future__ import annotations

import json
from pathlib import Path

from xxhash import xxh3_128

from nanovllm.config import Config
from nanovllm.model_config import ModelConfig
from nanovllm.models.remote_tensors import SafetensorsFile
from nanovllm.models.stored_tensors import weight_files

_SAMPLED_BYTES = 4096
"""Read of most tensors, since files of gigabytes take long: two checkpoints of one shape differ in most elements."""
_READ_BYTES = 2**26
"""At a time, of tensors that have a row for each token: training tokens that were added changes no others."""


def model_digest(config: Config, model_config: ModelConfig, folder: str, dtype: str, max_model_len: int) -> bytes:
    """Return 128 bits that follow from a model's config, its weights, and how it is run.

    Of the weights it reads the files' headers, embedding and head in whole, and the first 4 KiB of each other tensor.
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
        stored = SafetensorsFile(file)
        digest.update(b"%d " % stored.size + stored.header[8:])
        for sample in stored.samples(_SAMPLED_BYTES):
            digest.update(sample)
        for entry in stored.entries:
            if entry.shape[:1] == [model_config.vocab_size]:
                for start in range(entry.start, entry.stop, _READ_BYTES):
                    digest.update(stored.read(start, min(entry.stop, start + _READ_BYTES)))
    return digest.digest()
