"""The base class of layers that keep a state of fixed size of each sequence, instead of keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.attention.kv_cache_spec import State
from nanovllm.attention.metadata import get_step_metadata

if TYPE_CHECKING:
    from nanovllm.kernels.mixers.state_pool import StatePool
    from nanovllm.kernels.mixers.state_rows import StateRows, StateTiles


class StateLayer(nn.Module, ABC):
    """A layer that keeps a state of each sequence, as the runner sees it.

    Attributes:
        pool: the memory of all states; bound by the runner.
        places: where the layer's tensors begin in a state, in elements of each one's dtype, by the names of its spec.
    """

    pool: StatePool
    places: Mapping[str, int]

    @abstractmethod
    def state_spec(self, dtype: torch.dtype) -> State:
        """Return what the layer keeps of each sequence; dtype: of the activations."""

    def bind(self, pool: StatePool, places: Mapping[str, int]) -> None:
        """Give the layer the memory of states, and its places in each."""
        self.pool, self.places = pool, places

    def unbind(self) -> None:
        """Take from the layer what `bind` gave it."""
        del self.pool, self.places

    def run(
        self,
        num_tokens: int,
        step: Callable[[slice, StateRows], torch.Tensor],
        prompt: Callable[[slice, StateTiles], torch.Tensor],
    ) -> torch.Tensor:
        """Return what `step` computes of the decode rows among a step's tokens, then what `prompt` does of the others.

        Both take their tokens, and their states; only if there are some.
        """
        metadata = get_step_metadata()
        states, num_decodes = metadata.states, metadata.num_decodes
        assert states is not None
        outs = list[torch.Tensor]()
        if num_decodes:
            outs.append(step(slice(num_decodes), states.rows))
        if num_decodes < num_tokens:
            outs.append(prompt(slice(num_decodes, None), states.tiles))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
