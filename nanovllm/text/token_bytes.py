"""The bytes of tokens, of which a character may have several."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes_function(tokenizer: Any) -> Callable[[int], bytes | None]:
    """Return what tells the bytes of a token: those of consecutive tokens, joined, are the text in UTF-8.

    None stands for what a tokenizer does not tell.
    """
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    is_byte_level, has_byte_tokens = "ByteLevel" in decoder, "ByteFallback" in decoder

    @cache
    def anchor() -> tuple[list[int], int]:
        """Tokens that a text begins with, and the length of theirs: decoders drop the space at its start."""
        token_ids = tokenizer.encode("x", add_special_tokens=False)
        return token_ids, len(tokenizer.decode(token_ids))

    @cache
    def token_bytes(token_id: int) -> bytes | None:
        if tokenizer is None:
            return None
        before, length = anchor()
        text: str = tokenizer.decode([*before, token_id])[length:]
        if "\ufffd" not in text:
            return text.encode()
        # A part of a character, which its name tells.
        name = tokenizer.convert_ids_to_tokens(token_id)
        if is_byte_level and _BYTES.keys() >= set(name):
            return bytes(_BYTES[character] for character in name)
        if has_byte_tokens:
            byte = _BYTE_TOKEN.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else text.encode()
        return None

    return token_bytes


def _byte_characters() -> dict[str, int]:
    """Return the bytes for which the characters of byte-level tokens stand; printable Latin-1 is as it is."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
