"""``--status``: where each file is, what it waits for and since when. The client writes it down, the command shows it.

It lies in the state folder as ``status.json``, replaced as a whole every few seconds, and not made durable: it is about
the present. Whether a client runs is told by the lock on the folder, not by what the file says.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from logferry.client.agent.failover import Centres
from logferry.client.agent.source import Source
from logferry.client.files.checkpoint import LOCK

FILE = "status.json"
_SHOWN_FIRST = 40


def write(folder: Path, sources: Iterable[Source], failed: Mapping[str, str], now: float, centres: Centres) -> None:
    """Raises OSError; the file before is still whole then."""
    rows = [source.standing(now)._asdict() for source in sources]
    content = {"at_ms": int(time.time() * 1000), "pid": os.getpid(), "files": rows, "failed": dict(failed)}
    if len(centres.names) > 1:
        content["data_centre"] = centres.standing(now)
    temporary = folder / (FILE + ".new")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(folder / FILE)


def show(folder: Path, as_json: bool = False) -> int:
    """Prints it; returns the exit status: 0 all is well, 1 a file is in trouble, 3 no client runs on this folder."""
    runs = _is_locked(folder)
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        at_ms, rows, failed = content["at_ms"], content["files"], content["failed"]
    except (OSError, ValueError, KeyError, TypeError):
        print(f"{folder}: " + ("the client has only just begun" if runs else "no client runs on this state folder"))
        return 0 if runs else 3
    if as_json:
        print(json.dumps({**content, "runs": runs}))
    else:
        age_s = max(time.time() - at_ms / 1000, 0)
        print(f"{folder}: " + (f"as of {age_s:.0f} s ago" if runs else f"NO CLIENT RUNS; as of {age_s:.0f} s ago"))
        _print(rows, failed, content.get("data_centre"))
    if not runs:
        return 3
    return 1 if failed or any(row["error"] for row in rows) else 0


def _print(rows: list[dict[str, Any]], failed: dict[str, str], centre: dict[str, Any] | None) -> None:
    if centre is not None:
        since = "" if centre["for_s"] is None else f", for {centre['for_s']:.0f} s"
        why = f": {centre['why']}" if centre["why"] else ""
        print(f"writes to the data centre {centre['here']}{since}{why}")
        for other in centre["others"]:
            print(f"    {other['name']}: {other['state']}")
    for path, reason in failed.items():
        print(f"cannot be read: {path}: {reason}")
    rows.sort(key=lambda row: (not row["error"], -row["lag_bytes"]))
    for row in rows[:_SHOWN_FIRST]:
        behind = f"{row['lag_bytes']} bytes behind for {row['behind_s']:.0f} s" if row["lag_bytes"] else "all sent"
        print(f"{row['path']} -> {row['topic']}: {row['position']} of {row['size']}, {behind}")
        print(f"    waits for {row['waits_for']}, for {row['waits_s']:.0f} s")
        if row["error"]:
            print(f"    last error: {row['error']}")
    if len(rows) > _SHOWN_FIRST:
        print(f"and {len(rows) - _SHOWN_FIRST} more with less to send (--json shows all)")
    print(f"{len(rows)} files, {sum(row['lag_bytes'] for row in rows)} bytes behind")


def _is_locked(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
