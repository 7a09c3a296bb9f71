"""Generation for TRL's trainers, in each of their processes: `use_vllm=True` uses nanovllm instead of vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import make_params
from nanovllm.utils.display import install_hint

try:
    import trl
    from trl.generation.vllm_generation import VLLMGeneration
except ImportError as error:
    raise ImportError(f"TRL cannot be imported ({error}): {install_hint('trl')}") from error

_MODEL_IMPLS = {"auto": "auto", "vllm": "native", "transformers": "transformers"}
_SUPPORTED: dict[str, list[Any]] = {"mode": ["colocate"], "tensor_parallel_size": [1], "model_impl": [*_MODEL_IMPLS]}


class NanoVLLMGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration`, including its synchronisation of weights, with a one-rank engine on the trainer's device.

    Server mode, tensor parallelism and images are a ValueError. `engine_settings`: more settings of `LLM`, on the
    class.
    """

    engine_settings: ClassVar[dict[str, Any]] = {}

    def _init_vllm(self) -> None:
        """Make the engine."""
        for name, values in _SUPPORTED.items():
            if (value := getattr(self, name)) not in values:
                raise ValueError(f"vllm_{name}={value!r} is not supported, only {values}")
        # The trainer computes log-probabilities without top-k, top-p and min-p.
        settings: dict[str, Any] = {
            "device": str(self.accelerator.device), "seed": self.accelerator.process_index,
            "gpu_memory_utilization": self.gpu_memory_utilization, "max_num_seqs": self.max_num_seqs,
            "max_model_len": self.max_model_length, "model_impl": _MODEL_IMPLS[self.model_impl],
            "logprobs_mode": "scaled_logprobs", "trust_remote_code": getattr(self, "trust_remote_code", False),
        }  # fmt: skip
        settings = {name: value for name, value in settings.items() if value is not None}
        self.llm = LLM(self.model.name_or_path, **(settings | self.engine_settings))
        # TRL expects the model that loads weights, and its length, here.
        engine: Any = self.llm.llm_engine
        runner = SimpleNamespace(model=self.llm)
        engine.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        engine.model_config = SimpleNamespace(max_model_len=self.llm.max_model_len)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode
        self.accelerator.wait_for_everyone()

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> tuple[Any, ...]:
        """Complete prompts given as token ids; see TRL's `VLLMGeneration.generate`."""
        if images is not None and any(images):
            raise ValueError("images are not supported")
        if self._llm_weights_sleeping:
            self.sync_weights()
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        with profiler or nullcontext():
            outputs: list[Any] = self.llm.generate(prompts, self._sampling_params(), use_tqdm=False)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
            self._llm_weights_sleeping = True
        completions = [completion for output in outputs for completion in output.outputs]
        prompt_ids, token_ids = [o.prompt_token_ids for o in outputs], [c.token_ids for c in completions]
        if self.logprobs is None:
            return prompt_ids, token_ids, None, None
        # Most likely first, as in TRL.
        steps = [[sorted(step.items(), key=lambda item: item[1].rank) for step in c.logprobs] for c in completions]
        values = [[[logprob.logprob for _, logprob in step] for step in each] for each in steps]
        return prompt_ids, token_ids, values, [[[token for token, _ in step] for step in each] for each in steps]

    def _sampling_params(self) -> SamplingParams:
        given = {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": max(0, self.top_k or 0),
            "min_p": self.min_p or 0.0, "repetition_penalty": self.repetition_penalty,
            "max_tokens": self.max_completion_length, "logprobs": self.logprobs,
            "detokenize": bool(self.generation_kwargs.get("stop")),
            **self.generation_kwargs,
        }  # fmt: skip
        if self.structured_outputs_regex is not None:
            given["structured_outputs"] = {"regex": self.structured_outputs_regex}
        return make_params(given)


@contextmanager
def patched() -> Iterator[None]:
    """Make trainers that are created inside the `with` block generate with nanovllm; import TRL's trainers before."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("trl.") and "VLLMGeneration" in vars(module):
                stack.enter_context(mock.patch.object(module, "VLLMGeneration", NanoVLLMGeneration))
                if "is_vllm_available" in vars(module):
                    stack.enter_context(mock.patch.object(module, "is_vllm_available", lambda *_, **__: True))
        yield


class _PatchedTrainer:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with patched():
            super().__init__(*args, **kwargs)


class GRPOTrainer(_PatchedTrainer, trl.GRPOTrainer):
    """TRL's `GRPOTrainer`; `use_vllm=True` uses nanovllm."""


class RLOOTrainer(_PatchedTrainer, trl.RLOOTrainer):
    """TRL's `RLOOTrainer`; `use_vllm=True` uses nanovllm."""
