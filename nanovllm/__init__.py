"""Offline inference of large language models.

```python
from nanovllm import LLM, SamplingParams
```
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nanovllm.client.async_llm import AsyncLLM, QueueFullError
    from nanovllm.integrations.async_llm_engine import AsyncLLMEngine
    from nanovllm.llm import LLM
    from nanovllm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Logprob,
        Logprobs,
        RankedDocument,
        RequestMetrics,
        RequestOutput,
        ScoreOutput,
        StepError,
        StepResult,
        TextPrompt,
        TokensPrompt,
        ToolCall,
    )
    from nanovllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

_MODULES = {
    "llm": ("LLM",),
    "client.async_llm": ("AsyncLLM", "QueueFullError"),
    "integrations.async_llm_engine": ("AsyncLLMEngine",),
    "outputs": (
        "BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "Logprobs", "RankedDocument",
        "RequestMetrics", "RequestOutput", "ScoreOutput", "StepError", "StepResult", "TextPrompt", "TokensPrompt",
        "ToolCall",
    ),
    "sampling_params": ("BeamSearchParams", "SamplingParams", "StructuredOutputsParams"),
}  # fmt: skip
__all__ = [
    "LLM", "AsyncLLM", "AsyncLLMEngine", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence",
    "CompletionOutput", "Logprob", "Logprobs", "QueueFullError", "RankedDocument", "RequestMetrics", "RequestOutput",
    "SamplingParams", "ScoreOutput", "StepError", "StepResult", "StructuredOutputsParams", "TextPrompt",
    "TokensPrompt", "ToolCall",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on first access: ranks other than 0 never import transformers, which takes seconds."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"nanovllm.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
