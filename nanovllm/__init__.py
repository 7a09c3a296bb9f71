"""Offline inference of large language models.

```python
from nanovllm import LLM, SamplingParams
```
"""

from nanovllm.llm import LLM
from nanovllm.outputs import StepError
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams", "StepError"]
