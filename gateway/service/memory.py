"""What glibc's allocator does with memory that was freed.

* A short time it is kept (`reuse_memory`). By default glibc gives back large blocks at once, and the system clears each
  page before it is used again: a sixth of the processor time of a worker that takes requests of 1 MiB.
* After it was not needed for a while it goes back (`return_freed_memory`), also what lies between blocks in use. Else a
  process of large batches grows with each of them, though it holds none: push delivery by 10 MB for each 300 MB that it
  sent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

# The settings of mallopt(3), by the numbers of malloc.h; the second one is the largest that it takes.
_SETTINGS: Final = {"M_TRIM_THRESHOLD": (-1, 64 << 20), "M_MMAP_THRESHOLD": (-3, 32 << 20), "M_ARENA_MAX": (-8, 1)}
_LOOK_S: Final = 2.0
_GROWTH_BYTES: Final = 48 << 20
_STATM: Final = Path("/proc/self/statm")


def reuse_memory() -> bool:
    """Call it before the process has threads. False: this C library has no such settings, and nothing changes.

    All threads share one heap, so that what one has freed serves the others.
    """
    try:
        setting = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    taken = [setting(number, value) for number, value in _SETTINGS.values()]
    return all(taken)


def resident_bytes() -> int:
    """The memory of this process."""
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trimmer() -> Callable[[], None] | None:
    """Gives back what is free; None: this C library has no call for it, or the system does not tell what is used.

    It takes some hundredths of a second for some 100 MB, without Python's lock; others wait who ask for memory.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
        resident_bytes()
    except (AttributeError, OSError):
        return None
    return lambda: trim(0)


async def return_freed_memory() -> None:
    """Looks until it is cancelled, and gives back what is free each time that the process grew much."""
    trim = trimmer()
    if trim is None:
        return
    least = resident_bytes()
    while True:
        await asyncio.sleep(_LOOK_S)
        if resident_bytes() - least > _GROWTH_BYTES:
            await asyncio.to_thread(trim)
            least = resident_bytes()
        else:
            least = min(least, resident_bytes())
