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
    from nanovllm.outputs import StepError
    from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "StepError"]

_MODULES = {"LLM": "nanovllm.llm", "SamplingParams": "nanovllm.sampling_params", "StepError": "nanovllm.outputs"}


def __getattr__(name: str) -> Any:
    """Import what is asked for: ranks other than 0 do without transformers, which takes seconds to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
