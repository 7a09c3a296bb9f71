"""Any decoder of transformers, with this library's attention over its paged cache in place of its own.

transformers makes the model, loads the weights and runs everything but attention, on all of a step's tokens as one
sequence of a batch of one. What an attention layer is, its heads, window, softcap and sinks, is not read from the
config, where each family has names of its own, but seen by sending tokens through the model at loading; what this
library cannot do is refused then.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from nanovllm.config import Config
from nanovllm.distributed.communicator import Communicator
from nanovllm.distributed.shard import ModelShard, Shard
from nanovllm.model_config import MODELS, ModelConfig
from nanovllm.models.base import HiddenStates, LoadableCausalLM
from nanovllm.models.fuse import NUM_ROWS, fuse, fuse_linears
from nanovllm.models.fused_modules import step_positions
from nanovllm.models.source_slices import SourceParameters
from nanovllm.models.stored_tensors import shown
from nanovllm.models.transformers_attention import PAGED, PROBED, Probe, probing
from nanovllm.models.transformers_shard import shard_model
from nanovllm.quantization.loading import WeightSlice, WeightTarget, WholeTensor
from nanovllm.utils.remote import is_url, weights_place

_logger = logging.getLogger(__name__)
_PROBED_TOKENS = 128
_PROBES = 3
"""A mixture may send a token to another expert by a rounding error; a state shows with any tokens."""
_TOLERANCES = {torch.float32: 1e-3}
_COARSE_TOLERANCE = 3e-2


class TransformersForCausalLM(LoadableCausalLM):
    """A model of transformers; see the base class.

    Raises:
        ValueError: transformers has no such model, or one whose attention cannot be replaced.
    """

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__(config, communicator)
        self._communicator = communicator
        self._class = _class_of(config.hf)
        self.head = self._made(config.hf, torch.float32)

    def load(self, config: Config, folder: str, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """See the base class."""
        if config.load_format == "dummy":
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
                torch.manual_seed(config.seed or 0)
                self.head = self._made(self.config.hf, dtype)
        else:
            self.head = self._read(folder, dtype)
        self.head.eval().requires_grad_(False)
        self._sources, self._dtype = SourceParameters(self.head), dtype
        indices = self._divide() if self._communicator.size > 1 else {}
        self.head.to(device)
        prefix = self.head.base_model_prefix
        self._prefix = prefix if hasattr(self.head, prefix) else "model"
        self.model = getattr(self.head, self._prefix)
        try:
            with torch.inference_mode():
                _fix_rope(self.model, max_model_len, device)
                self._find_layers(min(_PROBED_TOKENS, self.config.max_position), dtype, device)
                self._sources.find(self.head, indices)
                self._detach_head(device)
                if device.type == "cuda" and not config.enforce_eager:
                    self._check_capture(device)
                self._fuse(max_model_len, device)
        except Exception as error:  # the code of each model has its own ways to fail
            cause = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{self._class.__name__} cannot run over a paged KV cache: {cause}") from error

    def weight_slices(self) -> dict[WeightTarget, WeightSlice]:
        """See the base class; targets have the names that transformers' model has."""
        return self._sources.slices(self)

    def weight_tensors(self) -> list[torch.Tensor]:
        """See the base class."""
        return [*self.parameters(), *self._sources.tensors]

    def weight_targets(self, name: str) -> list[WeightTarget]:
        """See the base class."""
        return self._sources.targets(name)

    def folder_tensors(self, folder: str) -> Iterator[tuple[str, Any]]:
        """See the base class; by transformers' code, which converts what is stored otherwise than it runs."""
        for name, parameter in self._read(folder, self._dtype).named_parameters():
            yield name, WholeTensor(parameter.detach())

    def _divide(self) -> dict[str, tuple[slice, ...]]:
        """Leave what this rank has of the model; see `shard_model`."""
        try:
            return shard_model(self.head, self.shard, self._communicator)
        except ValueError as error:
            size = self._communicator.size
            raise ValueError(f"tensor_parallel_size={size}: {self._class.__name__} has one rank: {error}") from error

    def _made(self, hf: Any, dtype: torch.dtype) -> Any:
        """Make the model with random weights, or on the meta device with none."""
        name = self._class.__name__
        try:
            return self._class._from_config(copy.deepcopy(hf), dtype=dtype, attn_implementation=PROBED)
        except Exception as error:  # the code of each model has its own ways to refuse a config
            if isinstance(error, KeyError) and error.args == (PROBED,):
                raise ValueError(f"{name} has attention classes of its own, which cannot be replaced") from error
            raise ValueError(f"transformers cannot make {name}: {type(error).__name__}: {error}") from error

    def _read(self, folder: str, dtype: torch.dtype) -> Any:
        """Read the weights by transformers' code, which knows what each family has renamed, merged or tied."""
        if is_url(place := weights_place(folder)):
            raise ValueError(f"transformers' code cannot stream {place!r}, which {self._class.__name__} needs: copy it")
        options = {"dtype": dtype, "attn_implementation": PROBED, "use_safetensors": True, "output_loading_info": True}
        # Which are refused here, by name.
        options["ignore_mismatched_sizes"] = True
        hf = copy.deepcopy(self.config.hf)
        try:
            head, info = self._class.from_pretrained(folder, config=hf, local_files_only=True, **options)
        except RuntimeError as error:
            raise ValueError(f"checkpoint in {folder!r} does not fit: {error}") from error
        missing, surplus = (sorted(info[name]) for name in ("missing_keys", "unexpected_keys"))
        if missing or surplus or info["mismatched_keys"]:
            misfits = f"tensors missing {shown(missing)}, left over {shown(surplus)}"
            others = info["mismatched_keys"]
            raise ValueError(f"checkpoint in {folder!r} does not fit: {misfits}, of another shape {others}")
        return head

    def _find_layers(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the attention layers; refuse a model in which more than attention mixes tokens."""
        half = num_tokens // 2
        positions = torch.arange(num_tokens, device=device)
        generator = torch.Generator().manual_seed(0)
        tolerance = _TOLERANCES.get(dtype, _COARSE_TOLERANCE)
        is_stateless = False
        for number in range(_PROBES):
            draws = (torch.randint(self.config.vocab_size, (num_tokens,), generator=generator) for _ in range(2))
            first, others = (drawn.to(device) for drawn in draws)
            with probing(makes_layers=number == 0) as probe, _watch_children(self.model) as called:
                # With a mask of ones nothing else is made out of the positions, such as where sequences begin.
                out = self._run(first, positions, torch.ones_like(positions) if number == 0 else None)
            if number == 0:
                self._take_layers(probe)
                self._drop_towers(called)
                self._output_type = type(out)
            # Backwards, the second half with other neighbours: attention has returned zeros, and so nothing changes.
            with probing(makes_layers=False) as other:
                changed = self._run(torch.cat((others[:half], first[half:])).flip(0), positions.flip(0))
            probe.tensors.append(out.last_hidden_state[0].float())
            other.tensors.append(changed.last_hidden_state[0].float())
            pairs = zip(probe.tensors, other.tensors, strict=True)
            is_equal = all(_are_close(x[half:], y.flip(0)[half:], tolerance) for x, y in pairs)
            # The ranks go on together.
            if self._communicator.all_reduce_min(int(is_equal)):
                is_stateless = True
                break
        if not is_stateless:
            raise ValueError("it has layers with a state that is no KV cache, or counts positions by itself")

    def _drop_towers(self, called: set[str]) -> None:
        """Let go of the parts of a wrapper, such as that for images, which a text does not run through."""
        if self.config.hf.get_text_config() is not self.config.hf:
            for name in {name for name, _ in self.model.named_children()} - called:
                setattr(self.model, name, None)

    def _take_layers(self, probe: Probe) -> None:
        """Take in what the first tokens have shown."""
        if len(probe.modules) != self.config.num_layers:
            raise ValueError(f"{len(probe.modules)} of {self.config.num_layers} layers attend")
        if len(numbers := sorted(set(probe.num_heads))) > 1:
            raise ValueError(f"its layers have different numbers of query heads: {numbers}")
        # Some have a window in the cache of transformers alone: without it their code computes something else. Layers
        # that share a cache are not there.
        cache = transformers.DynamicCache(config=self.config.hf)
        for layer, cached in zip(self.attention_layers, cache.layers, strict=False):
            seen, kept = layer.options.window, getattr(cached, "sliding_window", None)
            if kept is not None and (seen is None or seen > kept):
                raise ValueError(f"its cache keeps {kept} tokens, its mask shows {'all' if seen is None else seen}")
        heads, kv_heads = probe.num_heads[0], self.attention_layers[0].num_kv_heads
        shard = self.shard
        is_divided = heads != shard.heads.total
        if self._communicator.size > 1 and is_divided:
            counts = {(heads, layer.num_kv_heads) for layer in self.attention_layers}
            if counts != {(shard.heads.size, shard.kv_heads.size)}:
                raise ValueError(f"its layers have other heads than its config says: {sorted(counts)} on this rank")
        self.shard = ModelShard(Shard.whole(kv_heads), Shard.whole(heads), shard.intermediate, shard.vocab)
        # Steps take no masks, nor does what comes after this.
        for module in (self.head, *self.model.modules()):
            if hasattr(module, "config"):
                module.config._attn_implementation = PAGED

    def _detach_head(self, device: torch.device) -> None:
        """Let the head take hidden states, which its decoder would compute."""
        self._given = _GivenStates(self.model, self._output_type)
        setattr(self.head, self._prefix, self._given)
        dtype = next(self.model.parameters()).dtype
        size = self._head_logits(torch.zeros(1, self.config.hidden_size, dtype=dtype, device=device)).shape[-1]
        if size != self.shard.vocab.num_present:
            raise ValueError(f"it has logits of {size} tokens, the config a vocab_size={self.config.vocab_size}")

    def _fuse(self, max_model_len: int, device: torch.device) -> None:
        """Take our kernels where they compute what the model's code does."""
        positions = torch.arange(NUM_ROWS, device=device)
        fused = fuse(self.model, lambda: self._run(positions, positions), max_model_len)
        fuse_linears(self.head)
        _logger.info("%s has of this library's: %s", self._class.__name__, dict(fused))

    def _check_capture(self, device: torch.device) -> None:
        """Find out whether steps can be CUDA graphs: on the way of some tokens nothing waits for the device."""
        positions = torch.arange(NUM_ROWS, device=device)
        stream = torch.cuda.Stream(device)
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(stream):
            with probing(makes_layers=False):
                self._run(positions, positions)
            torch.cuda.set_sync_debug_mode("error")
            try:
                with probing(makes_layers=False):
                    self._run(positions, positions)
            except RuntimeError as error:
                self.supports_cuda_graph = False
                name, cause = self._class.__name__, str(error).splitlines()[0]
                warnings.warn(f"{name} runs without CUDA graphs, slower with few rows: {cause}", stacklevel=2)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize(device)

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """See the base class; where the layers are, and whether one can be left out, is the model's own affair."""
        yield

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        masks = {} if mask is None else {"attention_mask": mask[None]}
        return self.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **masks)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> HiddenStates:
        """See the base class."""
        with step_positions(positions):
            states = self._run(token_ids.long(), positions.long()).last_hidden_state[0]
        return _Computed(states if rows is None else states[rows])

    def compute_logits(self, hidden: HiddenStates) -> torch.Tensor:
        """See the base class."""
        return self.project_logits(hidden.compute())

    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the base class; the model's own head may scale the logits, cap them, or add a bias."""
        logits, vocab = self._head_logits(hidden), self.shard.vocab
        return logits if vocab.is_whole else nn.functional.pad(logits, (0, vocab.size - vocab.num_present))

    def _head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.states = hidden[None]
        logits: torch.Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


class _Computed:
    """Hidden states that nothing is left to do for."""

    def __init__(self, states: torch.Tensor) -> None:
        self._states = states

    def compute(self) -> torch.Tensor:
        """See `HiddenStates`."""
        return self._states


class _GivenStates(nn.Module):
    """Stands where a head expects its decoder, and returns `states`, as an output of that decoder's type."""

    states: torch.Tensor

    def __init__(self, decoder: nn.Module, output_type: type) -> None:
        super().__init__()
        # Not as a module: it has a place already.
        self._replaced = (decoder,)
        self.output_type = output_type

    def __getattr__(self, name: str) -> Any:
        """Some heads read a factor that is their decoder's."""
        return getattr(self.__dict__["_replaced"][0], name)

    @property
    def decoder(self) -> _GivenStates:
        """OPT's head asks for the decoder within."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the head gets."""
        return self.output_type(last_hidden_state=self.states)


def _class_of(hf: Any) -> Any:
    """Return transformers' class of a config, or that of the code which comes with it."""
    name = (getattr(hf, "architectures", None) or [""])[0]
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = {*causal.values(), *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    # Decoders without a head are published under the name of the trunk.
    if not name or name == modeling_auto.MODEL_MAPPING_NAMES.get(hf.model_type):
        name = causal.get(hf.model_type, name)
    if name in known:
        return getattr(transformers, name)
    code = getattr(hf, "auto_map", {}).get("AutoModelForCausalLM")
    if code:
        return transformers.dynamic_module_utils.get_class_from_dynamic_module(code, hf.name_or_path)
    near = get_close_matches(name, sorted({*MODELS, *known}))
    hint = f": did you mean {', '.join(near)}?" if near else ""
    raise ValueError(f"architecture {name!r} is not supported: transformers has no such decoder{hint}")


@contextmanager
def _watch_children(model: nn.Module) -> Iterator[set[str]]:
    """Collect the names of the model's children of which something runs inside the `with` block."""
    called = set[str]()
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, child in model.named_children()
        for module in child.modules()
    ]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _fix_rope(model: nn.Module, max_model_len: int, device: torch.device) -> None:
    """Give rotary embeddings that change with the longest sequence the angles of `max_model_len` tokens, for good.

    Otherwise an answer would depend on its neighbours in the batch, and cached keys would not fit new queries.
    """
    last = torch.tensor([[max_model_len - 1]], device=device)
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                module(torch.zeros(1, device=device), last, *([] if layer_type is None else [layer_type]))
                by_layer[layer_type] = "default"
        if not isinstance(kinds, dict) and kinds is not None:
            module.rope_type = by_layer[None]


def _are_close(x: torch.Tensor, y: torch.Tensor, tolerance: float) -> bool:
    return torch.allclose(x, y, rtol=tolerance, atol=tolerance * max(x.std().item(), 1e-6))
