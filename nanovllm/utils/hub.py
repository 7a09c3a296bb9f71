"""Resolves a model's name to a local folder."""

from __future__ import annotations

import os
import re

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError

from nanovllm.utils.folder_faults import MODEL_FORMS, not_in
from nanovllm.utils.remote import fetch_small_files, is_url

_CONFIG_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*_Pooling/config.json"]
_WEIGHT_FILES = ["*.safetensors"]
_UNUSED_FILES = ["consolidated*.safetensors", "original/*", "*/adapter_model*.safetensors", "optimizer*.safetensors"]
"""Weights in their maker's own layout, which many repositories also contain, and training artefacts."""
_CODE_FILES = ["*.py"]
_PAGE = re.compile(r"(?:https?://)?(?:huggingface|hf)\.co/([^/]+/[^/]+)/?")
_ANSWER_SECONDS = 5.0
"""Timeout for the Hub; behind a firewall its own client would wait for minutes, or forever."""
_MAX_REASON = 400


def resolve_model(model: str, revision: str | None, weights: bool = True, code: bool = False) -> str:
    """Return the folder of a model: `model` itself, or a Hub snapshot, downloaded unless `HF_HUB_OFFLINE` is set.

    For a URL that fsspec opens, everything but the weights is copied; weights are read in place. A GGUF file's model is
    converted once to a folder in a cache. ValueError if it can be neither downloaded nor found.

    Args:
        model: a folder, a folder's URL, a GGUF file, a folder with a GGUF file and no config, or a Hub id.
        revision: branch, tag or commit of a Hub id.
        weights: whether to fetch the weights, or only config and tokenizer.
        code: whether to fetch a URL's Python files; transformers fetches a Hub id's.
    """
    if page := _PAGE.fullmatch(model):
        raise ValueError(f"{model!r} is a page of the Hub: give its id, {page[1]!r}")
    if is_url(model):
        if model.endswith(".gguf"):
            raise ValueError(f"{model!r} is a GGUF file, which must be on a local disk: download it")
        return fetch_small_files(model.rstrip("/"), _CONFIG_FILES + (_CODE_FILES if code else []))
    path = os.path.expanduser(model)
    if os.path.exists(path):
        return _local_folder(path)
    if path.endswith(".gguf"):
        raise ValueError(f"GGUF file {model!r} does not exist")
    if not model or os.path.isabs(path) or model.startswith(".") or model.count("/") > 1:
        raise ValueError(f"model folder {model!r} does not exist")
    return _snapshot(model, revision, weights)


def _local_folder(path: str) -> str:
    if os.path.isfile(os.path.join(path, "config.json")):
        return path
    # Imported only for GGUF files and invalid folders.
    from nanovllm.utils.gguf import cached_folder, gguf_file  # noqa: PLC0415

    if (file := gguf_file(path)) is not None:
        return cached_folder(file)
    if not os.path.isdir(path):
        raise ValueError(f"{path!r} is a file that holds no model: {MODEL_FORMS}")
    return path


def _snapshot(model: str, revision: str | None, weights: bool) -> str:
    """Return a Hub id's cached folder, updated if the Hub is reachable; errors omit the HTTP client's tracebacks."""
    unreached: Exception | None = None
    names: list[str] = []
    try:
        info = HfApi().model_info(model, revision=revision, timeout=_ANSWER_SECONDS)
        names = [file.rfilename for file in info.siblings or ()]
    except HFValidationError:
        raise ValueError(f"{model!r} is neither a folder nor a Hub id, such as 'Qwen/Qwen3-0.6B'") from None
    except Exception as error:  # each version of the Hub's client has another HTTP client's errors
        unreached = error
    if weights and names and not any(name.endswith(".safetensors") for name in names):
        raise ValueError(not_in(model, "*.safetensors", names))
    try:
        return snapshot_download(
            model, revision=revision, allow_patterns=_CONFIG_FILES + (_WEIGHT_FILES if weights else []),
            ignore_patterns=_UNUSED_FILES, local_files_only=unreached is not None,
        )  # fmt: skip
    except Exception as error:
        failure = unreached or error
        # The Hub's client says what to do about a gated model, a name or a revision that is not there.
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:_MAX_REASON]}"
        command = f"`hf download {model}{'' if revision is None else f' --revision {revision}'}`"
        raise ValueError(
            f"{model!r} is neither a folder nor whole in the cache, and the Hub does not give it ({reason}): run "
            f"{command} where there is a network, give a folder with the model, or set HF_HUB_OFFLINE=1 for one that "
            "is in the cache"
        ) from None
