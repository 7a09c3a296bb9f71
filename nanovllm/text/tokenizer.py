"""Loads a model's tokenizer."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanovllm.utils.folder_faults import read_json, refuse_pointer, refuse_remote_code

_CONFIG, _FAST, _TEKKEN = "tokenizer_config.json", "tokenizer.json", "tekken.json"
_TEMPLATE = "chat_template.jinja"
_VOCABULARIES = (_FAST, _TEKKEN, "vocab.json", "merges.txt", "vocab.txt")
_VOCABULARY_SUFFIXES = (".model", ".tiktoken")
_OTHER_FILES = (_CONFIG, "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    """Return the tokenizer in a model's folder, None if there is none; ValueError if it cannot be read."""
    names = os.listdir(folder)
    found = sorted(name for name in names if name in _VOCABULARIES or name.endswith(_VOCABULARY_SUFFIXES))
    if not found and _CONFIG not in names:
        return None
    if _TEMPLATE in names:
        refuse_pointer(os.path.join(folder, _TEMPLATE))
    # With a tokenizer.json, no other vocabulary file is read. An LFS pointer would be parsed as merges.
    for name in [_FAST] if _FAST in found else found:
        refuse_pointer(os.path.join(folder, name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        _refuse_faults(folder, found, trust_remote_code)
        raise ValueError(f"the tokenizer in {folder!r} cannot be read: {error}") from error
    if type(tokenizer).__name__ == "MistralCommonBackend":
        # Imported here because older versions of transformers lack its base class.
        from nanovllm.text.mistral_tokenizer import MistralTokenizer  # noqa: PLC0415

        return MistralTokenizer.from_pretrained(folder)
    added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    if added.issuperset(tokenizer.get_vocab().values()):
        _refuse_faults(folder, found, trust_remote_code)
        files = sorted({*getattr(tokenizer, "vocab_files_names", {}).values(), _FAST})
        raise ValueError(
            f"the tokenizer in {folder!r} has special tokens alone, since a file of its vocabulary is missing: "
            f"{', '.join(files)}"
        )
    return tokenizer


def _refuse_faults(folder: str, vocabularies: list[str], trust_remote_code: bool) -> None:
    """Raise a `ValueError` that explains why a tokenizer cannot be read, if there is a known cause."""
    for name in [*vocabularies, *_OTHER_FILES]:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            (read_json if name.endswith(".json") else refuse_pointer)(path)
    for name in [] if _FAST in vocabularies else vocabularies:
        needed = _packages(os.path.join(folder, name))
        if missing := [package for package, module in needed.items() if not _is_there(module)]:
            packages = " ".join(missing)
            raise ValueError(f"{name!r} in {folder!r} cannot be read without {packages}: pip install {packages}")
    if not trust_remote_code:
        refuse_remote_code(folder, _CONFIG, "AutoTokenizer")


def _packages(path: str) -> dict[str, str]:
    """Return the packages that transformers needs to read a vocabulary, with a module of each."""
    name = os.path.basename(path)
    if name == _TEKKEN:
        return {"mistral-common": "mistral_common"}
    if not name.endswith(_VOCABULARY_SUFFIXES):
        return {}
    with open(path, "rb") as stream:
        # The first field of a SentencePiece model; tiktoken's files are text, under the same name in some folders.
        is_sentencepiece = stream.read(1) == b"\n"
    if is_sentencepiece:
        return {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
    return {"tiktoken": "tiktoken"}


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    # The parent package is missing.
    except ModuleNotFoundError:
        return False


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer (or None) can render messages, by a template or by its own code."""
    if getattr(tokenizer, "chat_template", None):
        return True
    apply = getattr(type(tokenizer), "apply_chat_template", None)
    return apply not in (None, PreTrainedTokenizerBase.apply_chat_template)
