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
    from nanovllm.client.async_llm import AsyncLLM, AsyncLLMEngine, QueueFullError
    from nanovllm.llm import LLM
    from nanovllm.outputs import (
        CompletionOutput,
        Logprob,
        Logprobs,
        RequestMetrics,
        RequestOutput,
        StepError,
        StepResult,
        ToolCall,
    )
    from nanovllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
    from nanovllm.tasks.beam_search import BeamSearchOutput, BeamSearchSequence
    from nanovllm.tasks.ranking import RankedDocument
    from nanovllm.tasks.scoring import ScoreOutput
    from nanovllm.text.input_processor import TextPrompt, TokensPrompt

_MODULES = {
    "LLM": "llm",
    **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine", "QueueFullError"), "client.async_llm"),
    **dict.fromkeys(("BeamSearchParams", "SamplingParams", "StructuredOutputsParams"), "sampling_params"),
    **dict.fromkeys(("BeamSearchOutput", "BeamSearchSequence"), "tasks.beam_search"),
    "RankedDocument": "tasks.ranking",
    "ScoreOutput": "tasks.scoring",
    **dict.fromkeys(("TextPrompt", "TokensPrompt"), "text.input_processor"),
}
"""The modules of public names; of others `outputs`."""
__all__ = [
    "LLM", "AsyncLLM", "AsyncLLMEngine", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence",
    "CompletionOutput", "Logprob", "Logprobs", "QueueFullError", "RankedDocument", "RequestMetrics", "RequestOutput",
    "SamplingParams", "ScoreOutput", "StepError", "StepResult", "StructuredOutputsParams", "TextPrompt",
    "TokensPrompt", "ToolCall",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on first access: ranks other than 0 never import transformers, which takes seconds."""
    if name in __all__:
        return getattr(import_module(f"nanovllm.{_MODULES.get(name, 'outputs')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List all public names, imported or not."""
    return sorted({*globals(), *__all__})
