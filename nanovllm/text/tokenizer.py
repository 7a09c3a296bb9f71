"""Loads a model's tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nanovllm.utils.checks import refuse_remote_code

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def load_tokenizer(folder: str, trust_remote_code: bool) -> Any:
    """Return the tokenizer in a model's folder; None if there is none.

    Raises:
        ValueError: it cannot be read, or names code to run and `trust_remote_code` is False.
    """
    if not any(os.path.isfile(os.path.join(folder, name)) for name in _TOKENIZER_FILES):
        return None
    if not trust_remote_code:
        refuse_remote_code(folder, "tokenizer_config.json", "AutoTokenizer")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"the tokenizer in {folder!r} cannot be read: {error}") from error


def decode_function(tokenizer: Any) -> Callable[..., str]:
    """Return `tokenizer.decode` for lists of token ids.

    That of transformers looks for tensors and batches first, which takes longer than decoding a few tokens.
    """
    is_theirs = getattr(type(tokenizer), "decode", None) is PreTrainedTokenizerBase.decode
    decode: Callable[..., str] = tokenizer._decode if is_theirs else tokenizer.decode
    return decode
