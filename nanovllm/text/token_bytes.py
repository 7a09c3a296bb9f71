"""The bytes of tokens, of which a character may have several."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""What SentencePiece writes for a space."""


def token_bytes_function(tokenizer: Any) -> Callable[[int], bytes | None]:
    """Return what tells the bytes of a token: those of consecutive tokens, joined, are the text in UTF-8.

    None stands for what a tokenizer does not tell.
    """
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    is_byte_level = "ByteLevel" in decoder
    added = getattr(tokenizer, "added_tokens_decoder", {})

    @cache
    def token_bytes(token_id: int) -> bytes | None:
        if tokenizer is None:
            return None
        if token_id in added:
            return str(added[token_id]).encode()
        name = tokenizer.convert_ids_to_tokens(token_id) if decoder != "None" else None
        if name is not None and is_byte_level and _BYTES.keys() >= set(name):
            return bytes(_BYTES[character] for character in name)
        if name is not None and "ByteFallback" in decoder:
            byte = _BYTE_TOKEN.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else name.replace(_SPACE, " ").encode()
        text: str = tokenizer.decode([token_id])
        return None if "\ufffd" in text else text.encode()

    return token_bytes


def _byte_characters() -> dict[str, int]:
    """Return the bytes for which the characters of byte-level tokens stand; printable Latin-1 is as it is."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
