"""Token counts of an answer."""

from __future__ import annotations

from nanovllm.openai_answers import UsageCounts
from nanovllm.openai_format import usage
from nanovllm.outputs import RequestOutput
from nanovllm.serve.protocol import StreamOptions


class Usage:
    """Counts the tokens of one answer's requests, from outputs that hold what is new.

    Args:
        num_prompt_tokens: of all its prompts.
        options: of a stream.

    Attributes:
        is_shown: whether the stream tells them at its end.
    """

    def __init__(self, num_prompt_tokens: int, options: StreamOptions | None = None) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = self.num_cached_tokens = 0
        self.is_shown = options is not None and bool(options.include_usage)
        self._is_continuous = self.is_shown and options is not None and bool(options.continuous_usage_stats)

    def add(self, output: RequestOutput) -> None:
        """Count an output."""
        self.num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        if output.finished:
            self.num_cached_tokens += output.num_cached_tokens

    def body(self) -> UsageCounts:
        """Return the counts in the API's form."""
        counts = usage(self.num_prompt_tokens, self.num_tokens)
        return {**counts, "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens}}

    def so_far(self) -> UsageCounts | None:
        """Return what an event before the last one tells."""
        return self.body() if self._is_continuous else None
