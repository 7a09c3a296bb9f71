"""The most that the ranks of an engine exchange in one step, from the engine's settings and the model's shape."""

from __future__ import annotations

from nanovllm.config import Config
from nanovllm.distributed.symmetric_communicator import StepLimits
from nanovllm.model_config import ModelConfig
from nanovllm.runner.prompt_outputs import scored_rows_at_once


def step_limits(config: Config, model_config: ModelConfig) -> StepLimits | None:
    """Return the limits of an engine's steps; None for a model whose collectives are not counted."""
    if model_config.hf is not None:
        return None
    max_tokens, max_samples = config.max_num_batched_tokens, 2 * config.max_num_running
    # After attention, after the MLP, and of norms that span the ranks' heads; the embedding besides.
    per_layer = 3 if model_config.architecture.qk_norm == "projections" else 2
    return StepLimits(
        num_reductions=per_layer * model_config.num_layers + 1,
        # A capture size has fewer than twice the prompt tokens of a step, and its decode rows besides.
        max_rows=2 * max_tokens + config.max_num_running,
        hidden_size=model_config.hidden_size,
        max_candidates=max_samples,
        # The rows that are edited, those with log-probabilities, and prompts that are scored.
        num_gathers=2 + -(-max_tokens // scored_rows_at_once(model_config.vocab_size)),
        max_gathered_rows=2 * max_samples + max_tokens,
        vocab_size=model_config.vocab_size,
    )
