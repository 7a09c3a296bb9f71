"""Token counts of an answer."""

from __future__ import annotations

from typing import Any

from nanovllm.openai_format import usage
from nanovllm.outputs import RequestOutput


class Usage:
    """Counts the tokens of one answer's requests, from outputs that hold what is new."""

    def __init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens = self.num_cached_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count an output; its prompt counts once, at its end."""
        self.num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        if output.finished:
            self.num_prompt_tokens += len(output.prompt_token_ids)
            self.num_cached_tokens += output.num_cached_tokens

    def body(self) -> dict[str, Any]:
        """Return the counts in the API's form."""
        details = {"prompt_tokens_details": {"cached_tokens": self.num_cached_tokens}}
        return {**usage(self.num_prompt_tokens, self.num_tokens), **details}
