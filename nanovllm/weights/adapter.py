"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), as PEFT stores them: their updates to weights."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nanovllm.utils.display import shown
from nanovllm.utils.folder_faults import ADAPTER_CONFIG, read_json, refuse_pointer

_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight")
_ALPHA = 8
"""Default for a config without one."""
_UNSUPPORTED = (
    "use_dora", "modules_to_save", "fan_in_fan_out", "alpha_pattern", "megatron_config", "trainable_token_indices",
    "layer_replication",
)  # fmt: skip


@dataclass(frozen=True)
class LowRankUpdate:
    """The product `scale * b @ a` of [outputs, rank] and [rank, inputs], computed in float32 where it is read."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def get_shape(self) -> list[int]:
        """Return the product's shape."""
        return [len(self.b), self.a.shape[1]]

    def get_dtype(self) -> torch.dtype:
        """Return the product's dtype."""
        return torch.float32

    def to(self, device: torch.device) -> LowRankUpdate:
        """Return the update on a device."""
        return LowRankUpdate(self.a.to(device).float(), self.b.to(device).float(), self.scale)

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = index
        return self.scale * (self.b[rows] @ self.a[:, columns])


def is_adapter(folder: str) -> bool:
    """Return whether a folder has an adapter instead of a model's weights."""
    return os.path.isfile(os.path.join(folder, ADAPTER_CONFIG))


def read_adapter(folder: str) -> dict[str, LowRankUpdate]:
    """Return an adapter's updates to tensors, by their names in the checkpoint; ValueError if it is no plain LoRA."""
    config = read_json(os.path.join(folder, ADAPTER_CONFIG))
    _check_config(folder, config)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _read_tensors(folder).items():
        found = _NAME.fullmatch(name)
        if found is None or tensor.dim() != 2:
            raise ValueError(f"adapter in {folder!r}: tensor {name!r} is no matrix lora_A or lora_B of a linear layer")
        pairs.setdefault(f"{found[1]}.weight", {})[found[2]] = tensor
    return {name: _update(folder, name, pair, config) for name, pair in pairs.items()}


def _check_config(folder: str, config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        kind = f"peft_type={config.get('peft_type')!r}, bias={config.get('bias')!r}"
        raise ValueError(f"adapter in {folder!r}: {kind} is not supported: only 'LORA' with bias 'none'")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise ValueError(f"adapter in {folder!r}: {name}={config[name]!r:.80} is not supported")
    alpha = config.get("lora_alpha", _ALPHA)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ValueError(f"adapter in {folder!r}: lora_alpha must be a finite number, not {alpha!r:.80}")
    if not isinstance(pattern := config.get("rank_pattern") or {}, dict):
        raise ValueError(f"adapter in {folder!r}: rank_pattern must be an object, not {pattern!r:.80}")


def _read_tensors(folder: str) -> dict[str, torch.Tensor]:
    path = os.path.join(folder, _WEIGHTS)
    if not os.path.isfile(path):
        raise ValueError(f"adapter in {folder!r} has no {_WEIGHTS}")
    others = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors") and name != _WEIGHTS)
    if others:
        raise ValueError(f"{folder!r} has both an adapter and other weights, {shown(others)}: which are meant?")
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        refuse_pointer(path)
        raise ValueError(f"{path!r} is damaged: {error}") from error
    return tensors


def _update(folder: str, name: str, pair: dict[str, torch.Tensor], config: dict[str, Any]) -> LowRankUpdate:
    if set(pair) != {"A", "B"} or len(pair["A"]) != pair["B"].shape[1]:
        shapes = {key: list(tensor.shape) for key, tensor in pair.items()}
        raise ValueError(f"adapter in {folder!r}: the matrices for {name!r} do not fit each other: {shapes}")
    rank = len(pair["A"])
    # The pattern gives some layers another rank.
    if rank not in (config.get("r", rank), *(config.get("rank_pattern") or {}).values()):
        found = f"the matrices for {name!r} have rank {rank}; the config has r={config['r']!r}"
        raise ValueError(f"adapter in {folder!r}: {found}")
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return LowRankUpdate(pair["A"], pair["B"], config.get("lora_alpha", _ALPHA) / divisor)
