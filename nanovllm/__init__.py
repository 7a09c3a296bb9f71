"""Offline inference of large language models.

```python
from nanovllm import LLM, SamplingParams
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StepError, TextPrompt, TokensPrompt
    from nanovllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM", "BeamSearchParams", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams", "StepError",
    "StructuredOutputsParams", "TextPrompt", "TokensPrompt",
]  # fmt: skip

_PARAMS = ("BeamSearchParams", "SamplingParams", "StructuredOutputsParams")


def __getattr__(name: str) -> Any:
    """Import what is asked for: ranks other than 0 do without transformers, which takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "llm" if name == "LLM" else "sampling_params" if name in _PARAMS else "outputs"
    return getattr(import_module(f"nanovllm.{module}"), name)
