"""Runs any transformers decoder with this library's attention over its paged KV cache.

transformers makes the model, loads the weights and runs everything but attention, with all of a step's tokens as one
sequence. The properties of attention layers (heads, window, softcap, sinks) are not read from the config, whose names
differ between families, but observed by running tokens through the model at loading; unsupported models are refused
then.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from typing_extensions import override

from nanovllm.config import Config
from nanovllm.configs.model import MODELS, ModelConfig, transformers_class
from nanovllm.models.base import CausalLM
from nanovllm.models.fuse import NUM_ROWS, are_close, fuse, fuse_linears, record_calls, step_positions
from nanovllm.models.transformers_attention import PAGED, PROBED, Probe, noise_of, probing
from nanovllm.models.transformers_shard import SourceParameters, shard_model
from nanovllm.parallel.communicator import Communicator
from nanovllm.parallel.shard import ModelShard, Shard
from nanovllm.weights.files import misfit, stored_tensors
from nanovllm.weights.model_weights import ModelWeights, WholeTensor
from nanovllm.weights.slices import Slices, WeightTarget

_logger = logging.getLogger(__name__)
_PROBED_TOKENS = 128
_PROBES = 3
"""Number of attempts: a mixture may route a token differently by a rounding error; a state fails every attempt."""
_TOLERANCES = {torch.float32: 1e-3}
_COARSE_TOLERANCE = 3e-2


class TransformersForCausalLM(CausalLM):
    """A transformers model over the paged KV cache; ValueError if transformers lacks it, or its attention's kind."""

    def __init__(self, config: ModelConfig, communicator: Communicator) -> None:
        super().__init__(config, communicator)
        self._class = _class_of(config.hf)
        self.head = self._made(config.hf, torch.float32)

    @override
    def load(
        self, config: Config, folder: str, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> ModelWeights:
        if config.load_format == "dummy":
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
                torch.manual_seed(config.seed or 0)
                self.head = self._made(self.config.hf, dtype)
        else:
            self.head = self._read(folder, dtype)
        self.head.eval().requires_grad_(False)
        self._sources, self._dtype = SourceParameters(self.head), dtype
        indices = self._divide() if self.communicator.size > 1 else {}
        self.head.to(device)
        prefix = self.head.base_model_prefix
        self._prefix = prefix if hasattr(self.head, prefix) else "model"
        self.model = getattr(self.head, self._prefix)
        try:
            with torch.inference_mode():
                _fix_rope(self.model, max_model_len, device)
                states = self._find_layers(min(_PROBED_TOKENS, self.config.max_position), max_model_len, device)
                self._sources.find(self.head, indices)
                self._detach_head(states)
                if device.type == "cuda" and not config.enforce_eager:
                    self._check_capture(device)
                self._fuse(max_model_len, device)
        except Exception as error:  # the code of each model has its own ways to fail
            cause = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"{self._class.__name__} cannot run over a paged KV cache: {cause}") from error
        return ModelWeights(self, device, self.communicator)

    @override
    def weight_slices(self) -> Slices:
        """Return the slices by the parameter names of transformers' model."""
        return self._sources.slices(self)

    @override
    def weight_tensors(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self._sources.tensors]

    @override
    def weight_targets(self, name: str) -> list[WeightTarget]:
        return self._sources.targets(name)

    @override
    def folder_tensors(self, folder: str) -> Iterator[tuple[str, str, Any]]:
        """Read a folder by transformers' code, which converts tensors stored in another form."""
        for name, parameter in self._read(folder, self._dtype).named_parameters():
            yield folder, name, WholeTensor(parameter.detach())

    def _divide(self) -> dict[str, tuple[slice, ...]]:
        try:
            return shard_model(self.head, self.shard, self.communicator)
        except ValueError as error:
            size = self.communicator.size
            raise ValueError(f"tensor_parallel_size={size}: {self._class.__name__} has one rank: {error}") from error

    def _made(self, hf: Any, dtype: torch.dtype) -> Any:
        """Make the model with random weights, or without weights on the meta device."""
        name = self._class.__name__
        try:
            return self._class._from_config(copy.deepcopy(hf), dtype=dtype, attn_implementation=PROBED)
        except Exception as error:  # the code of each model has its own ways to refuse a config
            if isinstance(error, KeyError) and error.args == (PROBED,):
                raise ValueError(f"{name} has attention classes of its own, which cannot be replaced") from error
            fields = _fields_of(hf.to_dict(), error.args) if isinstance(error, KeyError) else ""
            cause = f"it does not know {fields}" if fields else f"{type(error).__name__}: {error}"
            raise ValueError(f"transformers cannot make {name}: {cause}") from error

    def _read(self, folder: str, dtype: torch.dtype) -> Any:
        """Read the weights by transformers' code, which handles renamed, merged and tied weights of each family."""
        options = {"dtype": dtype, "attn_implementation": PROBED, "output_loading_info": True}
        # Mismatches are refused below, by name.
        options["ignore_mismatched_sizes"] = True
        # Pass tensors, not the folder, which may hold other files: `stored_tensors` decides what belongs to the model.
        options["state_dict"] = {name: tensor[...] for _, name, tensor in stored_tensors(folder)}
        try:
            head, info = self._class.from_pretrained(None, config=copy.deepcopy(self.config.hf), **options)
        except RuntimeError as error:
            raise ValueError(f"checkpoint in {folder!r} does not fit: {error}") from error
        missing, surplus = (sorted(info[name]) for name in ("missing_keys", "unexpected_keys"))
        if info["mismatched_keys"]:
            raise ValueError(f"{misfit(folder, missing, surplus)}, of another shape {info['mismatched_keys']}")
        if missing or surplus:
            raise ValueError(misfit(folder, missing, surplus))
        return head

    def _find_layers(self, num_tokens: int, max_model_len: int, device: torch.device) -> torch.Tensor:
        """Make the attention layers; refuse a model in which more than attention mixes tokens.

        Returns the hidden states of about `num_tokens` tokens.
        """
        half = num_tokens // 2
        first = torch.arange(2 * half, device=device)
        # Reversed, with the second half interleaved with other tokens, in two rows: sequence lengths differ, but not
        # the sizes of products, nor rounding. Attention returns the same for a token, so its states must not change.
        second = torch.stack((2 * half + first[:half], first[half:]), dim=1).flatten().flip(0).view(2, half)
        positions = torch.cat((first, torch.linspace(0, max_model_len - 1, half, device=device).long()))
        generator = torch.Generator().manual_seed(0)
        for number in range(_PROBES):
            token_ids = torch.randint(self.config.vocab_size, (len(positions),), generator=generator).to(device)
            with probing(makes_layers=number == 0, answers=noise_of(first, len(positions))) as probe:
                # A mask of ones keeps transformers from deriving sequence boundaries from the positions.
                out = self._run(token_ids[first], positions[first], torch.ones_like(first) if number == 0 else None)
            if number == 0:
                self._take_layers(probe)
                self._drop_towers(device)
                self._output_type = type(out)
            with probing(makes_layers=False, answers=noise_of(second, len(positions))) as other:
                changed = self._run(token_ids[second], positions[second])
            if probe.settings != other.settings:
                raise ValueError("it asks attention for another scale, window or softcap where there are other tokens")
            states: torch.Tensor = out.last_hidden_state[0]
            others = [*other.tensors, changed.last_hidden_state.flatten(0, 1)]
            pairs = zip([*probe.tensors, states], others, strict=True)
            if self._all_are_close((x[half:], y.flip(0)[1::2]) for x, y in pairs):
                return states
        raise ValueError(
            "it has layers with a state that is no KV cache, mixes tokens outside attention, or counts positions or "
            "tokens by itself"
        )

    def _all_are_close(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Return whether the tensors of each pair are equal but for rounding, on all ranks."""
        tolerance = _TOLERANCES.get(self._dtype, _COARSE_TOLERANCE)
        is_close = all(are_close(x.float(), y.float(), tolerance) for x, y in pairs)
        return bool(self.communicator.all_reduce_min(int(is_close)))

    def _drop_towers(self, device: torch.device) -> None:
        """Drop the parts of a wrapper that text does not run through, such as an image encoder."""
        if self.config.hf.get_text_config() is not self.config.hf:
            called = {call.module for call in record_calls(self.model, lambda: self._run_few(device))}
            for name, child in list(self.model.named_children()):
                if called.isdisjoint(child.modules()):
                    setattr(self.model, name, None)

    def _take_layers(self, probe: Probe) -> None:
        """Check and store the shapes that the first tokens have shown of the layers."""
        if len(probe.modules) != self.config.num_layers:
            raise ValueError(f"{len(probe.modules)} of {self.config.num_layers} layers attend")
        # Queries, keys and values of each layer.
        if len(numbers := sorted({query.shape[1] for query in probe.tensors[::3]})) > 1:
            raise ValueError(f"its layers have different numbers of query heads: {numbers}")
        # Some models implement a window only in transformers' cache, without which they would compute something else.
        # Layers that share a cache are missing there.
        cache = transformers.DynamicCache(config=self.config.hf)
        for layer, cached in zip(self.attention_layers, cache.layers, strict=False):
            seen, kept = layer.options.window, getattr(cached, "sliding_window", None)
            if kept is not None and (seen is None or seen > kept):
                raise ValueError(f"its cache keeps {kept} tokens, its mask shows {'all' if seen is None else seen}")
        heads, kv_heads, shard = numbers[0], self.attention_layers[0].num_kv_heads, self.shard
        if self.communicator.size > 1 and heads != shard.heads.total:
            counts = {(heads, layer.num_kv_heads) for layer in self.attention_layers}
            if counts != {(shard.heads.size, shard.kv_heads.size)}:
                raise ValueError(f"its layers have other heads than its config says: {sorted(counts)} on this rank")
        self.shard = ModelShard(Shard.whole(kv_heads), Shard.whole(heads), shard.intermediate, shard.vocab)
        # From here on no masks are needed.
        for module in (self.head, *self.model.modules()):
            if hasattr(module, "config"):
                module.config._attn_implementation = PAGED

    def _detach_head(self, states: torch.Tensor) -> None:
        """Give the head hidden states instead of its decoder's output; refuse a head that mixes tokens."""
        self._given = _GivenStates(self.model, self._output_type)
        setattr(self.head, self._prefix, self._given)
        states = states[: 2 * NUM_ROWS]
        logits = self._head_logits(states[:NUM_ROWS])
        if logits.shape[-1] != self.shard.vocab.num_present:
            size = logits.shape[-1]
            raise ValueError(f"it has logits of {size} tokens, the config a vocab_size={self.config.vocab_size}")
        # Reversed, with other and more neighbours.
        changed = self._head_logits(states.flip(0)).flip(0)[:NUM_ROWS]
        if not self._all_are_close([(logits, changed)]):
            raise ValueError("its head mixes tokens")

    def _fuse(self, max_model_len: int, device: torch.device) -> None:
        fused = fuse(self.model, lambda: self._run_few(device), max_model_len)
        fuse_linears(self.head)
        _logger.info("%s has of this library's: %s", self._class.__name__, dict(fused))

    def _check_capture(self, device: torch.device) -> None:
        """Set whether steps can be CUDA graphs: a run of some tokens must not wait for the device."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        mode = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(stream):
            self._run_few(device)
            torch.cuda.set_sync_debug_mode("error")
            try:
                self._run_few(device)
            except RuntimeError as error:
                self.supports_cuda_graph = False
                name, cause = self._class.__name__, str(error).splitlines()[0]
                warnings.warn(f"{name} runs without CUDA graphs, slower with few rows: {cause}", stacklevel=2)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize(device)

    @contextmanager
    @override
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Keep all layers: only the model's own code knows whether a layer can be omitted."""
        yield

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        """Run the decoder on tokens, [num_tokens], or on rows of them."""
        masks = {} if mask is None else {"attention_mask": mask[None]}
        token_ids, positions = torch.atleast_2d(token_ids, positions)
        return self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **masks)

    def _run_few(self, device: torch.device) -> None:
        """Run the decoder on `NUM_ROWS` tokens, with zeros in place of attention."""
        positions = torch.arange(NUM_ROWS, device=device)
        with probing(makes_layers=False):
            self._run(positions, positions)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None,
        hidden_states: dict[int, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Run the model including its last norm, unlike other models."""
        with step_positions(positions):
            states = self._run(token_ids.long(), positions.long()).last_hidden_state[0]
        return states if rows is None else states[rows], None

    @override
    def hidden_states(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return x

    @override
    def compute_logits(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        return self.project_logits(x)

    @override
    def project_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the model's own head, which may scale the logits, cap them, or add a bias."""
        logits, vocab = self._head_logits(hidden), self.shard.vocab
        return logits if vocab.is_whole else nn.functional.pad(logits, (0, vocab.size - vocab.num_present))

    def _head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.states = hidden[None]
        logits: torch.Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


class _GivenStates(nn.Module):
    """Replaces a head's decoder, and returns `states` as an output of that decoder's type."""

    states: torch.Tensor

    def __init__(self, decoder: nn.Module, output_type: type) -> None:
        super().__init__()
        # In a tuple, so that it is not registered as a submodule again.
        self._replaced = (decoder,)
        self.output_type = output_type

    def __getattr__(self, name: str) -> Any:
        """Return the decoder's attribute: some heads read a factor from it."""
        return getattr(self.__dict__["_replaced"][0], name)

    @property
    def decoder(self) -> _GivenStates:
        """Return itself, for OPT's head, which uses a nested decoder."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states for the head."""
        return self.output_type(last_hidden_state=self.states)


def _class_of(hf: Any) -> Any:
    """Return transformers' class for a config, or the class in the checkpoint's own code."""
    if (known := transformers_class(hf)) is not None:
        return getattr(transformers, known)
    code = getattr(hf, "auto_map", {}).get("AutoModelForCausalLM")
    if code:
        return transformers.dynamic_module_utils.get_class_from_dynamic_module(code, hf.name_or_path)
    name = (getattr(hf, "architectures", None) or [""])[0]
    wrapped = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    near = get_close_matches(
        name, sorted({*MODELS, *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *wrapped})
    )
    hint = f": did you mean {', '.join(near)}?" if near else ""
    raise ValueError(f"architecture {name!r} is not supported: transformers has no such decoder{hint}")


def _fields_of(values: dict[str, Any], wanted: tuple[Any, ...]) -> str:
    """Return as text the fields of a config, nested ones included, that have one of the wanted values."""
    found = [_fields_of(value, wanted) for value in values.values() if isinstance(value, dict)]
    found += [f"{name}={value!r}" for name, value in values.items() if isinstance(value, str) and value in wanted]
    return ", ".join(filter(None, found))


def _fix_rope(model: nn.Module, max_model_len: int, device: torch.device) -> None:
    """Fix rotary embeddings that depend on the longest sequence at the angles of `max_model_len` tokens.

    Otherwise an answer would depend on other requests in the batch, and cached keys would not match new queries.
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
