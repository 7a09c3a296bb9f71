"""Base class of objects that hold a device, and so belong to one process."""

from __future__ import annotations

from typing import NoReturn


class Unpicklable:
    """An object that cannot be pickled or copied.

    Without this, pickling would serialise gigabytes of weights and cache before failing.
    """

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} holds a device and cannot be pickled or copied: create one in each process")
