"""One device: loads its shard of the model, sizes the cache, runs batches.

`launch` queues a step and returns at once; the newest token of each sequence stays on the device, where the next step
finds it, and the host gets a copy when it asks.
"""

from __future__ import annotations

from array import array
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from nanovllm.attention import make_backend
from nanovllm.config import Config
from nanovllm.engine.cuda_graph import Ladder, StepGraphs, decode_ladder, mixed_ladder
from nanovllm.engine.input_buffers import InputBuffers, StagedStep, StepInputs, StepShape
from nanovllm.engine.messages import PromptChunk, ScheduledBatch, SlotJoin
from nanovllm.engine.step_results import StepHandle, StepResults
from nanovllm.kernels._triton import uses_triton
from nanovllm.kernels.compile_ahead import compile_ahead, compiler_ready
from nanovllm.kernels.compilers import Compilers
from nanovllm.layers.attention import Attention
from nanovllm.layers.sampler import Sampler
from nanovllm.model_config import ModelConfig
from nanovllm.model_shard import shard_of
from nanovllm.models import make_model
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.communicator import Communicator
from nanovllm.utils.context import set_context
from nanovllm.utils.device import cpu_cache_budget, resolve_device, resolve_dtype
from nanovllm.utils.loader import init_dummy_weights, load_weights


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
        self.sampler = Sampler(self.model.shard.vocab, self.communicator)
        self.max_blocks = -(-max_model_len // self.block_size)
        # Whether a step shares prefixes decides its padding, so every rank must find the same.
        max_prefix_items = self.communicator.least(self.backend.max_prefix_items)
        self.max_prefix_items = max_prefix_items if config.enable_prefix_caching else 0
        prefix_sizes = self.max_prefix_items, self.backend.rows_per_prefix_item
        # Steps of either way have graphs of their own, which all ranks capture together.
        whole_contexts_pay = partial(self.backend.whole_contexts_pay, self.communicator.least(num_kv_heads))
        self.buffers = InputBuffers(
            config.max_num_running, self.max_blocks, self.block_size, config.max_num_batched_tokens, *prefix_sizes,
            whole_contexts_pay, self.device,
        )  # fmt: skip
        # Decoded tokens, and those of the prompts that end in the same step; padding in between.
        self._sampled = torch.zeros(2 * config.max_num_running, dtype=torch.int64, device=self.device)
        self._results = StepResults(self._sampled)
        self.max_model_len = max_model_len
        self.graphs: StepGraphs | None = None
        self.ladder = self._make_ladder()
        self._compile_kernels(compilers)
        self.num_kvcache_blocks = self._num_blocks(free_before)
        self._bind_cache(self.num_kvcache_blocks)
        if self.ladder.shapes and not config.enforce_eager:
            with torch.inference_mode():
                self.graphs = StepGraphs()
                largest = self.ladder.shapes[-1]
                # The others fit into its memory.
                for _ in range(2):
                    self.graphs.run(largest, partial(self._forward, self.buffers.stage_empty(largest)))

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Queue one step and return without waiting for it."""
        with torch.inference_mode(), self._device_guard():
            shape = self._run(batch)
            num_decodes = len(batch.decode_slots)
            return self._results.copy(num_decodes, shape.num_decodes, len(batch.sampled_seq_ids) - num_decodes)

    def follow(self, batch: ScheduledBatch) -> None:
        """Queue one step on a rank whose tokens the host does not ask for."""
        with torch.inference_mode(), self._device_guard():
            self._run(batch)

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

    def _run(self, batch: ScheduledBatch) -> StepShape:
        """Queue one step; returns the sizes that it was padded to."""
        exact = self.buffers.shape_of(batch)
        rung = self.ladder.fit(exact)
        step = partial(self._forward, self.buffers.stage(batch, rung or exact))
        if self.graphs is None or rung is None:
            step()
        else:
            self.graphs.run(rung, step)
        return rung or exact

    def exit(self) -> None:
        """Let go of everything on the device."""
        self.synchronize()
        self.release()

    def release(self) -> None:
        """The same without waiting for the device."""
        if self.graphs is not None:
            self.graphs.close()
        del self.graphs, self.model, self.buffers, self._sampled, self._results, self.k_cache, self.v_cache
        with self._device_guard():
            if self.is_cuda:
                torch.cuda.empty_cache()

    def _forward(self, staged: StagedStep) -> None:
        """Compute, sample, and leave the tokens in the slots and in `_sampled`."""
        self.communicator.begin_step()
        self._compute(self.buffers.assemble(staged))

    def _compute(self, inputs: StepInputs) -> None:
        """Run the model on what is on the device, sample, and put the tokens where they belong."""
        inputs.context.plan = self.backend.plan(inputs.context)
        with set_context(inputs.context):
            x, residual = self.model(inputs.token_ids, inputs.positions, inputs.sample_rows)
        logits = self.model.compute_logits(x, residual)
        token_ids = self.sampler(logits, inputs.temperatures, inputs.seeds, inputs.output_index)
        self.buffers.scatter(inputs, token_ids, self._sampled)

    def _make_ladder(self) -> Ladder:
        """What steps are padded to: no more than what has a graph, unless `enforce_eager` does without."""
        config, shares = self.config, self.max_prefix_items > 0
        shapes = []
        if self.is_cuda and self.backend.supports_cuda_graph:
            shapes += decode_ladder(config.max_num_running, shares)
            if self.backend.supports_mixed_graph:
                shapes += mixed_ladder(config.max_num_running, config.max_num_batched_tokens, shares)
        return Ladder(shapes, self.backend.supports_whole_contexts)

    def _compile_kernels(self, compilers: Compilers | None) -> None:
        """Compile, all at once, the kernels that steps take."""
        if not self.ladder.shapes:
            return
        self._bind_cache(1)
        with torch.inference_mode(), self._device_guard():
            # Kernels for many rows take the longest, and so come first.
            shapes = [StepShape(0, self.config.max_num_batched_tokens, 1), *reversed(self.ladder.samples())]
            # Two layers launch what all of them do.
            model = self.model.model
            layers, model.layers = model.layers, model.layers[:2]
            runs = [partial(self._run_without_kernels, shape) for shape in shapes]
            compile_ahead(self.device, runs, compilers, self.communicator.rank, self.communicator.size)
            model.layers = layers

    def _run_without_kernels(self, shape: StepShape) -> None:
        """Run an empty step for `compile_ahead`: no kernel is launched, and what one would fill has anything in it."""
        inputs = self.buffers.assemble(self.buffers.stage_empty(shape))
        # What does run finds its data by these: torch its embeddings, flash-attn keys and values.
        inputs.token_ids[: shape.num_decodes].zero_()
        inputs.context.block_tables[: shape.num_decodes].zero_()
        inputs.context.context_lens[: shape.num_decodes].fill_(1)
        self._compute(inputs)

    def _load_model(self, folder: str, max_model_len: int) -> Qwen3ForCausalLM:
        with torch.device("meta"):
            model = make_model(self.model_config, self.communicator)
        model = model.to(self.dtype).to_empty(device=self.device)
        if self.config.load_format == "dummy":
            init_dummy_weights(model, self.config.seed or 0)
        else:
            load_weights(model, folder)
        model.init_rope(max_model_len, self.device)
        return model.eval()

    def _bind_cache(self, num_blocks: int) -> None:
        model = self.model_config
        num_kv_heads = self.model.shard.kv_heads.size
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
        kv_elements = 2 * model.num_layers * self.model.shard.kv_heads.size * model.head_dim
        block_bytes = kv_elements * self.dtype.itemsize * self.block_size
        cpu_budget = cpu_cache_budget() // self.communicator.size
        budget = self._gpu_cache_budget(free_before) if self.is_cuda else cpu_budget
        if budget < block_bytes:
            free, total = torch.cuda.mem_get_info(self.device) if self.is_cuda else (cpu_budget, cpu_budget)
            raise ValueError(
                f"{budget / 2**30:.2f} GiB are left for the KV cache, less than one block of "
                f"{block_bytes / 2**30:.3f} GiB; with the weights loaded {free / 2**30:.2f} of {total / 2**30:.2f} GiB "
                f"are free: raise gpu_memory_utilization ({self.config.gpu_memory_utilization}), lower "
                "max_num_batched_tokens, or end what else uses the device"
            )
        # More than every running sequence can use at its longest is of use to the prefix cache alone; on the CPU, where
        # memory is other programs' too, that much is enough.
        most = self.max_blocks * self.config.max_num_running
        return self.communicator.least(budget // block_bytes if self.is_cuda else min(budget // block_bytes, most))

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
        num_tokens, num_seqs = self.config.max_num_batched_tokens, self.config.max_num_running
        lens = [num_tokens // num_seqs + (slot < num_tokens % num_seqs) for slot in range(num_seqs)]
        batch = ScheduledBatch(
            joins=[SlotJoin(slot, [0] * self.max_blocks, 1, 1.0, 0) for slot in range(num_seqs)],
            chunks=[PromptChunk(slot, 0, array("i", [0]) * min(n, self.max_model_len), False, True)
                    for slot, n in enumerate(lens)],
            sampled_seq_ids=list(range(num_seqs)),
        )  # fmt: skip
        self.launch(batch).result()
