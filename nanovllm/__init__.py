"""Offline inference of large language models.

```python
from nanovllm import LLM, SamplingParams
```
"""

from nanovllm.engine.llm_engine import StepError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "StepError"]
