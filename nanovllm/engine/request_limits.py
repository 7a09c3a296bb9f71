"""Which requests an engine can serve."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import check_token_ids


@dataclass(frozen=True)
class RequestLimits:
    """What a request must keep to.

    Attributes:
        vocab_size: token ids of prompts are below it.
        max_model_len: most tokens of one request, prompt and output together.
        num_kv_slots: tokens that the KV cache holds.
    """

    vocab_size: int
    max_model_len: int
    num_kv_slots: int

    def check(self, prompt: Any, params: Any) -> array[int]:
        """Return a prompt's token ids, if the request can be served.

        Raises:
            ValueError: it cannot; says what is out of bounds.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, not {params!r}")
        try:
            token_ids = check_token_ids(prompt, self.vocab_size)
        except TypeError as error:
            kind = type(prompt).__name__
            raise ValueError(f"a prompt is a string or a list of token ids, not {kind}: {prompt!r:.80}") from error
        if len(token_ids) > self.max_model_len:
            raise ValueError(f"the prompt has {len(token_ids)} tokens, over max_model_len={self.max_model_len}")
        # The last token is returned and never computed, so its keys and values are not stored.
        num_stored = max(len(token_ids), min(len(token_ids) + params.max_tokens, self.max_model_len) - 1)
        if num_stored > self.num_kv_slots:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and max_tokens={params.max_tokens} need {num_stored} KV slots, "
                f"over the cache's {self.num_kv_slots} (num_kvcache_blocks * kvcache_block_size)"
            )
        return token_ids
