"""Objects that hold a device, and so belong to one process."""

from __future__ import annotations

from typing import NoReturn


class Unpicklable:
    """An object that can neither be pickled nor copied.

    Without this, pickling one would pack gigabytes of weights and cache before it fails.
    """

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} holds a device and cannot be pickled or copied: create one in each process")
