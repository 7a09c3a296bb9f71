"""The weights of a model that runs: new values in place, an adapter merged and taken out, memory given back.

Everything is written where it is, so that captured graphs go on reading it. Storages are emptied and filled again, and
so whatever views them (parts of a merged matrix, a tied head) stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from nanovllm.models.adapter import read_adapter
from nanovllm.models.base import CausalLM
from nanovllm.models.loader import rows_of, shape_of
from nanovllm.quantization.loading import WeightSlice, WeightTarget, WholeTensor
from nanovllm.utils.remote import is_url, weights_place
from nanovllm.utils.units import shown

Parts = list[tuple[WeightTarget, WeightSlice]]
Maxima = list[tuple[str, torch.Tensor]]
_E4M3_NAN = 0x7F
"""Its bits without the sign."""
_STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
"""By their names in safetensors."""


class LiveWeights:
    """One rank's weights.

    Args:
        model: filled before.
        device: of the model.

    Attributes:
        missing: what a sleep has dropped, and nothing has brought again; or a load that failed has left undone.
        half_merged: what may have parts of an adapter, on this rank or another, since a change of it has failed.
    """

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._slices = model.weight_slices()
        # By the names of tensors that have come once: a trainer brings them again and again.
        self._parts: dict[str, Parts] = {}
        self._maxima: Maxima = []
        # What an adapter has changed, as it was.
        self._base: dict[WeightTarget, torch.Tensor] = {}
        # Of each storage its bytes while it is released, and a copy of its content.
        self._sizes: list[int] | None = None
        self._is_kept = False
        self._pinned: list[torch.Tensor] = []
        self.missing: set[WeightTarget] = set()
        self.half_merged: set[WeightTarget] = set()

    @property
    def slices(self) -> dict[WeightTarget, WeightSlice]:
        """What this rank holds of each tensor that the model is made of."""
        return self._slices

    @property
    def adapter_targets(self) -> set[WeightTarget]:
        """What an adapter has changed, or may have, in whole or in part."""
        return self.half_merged | set(self._base)

    def targets(self, name: str) -> list[WeightTarget]:
        """Return what a tensor, which `check` has passed, is for; nothing for one that is not needed."""
        return [target for target, _ in self._parts[name]]

    def check(self, name: str, tensor: Any) -> bool:
        """Return whether a tensor is needed; a tied head is not.

        Args:
            name: in the checkpoint.
            tensor: a tensor, or what reads one of safetensors.

        Raises:
            ValueError: the model has no such tensor, or one of another shape or dtype.
        """
        if isinstance(tensor, torch.Tensor):
            tensor = WholeTensor(tensor)
        parts = self._find(name)
        shape, dtype = list(tensor.get_shape()), tensor.get_dtype()
        dtype = _STORED_DTYPES.get(dtype, dtype)
        if len(parts) > 1 and shape not in ([], [1], expected := shape_of(parts)):
            raise ValueError(f"tensor {name!r} has shape {shape}; the config asks for {expected}")
        for target, rows in rows_of(tensor, parts):
            part = self._slices[target]
            part.check_shape(name, rows.get_shape())
            part.check_dtype(name, dtype)
        return bool(parts)

    def check_values(self, name: str, tensor: Any) -> None:
        """Raise a `ValueError` if a tensor, which `check` has passed, has values that are not stored."""
        for part in {type(part): part for _, part in self._parts[name]}.values():
            part.check_values(name, tensor)

    def _find(self, name: str) -> Parts:
        if name in self._parts:
            return self._parts[name]
        targets = self._model.weight_targets(name)
        unknown = [target for target in targets if target not in self._slices]
        if unknown:
            near = get_close_matches(name, map(self._model.stored_name, self._slices), 1)
            raise ValueError(f"the model has no tensor {name!r}" + (f"; it has {near[0]!r}" if near else ""))
        self._parts[name] = [(target, self._slices[target]) for target in targets]
        return self._parts[name]

    def write(self, name: str, tensor: Any) -> None:
        """Put a tensor that `check` has passed where it goes. An adapter must have been taken out."""
        if isinstance(tensor, torch.Tensor):
            tensor = WholeTensor(tensor)
        for target, rows in rows_of(tensor, self._parts[name]):
            maxima: Maxima = []
            self._slices[target].fill(name, _Watched(name, rows, self._device, maxima))
            # Not of what was refused.
            self._maxima += maxima
            self.missing.discard(target)

    def check_folder(self, folder: str, strict: bool) -> tuple[int, set[WeightTarget]]:
        """Return how many tensors of a folder are needed, and what for; refuses one that does not fit.

        Raises:
            ValueError: see `check`; a file is missing or damaged; or, with `strict`, tensors are missing. Or, of a
                local folder, see `check_values`.
        """
        num_needed, found = 0, set[WeightTarget]()
        # Elsewhere neighbours come with what is read: that would be all of the folder, once more.
        is_local = not is_url(weights_place(folder))
        for name, tensor in self._model.folder_tensors(folder):
            num_needed += self.check(name, tensor)
            if is_local:
                self.check_values(name, tensor)
            found.update(self.targets(name))
        if strict:
            self.check_whole(found)
        return num_needed, found

    def check_whole(self, written: set[WeightTarget]) -> None:
        """Raise a `ValueError` if these are not all."""
        if missing := [str(target) for target in self._slices if target not in written]:
            raise ValueError(f"{len(missing)} of {len(self._slices)} tensors are missing: {shown(missing)}")

    def write_folder(self, folder: str) -> None:
        """Write the tensors of a folder, which `check_folder` has passed."""
        for name, tensor in self._model.folder_tensors(folder):
            if self.check(name, tensor):
                self.write(name, tensor)

    def check_adapter(self, folder: str) -> tuple[int, set[WeightTarget]]:
        """Return how many matrices an adapter changes, and which weights they are.

        Raises:
            ValueError: it does not fit, or the weights that it changes are missing, quantised or tied to others.
        """
        updates = read_adapter(folder)
        if self.missing:
            raise ValueError(f"an adapter changes weights, of which {len(self.missing)} are missing")
        for name, update in updates.items():
            # Of what is stored in e4m3 the update would have another dtype.
            if not all(part.has_model_dtype for _, part in self._find(name)):
                raise ValueError(f"adapter in {folder!r}: the model's {name!r} is quantised")
            if not self.check(name, update):
                raise ValueError(f"adapter in {folder!r}: the model's {name!r} is tied to its embedding")
        return len(updates), {target for name in updates for target in self.targets(name)}

    def merge_adapter(self, folder: str) -> None:
        """Add an adapter, which `check_adapter` has passed, to the weights without the one before it."""
        self.take_adapter_out()
        for name, update in read_adapter(folder).items():
            # Other ranks than the first have checked nothing.
            self.check(name, update)
            for target, rows in rows_of(update.to(self._device), self._parts[name]):
                part = self._slices[target]
                self._base[target] = part.region.to("cpu", copy=True)
                part.store(name, part.region.float() + _Watched(name, rows, self._device, self._maxima)[part.index])

    def take_adapter_out(self) -> int:
        """Restore the weights that an adapter has changed, to the bit; return how many."""
        count = len(self._base)
        while self._base:
            # Kept until it is restored: a device may have no memory for what a store takes.
            target, values = next(iter(self._base.items()))
            self._slices[target].store(str(target), values)
            del self._base[target]
        return count

    def take_nans(self) -> list[str]:
        """Return, once, the names of tensors written since the last call that have NaN; waits for the device."""
        maxima, self._maxima = self._maxima, []
        names: list[str] = []
        # One launch for those of a dtype: a conversion of each costs as much as its maximum.
        for dtype in dict.fromkeys(value.dtype for _, value in maxima):
            same = [(name, value) for name, value in maxima if value.dtype == dtype]
            stacked = torch.stack([value for _, value in same])
            found = (stacked == _E4M3_NAN if dtype == torch.uint8 else stacked.isnan()).tolist()
            names += [name for (name, _), is_nan in zip(same, found, strict=True) if is_nan]
        return list(dict.fromkeys(names))

    @property
    def is_complete(self) -> bool:
        """Whether the model can run: the weights are on the device, and none is missing."""
        return self._sizes is None and not self.missing

    def release(self, keep: bool) -> None:
        """Give the weights' memory back; on the CPU only what is not kept.

        Args:
            keep: copy them to the host's memory, from where `restore` brings them, unless they were dropped before.
        """
        storages, is_cuda = self._storages(), self._device.type == "cuda"
        if self._sizes is None:
            self._sizes, self._is_kept = [storage.nbytes() for storage in storages], keep
            if keep and is_cuda:
                # Pinned once: that takes seconds, and a trainer's engine sleeps in every step.
                self._pinned = self._pinned or [torch.empty(n, dtype=torch.uint8, pin_memory=True) for n in self._sizes]
                for storage, copy in zip(storages, self._pinned, strict=True):
                    copy.copy_(_bytes_of(storage), non_blocking=True)
                torch.cuda.synchronize(self._device)
        elif keep or not self._is_kept:
            return
        if not keep:
            self._is_kept = False
            self._pinned, self._base, self.half_merged = [], {}, set()
            self.missing = set(self._slices)
        if is_cuda or not keep:
            for storage in storages:
                # A file that is mapped is no memory to give back.
                if storage.resizable():
                    storage.resize_(0)

    def restore(self) -> None:
        """Take memory for the weights again, with what was kept in it; nothing happens if they have some."""
        if self._sizes is None:
            return
        storages = self._storages()
        for storage, size in zip(storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
        if self._is_kept:
            for storage, copy in zip(storages, self._pinned, strict=False):
                _bytes_of(storage).copy_(copy, non_blocking=True)
        self._sizes = None

    def _storages(self) -> list[torch.UntypedStorage]:
        """Return each storage that weights lie in, once."""
        found = {}
        for tensor in self._model.weight_tensors():
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage
        return list(found.values())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def weight_pair(item: Any) -> tuple[str, torch.Tensor]:
    """Return a name and its tensor, if they are that; floats of 64 bits, which no model has, as such of 32."""
    if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str)):
        raise ValueError(f"weights are pairs of a name and a tensor, not {item!r:.80}")
    name, tensor = item
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"tensor {name!r} is a {type(tensor).__name__}")
    if hasattr(tensor, "full_tensor"):
        raise ValueError(f"tensor {name!r} is a DTensor, of which a rank has a part: give its full_tensor()")
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ValueError(f"tensor {name!r} has no values: {tensor.device}, {tensor.layout}")
    tensor = tensor.detach()
    return name, tensor.float() if tensor.dtype == torch.float64 else tensor


@dataclass(frozen=True)
class _Watched:
    """A tensor of which each part that is read goes to the device, and has its maximum noted: NaN if there is one."""

    name: str
    tensor: Any
    device: torch.device
    maxima: Maxima

    def get_shape(self) -> list[int]:
        return list(self.tensor.get_shape())

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        values: torch.Tensor = self.tensor[index].to(self.device, non_blocking=True)
        if values.numel():
            # There is no maximum in e4m3; without their signs its bytes are in the order of their values.
            is_e4m3 = values.dtype == torch.float8_e4m3fn
            self.maxima.append((self.name, (values.view(torch.uint8) & _E4M3_NAN if is_e4m3 else values).amax()))
        return values
