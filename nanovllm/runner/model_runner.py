"""One device: loads its shard of the model, sizes the cache, runs batches.

A step is four moves: `prepare` sends what changed to the device, `forward` computes logits, `sample` draws tokens and
leaves them in their slots, where the next step finds them, and `collect` copies them to the host. All of them queue
work and return at once.
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
from nanovllm.kernels.slot_state import scatter_tokens
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler
from nanovllm.model_config import ModelConfig
from nanovllm.models.base import CausalLM
from nanovllm.models.loader import load_model
from nanovllm.runner.batch import BatchBuilder, DeviceBatch, PreparedStep, StepShape
from nanovllm.runner.cuda_graph import StepGraphs, make_capture_sizes
from nanovllm.runner.memory import check_cache_budget, profiling_batch
from nanovllm.runner.messages import ScheduledBatch
from nanovllm.runner.step_results import StepHandle, StepResults
from nanovllm.utils.device import cpu_cache_budget, resolve_device, resolve_dtype


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
        self.block_size = config.kvcache_block_size
        self.model_shard = shard_of(model_config, self.communicator.rank, self.communicator.size)
        heads = self.model_shard.heads.size, self.model_shard.kv_heads.size, model_config.head_dim
        self.backend = make_backend(config.attention_backend, self.device, self.dtype, self.block_size, *heads)
        with self._device_guard():
            self._set_up(folder, max_model_len, compilers)

    def _set_up(self, folder: str, max_model_len: int, compilers: Compilers | None) -> None:
        """Load the model, compile the kernels, size the cache, and capture the largest graph."""
        config, num_kv_heads = self.config, self.model_shard.kv_heads.size
        free_before = self._free_memory()
        self.model = self._load_model(folder, max_model_len)
        self.sampler = Sampler(self.model_shard.vocab, self.communicator)
        self.max_blocks = -(-max_model_len // self.block_size)
        # Whether a step shares prefixes decides its padding, so every rank must find the same.
        max_cascade_items = self.communicator.all_reduce_min(self.backend.max_cascade_items)
        self.max_cascade_items = max_cascade_items if config.enable_prefix_caching else 0
        prefix_sizes = self.max_cascade_items, self.backend.rows_per_cascade_item
        # Steps of either way have graphs of their own, which all ranks capture together.
        should_use_single_split = partial(
            self.backend.should_use_single_split, self.communicator.all_reduce_min(num_kv_heads)
        )
        self.batch_builder = BatchBuilder(
            config.max_num_running, self.max_blocks, self.block_size, config.max_num_batched_tokens, *prefix_sizes,
            should_use_single_split, self.device,
        )  # fmt: skip
        # Decoded tokens, and those of the prompts that end in the same step; padding in between.
        self._sampled = torch.zeros(2 * config.max_num_running, dtype=torch.int64, device=self.device)
        self._results = StepResults(self._sampled)
        self.max_model_len = max_model_len
        self.graphs: StepGraphs | None = None
        self.capture_sizes = make_capture_sizes(config, self.backend, self.is_cuda, self.max_cascade_items > 0)
        self._compile_kernels(compilers)
        self.num_kvcache_blocks = self._num_blocks(free_before)
        self._bind_cache(self.num_kvcache_blocks)
        if self.capture_sizes.shapes and not config.enforce_eager:
            with torch.inference_mode():
                self.graphs = StepGraphs()
                # The largest: the others fit into its memory.
                empty = self.batch_builder.send_empty(self.capture_sizes.shapes[-1])
                for _ in range(2):
                    self._run_or_replay(empty, "step", lambda: self.sample(*self._gather_and_forward(empty)))

    def execute(self, batch: ScheduledBatch) -> StepHandle:
        """Queue one step and return without waiting for it."""
        with torch.inference_mode(), self._device_guard():
            return self.collect(self._run(batch))

    def run(self, batch: ScheduledBatch) -> None:
        """Queue one step on a rank whose tokens the host does not ask for."""
        with torch.inference_mode(), self._device_guard():
            self._run(batch)

    def prepare(self, batch: ScheduledBatch) -> PreparedStep:
        """Send what a batch changes to the device, padded to a capture size if one is large enough."""
        exact = self.batch_builder.shape_of(batch)
        padded = self.capture_sizes.fit(exact)
        return self.batch_builder.send(batch, padded or exact, is_capture_size=padded is not None)

    def forward(self, inputs: DeviceBatch) -> torch.Tensor:
        """Run the model; returns the logits, [num_samples, tokens of this rank]."""
        inputs.metadata.plan = self.backend.plan(inputs.metadata)
        with set_attention_metadata(inputs.metadata):
            hidden = self.model(inputs.token_ids, inputs.positions, inputs.sample_rows)
        return self.model.compute_logits(hidden)

    def sample(self, inputs: DeviceBatch, logits: torch.Tensor) -> None:
        """Draw a token from each row of logits into its slot, and into `_sampled` for `collect`."""
        token_ids = self.sampler(logits, inputs.temperatures, inputs.seeds, inputs.output_index)
        slots, num_decodes = inputs.sample_slots, inputs.metadata.num_decodes
        scatter_tokens(self.batch_builder.slots.tensors, slots, token_ids, num_decodes, self._sampled)

    def collect(self, step: PreparedStep) -> StepHandle:
        """Send the step's tokens on their way to the host."""
        return self._results.copy(
            step.num_real_decodes, step.shape.num_decodes, step.num_real_samples - step.num_real_decodes
        )

    def _run(self, batch: ScheduledBatch) -> PreparedStep:
        """Queue one step up to its tokens.

        Forward and sampling are one CUDA graph where there is one for the step's size; sampling is launched behind the
        forward's graph if the host comes between them.
        """
        step = self.prepare(batch)
        if batch.sample_apart:
            self.sample(*self._run_or_replay(step, "forward", partial(self._gather_and_forward, step)))
        else:
            self._run_or_replay(step, "step", lambda: self.sample(*self._gather_and_forward(step)))
        return step

    def _run_or_replay(self, step: PreparedStep, part: str, run: Callable[[], Any]) -> Any:
        """Run a part of a step, as a graph if the step has a capture size; returns what it returns."""
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
        """Let go of everything on the device."""
        self.synchronize()
        self.release()

    def release(self) -> None:
        """The same without waiting for the device."""
        if self.graphs is not None:
            self.graphs.close()
        del self.graphs, self.model, self.batch_builder, self._sampled, self._results, self.k_cache, self.v_cache
        with self._device_guard():
            if self.is_cuda:
                torch.cuda.empty_cache()

    def _compile_kernels(self, compilers: Compilers | None) -> None:
        """Compile, all at once, the kernels that steps take."""
        if not self.capture_sizes.shapes:
            return
        self._bind_cache(1)
        with torch.inference_mode(), self._device_guard():
            # Kernels for many rows take the longest, and so come first.
            shapes = [
                StepShape(0, self.config.max_num_batched_tokens, 1),
                *reversed(self.capture_sizes.representatives()),
            ]
            # Two layers launch what all of them do.
            model = self.model.model
            layers, model.layers = model.layers, model.layers[:2]
            runs = [partial(self._run_without_kernels, shape) for shape in shapes]
            compile_ahead(self.device, runs, compilers, self.communicator.rank, self.communicator.size)
            model.layers = layers

    def _run_without_kernels(self, shape: StepShape) -> None:
        """Run an empty step for `compile_ahead`: no kernel is launched, and what one would fill has anything in it."""
        inputs = self.batch_builder.gather(self.batch_builder.send_empty(shape))
        # What does run finds its data by these: torch its embeddings, flash-attn keys and values.
        inputs.token_ids[: shape.num_decodes].zero_()
        inputs.metadata.block_tables[: shape.num_decodes].zero_()
        inputs.metadata.seq_lens[: shape.num_decodes].fill_(1)
        self.sample(inputs, self.forward(inputs))

    def _load_model(self, folder: str, max_model_len: int) -> CausalLM:
        model = load_model(self.model_config, self.communicator, self.config, folder, self.dtype, self.device)
        model.init_rope(max_model_len, self.device)
        return model.eval()

    def _bind_cache(self, num_blocks: int) -> None:
        model = self.model_config
        num_kv_heads = self.model_shard.kv_heads.size
        shape = (2, model.num_layers, num_blocks, self.block_size, num_kv_heads, model.head_dim)
        # Zeros, because a masked key still meets a product, and garbage may be NaN.
        self.k_cache, self.v_cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        layers = [module for module in self.model.modules() if isinstance(module, Attention)]
        for i, layer in enumerate(layers):
            layer.bind(self.k_cache[i], self.v_cache[i], self.backend)

    def _num_blocks(self, free_before: int) -> int:
        if self.config.num_kvcache_blocks != -1:
            return self.config.num_kvcache_blocks
        model = self.model_config
        kv_elements = 2 * model.num_layers * self.model_shard.kv_heads.size * model.head_dim
        block_bytes = kv_elements * self.dtype.itemsize * self.block_size
        cpu_budget = cpu_cache_budget() // self.communicator.size
        budget = self._gpu_cache_budget(free_before) if self.is_cuda else cpu_budget
        check_cache_budget(budget, block_bytes, self.config, self.device)
        # More than every running sequence can use at its longest is of use to the prefix cache alone; on the CPU, where
        # memory is other programs' too, that much is enough.
        most = self.max_blocks * self.config.max_num_running
        return self.communicator.all_reduce_min(
            budget // block_bytes if self.is_cuda else min(budget // block_bytes, most)
        )

    def _gpu_cache_budget(self, free_before: int) -> int:
        """Bytes for the cache: this engine's share of the GPU less what it takes besides, measured by a largest step.

        Other processes' memory is not charged to the engine; it only limits what is there to take.
        """
        self._free_memory()
        torch.cuda.reset_peak_memory_stats(self.device)
        reserved_before_run = torch.cuda.memory_reserved(self.device)
        self._profile_run()
        peak = torch.cuda.max_memory_reserved(self.device) - reserved_before_run
        free, total = self._free_memory(), torch.cuda.mem_get_info(self.device)[1]
        used = free_before - free + self.communicator.device_bytes
        # The captured graphs keep a pool of their own, no larger than the peak of an eager step.
        spare = peak * (1 if self.config.enforce_eager else 2)
        return int(min(total * self.config.gpu_memory_utilization - used, free) - spare)

    def _free_memory(self) -> int:
        """Bytes free on the GPU, once torch has given back what it holds for nothing; 0 on the CPU."""
        if not self.is_cuda:
            return 0
        torch.cuda.synchronize(self.device)
        with self._device_guard():
            torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def _profile_run(self) -> None:
        """Run the step that takes the most memory: the whole token budget in prompts, sampled in every slot."""
        self._bind_cache(1)
        batch = profiling_batch(self.config, self.max_blocks, self.max_model_len)
        self.execute(batch).result()
