"""One device: loads its shard of the model, sizes the cache, runs batches.

A step is four moves: `prepare` sends what changed to the device, `forward` computes logits, `sample` draws tokens and
leaves them in their slots, where the next step finds them, and `collect` copies them to the host. All only queue work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from nanovllm.attention import make_backend
from nanovllm.attention.metadata import set_attention_metadata
from nanovllm.config import Config
from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import shard_of
from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.compile_ahead import compile_ahead, compiler_ready
from nanovllm.kernels.compilers import Compilers
from nanovllm.kernels.logits import own_logprobs
from nanovllm.kernels.slot_state import scatter_tokens
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler
from nanovllm.model_config import ModelConfig
from nanovllm.models.loader import load_model
from nanovllm.runner.batch import BatchBuilder, DeviceBatch, PreparedStep, StepShape
from nanovllm.runner.cuda_graph import StepGraphs, make_capture_sizes
from nanovllm.runner.extended_step import prompt_outputs, rows_asked_for, sample_rows
from nanovllm.runner.memory import free_memory, most_extra_bytes, num_cache_blocks, profiling_batch
from nanovllm.runner.messages import FillMasks, ScheduledBatch
from nanovllm.runner.sampling_state import SamplingRows, SamplingState
from nanovllm.runner.step_results import DeviceLogprobs, StepExtras, StepHandle, StepResults
from nanovllm.utils.device import resolve_device, resolve_dtype
from nanovllm.utils.loading_bar import loading_bar


class ModelRunner:
    """Runs the steps of one engine on one device.

    Args:
        config: the engine's settings.
        model_config: the model's shape.
        folder: where its weights are.
        max_model_len: most tokens of one sequence.
        communicator: joins this rank with the others that share the model; None if it has the model to itself.
        compilers: processes that compile kernels; None leaves it to threads.

    Raises:
        ValueError: a device, dtype or backend that cannot be had, or weights that do not fit the config.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        folder: str,
        *,
        max_model_len: int,
        communicator: Communicator | None = None,
        compilers: Compilers | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.communicator = communicator or Communicator()
        self.device = resolve_device(config.device, self.communicator.rank, self.communicator.size)
        self.is_cuda = self.device.type == "cuda"
        if uses_triton(self.device):
            compiler_ready(self.device)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, self.is_cuda)
        # A step is planned while the one before it runs; on the CPU there is nobody to plan meanwhile.
        self.pipeline_depth = 1 if self.is_cuda else 0
        self.model_shard = shard_of(model_config, self.communicator.rank, self.communicator.size)
        self.num_kv_heads = self.model_shard.kv_heads.size
        shape = config.kvcache_block_size, self.model_shard.heads.size, self.num_kv_heads, model_config.head_dim
        self.backend = make_backend(config.attention_backend, self.device, self.dtype, *shape)
        with self._device_guard():
            self._set_up(folder, max_model_len, compilers)

    def _set_up(self, folder: str, max_model_len: int, compilers: Compilers | None) -> None:
        """Load the model, compile the kernels, size the cache, and capture the largest graph."""
        config, device, max_blocks = self.config, self.device, -(-max_model_len // self.config.kvcache_block_size)
        free_before = free_memory(device)
        self.model = load_model(self.model_config, self.communicator, config, folder, max_model_len, self.dtype, device)
        self.sampler = Sampler(self.model_shard.vocab, self.communicator)
        self.batch_builder = self._make_batch_builder(max_blocks)
        # Decoded tokens, and those of the prompts that end in the same step; padding in between.
        self._sampled = torch.zeros(2 * config.max_num_running, dtype=torch.int64, device=device)
        self._results = StepResults(self._sampled)
        processed_logprobs = config.logprobs_mode == "processed_logprobs"
        self.sampling = SamplingState(self.model_config.vocab_size, device, processed_logprobs)
        self.graphs: StepGraphs | None = None
        uses_cascade = self.batch_builder.cascade.max_items > 0
        self.capture_sizes = make_capture_sizes(config, self.backend, self.is_cuda, uses_cascade)
        # One block is enough to compile with, and to run a step whose results do not count.
        self._allocate_cache(1)
        self._compile_kernels(compilers)
        self.num_kvcache_blocks = num_cache_blocks(
            config,
            device,
            self.communicator,
            free_before=free_before,
            block_bytes=self.kv_cache.nbytes,
            most_blocks=max_blocks * config.max_num_running,
            run_step=lambda: self.execute(profiling_batch(config, max_blocks, max_model_len)).result(),
            extra_bytes=most_extra_bytes(config, self.model_config.vocab_size, self.kv_cache[0, 0].nbytes),
        )
        self._allocate_cache(self.num_kvcache_blocks)
        if self.capture_sizes.shapes and not config.enforce_eager:
            self._capture_largest()

    def _make_batch_builder(self, max_blocks: int) -> BatchBuilder:
        config, communicator, backend = self.config, self.communicator, self.backend
        # Cascade attention and split-KV decide a step's graph, which all ranks capture together, so they must agree.
        max_cascade_items = communicator.all_reduce_min(backend.max_cascade_items)
        num_kv_heads = communicator.all_reduce_min(self.num_kv_heads)
        return BatchBuilder(
            config.max_num_running,
            max_blocks,
            config.kvcache_block_size,
            config.max_num_batched_tokens,
            max_cascade_items if config.enable_prefix_caching else 0,
            backend.rows_per_cascade_item,
            partial(backend.should_use_single_split, num_kv_heads),
            self.device,
        )

    def execute(self, batch: ScheduledBatch, fill_masks: FillMasks | None = None) -> StepHandle:
        """Queue one step and return; waits for nothing but the host's masks."""
        with torch.inference_mode(), self._device_guard():
            return self.collect(*self._run(batch, fill_masks))

    def run(self, batch: ScheduledBatch, fill_masks: FillMasks | None = None) -> None:
        """Queue one step on a rank whose tokens the host does not ask for."""
        with torch.inference_mode(), self._device_guard():
            self._run(batch, fill_masks)

    def prepare(self, batch: ScheduledBatch) -> PreparedStep:
        """Send what a batch changes to the device, padded to a capture size if one is large enough."""
        builder = self.batch_builder
        self.sampling.add(batch.new_requests)
        if batch.block_copies:
            self._copy_blocks(batch.block_copies)
        exact = builder.shape_of(batch, builder.plan_cascade(batch))
        padded = self.capture_sizes.fit(exact)
        return builder.send(batch, padded or exact, is_capture_size=padded is not None)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks, of which one may be copied and then be the copy of another."""
        pairs = torch.tensor(copies)
        sources, targets = (pairs.pin_memory() if self.is_cuda else pairs).to(self.device, non_blocking=True).unbind(1)
        # Layer by layer, since all layers' blocks of many sequences would be gigabytes at once.
        for layer in self.kv_cache.flatten(0, 1):
            layer[targets] = layer[sources]

    def forward(self, inputs: DeviceBatch) -> torch.Tensor:
        """Run the model; returns the logits, [num_samples, tokens of this rank]."""
        inputs.metadata.plan = self.backend.plan(inputs.metadata)
        with set_attention_metadata(inputs.metadata):
            hidden = self.model(inputs.token_ids, inputs.positions, inputs.sample_indices)
        return self.model.compute_logits(hidden)

    def sample(self, inputs: DeviceBatch, logits: torch.Tensor, rows: SamplingRows | None = None) -> StepExtras | None:
        """Draw a token from each row of logits into its slot, and into `_sampled` for `collect`."""
        if rows is None:
            self._draw(inputs, logits)
            return None
        token_ids, extras = sample_rows(self.sampler, inputs, logits, rows, self.sampling.processed_logprobs)
        self.sampling.count(rows, token_ids)
        self._scatter(inputs, token_ids)
        return extras

    def _draw(self, inputs: DeviceBatch, logits: torch.Tensor) -> torch.Tensor:
        """Do the same for rows that ask for no more than a temperature; returns the tokens."""
        token_ids = self.sampler(logits, inputs.temperatures, inputs.seeds, inputs.output_index)
        self._scatter(inputs, token_ids)
        return token_ids

    def _scatter(self, inputs: DeviceBatch, token_ids: torch.Tensor) -> None:
        slots, num_decodes = inputs.sample_slots, inputs.metadata.num_decodes
        scatter_tokens(self.batch_builder.slots.tensors, slots, token_ids, num_decodes, self._sampled)

    def collect(self, step: PreparedStep, extras: StepExtras | None) -> StepHandle:
        """Send the step's tokens, and what else it was asked for, on their way to the host."""
        num_decodes, num_prompts = step.num_real_decodes, step.num_real_samples - step.num_real_decodes
        return self._results.copy(num_decodes, step.shape.num_decodes, num_prompts, extras)

    def _run(self, batch: ScheduledBatch, fill_masks: FillMasks | None) -> tuple[PreparedStep, StepExtras | None]:
        """Queue one step up to its tokens.

        Forward and sampling are one CUDA graph where there is one for the step's size, also if rows ask for their
        tokens' log-probabilities. If they ask for more, perhaps of the host, sampling is launched behind the forward's.
        """
        self.communicator.prepare_step()
        step = self.prepare(batch)
        rows = self._sampling_rows(batch, step) if batch.sample_apart else None
        if batch.scored_seq_ids:
            return step, self._run_scored(batch, step, rows, fill_masks)
        if not batch.sample_apart:
            self._run_or_replay(step, "step", lambda: self.sample(*self._gather_and_forward(step)))
            return step, None
        if rows is not None and rows.only_own_logprobs and self.communicator.size == 1:
            run = partial(self._sample_with_logprobs, step)
            return step, rows_asked_for(rows, self._run_or_replay(step, "step with logprobs", run))
        inputs, logits = self._run_or_replay(step, "forward", partial(self._gather_and_forward, step))
        self._begin_sampling(batch, step, rows, fill_masks)
        return step, self.sample(inputs, logits, rows)

    def _sample_with_logprobs(self, step: PreparedStep) -> DeviceLogprobs:
        """Run a step; returns the log-probabilities of all its tokens."""
        inputs, logits = self._gather_and_forward(step)
        token_ids = self._draw(inputs, logits)
        temperatures = inputs.temperatures if self.sampling.processed_logprobs else None
        return own_logprobs(logits[:, : self.sampler.vocab.total].contiguous(), token_ids, temperatures)

    def _run_scored(
        self, batch: ScheduledBatch, step: PreparedStep, rows: SamplingRows | None, fill_masks: FillMasks | None
    ) -> StepExtras:
        """Queue a step that needs the hidden states of whole chunks."""
        self.communicator.begin_step()
        inputs = self.batch_builder.gather(step)
        inputs.metadata.plan = self.backend.plan(inputs.metadata)
        with set_attention_metadata(inputs.metadata):
            hidden = self.model(inputs.token_ids, inputs.positions).compute()
        logits = self.model.project_logits(hidden[inputs.sample_indices])
        self._begin_sampling(batch, step, rows, fill_masks)
        extras = self.sample(inputs, logits, rows) or StepExtras()
        extras.prompt_outputs = prompt_outputs(self.model, self.sampler, batch, hidden[step.shape.num_decodes :])
        return extras

    def _sampling_rows(self, batch: ScheduledBatch, step: PreparedStep) -> SamplingRows | None:
        """Return what rows ask for beyond a temperature."""
        slots, num_padding = self.batch_builder.slots, step.shape.num_decodes - step.num_real_decodes
        sampled = batch.decode_slots + [slots.padding_slot] * num_padding
        sampled += [chunk.slot for chunk in batch.chunks if chunk.samples]
        return self.sampling.rows_of(sampled, slots.num_computed)

    def _begin_sampling(
        self, batch: ScheduledBatch, step: PreparedStep, rows: SamplingRows | None, fill_masks: FillMasks | None
    ) -> None:
        """Begin sampling apart from the forward pass; waits for the host's masks."""
        self.communicator.begin_sampling()
        if rows is not None and fill_masks is not None:
            num_padding = step.shape.num_decodes - step.num_real_decodes
            masked = [row if row < step.num_real_decodes else row + num_padding for row in batch.masked]
            self.sampling.add_masks(rows, masked, fill_masks)

    def _run_or_replay(self, step: PreparedStep, part: str, run: Callable[[], Any]) -> Any:
        """Run a part of a step, as a graph if the step has a capture size."""
        if self.graphs is None or not step.is_capture_size:
            return run()
        return self.graphs.run((part, step.shape), run)

    def _gather_and_forward(self, step: PreparedStep) -> tuple[DeviceBatch, torch.Tensor]:
        self.communicator.begin_step()
        inputs = self.batch_builder.gather(step)
        return inputs, self.forward(inputs)

    def check(self) -> None:
        """Raise if something that was launched has failed; waits for nothing."""
        if self.is_cuda:
            self._stream.query()

    def synchronize(self) -> None:
        """Wait for all that was launched; raises if the device is lost."""
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

    def exit(self) -> None:
        """Wait for the device, and let go of everything on it."""
        self.synchronize()
        self.release()

    def release(self) -> None:
        """Let go of everything on the device."""
        if self.graphs is not None:
            self.graphs.close()
        del self.graphs, self.model, self.batch_builder, self.sampling, self._sampled, self._results
        del self.kv_cache
        if self.is_cuda:
            with self._device_guard():
                torch.cuda.empty_cache()

    def _compile_kernels(self, compilers: Compilers | None) -> None:
        """Compile, all at once, the kernels that steps take."""
        if not self.capture_sizes.shapes:
            return
        # Kernels for many rows take the longest, and so come first.
        largest = StepShape(0, self.config.max_num_batched_tokens, 1)
        shapes = [largest, *reversed(self.capture_sizes.representatives())]
        runs = [partial(self._run_without_kernels, shape) for shape in shapes]
        # Two layers launch what all of them do.
        decoder: Any = self.model.model
        layers, decoder.layers = decoder.layers, decoder.layers[:2]
        with torch.inference_mode():
            compile_ahead(self.device, runs, compilers, self.communicator.rank, self.communicator.size)
        decoder.layers = layers

    def _capture_largest(self) -> None:
        """Capture the largest graph, into whose memory the others fit."""
        self.graphs = StepGraphs()
        with torch.inference_mode(), loading_bar("Capturing graphs", 2, "run", self.communicator.rank) as bar:
            step = self.batch_builder.send_empty(self.capture_sizes.shapes[-1])
            for _ in range(2):
                self.communicator.prepare_step()
                self._run_or_replay(step, "step", lambda: self.sample(*self._gather_and_forward(step)))
                bar.update()

    def _run_without_kernels(self, shape: StepShape) -> None:
        """Run an empty step for `compile_ahead`: no kernel is launched, and what one would fill has anything in it."""
        self.communicator.prepare_step()
        self.communicator.begin_step()
        inputs = self.batch_builder.gather(self.batch_builder.send_empty(shape))
        # What does run finds its data by these: torch its embeddings, flash-attn keys and values.
        for filled, value in ((inputs.token_ids, 0), (inputs.metadata.block_tables, 0), (inputs.metadata.seq_lens, 1)):
            filled[: shape.num_decodes].fill_(value)
        self.sample(inputs, self.forward(inputs))

    def _allocate_cache(self, num_blocks: int) -> None:
        """Give every layer `num_blocks` blocks of cache."""
        model = self.model_config
        shape = (2, model.num_layers, num_blocks, self.config.kvcache_block_size, self.num_kv_heads, model.head_dim)
        # Zeros, because a masked key still meets a product, and garbage may be NaN.
        self.kv_cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for i, layer in enumerate(module for module in self.model.modules() if isinstance(module, Attention)):
            layer.bind(self.kv_cache[0, i], self.kv_cache[1, i], self.backend)
