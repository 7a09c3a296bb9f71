"""A model and its engine, as every front end has them: processors, state, and control between two steps."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from nanovllm.client.engine_client import EngineClient, RequestState
from nanovllm.client.loading import LoadedModel
from nanovllm.config import (
    AttentionBackendName,
    Config,
    Dtype,
    KVCacheDtype,
    LoadFormat,
    LogprobsMode,
    ModelImpl,
    Pooling,
    Quantization,
)
from nanovllm.configs.model import folder_pooling
from nanovllm.engine.engine import SLEEP_TAGS, EngineRunningError, PauseMode, Unpicklable
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.stats import BlockUsage, StatsSample, StepHistograms
from nanovllm.outputs import StepResult
from nanovllm.sampling_params import SamplingParams, recommended_values
from nanovllm.text.chat_template import ChatTemplateOptions
from nanovllm.text.input_processor import InputProcessor, Prompt, TokenIds
from nanovllm.text.output_processor import OutputProcessor
from nanovllm.utils.checks import check_bool
from nanovllm.utils.remote import absolute_folder
from nanovllm.weights.report import LoadedWeights

if TYPE_CHECKING:
    from nanovllm.text.answers import AnswerFormat, AnswerOptions

_POLL_SECONDS = 0.005
Weights = Iterable[tuple[str, Any]] | Mapping[str, Any] | str | os.PathLike[str]
_MOST_QUEUED = 4000
"""Requests that a job holds ready for several replicas."""


class EngineSettings(TypedDict, total=False):
    """Keyword arguments of `LLM` for type checkers and editors: the fields of `Config` except the model."""

    tokenizer: str | None
    device: str
    dtype: Dtype
    tensor_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    enforce_eager: bool
    kvcache_block_size: int
    kv_cache_dtype: KVCacheDtype
    num_kvcache_blocks: int
    swap_space: float
    enable_prefix_caching: bool
    attention_backend: AttentionBackendName
    load_format: LoadFormat
    quantization: Quantization | None
    model_impl: ModelImpl
    revision: str | None
    trust_remote_code: bool
    logprobs_mode: LogprobsMode
    max_logprobs: int
    seed: int | None
    speculative_config: Mapping[str, Any] | None


class ModelClient(Unpicklable):
    """A loaded model: `LLM` adds calls that step its engine, `AsyncLLM` has a thread that does.

    Methods that change the engine do so between two steps, and may be called from any thread. `device` is the first
    rank's, `dtype` is of weights and KV cache, and requests must keep to `limits`.
    """

    def __init__(self, config: Config, loaded: LoadedModel) -> None:
        files, device = loaded.files, loaded.device
        self.config, self._folder = config, files.folder
        self.device, self.dtype, self.device_name = device.device, device.dtype, device.name
        self.model_config, self.tokenizer, self.eos_token_ids = files.model_config, files.tokenizer, files.eos_token_ids
        self.limits = loaded.engine.limits
        self.input_processor = InputProcessor(
            self.tokenizer, self.limits, files.constraints, loaded.engine.seeds, files.model_config.has_head
        )
        self.output_processor = OutputProcessor(self.tokenizer)
        self.engine_client = EngineClient(loaded.engine, self.output_processor)
        self._engine = loaded.engine

    @cached_property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, embeddings included."""
        from nanovllm.models import count_parameters  # noqa: PLC0415

        return count_parameters(self.model_config)

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, if it is in this process; otherwise raises a ValueError."""
        if not isinstance(self._engine, LLMEngine):
            raise ValueError("this needs an engine in this process (data_parallel_size=1), and it is in others")
        return self._engine

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """The model's format of tool calls and thoughts, as its chat template shows."""
        from nanovllm.text.answers import AnswerFormat  # noqa: PLC0415

        return AnswerFormat(self.tokenizer)

    def answer_options(self, template: ChatTemplateOptions) -> AnswerOptions | None:
        """Return how answers are parsed; None if there are no tools, and answers are text."""
        if not (tools := template.get("tools")):
            return None
        from nanovllm.text.answers import AnswerOptions  # noqa: PLC0415

        # Chat templates may accept more kinds of tools than OpenAI's API does.
        return AnswerOptions(self.answer_format, tools, separates=self.answer_format.has_channels)

    @property
    def default_pooling(self) -> Pooling:
        """The pooling of a sentence-transformers folder, "last" for others; ValueError if it is not supported."""
        return folder_pooling(self._folder)

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, one of transformers; None if the model's folder has none."""
        return self.tokenizer

    @property
    def most_pending(self) -> int:
        """Requests that a job has in the engine at a time: one running batch, and an equal number waiting.

        Several engines get them from the front end's own queue, which is longer, so that each one's part is long.
        """
        count = 2 * self.config.max_num_running
        return count if self._engine.is_in_process else max(self.config.data_parallel_size * count, _MOST_QUEUED)

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request, prompt and output together: the setting, capped by the model's own limit."""
        return self.limits.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's `generation_config.json` recommends."""
        return SamplingParams.from_model(self._folder)

    def recommended_values(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's `generation_config.json` sets, by name."""
        return recommended_values(self._folder)

    def add_request(
        self, prompt: Prompt | TokenIds, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> int:
        """Queue a request and return its id; see `LLMEngine.add_request`.

        Example:
            >>> request_id = llm.add_request("Hello", SamplingParams(max_tokens=8))
            >>> while not llm.is_finished():
            ...     for finished_id, output in llm.step().finished:
            ...         assert finished_id == request_id
        """
        self.require_awake()
        params = SamplingParams() if sampling_params is None else sampling_params
        # An engine in another process tells `step` the tokens of streamed requests alone.
        streams = not self._engine.is_in_process
        (request,) = self.input_processor.process([prompt], [params], [priority], streams=streams)
        state = RequestState(request, self.output_processor)
        state.awaits_step = True
        self.engine_client.add(state)
        return state.request_id

    def step(self) -> StepResult:
        """Run one step of the engine; see `LLMEngine.step`."""
        return self.engine_client.step()

    def abort(self, request_ids: Iterable[int]) -> None:
        """Drop requests; see `LLMEngine.abort`."""
        self.engine_client.abort(request_ids)

    def is_finished(self) -> bool:
        """Whether no request is left, and every result has been returned."""
        return self.engine_client.is_finished()

    def load_weights(self, weights: Weights, *, strict: bool = False) -> int:
        """Write weights into the running model, in place, on every rank and replica.

        The prefix cache keeps results of the old weights until `reset_prefix_cache`. Replicas get tensors through files
        in a temporary folder.

        Args:
            weights: tensors by their names in the checkpoint, as pairs or as a dict, on any device and of any plain
                float dtype; or a folder with safetensors, which fsspec may open (`s3://`). A tied head is ignored.
                A folder of a PEFT adapter (LoRA) is merged into the weights, replacing the previous one;
                `unload_adapter` removes it, and so do other weights.
            strict: refuse to leave a tensor of the model unchanged.

        Returns:
            The number of tensors written. A warning names one that has NaN.

        Raises:
            ValueError: a name, shape or dtype does not fit: nothing of that tensor is written, and of a folder nothing
                at all; the message has the number written before. Or see `strict`.
            RuntimeError: requests are pending, and the engine is not paused; its weights are asleep; a folder or a
                tensor was written in part, and nothing is generated until all of it is loaded; or an adapter was not
                merged, and, if it could not be removed again, nothing is generated until `unload_adapter` has done so.
                Or the pairs' iterator raised, which is the cause.

        Example:
            >>> llm.load_weights([("model.norm.weight", torch.ones(256))])
            1
        """
        loaded = self.load_and_report(weights, strict=strict)
        warn_of_nans(loaded.nan_names)
        return loaded.count

    def load_and_report(self, weights: Weights, *, strict: bool = False) -> LoadedWeights:
        """Like `load_weights`, and return which tensors have NaN instead of warning."""
        check_bool("strict", strict)
        given: Any = absolute_folder(os.fspath(weights)) if isinstance(weights, str | os.PathLike) else weights
        self._engine.state.require_no_requests("load_weights", self._engine.request_ids)
        return self._engine.load_weights(given, strict)

    def unload_adapter(self) -> bool:
        """Remove the adapter that `load_weights` has merged; the weights are restored bit for bit.

        Returns:
            Whether there was one.

        Raises:
            RuntimeError: see `load_weights`; or a part of the adapter remains, and nothing is generated until a later
                call has removed it.
        """
        self._engine.state.require_no_requests("unload_adapter", self._engine.request_ids)
        # Some replicas may have restored theirs in an earlier call, which failed in another.
        return any(self._engine.call(LLMEngine.unload_adapter))

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache; return whether no request, such as a paused one, holds blocks."""
        return all(self._engine.call(LLMEngine.reset_prefix_cache))

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop running steps until `resume`; new requests are accepted, and wait.

        Args:
            mode: "keep" freezes requests with their keys and values, between two steps; "wait" first lets current
                requests finish; "abort" ends them with their output so far, `finish_reason` "abort".

        Raises:
            ValueError: an unknown mode.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f"mode must be one of {', '.join(get_args(PauseMode))}, not {mode!r}")
        self._engine.call(LLMEngine.pause, mode)
        if mode == "abort":
            # Includes requests that no replica has yet.
            self._engine.abort(self._engine.request_ids, keep_outputs=True)
        else:
            self._drain()

    def _drain(self) -> None:
        """Let requests finish; their results are kept for their callers."""

        def is_draining() -> bool:
            return any(self._engine.call(LLMEngine.is_draining))

        while is_draining():
            try:
                for _ in self.engine_client.steps(is_draining):
                    pass
            except EngineRunningError:
                time.sleep(_POLL_SECONDS)

    def resume(self) -> None:
        """Continue after a `pause`."""
        self._engine.call(LLMEngine.resume)

    def sleep(self, level: int = 1) -> None:
        """Release the memory of the weights, the KV cache and the CUDA graphs, until `wake_up`.

        Requests of a paused engine are computed again afterwards.

        Args:
            level: 1 keeps the weights in host memory; 2 drops them, and `load_weights` must load all of them.

        Raises:
            ValueError: another level.
            RuntimeError: requests are pending, and the engine is not paused.
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, not {level!r}")
        self._engine.state.require_no_requests("sleep", self._engine.request_ids)
        self._engine.call(LLMEngine.sleep, level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again, and restore weights kept by `sleep(1)`. Parts that are awake stay unchanged.

        Args:
            tags: "weights", "kv_cache", or both; None for both.

        Raises:
            ValueError: another tag.

        Example:
            >>> llm.sleep(level=2)
            >>> llm.wake_up(["weights"])
            >>> num_tensors = llm.load_weights(llm.config.model)
            >>> llm.wake_up(["kv_cache"])
        """
        chosen = list(SLEEP_TAGS) if tags is None else tags
        if isinstance(chosen, str) or not set(chosen) <= set(SLEEP_TAGS):
            raise ValueError(f"tags must be a list of some of {', '.join(SLEEP_TAGS)}, not {tags!r}")
        self._engine.call(LLMEngine.wake_up, list(chosen))

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are asleep."""
        return bool(self._engine.state.asleep)

    @property
    def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return self._engine.state.pause_mode is not None

    def require_awake(self) -> None:
        """Raise a RuntimeError if the engine is closed or cannot run a step."""
        self._engine.require_open()
        if (lack := self._engine.state.cannot_run) is not None:
            raise RuntimeError(lack)

    def require_ready(self) -> None:
        """Like `require_awake`, and reject a paused engine: the caller would wait for itself."""
        self.require_awake()
        if self.is_paused:
            raise RuntimeError("the engine is paused: call resume()")

    def stats(self) -> dict[str, Any]:
        """Return integers: counters since the engine began (a list: `num_accepted_per_position`), and blocks in use."""
        return self._engine.stats(now=True)

    def block_usage(self, most_cells: int = 2048) -> BlockUsage:
        """Return the state of the cache's blocks, of all replicas, in at most `most_cells` cells; see `BlockUsage`."""
        share = max(1, most_cells // self.config.data_parallel_size)
        return _joined_usage(self._engine.call(LLMEngine.block_usage, share))

    def stats_history(self) -> list[StatsSample]:
        """Return the counters since the engine began, over time; see `Engine.stats_history`."""
        return self._engine.stats_history()

    def step_histograms(self) -> StepHistograms:
        """Return histograms of step sizes, and of the times between tokens of an output."""
        merged = StepHistograms()
        for histograms in self._engine.call(attrgetter("histograms")):
            merged.step_tokens.merge(histograms.step_tokens)
            merged.inter_token_seconds.merge(histograms.inter_token_seconds)
        return merged

    def exit(self) -> None:
        """Free the device; see `LLMEngine.exit`."""
        self._engine.exit()


def warn_of_nans(names: list[str]) -> None:
    """Warn the caller of the calling function of tensors that have NaN."""
    if names:
        warnings.warn(f"{len(names)} tensors that were loaded have NaN, such as {names[0]!r}", stacklevel=3)


def _joined_usage(usages: Sequence[BlockUsage]) -> BlockUsage:
    """Return the blocks of several engines' caches of about one size, concatenated."""
    first = usages[0]
    cells = {
        name: [n for usage in usages for n in getattr(usage, name)] for name in ("used", "cached", "users", "hits")
    }
    return BlockUsage(first.block_size, sum(usage.num_blocks for usage in usages), first.blocks_per_cell, **cells)
