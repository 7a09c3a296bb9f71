"""Loads weights into the engines behind a front end, and warns where its caller hears it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.engine.engine import Engine
from nanovllm.models.tensor_files import write_tensors
from nanovllm.runner.messages import LoadedWeights, LoadFailedError
from nanovllm.runner.weights_loader import counted
from nanovllm.utils.checks import check_bool
from nanovllm.utils.remote import absolute_folder

Weights = Iterable[tuple[str, Any]] | Mapping[str, Any] | str | os.PathLike[str]


def load_weights(engine: Engine, weights: Weights, strict: bool) -> LoadedWeights:
    """Write weights into the model of every engine; see `LLM.load_weights`."""
    check_bool("strict", strict)
    given = absolute_folder(os.fspath(weights)) if isinstance(weights, str | os.PathLike) else weights
    engine.state.require_no_requests("load_weights", engine.request_ids)
    if isinstance(given, str) or engine.is_in_process:
        return _load(engine, given, strict)
    with TemporaryDirectory(prefix="nanovllm-weights-") as folder:
        with counted([]):
            files = write_tensors(folder, given.items() if isinstance(given, Mapping) else given)
        return _load(engine, files, strict)


def _load(engine: Engine, weights: Any, strict: bool) -> LoadedWeights:
    try:
        loaded: list[LoadedWeights] = engine.call("load_weights", weights, strict)
    except LoadFailedError:
        if not engine.is_in_process:
            # Replicas that have merged an adapter would go on with it beside those that have taken it out.
            engine.call("unload_adapter")
        raise
    nan_names = dict.fromkeys(name for replica in loaded for name in replica.nan_names)
    return LoadedWeights(loaded[0].count, loaded[0].missing, list(nan_names))


def warn_of_nans(names: list[str]) -> None:
    """Warn the caller of the function that calls this of tensors that have NaN."""
    if names:
        warnings.warn(f"{len(names)} tensors that were loaded have NaN, such as {names[0]!r}", stacklevel=3)
