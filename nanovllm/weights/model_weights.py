"""Weights of a running model: first load, updates in place, adapters, and memory released by a sleep.

A first load and an update share one path: a pair of a name and a tensor, from a folder or a caller; this rank's slices
of it; checks, before any of it is written; then the storage. Everything is written in place, so that captured graphs
keep reading it. Storages are emptied and filled again, so that views of them (parts of a merged matrix, a tied head)
stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from typing import Any

import torch

from nanovllm.parallel.communicator import Communicator
from nanovllm.utils.display import loading_bar, shown
from nanovllm.weights.adapter import is_adapter, read_adapter
from nanovllm.weights.files import misfit, weight_pair
from nanovllm.weights.names import WeightedModel
from nanovllm.weights.report import LoadedWeights, LoadFailedError, MissingWeights
from nanovllm.weights.slices import WeightSlice, WeightTarget

Parts = list[tuple[WeightTarget, WeightSlice]]
NanFlags = list[tuple[str, torch.Tensor]]
_E4M3_NAN = 0x7F
"""Its bits without the sign."""
_STAGED_BYTES = 2**25
"""Bytes that are copied to a device at once."""
_STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip
"""By their names in safetensors."""


@dataclass(frozen=True)
class WholeTensor:
    """A tensor in memory, as `ModelWeights.write` expects it."""

    tensor: torch.Tensor

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self.tensor.shape)

    def get_dtype(self) -> torch.dtype:
        """Return its dtype."""
        return self.tensor.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        return self.tensor[index]


@dataclass(frozen=True)
class TensorRows:
    """Rows `start ... stop - 1`, or columns, of a checkpoint tensor that stacks several."""

    tensor: Any
    start: int
    stop: int
    dim: int

    def get_shape(self) -> list[int]:
        """Return the shape of these rows."""
        shape = list(self.tensor.get_shape())
        shape[self.dim] = self.stop - self.start
        return shape

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        place, own = list(index), index[self.dim]
        place[self.dim] = slice(self.start + own.start, self.start + own.stop)
        values: torch.Tensor = self.tensor[tuple(place)]
        return values


@dataclass(frozen=True)
class StackedTensor:
    """One matrix of a tensor that stacks several, such as a trainer's experts."""

    tensor: Any
    number: int

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix."""
        return list(self.tensor.get_shape()[1:])

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        place = (slice(self.number, self.number + 1), *index)
        values: torch.Tensor = self.tensor[place]
        return values[0]


class ModelWeights:
    """The weights of one rank, for which a model has memory on a device.

    Attributes:
        missing: weights that a sleep dropped, or a failed load left incomplete, and that were not loaded since.
        merged: weights that an adapter changes on some rank, as far as this one knows.
    """

    def __init__(self, model: WeightedModel, device: torch.device, communicator: Communicator | None = None) -> None:
        self._model = model
        self._device = device
        self._communicator = communicator or Communicator()
        self._slices = model.weight_slices()
        # By the names of tensors seen before: a trainer sends them again and again.
        self._parts: dict[str, Parts] = {}
        self._nan_flags: NanFlags = []
        # The original values of weights that an adapter has changed.
        self._base: dict[WeightTarget, torch.Tensor] = {}
        # The bytes of each storage while it is released, and a copy of its content.
        self._sizes: list[int] | None = None
        self._is_kept = False
        self._pinned: list[torch.Tensor] = []
        self.missing: set[WeightTarget] = set()
        self.merged: set[WeightTarget] = set()

    def targets(self, name: str) -> list[WeightTarget]:
        """Return the targets of a tensor that `check` has passed; empty if it is not needed."""
        return [target for target, _ in self._parts[name]]

    def check(self, name: str, tensor: Any) -> bool:
        """Return whether a tensor, or a reader of one, is needed; ValueError for another name, shape or dtype."""
        if isinstance(tensor, torch.Tensor):
            tensor = WholeTensor(tensor)
        parts = self._find(name)
        shape, dtype = list(tensor.get_shape()), tensor.get_dtype()
        if len(parts) > 1 and shape not in ([], [1]) and shape != (expected := shape_of(parts)):
            raise ValueError(f"tensor {name!r} has shape {shape}; the config asks for {expected}")
        for target, rows in rows_of(tensor, parts):
            part = self._slices[target]
            part.check_shape(name, rows.get_shape())
            part.check_dtype(name, _STORED_DTYPES.get(dtype, dtype))
        return bool(parts)

    def check_values(self, name: str, tensor: Any) -> None:
        """Raise a `ValueError` if a tensor that `check` has passed has values that are not stored."""
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

    def write(self, name: str, tensor: Any, *, finds_nans: bool = True) -> None:
        """Store this rank's slices of a tensor that `check` has passed; with `finds_nans`, `take_nans` reports any NaN.

        `tensor` is a reader of a file's tensor; or a tensor of the first rank, which broadcasts it to the others, where
        it has no values (meta device).
        """
        if isinstance(tensor, torch.Tensor):
            tensor = WholeTensor(self._broadcast(name, tensor))
        for target, rows in rows_of(tensor, self._parts[name]):
            for place in self._slices[target].places:
                values = _on_device(rows[place.index], self._device)
                place.store(name, values)
                if finds_nans:
                    self._nan_flags += _nan_flags(name, values)
            self.missing.discard(target)

    def _broadcast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._communicator.size == 1:
            return tensor
        if tensor.is_meta:
            # This rank has not seen the name.
            self.check(name, tensor)
            return self._communicator.broadcast(torch.empty_like(tensor, device=self._device))
        return self._communicator.broadcast(tensor.to(self._device))

    @contextmanager
    def after_the_caller(self) -> Iterator[None]:
        """Work on the stream of the steps, after work queued on the caller's stream, which then waits."""
        if self._device.type != "cuda":
            with torch.inference_mode():
                yield
            return
        callers, own = torch.cuda.current_stream(self._device), torch.cuda.default_stream(self._device)
        with torch.inference_mode(), torch.cuda.stream(own):
            own.wait_stream(callers)
            yield
            callers.wait_stream(own)

    def load_folder(self, folder: str) -> None:
        """Fill the model for the first time with all tensors from the safetensors of a folder.

        A rank reads its slices from the memory-mapped files, one tensor after the other, so that host memory holds at
        most one. The first rank shows a progress bar. ValueError if a file is missing or damaged, or tensors are
        missing, left over, or of another shape or dtype.
        """
        self._check_names(folder)
        num_bytes = sum(part.region.nbytes for part in self._slices.values())
        with loading_bar("Loading weights", num_bytes, "B", self._communicator.rank) as bar:
            for _, name, tensor in self._model.folder_tensors(folder):
                self.check(name, tensor)
                self.write(name, tensor, finds_nans=False)
                for _, part in self._parts[name]:
                    bar.update(part.region.nbytes)

    def _check_names(self, folder: str) -> None:
        """Reject, before reading any, tensors that are missing, left over, or duplicated."""
        found, surplus = set[WeightTarget](), []
        for file, name, _ in self._model.folder_tensors(folder):
            for target in self._model.weight_targets(name):
                if target in found:
                    raise ValueError(f"tensor {name!r} is there twice, the second time in {file!r}")
                found.add(target)
                if target not in self._slices:
                    surplus.append(name)
        missing = [self._model.stored_name(target) for target in self._slices if target not in found]
        if surplus or missing:
            raise ValueError(misfit(folder, missing, surplus))

    def draw(self, seed: int) -> None:
        """Fill the model with normal numbers of the config's spread, the same on all ranks, and norms with ones."""
        like = next(self._model.parameters())
        generator = torch.Generator(like.device).manual_seed(seed % 2**63)
        for target, part in self._slices.items():
            if "norm" in target.param:
                part.region.fill_(1.0)
                continue
            drawn = torch.empty(part.shape, dtype=like.dtype, device=like.device)
            drawn.normal_(0.0, self._model.config.initializer_range, generator=generator)
            part.store(str(target), drawn[part.index])

    def check_folder(self, folder: str, strict: bool) -> tuple[int, set[WeightTarget]]:
        """Return the number of needed tensors in a folder, and their targets; ValueError if one does not fit."""
        num_needed, found = 0, set[WeightTarget]()
        for _, name, tensor in self._model.folder_tensors(folder):
            num_needed += self.check(name, tensor)
            self.check_values(name, tensor)
            found.update(self.targets(name))
        if strict:
            self.check_whole(found)
        return num_needed, found

    def check_whole(self, written: set[WeightTarget]) -> None:
        """Raise a `ValueError` if targets are missing."""
        if missing := [self._model.stored_name(target) for target in self._slices if target not in written]:
            raise ValueError(f"{len(missing)} of {len(self._slices)} tensors are missing: {shown(missing)}")

    def write_folder(self, folder: str) -> None:
        """Write the tensors of a folder, which `check_folder` has passed."""
        for _, name, tensor in self._model.folder_tensors(folder):
            if self.check(name, tensor):
                self.write(name, tensor)

    def check_adapter(self, folder: str) -> tuple[int, set[WeightTarget]]:
        """Return the number of matrices that an adapter changes, and their weights; ValueError if it does not fit."""
        updates = read_adapter(folder)
        if self.missing:
            raise ValueError(f"an adapter needs all weights, but {len(self.missing)} are missing")
        for name, update in updates.items():
            # Weights stored in e4m3 would need an update of another dtype.
            if not all(part.has_model_dtype for _, part in self._find(name)):
                raise ValueError(f"adapter in {folder!r}: the model's {name!r} is quantised")
            if not self.check(name, update):
                raise ValueError(f"adapter in {folder!r}: the model's {name!r} is tied to its embedding")
        return len(updates), {target for name in updates for target in self.targets(name)}

    def merge_adapter(self, folder: str) -> None:
        """Add an adapter, which `check_adapter` has passed, to the weights, replacing the previous one."""
        self.take_adapter_out()
        for name, update in read_adapter(folder).items():
            # Only the first rank has checked it before.
            self.check(name, update)
            for target, rows in rows_of(update.to(self._device), self._parts[name]):
                part = self._slices[target]
                self._base[target] = part.region.to("cpu", copy=True)
                change = rows[part.index]
                self._nan_flags += _nan_flags(name, change)
                replace(part, factor=1.0).store(name, part.region.float() + part.scaled(change))

    def take_adapter_out(self, merged: Collection[WeightTarget] = ()) -> int:
        """Restore the weights that an adapter has changed, bit for bit; `merged`: on any rank. Return their number."""
        count = len(self._base)
        while self._base:
            # Kept until restored: the device may lack memory for a store.
            target, values = next(iter(self._base.items()))
            replace(self._slices[target], factor=1.0).store(str(target), values)
            del self._base[target]
        self.missing.difference_update(merged)
        return count

    def take_nans(self) -> list[str]:
        """Return the names of tensors with NaN written since the last call; waits for the device."""
        flags, self._nan_flags = self._nan_flags, []
        found = torch.stack([flag for _, flag in flags]).tolist() if flags else []
        return list(dict.fromkeys(name for (name, _), is_nan in zip(flags, found, strict=True) if is_nan))

    def count_missing(self) -> MissingWeights:
        """Return the number of weights in `missing`, with an example."""
        return MissingWeights(len(self.missing), str(min(self.missing)) if self.missing else "")

    def mark_missing(self, targets: set[WeightTarget]) -> None:
        """Add missing weights that another rank knows of."""
        self.missing |= targets

    @property
    def is_complete(self) -> bool:
        """Whether the model can run: all weights are on the device and valid."""
        return self._sizes is None and not self.missing

    def release(self, keep: bool) -> None:
        """Release the weights' memory; on the CPU only if they are not kept.

        With `keep`, copy them to host memory, from which `restore` brings them back, unless they were dropped before.
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
            self._pinned, self._base, self.merged = [], {}, set()
            self.missing = set(self._slices)
        if is_cuda or not keep:
            for storage in storages:
                # A memory-mapped file has no memory to release.
                if storage.resizable():
                    storage.resize_(0)

    def restore(self) -> None:
        """Allocate the weights again, and copy kept values back; do nothing if they are allocated."""
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
        storages = [tensor.untyped_storage() for tensor in self._model.weight_tensors()]
        return list({storage._cdata: storage for storage in storages}.values())


def rows_of(tensor: Any, parts: Parts) -> Iterator[tuple[WeightTarget, Any]]:
    """Yield each target with its rows of a tensor; the last gets the rest."""
    if len(parts) < 2 or tensor.get_shape() in ([], [1]):
        # A single number belongs to all.
        yield from ((target, tensor) for target, _ in parts)
        return
    if len(tensor.get_shape()) > len(parts[0][1].shape):
        for number, (_, own) in enumerate(groupby(parts, lambda part: part[0].expert)):
            yield from rows_of(StackedTensor(tensor, number), list(own))
        return
    if (dim := parts[0][1].outputs_dim) is None:
        yield from ((target, tensor) for target, _ in parts)
        return
    start, num_rows = 0, tensor.get_shape()[dim]
    for number, (target, part) in enumerate(parts, 1):
        stop = num_rows if number == len(parts) else start + part.shape[dim]
        yield target, TensorRows(tensor, start, stop, dim)
        start = stop


def shape_of(parts: Parts) -> list[int]:
    """Return the shape of the tensor that consists of these parts."""
    experts = {target.expert for target, _ in parts}
    shape, dim = list(parts[0][1].shape), parts[0][1].outputs_dim
    if dim is not None:
        shape[dim] = sum(part.shape[dim] for _, part in parts) // len(experts)
    return [*([len(experts)] if len(experts) > 1 else []), *shape]


@contextmanager
def counted(written: Sized) -> Iterator[None]:
    """If the `with` block raises, add the number of tensors written before to the message.

    ValueErrors and LoadFailedErrors stay such; another error, as of a trainer's iterator, becomes a RuntimeError.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}; {len(written)} tensors were written before") from error
    except LoadFailedError as error:
        raise LoadFailedError(f"{error}; {len(written)} tensors were written before", error.missing) from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise RuntimeError(f"the weights end with {cause}; {len(written)} tensors were written before") from error


@dataclass(frozen=True)
class WeightsLoader:
    """Changes the weights of every rank from the first; see `WeightsControl`.

    Attributes:
        own: returns the first rank's weights, which check tensors and track missing ones.
        call: calls a function with every rank's `ModelWeights` and further arguments, and returns the results in rank
            order; the keyword `own` is called instead on this rank.
        sleep, wake_up: of the runner.
    """

    own: Callable[[], ModelWeights]
    call: Callable[..., list[Any]]
    sleep: Callable[[bool], MissingWeights]
    wake_up: Callable[[list[str]], None]

    def load(self, weights: str | Iterable[tuple[str, torch.Tensor]], strict: bool) -> LoadedWeights:
        """Write tensors into the running model, on every rank, or merge an adapter.

        Args:
            weights: pairs of a name and a tensor, consumed one by one; or a folder of them, or of an adapter.
            strict: refuse to leave a tensor unchanged.

        Raises:
            ValueError: a tensor does not fit. No part of it is written, and from a folder no tensor; the message has
                the number of tensors written before.
            LoadFailedError: a folder, or a tensor, was written in part; or an adapter was not merged.
        """
        if isinstance(weights, str):
            count = self._merge_adapter(weights) if is_adapter(weights) else self._load_folder(weights, strict)
            return self._loaded(count)
        own, written = self.own(), list[str]()
        with counted(written):
            for item in weights.items() if isinstance(weights, Mapping) else weights:
                name, tensor = weight_pair(item)
                if not own.check(name, tensor):
                    continue
                own.check_values(name, tensor)
                if own.merged:
                    self.unload_adapter()
                spec = torch.empty_like(tensor, device="meta", memory_format=torch.contiguous_format)
                with self._left_undone(f"writing {name!r}", set(own.targets(name))), own.after_the_caller():
                    self.call(ModelWeights.write, name, spec, own=partial(own.write, name, tensor))
                written.append(name)
            if strict:
                own.check_whole({target for name in written for target in own.targets(name)})
        return self._loaded(len(written))

    def _loaded(self, count: int) -> LoadedWeights:
        nans = [name for names in self.call(ModelWeights.take_nans) for name in names]
        return LoadedWeights(count, self.missing, list(dict.fromkeys(nans)))

    @property
    def missing(self) -> MissingWeights:
        """The weights that steps must wait for."""
        return self.own().count_missing()

    def _load_folder(self, folder: str, strict: bool) -> int:
        count, targets = self.own().check_folder(folder, strict)
        self.unload_adapter()
        with self._left_undone("loading weights", targets):
            self.call(ModelWeights.write_folder, folder)
        return count

    @contextmanager
    def _left_undone(self, what: str, targets: set[WeightTarget]) -> Iterator[None]:
        """If the `with` block raises, mark these weights as missing until they are loaded, or an adapter is out."""
        try:
            yield
        except Exception as error:
            self.own().missing |= targets
            raise LoadFailedError(f"{what} has failed in its middle: {error}", self.missing) from error

    def _merge_adapter(self, folder: str) -> int:
        own = self.own()
        count, targets = own.check_adapter(folder)
        # Other ranks may change more of them than this one, and may fail to remove the adapter.
        own.merged |= targets
        try:
            self.call(ModelWeights.merge_adapter, folder)
        except Exception as error:
            failure = f"merging an adapter has failed: {error}"
            try:
                self.unload_adapter()
            except LoadFailedError as again:
                raise LoadFailedError(f"{failure}; {again}", again.missing) from error
            raise LoadFailedError(f"{failure}; the weights are those without one", self.missing) from error
        return count

    def unload_adapter(self) -> int:
        """Restore what an adapter has changed on every rank, and return its number; LoadFailedError if only in part."""
        own = self.own()
        with self._left_undone("taking an adapter out", own.merged):
            counts = self.call(ModelWeights.take_adapter_out, own.merged)
        own.merged = set()
        # A rank may have restored its weights in an earlier call, which failed on another rank.
        return max(counts)


def _on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values to a device; through pinned memory, since a copy from mapped files takes five times as long."""
    if device.type != "cuda" or values.is_cuda or not values.dim():
        return values.to(device)
    out = torch.empty(values.shape, dtype=values.dtype, device=device)
    num_rows = max(1, _STAGED_BYTES * len(values) // max(1, values.nbytes))
    for rows, part in zip(out.split(num_rows), values.split(num_rows), strict=True):
        rows.copy_(torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part), non_blocking=True)
    return out


def _nan_flags(name: str, values: torch.Tensor) -> NanFlags:
    """Return whether a value is NaN, on the device; nothing of packed values, which have no NaN."""
    if not (values.numel() and values.dtype.is_floating_point):
        return []
    if values.dtype != torch.float8_e4m3fn:
        return [(name, values.amax().isnan())]
    # e4m3 has no maximum operation; without the sign, its bytes are ordered like its values.
    return [(name, (values.view(torch.uint8) & _E4M3_NAN).amax() == _E4M3_NAN)]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
