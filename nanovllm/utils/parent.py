"""Ends a process when its parent is gone for any reason."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_POLL_SECONDS = 0.5


def end_with_parent(parent: int, clean_up: Callable[[], object] = lambda: None) -> None:
    """Exit this process once its parent is gone, even if the main thread is blocked.

    Args:
        parent: the parent's process id; the parent may be gone already.
        clean_up: called before the exit.
    """

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        try:
            clean_up()
        finally:
            os._exit(1)

    threading.Thread(target=poll, name="nanovllm-parent", daemon=True).start()
