"""One structured line a thing, to standard error: JSON with the time, the level, the event and its facts."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def event(level: str, what: str, **facts: Any) -> None:
    """``level``: debug, info, warning, or error when somebody must act."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    line = json.dumps({"time": stamp, "level": level, "event": what, **facts}, ensure_ascii=False, default=str)
    print(line, file=sys.stderr, flush=True)
