"""The loader's runs: the first is killed in mid-write, the second repeats its batch, the last one loads the rest and
follows until every segment is READY.

The first kill is certain: a batch is in the ledger before its rows are written, and its data files are in the table's
folder before the commit that makes them rows. So when the first data file appears, the demo kills the loader and its
JVM at once, as at a power failure. Afterwards it checks that the ledger has the batch and the table does not.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import READY
from logferry.loaders.planning.source_facts import utc_text
from logferry.loaders.storage.files import list_files, open_table
from logferry.loaders.storage.ledger import Ledger, last_batch
from logferry.loaders.storage.side_tables import Segments, read_segments
from logferry.ops.demo.plan import DC, FULL_TOPIC, SEGMENT_S, DemoPlan
from logferry.ops.demo.view import View
from logferry.ops.runtime.jars import spark_environment
from logferry.ops.stack.processes import Child, Setting, configuration
from logferry.ops.stack.stack import Stack

_LOOK_S: Final = 0.005
_FOLLOW_S: Final = 0.5
_SEGMENTS_LOOK_S: Final = 0.2
# Short times for a demo: in a warehouse a segment is an hour, and so is the wait for late rows.
_SEGMENTS: Final = {"window_s": SEGMENT_S, "late_wait_s": 1, "source_idle_s": 5}
_READY_S: Final = 90.0
_STOP_S: Final = 60.0
RUN_S: Final = 600.0
_ROWS: Final = re.compile(r"batch-.*\.parquet")


class LoaderRun(NamedTuple):
    """The report of a run. ``seconds``: time spent in batches, without Spark's start and the waits for new records."""

    run: int
    batches: int
    rows: int
    quarantined: int
    seconds: float


class LoaderRuns:
    """Runs the loader, once at a time; another thread may call `end`. All may raise Unavailable.

    ``reports``: of the runs that were not killed. ``has_killed``: whether one was. ``segments``: as last seen.
    """

    def __init__(self, plan: DemoPlan, stack: Stack, view: View) -> None:
        self.paths = TablePaths.of(plan.table)
        settings: dict[str, Setting] = {
            "dc": DC,
            "kafka": {"bootstrap_servers": stack.cluster().bootstrap},
            "spark": {"scratch": str(plan.data / "scratch")},
            "follow_s": _FOLLOW_S,
            "gateways": {f"{DC}.urls": stack.urls()},
        }
        table: dict[str, Setting] = {"path": str(plan.table), "topics": [FULL_TOPIC]}
        if plan.is_live:
            table["parser.format"] = "access"
            table |= {f"segments.{name}": value for name, value in _SEGMENTS.items()}
        self._config = plan.data / "loader.toml"
        self._config.write_text(f"{configuration(settings)}\n[[tables]]\n{configuration(table)}", encoding="utf-8")
        self._logs, self._view, self._on_s3 = plan.runs, view, plan.on_s3
        self._ending = threading.Event()
        self.child: Child | None = None
        self.runs = 0
        self.reports: list[LoaderRun] = []
        self.has_killed = False
        self.segments: Segments = {}

    def end(self) -> None:
        """Kills the present run, and each later one."""
        self._ending.set()
        if self.child is not None:
            self.child.kill_group()

    def kill_and_repeat(self) -> None:
        """Kills a run in mid-write, and runs the next one to its end. None is killed if the first has no rows to write.

        If the commit is faster than the kill, it tries the next run; no such case has been seen.
        """
        before = self._rows_files()
        child = self._start()
        pid = child.pid
        self._until(child, lambda: self._rows_files() != before)
        if not child.running:
            self._report(child)
            return
        child.kill_group()
        batch, files = Ledger(self.paths.ledger).last(), len(self._rows_files() - before)
        if last_batch(open_table(self.paths.main)) >= batch:
            self.kill_and_repeat()
            return
        names = "its data file is" if files == 1 else f"its {files} data files are"
        said = f"loader (pid {pid}) in mid-write: batch {batch} is in the ledger, {names} uncommitted"
        self._view.say_killed("a loader", said)
        self.has_killed = True
        self.run()

    def run(self) -> None:
        """One run to its end."""
        child = self._start()
        self._until(child, lambda: False)
        self._report(child)

    def follow_until_ready(self, rows: int) -> None:
        """A run with ``--follow``, until the segments hold so many rows and all are READY."""
        child = self._start("--follow")
        self._until(child, lambda: self._are_ready(rows), _READY_S, _SEGMENTS_LOOK_S)
        child.stop(_STOP_S)
        self._report(child)

    def _are_ready(self, rows: int) -> bool:
        """Prints the segments that became READY."""
        before = self.segments
        self.segments = read_segments(self.paths.segments, last_batch(open_table(self.paths.main)))
        for start, segment in sorted(self.segments.items()):
            is_new = start not in before or before[start].state != READY
            if segment.state == READY and segment.rows and is_new:
                said = f"segment {utc_text(start)} is READY: {segment.rows:,} rows, no source can add one"
                self._view.say(said, "green")
        counted = sum(segment.rows for segment in self.segments.values())
        return counted >= rows and all(segment.state == READY for segment in self.segments.values())

    def _start(self, *options: str) -> Child:
        self.runs += 1
        command = [sys.executable, "-m", "logferry.loaders", "--config", str(self._config), "--json", *options]
        log, environment = self._logs / f"loader-{self.runs}.log", {**os.environ, **spark_environment(s3=self._on_s3)}
        self.child = child = Child(f"loader run {self.runs}", command, log, environment)
        child.start()
        return child

    def _until(self, child: Child, done: Callable[[], bool], limit_s: float = RUN_S, look_s: float = _LOOK_S) -> None:
        """Returns when ``done`` or the run has ended; kills it after the limit."""
        deadline = time.monotonic() + limit_s
        while child.running and not done():
            if self._ending.is_set() or time.monotonic() > deadline:
                child.kill_group()
                raise child.failed(f"was killed: it was not done within {limit_s:.0f} s")
            time.sleep(look_s)

    def _rows_files(self) -> set[str]:
        """Names of the main table's data files, committed or not; on S3 those of unfinished uploads, too."""
        return {file.name for file in list_files(self.paths.main) if _ROWS.fullmatch(file.name)}

    def _report(self, child: Child) -> None:
        child.check_end()
        found = run_of(self.runs, child)
        self.reports.append(found)
        batches = "1 batch" if found.batches == 1 else f"{found.batches} batches"
        said = f"{batches}, {found.rows:,} rows, {found.quarantined:,} quarantined, in {found.seconds:.1f} s"
        self._view.say(f"loader run {found.run}: {said if found.batches else 'no record was left to load'}", "green")


def run_of(run: int, child: Child) -> LoaderRun:
    """From the JSON summary at the end of its log."""
    summary: dict[str, Any] = json.loads(child.log_tail().splitlines()[-1])
    batches = summary["tables"][0]["batches"]
    loaded = sum(bool(batch["ranges"]) for batch in batches)
    seconds = sum(batch["seconds"] for batch in batches)
    return LoaderRun(run, loaded, summary["rows"], summary["quarantined"], seconds)
