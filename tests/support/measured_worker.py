"""A gateway worker that measures for how long its event loop is held, in CPU time of the loop's thread.

``python tests/support/measured_worker.py --config FILE --worker I``

It runs on asyncio's own loop, whose callbacks can be measured one by one. Other processes do not disturb a CPU time;
a thread of the same worker does not either. Each callback that holds the loop for longer than `REPORT_MS` is a line
of JSON on standard error: ``{"held_ms", "unit_ms", "by"}``. ``unit_ms``: the CPU time of a fixed piece of work, taken
after it in the same thread, so that a slow or a busy processor is not mistaken for a long callback.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Coroutine
from typing import Any, Final

import uvloop
from logferry.gateway.__main__ import main

REPORT_MS: Final = 5.0
_UNIT_LOOPS: Final = 40_000


def unit_ms() -> float:
    """The CPU time of a fixed piece of work, in ms: about one where a core runs at 3 GHz."""
    began = time.thread_time()
    total = 0
    for number in range(_UNIT_LOOPS):
        total += number
    return 1000 * (time.thread_time() - began)


def _by(handle: asyncio.Handle) -> str:
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    if not isinstance(task, asyncio.Task):
        return repr(handle)[:300]
    frames = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in task.get_stack()]
    return f"{task.get_coro()!r}"[:120] + " at " + " > ".join(frames[-3:])


def measure() -> None:
    """Measures the callbacks of all loops of the main thread from now on."""
    run = asyncio.Handle._run
    collected = 0.0
    since = 0.0

    def on_gc(phase: str, _info: dict[str, int]) -> None:
        nonlocal collected, since
        if phase == "start":
            since = time.thread_time()
        else:
            collected += time.thread_time() - since

    def measured(handle: asyncio.Handle) -> None:
        nonlocal collected
        collected = 0.0
        began = time.thread_time()
        run(handle)
        held_ms = 1000 * (time.thread_time() - began)
        if held_ms > REPORT_MS:
            said = {"held_ms": round(held_ms, 2), "unit_ms": round(unit_ms(), 3), "gc_ms": round(1000 * collected, 2)}
            print(json.dumps({**said, "by": _by(handle)}), file=sys.stderr, flush=True)

    gc.callbacks.append(on_gc)
    asyncio.Handle._run = measured  # type: ignore[method-assign, assignment]


def _run(main_coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main_coroutine)


if __name__ == "__main__":
    uvloop.run = _run  # type: ignore[assignment]
    measure()
    sys.exit(main())
