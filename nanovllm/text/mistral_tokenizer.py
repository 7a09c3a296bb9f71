"""Adapts mistral-common's tokenizer (tekken.json) to the interface of other tokenizers."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from transformers import MistralCommonBackend
from typing_extensions import override


class MistralTokenizer(MistralCommonBackend):
    """mistral-common's tokenizer behind transformers' interface, with the methods that its own class lacks.

    Token ids of text are the base class's, which treats control tokens in a text as text. Only with
    `add_special_tokens=False`, which this library passes for a rendered conversation, are they control tokens.
    """

    @cached_property
    def _control_ids(self) -> dict[str, int]:
        return dict(zip(self.all_special_tokens, self.all_special_ids, strict=True))

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, self._control_ids))})")

    @property
    def added_tokens_decoder(self) -> dict[int, str]:
        """Control tokens by id."""
        return {token_id: token for token, token_id in self._control_ids.items()}

    @override
    def __call__(self, text: Any, *, add_special_tokens: bool = True, **options: Any) -> Any:
        """Drop `return_token_type_ids`, which the base class does not know."""
        options.pop("return_token_type_ids", None)
        if add_special_tokens or not isinstance(text, list):
            return super().__call__(text, add_special_tokens=add_special_tokens, **options)
        return {"input_ids": [self.encode(item, add_special_tokens=False) for item in text]}

    def encode(self, text: Any, *, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Encode a text; control tokens count only with `add_special_tokens=False`."""
        if add_special_tokens or not isinstance(text, str):
            return list(super().encode(text, add_special_tokens=add_special_tokens, **options))
        token_ids: list[int] = []
        for part in filter(None, self._control_pattern.split(text)):
            known = self._control_ids.get(part)
            token_ids += self._text_to_ids(part, False) if known is None else [known]
        return token_ids

    @override
    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """Drop `spaces_between_special_tokens`, which the base class does not support."""
        options.pop("spaces_between_special_tokens", None)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)

    @override
    def apply_chat_template(self, conversation: Any, *, chat_template: str | None = None, **options: Any) -> Any:
        """Render with mistral-common's code, which has no templates."""
        if chat_template is not None:
            raise ValueError("chat_template: mistral-common writes the prompts of this tokenizer by its own code")
        return super().apply_chat_template(conversation, **options)
