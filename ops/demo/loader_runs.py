"""The loader's runs: the first is killed in mid-write, the second repeats its batch, the last brings the rest, and
follows until every segment is READY.

What makes the first kill certain: a batch is in the ledger before its rows are written, its data files appear in the
table's folder before the commit that makes them rows. So the kill comes when the first data file is there, and
afterwards it is looked up that the ledger knows the batch and the table does not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from logferry.loaders.planning.segment_states import READY
from logferry.loaders.storage.ledger import Ledger, TablePaths, last_batch, open_table
from logferry.loaders.storage.segment_table import Segments, read_segments
from logferry.ops.demo.plan import DC, FULL_TOPIC, SEGMENT_S, Plan
from logferry.ops.demo.wait import failure
from logferry.ops.runtime.jars import spark_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.processes import Child
from logferry.ops.stack.service_workers import Setting, configuration

_LOOK_S: Final = 0.005
_FOLLOW_S: Final = 0.5
_SEGMENTS_LOOK_S: Final = 0.2
# Short ones: in a warehouse a window is an hour, and late rows are waited for as long.
_SEGMENTS: Final = {"window_s": SEGMENT_S, "wait_s": 1, "idle_s": 5}
_READY_S: Final = 90.0
_STOP_S: Final = 60.0
RUN_S: Final = 600.0


class Interrupted(Exception):
    """The demo ends; the loader was not to go on."""


@dataclass(frozen=True)
class Loaded:
    """What a run said that it did."""

    run: int
    batches: int
    rows: int
    quarantined: int
    seconds: float


@dataclass(frozen=True)
class Torn:
    """A run that was killed in mid-write: the batch that the ledger knows, and the files that no commit names."""

    pid: int
    batch: int
    files: int
    bytes: int


class Loads:
    """One run at a time. Safe to be ended by another thread."""

    def __init__(self, plan: Plan, bootstrap: str, urls: Sequence[str]) -> None:
        self.paths = TablePaths.of(plan.table)
        self._config = plan.data / "loader.toml"
        settings: dict[str, Setting] = {
            "dc": DC,
            "kafka": {"bootstrap_servers": bootstrap},
            "spark": {"scratch": str(plan.data / "scratch")},
            "follow_s": _FOLLOW_S,
            "gateways": {f"{DC}.urls": list(urls)},
        }
        table: dict[str, Setting] = {"path": str(plan.table), "topics": [FULL_TOPIC]}
        if plan.is_live:
            table["parser.format"] = "access"
            table |= {f"segments.{name}": value for name, value in _SEGMENTS.items()}
        job = configuration(table)
        self._config.write_text(f"{configuration(settings)}\n[[tables]]\n{job}", encoding="utf-8")
        self._logs = plan.runs
        self._starting = threading.Lock()
        self._ending = threading.Event()
        self.child: Child | None = None
        self.runs = 0

    def start(self, *options: str) -> Child:
        """A process group of its own holds the loader and its JVM."""
        self.runs += 1
        command = [sys.executable, "-m", "logferry.loaders", "--config", str(self._config), "--json", *options]
        child = Child(f"loader run {self.runs}", command, self._logs / f"loader-{self.runs}.log", _environment())
        with self._starting:
            if self._ending.is_set():
                raise Interrupted
            child.start()
            self.child = child
        return child

    def kill(self) -> None:
        """SIGKILL to the loader and its JVM at once, as when a machine goes down."""
        child = self.child
        if child is not None and child.pid is not None:
            os.killpg(child.pid, signal.SIGKILL)
            child.ends_by_itself()

    def end(self) -> None:
        """Nothing runs any more, and nothing is started again."""
        with self._starting:
            self._ending.set()
            self.kill()

    def kill_in_mid_write(self) -> Torn | Loaded:
        """Starts a run and kills it. `Loaded` if there was nothing to write. Raises Unavailable, Interrupted.

        Should the commit be faster than the kill, the next run is tried; that is not seen to happen.
        """
        while True:
            before = self._rows_files()
            child = self.start()
            pid = child.pid or 0
            self._until(child, partial(self._has_more_than, before))
            if not child.running:
                return self._said(child)
            self.kill()
            planned = Ledger(self.paths.ledger).last()
            if last_batch(open_table(self.paths.main)) < planned:
                torn = self._rows_files().items() - before.items()
                return Torn(pid, planned, len(torn), sum(size for _, size in torn))

    def run(self) -> Loaded:
        """One run to its end. Raises Unavailable, Interrupted."""
        child = self.start()
        self._until(child, lambda: False)
        return self._said(child)

    def follow_until_ready(self, rows: int, seen: Callable[[Segments], None]) -> Loaded:
        """A run that follows, until so many rows are in windows, and all of these are READY; ``seen`` is told how they
        are. Raises Unavailable, Interrupted.
        """
        child = self.start("--follow")

        def all_ready() -> bool:
            found = self.segments()
            seen(found)
            have = sum(segment.rows for segment in found.values())
            return have >= rows and all(segment.state == READY for segment in found.values())

        self._until(child, all_ready, _READY_S, look_s=_SEGMENTS_LOOK_S)
        if child.running and not child.stop(_STOP_S):
            raise child.failed(f"did not stop within {_STOP_S:.0f} s")
        return self._said(child)

    def segments(self) -> Segments:
        """As they are now; none where the table has none."""
        return read_segments(self.paths.segments, last_batch(open_table(self.paths.main)))

    def _until(self, child: Child, done: Callable[[], bool], limit_s: float = RUN_S, look_s: float = _LOOK_S) -> None:
        """Returns when that is so or the run has ended."""
        deadline = time.monotonic() + limit_s
        while child.running and not done():
            if time.monotonic() > deadline:
                raise child.failed(f"is not done after {limit_s:.0f} s")
            time.sleep(look_s)

    def _has_more_than(self, before: dict[str, int]) -> bool:
        return self._rows_files() != before

    def _rows_files(self) -> dict[str, int]:
        """The data files of the main table by name, committed or not, with their sizes."""
        found = {}
        for path in self.paths.main.glob("batch-*/**/*.parquet"):
            with suppress(FileNotFoundError):
                found[path.name] = path.stat().st_size
        return found

    def _said(self, child: Child) -> Loaded:
        if self._ending.is_set():
            raise Interrupted
        if child.exit_status != 0:
            raise failure(child)
        return _loaded(self.runs, child)


def _loaded(run: int, child: Child) -> Loaded:
    summary: dict[str, Any] = json.loads(child.said().splitlines()[-1])
    table = summary["tables"][0]
    batches = sum(bool(batch["ranges"]) for batch in table["batches"])
    return Loaded(run, batches, summary["rows"], summary["quarantined"], table["seconds"])


def _environment() -> Mapping[str, str]:
    """The Java that was found, and the jars that are in the cache."""
    jars = os.pathsep.join(map(str, spark_jars()))
    return {**os.environ, "JAVA_HOME": str(find_java().home), "LOGFERRY_SPARK_JARS": jars}
