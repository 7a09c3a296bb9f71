"""Memory that large requests have left behind, given back to the system.

Encoding a text of some megabytes takes hundreds of megabytes for a moment. glibc keeps what is freed if anything above
it is still in use, and so would keep nearly all of it for good.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

from anyio import to_thread

_SECONDS = 5.0
_MOST_PAUSE = 64
"""How often it is looked, and of these times the most that pass between two attempts."""
_LEAST_GROWTH_BYTES = 64 * 2**20
_STATM = Path("/proc/self/statm")


async def give_back_memory() -> None:
    """Give memory back while the process is larger than it was, until this is cancelled. Only glibc keeps it."""
    trim = None if os.name == "nt" else getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None or not _STATM.exists():
        return
    least = _resident_bytes()
    pause = left = 1
    while True:
        await asyncio.sleep(_SECONDS)
        resident = _resident_bytes()
        least = min(least, resident)
        if resident <= least + _LEAST_GROWTH_BYTES:
            pause = left = 1
            continue
        left -= 1
        if not left:
            # It takes some 0.1 s, without the interpreter's lock.
            await to_thread.run_sync(trim, 0)
            # What is in use does not come back, but may be freed later, of which nothing tells.
            pause = left = min(2 * pause, _MOST_PAUSE)


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
