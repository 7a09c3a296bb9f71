"""The UTF-8 bytes of tokens, which may be parts of characters."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes_function(tokenizer: Any) -> Callable[[int], bytes | None]:
    """Return a function from a token to its bytes; bytes of consecutive tokens join to the text in UTF-8.

    It returns None for a token whose bytes are unknown.
    """
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    is_byte_level, has_byte_tokens = "ByteLevel" in decoder, "ByteFallback" in decoder

    @cache
    def anchor() -> tuple[list[int], int]:
        """Tokens to decode before another one, and their text's length: decoders drop a text's leading space."""
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
        # Part of a character: the token's name tells its bytes.
        name = tokenizer.convert_ids_to_tokens(token_id)
        if is_byte_level and _BYTES.keys() >= set(name):
            return bytes(_BYTES[character] for character in name)
        if has_byte_tokens:
            byte = _BYTE_TOKEN.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else text.encode()
        return None

    return token_bytes


def _byte_characters() -> dict[str, int]:
    """Return the bytes that the characters of byte-level tokens stand for; printable Latin-1 stands for itself."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
