"""Runs the model on one device: loads its shard, sizes the cache, runs batches.

A step is two calls, which only queue work. `forward` sends changes to the device and computes logits; `sample` draws
tokens, stores them in their slots for the next step, and starts copying them to the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import Enum
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from nanovllm.attention import AttentionSetup, check_backend, make_backend
from nanovllm.attention.kv_cache_groups import KVCacheGroup, have_equal_pages, make_groups, single_group
from nanovllm.attention.kv_cache_spec import StateLayout
from nanovllm.attention.metadata import set_step_metadata
from nanovllm.config import Config
from nanovllm.configs.model import ModelConfig
from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.compile_ahead import compile_ahead, compiler_ready
from nanovllm.kernels.policy import FASTEST, KernelPolicy
from nanovllm.kernels.slot_tensors import scatter_tokens
from nanovllm.models import load_model
from nanovllm.models.draft_head import load_draft_head
from nanovllm.parallel.communicator import Communicator
from nanovllm.runner.batch import BatchBuilder, DeviceStep, StepInputs, StepShape, Unsampled
from nanovllm.runner.cuda_graph import StepGraphs, make_capture_sizes, max_draft_rows
from nanovllm.runner.drafter import Drafter, HeadDrafter, NgramDrafter
from nanovllm.runner.host_blocks import HostBlocks
from nanovllm.runner.kv_cache import KVCache, block_bytes, state_kind
from nanovllm.runner.memory import free_memory, most_extra_bytes, num_cache_blocks, num_host_slots, profiling_batch
from nanovllm.runner.messages import NO_DRAFTS, CacheKind, DraftCosts, HostMemory, PagedCache, Rows, ScheduledBatch
from nanovllm.runner.step_outputs import OutputBuffers, PendingStep, prompt_outputs
from nanovllm.sampling.sampler import DeviceLogprobs, ExtraRows, Sampled, Sampler
from nanovllm.sampling.state import SamplingState
from nanovllm.utils.device import resolve_device, resolve_dtype
from nanovllm.utils.display import loading_bar
from nanovllm.weights.model_weights import WeightsLoader
from nanovllm.weights.report import MissingWeights

_CPU_DRAFT_RATIO = 1.25
"""`DraftCosts.ratios` of a CPU, which is not measured, so that answers take the same steps everywhere."""
_MEASURED_ROWS = (1, 8, 32)
_WARM_STEPS, _TIMED_STEPS = 2, 5
"""Rows of the steps that are timed for `DraftCosts`, beside the most, and how often each runs."""


class _Part(Enum):
    """The part of a step that `ModelRunner.forward` queues; the rest follows in `sample`."""

    WHOLE_CHUNKS = "logits, and the hidden states of all tokens of chunks"
    FORWARD = "logits"
    SAMPLED = "tokens of rows with temperature as their only option"
    SAMPLED_WITH_LOGPROBS = "tokens, and the log-probabilities of all rows"


class ModelRunner:
    """Runs the steps of one engine on one device, alone or with other ranks that share the model (`communicator`).

    Raises a ValueError if a device, dtype or backend is unavailable, or weights do not fit the config.
    """

    # Chooses the kernels of weights, attention and collectives.
    policy: KernelPolicy = FASTEST

    def __init__(
        self, config: Config, model_config: ModelConfig, folder: str,
        *, max_model_len: int, communicator: Communicator | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.model_config = model_config
        self.communicator = communicator or Communicator()
        self.communicator.policy = self.policy
        self.device = resolve_device(config.device, self.communicator.rank, self.communicator.size)
        self.is_cuda = self.device.type == "cuda"
        if uses_triton(self.device):
            compiler_ready(self.device)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, self.is_cuda)
        self.kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else self.dtype
        # A step is planned while the previous one runs; on the CPU both would use the same cores.
        self.pipeline_depth = 1 if self.is_cuda else 0
        check_backend(config.attention_backend, self.device, self.dtype, config.kvcache_block_size)
        self.num_drafts = config.num_drafts
        self.max_draft_rows = max_draft_rows(config)
        self.max_model_len = max_model_len
        # Drafts may be beyond the last token.
        self.max_blocks = -(-(max_model_len + self.num_drafts) // config.kvcache_block_size)
        self.graphs: StepGraphs | None = None
        self.host_memory: HostMemory | None = None
        with self._device_guard():
            free_before = free_memory(self.device)
            self._load(folder)
            self._make_backend()
            self._make_buffers()
            can_capture = self.is_cuda and self.model.supports_cuda_graph
            self.capture_sizes = make_capture_sizes(config, self.backend, self.model, can_capture)
            # One block is enough to compile with, and to run a step whose results do not count.
            self._allocate(num_blocks=1)
            self._compile_kernels()
            self.num_kvcache_blocks = self._measure_cache(free_before)
            self._free()
            self._num_clipped.zero_()
            self._allocate(self.num_kvcache_blocks)
            self._capture()
            self.draft_costs = self._measure_drafts()
            if config.swap_space:
                self.host_memory = self._make_host_memory()

    def _load(self, folder: str) -> None:
        self.model, self.weights = load_model(
            self.model_config, self.communicator, self.config, folder, self.max_model_len, self.dtype, self.device
        )
        self.head = load_draft_head(self.config, self.model, folder, self.max_model_len, self.dtype, self.device)
        models = [self.model] if self.head is None else [self.model, self.head]
        for model in models:
            model.set_kernel_policy(self.policy)
        for layer in self.model.state_layers:
            layer.keep_drafts(self.num_drafts, self.config.max_num_running, self.dtype, self.device)
        self.attention_layers = [layer for model in models for layer in model.attention_layers]

    def _make_backend(self) -> None:
        config, self.shard = self.config, self.model.shard
        self.kv_specs = [layer.kv_cache_spec(self.kv_dtype) for layer in self.attention_layers]
        self.kv_groups = self._make_groups()
        self.cache_kinds = self._make_kinds()
        block_size, num_heads = config.kvcache_block_size, self.shard.heads.size
        setup = AttentionSetup(
            self.device, self.dtype, block_size, num_heads, self.kv_specs, config.max_num_running,
            shares_prefixes=config.enable_prefix_caching, all_reduce_min=self.communicator.all_reduce_min,
            policy=self.policy,
        )  # fmt: skip
        self.backend = make_backend(config.attention_backend, setup)

    def _make_groups(self) -> list[KVCacheGroup]:
        """Divide the layers into groups, alike on all ranks; with `swap_space` one group, which keeps all blocks."""
        config, specs = self.config, self.kv_specs
        is_one = config.swap_space or not have_equal_pages(specs)
        if not self.communicator.all_reduce_min(int(not is_one)):
            return single_group(specs)
        return make_groups(specs, config.kvcache_block_size, self.max_blocks)

    def _make_kinds(self) -> list[CacheKind]:
        """Return the kind of each group of the cache: groups of attention layers, then the states, if any."""
        kinds: list[CacheKind] = [PagedCache(group.window) for group in self.kv_groups]
        self.num_state_blocks = 0
        self.state_layout = StateLayout.of([layer.state_spec(self.dtype) for layer in self.model.state_layers])
        if self.model.state_layers:
            num_bytes = block_bytes(self.kv_specs, self.kv_groups, self.config.kvcache_block_size)
            kind = state_kind(self.state_layout.num_bytes, num_bytes)
            # A rank may have more heads than another.
            self.num_state_blocks = -self.communicator.all_reduce_min(-kind.num_blocks)
            kinds.append(replace(kind, num_blocks=self.num_state_blocks))
        return kinds

    def _make_buffers(self) -> None:
        """Allocate the device buffers of steps beside weights and cache."""
        config = self.config
        self.sampler = Sampler(self.shard.vocab, self.communicator, config.logprobs_mode)
        self.batch_builder = BatchBuilder(
            config.max_num_running, self.max_blocks, config.kvcache_block_size, config.max_num_batched_tokens,
            self.backend, self.device, num_groups=len(self.cache_kinds), num_state_blocks=self.num_state_blocks,
            num_drafts=self.num_drafts,
        )  # fmt: skip
        self.drafter = self._make_drafter()
        # Tokens of decode rows, padding, and tokens of chunks; and what `PendingStep` says of drafts.
        num_rows = 2 * config.max_num_running
        num_counts = 0 if self.drafter is None else 2 * num_rows + self.max_draft_rows * self.num_drafts
        self._sampled = torch.zeros(num_rows + num_counts, dtype=torch.int64, device=self.device)
        self._output_buffers = OutputBuffers(self._sampled)
        self._num_clipped = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.sampling = SamplingState(self.model_config.vocab_size, self.device, config.logprobs_mode)

    def _make_drafter(self) -> Drafter | None:
        config, speculation = self.config, self.config.speculation
        if speculation is None:
            return None
        if self.is_cuda and not self.backend.supports_mixed_graph:
            raise ValueError(
                f"speculative_config does not support attention_backend={config.attention_backend!r} on a GPU: use "
                "'triton', whose steps with drafts are CUDA graphs"
            )
        if self.head is None:
            return NgramDrafter(speculation, config.max_num_running, self.max_model_len, self.device)
        return HeadDrafter(self.head, self.backend, block_size=config.kvcache_block_size, num_drafts=self.num_drafts)

    def _allocate(self, num_blocks: int) -> None:
        """Give every layer its pages of a cache; undone by `_free`."""
        self.kv_cache = KVCache(
            self.attention_layers, self.kv_specs, self.kv_groups, self.backend, self._num_clipped,
            num_blocks=num_blocks, block_size=self.config.kvcache_block_size,
            state_layers=self.model.state_layers, layout=self.state_layout,
        )  # fmt: skip
        if self.host_memory is not None:
            self.kv_cache.keep_blocks(self.host_memory.num_slots)

    def _make_host_memory(self) -> HostMemory:
        """Keep blocks in host memory as well, also of the caches that replace this one after a sleep."""
        block_bytes = self.kv_cache.block_bytes
        num_slots = num_host_slots(self.config, self.communicator, self.cache_kinds[0], block_bytes)
        self.kv_cache.keep_blocks(num_slots)

        def host() -> HostBlocks:
            assert self.kv_cache.copies is not None
            return self.kv_cache.copies.host

        return HostMemory(num_slots, lambda: host().num_ready_slots, lambda: host().has_all_slots, block_bytes)

    def _free(self) -> None:
        if "kv_cache" in vars(self):
            self.kv_cache.unbind()
            del self.kv_cache

    def _measure_cache(self, free_before: int) -> int:
        """Return the number of blocks of the cache; if memory decides, run the largest step."""
        config, num_groups, vocab_size = self.config, len(self.kv_groups), self.model_config.vocab_size
        num_copied = num_groups + self.num_state_blocks
        return num_cache_blocks(
            config, self.device, self.communicator, free_before=free_before, num_groups=num_groups,
            num_state_blocks=self.num_state_blocks, block_bytes=self.kv_cache.block_bytes,
            most_blocks=(num_groups * self.max_blocks + self.num_state_blocks) * config.max_num_running,
            run_step=lambda: self._run(
                profiling_batch(config, self.max_blocks, len(self.cache_kinds), self.max_model_len)
            ),
            extra_bytes=most_extra_bytes(config, vocab_size, num_copied * self.kv_cache.most_copied_bytes),
        )  # fmt: skip

    def _run(self, batch: ScheduledBatch) -> None:
        self.sample(self.forward(batch)).result()

    def _capture(self) -> None:
        """Capture the largest graph, into whose memory the others fit; the first run of two loads modules."""
        if not self.capture_sizes.shapes or self.config.enforce_eager:
            return
        self.graphs = StepGraphs()
        with torch.inference_mode(), loading_bar("Capturing graphs", 2, "run", self.communicator.rank) as bar:
            step = self.batch_builder.send_empty(self.capture_sizes.shapes[-1])
            for _ in range(2):
                self.communicator.prepare_step()
                self._run_or_replay(step, _Part.SAMPLED)
                bar.update()

    def _measure_drafts(self) -> DraftCosts:
        """Time steps with drafts and without; on the CPU nothing is timed."""
        if not self.max_draft_rows:
            return NO_DRAFTS
        if not self.is_cuda:
            return DraftCosts((self.max_draft_rows,), (_CPU_DRAFT_RATIO,), self.head is None)
        rows = [*(number for number in _MEASURED_ROWS if number < self.max_draft_rows), self.max_draft_rows]
        seconds = [(self._step_seconds(number, self.num_drafts), self._step_seconds(number, 0)) for number in rows]
        self._num_clipped.zero_()
        # A plan of attention serves steps with rows in the same slots; these end with the next.
        self.batch_builder.plan(ScheduledBatch())
        return DraftCosts(tuple(rows), tuple(drafted / plain for drafted, plain in seconds), self.head is None)

    def _step_seconds(self, num_rows: int, num_drafts: int) -> float:
        """Return the time of a step of rows in slots and a block that have not been given away yet."""
        # With a full block they would share a prefix.
        slots, length = np.arange(num_rows, dtype=np.int32), min(self.config.kvcache_block_size, self.max_model_len) - 1
        rows = Rows(slots, np.full_like(slots, 1 + num_drafts), np.full_like(slots, length))
        batch, state = ScheduledBatch(rows=rows, drafts=num_drafts > 0), self.batch_builder.slots.tensors
        # Tokens that differ are sent to different experts.
        vocab_size, size, ends = self.model_config.vocab_size, (num_rows, 1 + self.num_drafts), list[float]()
        tokens = torch.randint(vocab_size, size, generator=torch.Generator()).to(self.device)
        fields = [getattr(state, name)[:num_rows] for name in ("last_token", "drafts", "num_computed", "num_blocks")]
        for count in (_WARM_STEPS, _TIMED_STEPS):
            for _ in range(count):
                for field, values in zip(fields, (tokens[:, 0], tokens[:, 1:], length, self.max_blocks), strict=True):
                    field[:] = values
                self.sample(self.forward(batch))
            self.synchronize()
            ends.append(time.perf_counter())
        for field in fields:
            field.zero_()
        return (ends[1] - ends[0]) / _TIMED_STEPS

    def _drop_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None

    def forward(self, batch: ScheduledBatch) -> DeviceStep:
        """Queue a step's forward pass, and its sampling with it if no host data is needed.

        Both are one CUDA graph if there is one for the step's size and its rows only use a temperature, or also their
        tokens' log-probabilities.
        """
        with torch.inference_mode(), self._device_guard():
            self.communicator.prepare_step()
            step = self.prepare(batch)
            self.kv_cache.load_and_save(batch)
            if batch.has_extra:
                step.extra = self._extra_rows(step)
            step.computed = self._run_or_replay(step, self._part(step))
            return step

    def prepare(self, batch: ScheduledBatch) -> DeviceStep:
        """Send a batch's changes to the device, padded to a capture size if one is large enough."""
        for request in batch.new_requests:
            self.sampling.add(request.slot, request.extra)
            if self.drafter is not None:
                self.drafter.add(request.slot, request.token_ids)
        self.kv_cache.begin_step(batch)
        exact, plan = self.batch_builder.plan(batch)
        padded = self.capture_sizes.fit(exact)
        return self.batch_builder.send(batch, padded or exact, plan, is_capture_size=padded is not None)

    def _extra_rows(self, step: DeviceStep) -> ExtraRows | None:
        batch, slots, own = step.batch, self.batch_builder.slots, step.batch.rows.slots
        if step.shape.num_drafts:
            # What is not new in a row is padding.
            is_new = np.arange(1 + step.shape.num_drafts) < batch.rows.num_new[:, None]
            own = np.where(is_new, own[:, None], slots.padding_slot).flatten()
        sampled = own.tolist()
        sampled += [slots.padding_slot] * (step.shape.num_row_tokens - len(sampled))
        sampled += [chunk.slot for chunk in batch.chunks if chunk.samples]
        return self.sampling.rows_of(sampled, slots.num_computed)

    def _part(self, step: DeviceStep) -> _Part:
        """Return the part of a step that needs no host data."""
        if step.batch.scored_seq_ids:
            return _Part.WHOLE_CHUNKS
        if not step.batch.has_extra:
            return _Part.SAMPLED
        if step.extra is not None and step.extra.only_own_logprobs and self.communicator.size == 1:
            return _Part.SAMPLED_WITH_LOGPROBS
        return _Part.FORWARD

    def _run_or_replay(self, step: DeviceStep, part: _Part) -> Sampled | Unsampled:
        run = partial(self._compute, step, part)
        if self.graphs is None or not step.is_capture_size or part is _Part.WHOLE_CHUNKS:
            return run()
        return self.graphs.run((part, step.shape), run)

    def _compute(self, step: DeviceStep, part: _Part) -> Sampled | Unsampled:
        """Run the model, and the sampler if it is in the part."""
        self.communicator.begin_step()
        inputs = self.batch_builder.gather(step)
        if part is _Part.WHOLE_CHUNKS:
            asked = {number for chunk in step.batch.chunks for number in chunk.hidden_states}
            logits, states = self._run_model(inputs, {*asked, self.model_config.num_layers})
            first = step.shape.num_row_tokens
            return Unsampled(inputs, logits, {number: tensor[first:] for number, tensor in states.items()})
        logits = self._run_model(inputs)[0]
        if part is _Part.FORWARD:
            return Unsampled(inputs, logits)
        with_logprobs = part is _Part.SAMPLED_WITH_LOGPROBS
        sample = self.sampler.sample_with_logprobs if with_logprobs else self.sampler.sample
        sampled = sample(logits, inputs.sampling)
        self._scatter(inputs, sampled.token_ids)
        return sampled

    def _run_model(
        self, inputs: StepInputs, layer_ids: Collection[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run the model, and hand the drafter what it reads; `layer_ids`: of further states to return.

        Returns the logits, [num_samples, tokens of this rank], and all tokens' states, [num_tokens, hidden_size]: by
        layer what it takes, and by the number of layers those after the last norm.
        """
        model, last, rows = self.model, self.model_config.num_layers, inputs.sample_indices
        drafter_ids = () if self.head is None else self.head.layer_ids
        asked = {*layer_ids, *drafter_ids}
        found: dict[int, Any] = dict.fromkeys(asked - {last})
        self.backend.plan(inputs.metadata)
        with set_step_metadata(inputs.metadata):
            x, residual = model(inputs.token_ids, inputs.positions, None if last in asked else rows, found)
        if last in asked:
            hidden = found[last] = model.hidden_states(x, residual)
            logits = model.project_logits(hidden if rows is None else hidden[rows])
        else:
            logits = model.compute_logits(x, residual)
        if drafter_ids:
            parts = [found[number] for number in drafter_ids]
            inputs.hidden_states = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return logits, found

    def sample(self, step: DeviceStep, masks: np.ndarray | None = None) -> PendingStep:
        """Queue the rest of a step: its sampling, and the copy of its tokens to the host; see `Runner`."""
        with torch.inference_mode(), self._device_guard():
            computed, prompts = step.computed, list[DeviceLogprobs | torch.Tensor]()
            assert computed is not None
            if isinstance(computed, Unsampled):
                logprobs = self._sample_logits(step, computed, masks).logprobs
                if computed.prompt_states:
                    prompts = prompt_outputs(self.model, self.sampler, step.batch.chunks, computed.prompt_states)
            else:
                logprobs = None if step.extra is None else computed.logprobs_of(step.extra.logprob_indices)
            return self._output_buffers.copy(step, logprobs, prompts, self.kv_cache.num_clipped)

    def _sample_logits(self, step: DeviceStep, computed: Unsampled, masks: np.ndarray | None) -> Sampled:
        """Sample from a forward pass's logits, with masks and all options beyond a temperature."""
        self.communicator.begin_sampling()
        extra, num_rows = step.extra, len(step.batch.rows)
        if extra is not None and masks is not None:
            # The only token that is new in a row, its first, or a chunk's.
            first, per_row = step.shape.num_row_tokens - num_rows, 1 + step.shape.num_drafts
            masked = [row * per_row if row < num_rows else row + first for row in step.batch.masked]
            self.sampling.add_masks(extra, masked, masks)
        sampled = self.sampler.sample(computed.logits, computed.inputs.sampling, extra)
        if extra is not None:
            self.sampling.count(extra, sampled.token_ids)
        self._scatter(computed.inputs, sampled.token_ids)
        return sampled

    def _scatter(self, inputs: StepInputs, token_ids: torch.Tensor) -> None:
        """Store tokens in their slots for the next step, and in `_sampled`, from which they are copied to the host."""
        slots, metadata, state = inputs.sample_slots, inputs.metadata, self.batch_builder.slots.tensors
        num_decodes, end, num_pending = metadata.num_decodes, len(token_ids), self.batch_builder.num_pending
        seq_lens = None if metadata.row_positions is None else metadata.seq_lens
        scatter_tokens(state, slots, token_ids, num_decodes, self._sampled, seq_lens)
        if num_pending is not None and seq_lens is None:
            num_pending.index_fill_(0, slots[:num_decodes].long(), 0)
        if seq_lens is not None:
            gained, end = self._sampled[end : end + num_decodes], end + num_decodes
            if num_pending is not None:
                num_pending[slots[:num_decodes]] = gained.int()
        if self.drafter is not None:
            self.drafter.propose(state, inputs, token_ids)
        if inputs.drafts:
            self._sampled[end : end + len(slots)] = (state.drafts[slots] >= 0).sum(1)

    def check(self) -> None:
        """Raise if launched work has failed, without waiting."""
        if self.is_cuda:
            self._stream.query()

    def synchronize(self) -> None:
        """Wait for all launched work; raises if the device is lost."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def _device_guard(self) -> AbstractContextManager[Any]:
        """Make the device and one stream of it current: Triton launches there, whatever its arguments' device.

        Steps are ordered by their stream, and the caller's may change between two of them.
        """
        return torch.cuda.stream(self._stream) if self.is_cuda else nullcontext()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.default_stream(self.device)

    def weights_loader(self) -> WeightsLoader:
        """Return the loader of this rank's weights, which are looked up at each use."""

        def call(function: Callable[..., Any], *args: Any, own: Callable[[], Any] | None = None) -> list[Any]:
            return [self.on_weights(function, *args) if own is None else own()]

        return WeightsLoader(lambda: self.weights, call, self.sleep, self.wake_up)

    def on_weights(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function with this rank's weights and other arguments, on the stream of the steps."""
        with torch.inference_mode(), self._device_guard():
            return function(self.weights, *args)

    def sleep(self, keep_weights: bool) -> MissingWeights:
        """Release the memory of weights, cache and graphs; see `WeightsControl`."""
        with torch.inference_mode(), self._device_guard():
            self.synchronize()
            self._drop_graphs()
            self._free()
            self.weights.release(keep_weights)
            if self.head is not None:
                self.head.weights.release(keep=True)
            free_memory(self.device)
            return self.weights.count_missing()

    def wake_up(self, tags: list[str]) -> None:
        """Allocate memory again; see `WeightsControl`."""
        with torch.inference_mode(), self._device_guard():
            if "weights" in tags:
                self.weights.restore()
                if self.head is not None:
                    self.head.weights.restore()
            if "kv_cache" in tags and "kv_cache" not in vars(self):
                self._allocate(self.num_kvcache_blocks)
            # Not with undefined weights.
            if "kv_cache" in vars(self) and self.graphs is None and self.weights.is_complete:
                self._capture()

    def exit(self) -> None:
        """Wait for launched work, and free the device."""
        self.synchronize()
        self.release()

    def release(self) -> None:
        """Release everything on the device."""
        self._drop_graphs()
        self._free()
        del self.weights, self.model, self.head, self.drafter, self.attention_layers
        del self.batch_builder, self.sampling, self._sampled, self._output_buffers, self._num_clipped
        if self.is_cuda:
            with self._device_guard():
                torch.cuda.empty_cache()

    def _compile_kernels(self) -> None:
        """Compile all kernels that steps need, in parallel."""
        if not self.capture_sizes.shapes:
            return
        # Kernels for many rows take the longest, and so come first.
        largest = StepShape(0, self.config.max_num_batched_tokens, 1, self.capture_sizes.shapes[0].variant)
        shapes = [largest, *reversed(self.capture_sizes.representatives())]

        def run(shape: StepShape) -> None:
            self.communicator.prepare_step()
            step = self.batch_builder.send_empty(shape, is_capture_size=shape is not largest)
            self._compute(step, _Part.SAMPLED)

        with torch.inference_mode(), self.model.one_layer_of_each_kind():
            runs = [partial(run, shape) for shape in shapes]
            compile_ahead(self.device, runs, self.communicator.rank, self.communicator.size)
