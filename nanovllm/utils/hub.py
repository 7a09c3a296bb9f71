"""Resolve a model's name to a local folder."""

from __future__ import annotations

import os

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from nanovllm.utils.remote import fetch_small_files, is_url

_CONFIG_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*_Pooling/config.json"]
_WEIGHT_FILES = ["*.safetensors"]
_UNUSED_FILES = ["consolidated*.safetensors", "original/*", "*/adapter_model*.safetensors", "optimizer*.safetensors"]
"""Weights in their maker's own layout, which many repositories have, too, and what is left of a training."""
_CODE_FILES = ["*.py"]


def resolve_model(model: str, revision: str | None, weights: bool = True, code: bool = False) -> str:
    """Return the folder of a model: `model` itself, or a Hub snapshot, downloaded unless `HF_HUB_OFFLINE` is set.

    Of a folder that fsspec opens, all but the weights is copied; these are read where they are.

    Args:
        model: a folder, a URL of one, or a Hub id.
        revision: branch, tag or commit of a Hub id.
        weights: whether to fetch the weights, or only config and tokenizer.
        code: whether to fetch the Python files of a URL; those of a Hub id transformers fetches.

    Raises:
        ValueError: `model` is neither a folder nor a Hub id that can be downloaded or is cached.
    """
    if is_url(model):
        return fetch_small_files(model.rstrip("/"), _CONFIG_FILES + (_CODE_FILES if code else []))
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return path
    if path.endswith(".gguf") and os.path.isfile(path):
        raise ValueError(f"{model!r} is a GGUF file: make a folder of it with `nanovllm convert`")
    if not model or os.path.exists(path) or os.path.isabs(path) or model.startswith(".") or model.count("/") > 1:
        raise ValueError(f"model folder {model!r} does not exist, or is no folder")
    try:
        patterns = _CONFIG_FILES + (_WEIGHT_FILES if weights else [])
        return snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=_UNUSED_FILES)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"{model!r} is neither a folder nor a model that the Hub gives: {error}") from error
