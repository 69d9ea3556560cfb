"""``--status`` prints how far each file is, and what it waits for. The client writes this as ``status.json`` into the
state folder every few seconds, as a whole and without fsync: it describes the present. The lock of the folder, not
the file, shows whether a client runs.

``--metrics-port`` serves metrics for Prometheus on the loopback interface. A request waits until the main thread has
rendered the page: at most once a second, and never while nobody scrapes.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from logferry.client.agent.schedule import SourceStatus
from logferry.client.agent.watch import Watch
from logferry.client.files.checkpoint import LOCK, owned
from logferry.client.transport.failover import FailoverPolicy
from logferry.client.transport.metrics_page import MetricsServer
from logferry.gateway.contract.names import visible

FILE = "status.json"
PAGE_EVERY_S = 1.0
PAGE_PATIENCE_S = 5.0  # then a request gets the last page: the main thread may hang on a file system
_SHOWN_FIRST = 40
ROWS = 100  # in `FILE`, of files in trouble; those at rest, with thousands nearly all, fill up what is shown
_SUMS = {
    "files": "Files that the client follows.",
    "lag_bytes": "Bytes in the followed files that no gateway has acknowledged yet.",
    "behind_seconds": "Seconds for which the slowest file has not been sent to its end.",
    "files_in_trouble": "Files whose last request or read failed.",
}
_OF_INPUTS = {
    "input_messages_total": ("counter", "Messages that an input took; of standard input lines."),
    "input_bytes_total": ("counter", "Bytes that an input took."),
    "input_dropped_total": ("counter", "Messages for which the spool had no room, of senders that cannot wait."),
    "input_refused_total": (
        "counter",
        "Messages that were too long; connections beyond the limit or without handshake.",
    ),
    "input_spool_bytes": ("gauge", "Bytes in the spool of an input, with some that are sent already."),
    "input_spool_limit_bytes": ("gauge", "Limit of the spool of an input."),
}


def say(line: str) -> None:
    print(visible(line))


def _troubled(watches: Iterable[Watch], now: float) -> list[SourceStatus]:
    """The sources that are behind or have an error. The others, mostly nearly all, are not asked."""
    found = []
    for watch in watches:
        rows = [source.status(now) for source in watch.restless if source.name in watch.sources]
        rows = [row for row in rows if row.lag_bytes or row.error]
        watch.restless = dict.fromkeys(watch.sources[row.source] for row in rows)
        found += rows
    return found


def _polled(watches: Iterable[Watch]) -> dict[str, int]:
    """Reason → how many files are polled because of it."""
    counts: dict[str, int] = {}
    for watch in watches:
        hints = watch.looks.hints
        for why, count in ({hints.unusable: len(watch.sources)} if hints.unusable else hints.polled).items():
            counts[why] = counts.get(why, 0) + count
    return counts


def write_status(
    folder: Path, watches: Sequence[Watch], now: float, centres: FailoverPolicy, inputs: Sequence[dict[str, Any]] = ()
) -> None:
    """The worst files first, `ROWS` at most. Raises OSError; the previous file is still whole then."""
    rows = sorted(_troubled(watches, now), key=lambda row: (not row.error, -row.lag_bytes))
    all_failed = {path: why for watch in watches for path, why in watch.failed.items()}
    totals = {"files": sum(len(watch.sources) for watch in watches), "behind": sum(bool(row.lag_bytes) for row in rows)}
    totals.update(errors=sum(bool(row.error) for row in rows), lag_bytes=sum(row.lag_bytes for row in rows))
    totals["failed"] = len(all_failed)
    named = {row.source for row in rows[:ROWS]}
    sources = (each for watch in watches for each in watch.sources.items())
    others = (source.status(now) for name, source in sources if name not in named)
    shown = [row._asdict() for row in (*rows[:ROWS], *islice(others, max(_SHOWN_FIRST - len(rows), 0)))]
    failed = dict(islice(all_failed.items(), ROWS))
    content = {"at_ms": int(time.time() * 1000), "pid": os.getpid(), "totals": totals, "files": shown, "failed": failed}
    hints = [watch.looks.hints for watch in watches]
    unusable = hints[0].unusable if all(each.unusable for each in hints) else ""
    polled = {} if unusable else _polled(watches)
    content["inotify"] = {"files": sum(each.armed for each in hints), "polled": polled, "unusable": unusable}
    if inputs:
        content["inputs"] = inputs
    if len(centres.names) > 1:
        content["data_centre"] = centres.status(now)
    temporary = folder / (FILE + ".new")
    with open(temporary, "w", encoding="utf-8", opener=owned) as file:
        file.write(json.dumps(content))
    temporary.replace(folder / FILE)


def show_status(folder: Path, as_json: bool = False) -> int:
    """Prints the status. Returns the exit status: 0 all is well, 1 a file has an error, 3 no client runs here."""
    runs = _is_locked(folder)
    try:
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        at_ms, totals, inputs = content["at_ms"], content["totals"], content.get("inputs", ())
    except (OSError, ValueError, KeyError, TypeError):
        say(f"{folder}: " + ("the client has just started" if runs else "no client runs on this state folder"))
        return 0 if runs else 3
    if as_json:
        say(json.dumps({**content, "runs": runs}))
    else:
        age_s = max(time.time() - at_ms / 1000, 0)
        say(f"{folder}: " + (f"as of {age_s:.0f} s ago" if runs else f"NO CLIENT RUNS; as of {age_s:.0f} s ago"))
        _print_inputs(inputs)
        _print(content)
    if not runs:
        return 3
    return 1 if totals["failed"] or totals["errors"] or any(row["error"] for row in inputs) else 0


def _print_inputs(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        took = f"took {row['messages']} messages, {row['bytes']} bytes"
        lost = f"dropped {row['dropped']}, refused {row['refused']}"
        say(f"{row['name']}: {took}; {lost}; its spool has {row['spool_bytes']} of {row['spool_limit_bytes']} bytes")
        if row["error"]:
            say(f"    error: {row['error']}")


def _print(content: dict[str, Any]) -> None:
    totals, rows, failed = (content[name] for name in ("totals", "files", "failed"))
    centre = content.get("data_centre")
    if centre is not None:
        since = "" if centre["for_s"] is None else f", for {centre['for_s']:.0f} s"
        why = f": {centre['why']}" if centre["why"] else ""
        say(f"writes to the data centre {centre['here']}{since}{why}")
        for other in centre["others"]:
            say(f"    {other['name']}: {other['state']}")
    for path, reason in list(failed.items())[:_SHOWN_FIRST]:
        say(f"cannot be read: {path}: {reason}")
    if totals["failed"] > _SHOWN_FIRST:
        say(f"and {totals['failed'] - _SHOWN_FIRST} more that cannot be read")
    for row in rows[:_SHOWN_FIRST]:
        behind = f"{row['lag_bytes']} bytes behind for {row['behind_s']:.0f} s" if row["lag_bytes"] else "all sent"
        say(f"{row['path']} -> {row['topic']}: {row['position']} of {row['size']}, {behind}")
        say(f"    waits for {row['waits_for']}, for {row['waits_s']:.0f} s")
        if row["error"]:
            say(f"    last error: {row['error']}")
    if totals["files"] > _SHOWN_FIRST:
        say(f"and {totals['files'] - _SHOWN_FIRST} more with less to send (--json has up to {ROWS} that are behind)")
    told = content["inotify"]
    for why, count in {told["unusable"]: totals["files"]}.items() if told["unusable"] else told["polled"].items():
        say(f"{count} files are polled: {why}")
    behind = f"{totals['behind']} of them behind, {totals['errors']} with an error"
    say(f"{totals['files']} files, {totals['lag_bytes']} bytes behind; {behind}")


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


def render_metrics(
    watches: Sequence[Watch],
    now: float,
    facts: Mapping[str, tuple[str, str, float]],
    here: str,
    inputs: Sequence[dict[str, Any]] = (),
) -> str:
    """``facts``: name → type, help and value. ``here``: the data centre that the client writes to."""
    topics: dict[str, dict[str, float]] = {}
    for source in (source for watch in watches for source in watch.sources.values()):
        topics.setdefault(source.entry.topic, dict.fromkeys(_SUMS, 0.0))["files"] += 1
    for row in _troubled(watches, now):
        sums = topics[row.topic]
        sums["lag_bytes"] += row.lag_bytes
        sums["behind_seconds"] = max(sums["behind_seconds"], row.behind_s)
        sums["files_in_trouble"] += bool(row.error)
    lines = []
    for name, help_ in _SUMS.items():
        lines += _head(name, "gauge", help_)
        lines += [f'logferry_push_{name}{{topic="{topic}"}} {sums[name]:g}' for topic, sums in sorted(topics.items())]
    for name, (kind, help_, value) in facts.items():
        lines += [*_head(name, kind, help_), f"logferry_push_{name} {value:.15g}"]
    for name, (kind, help_) in _OF_INPUTS.items() if inputs else ():
        key = name[len("input_") :].replace("_total", "")
        lines += _head(name, kind, help_)
        lines += [f'logferry_push_{name}{{input="{row["name"]}"}} {row[key]}' for row in inputs]
    lines += _head("files_unreadable", "gauge", "Files that match a pattern and cannot be opened.")
    lines += [f"logferry_push_files_unreadable {len({path for watch in watches for path in watch.failed})}"]
    lines += _head("files_polled", "gauge", "Files that are polled, because inotify tells nothing of them.")
    lines += [f"logferry_push_files_polled {sum(_polled(watches).values())}"]
    lines += [*_head("data_centre", "gauge", "1 for the data centre that the client writes to.")]
    here = here.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines += [f'logferry_push_data_centre{{name="{here}"}} 1']
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, help_: str) -> list[str]:
    return [f"# HELP logferry_push_{name} {help_}", f"# TYPE logferry_push_{name} {kind}"]


class MetricsPage:
    """The page, and the thread that serves it at ``http://<host>:<port>/metrics``. OSError for a port in use."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.is_asked = False
        self._text = ""
        self._rendered = threading.Event()
        self._next = 0.0
        self._server = MetricsServer(port, self._current, host)

    def refresh(self, now: float, render: Callable[[float], str]) -> None:
        """Renders the page if a request waits for it; called by the main thread in every round."""
        if self.is_asked and now >= self._next:
            self._next, self.is_asked = now + PAGE_EVERY_S, False
            self._text = render(now)
            self._rendered.set()

    def _current(self) -> str:
        self._rendered.clear()
        self.is_asked = True
        self._rendered.wait(PAGE_PATIENCE_S)
        return self._text

    def close(self) -> None:
        self._rendered.set()
        self._server.close()
