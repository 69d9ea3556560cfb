"""The loader's runs: the first is killed in mid-write, the second repeats its batch, the last one loads the rest and
follows until every segment is READY.

The first kill is certain: a batch is in the ledger before its rows are written, and its data files are in the table's
folder before the commit that makes them rows. So the demo kills when the first data file appears. Afterwards it checks
that the ledger has the batch and the table does not. Meanwhile a query reads the table and the records not loaded yet.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import READY
from logferry.loaders.storage.ledger import Ledger, last_batch, open_table
from logferry.loaders.storage.side_tables import Segments, read_segments
from logferry.ops.cli.problems import Unavailable
from logferry.ops.demo.plan import DC, FULL_TOPIC, SEGMENT_S, DemoPlan
from logferry.ops.demo.wait import BoundedWait, failure
from logferry.ops.runtime.jars import spark_environment
from logferry.ops.stack.processes import Child
from logferry.ops.stack.service_workers import Setting, configuration

_LOOK_S: Final = 0.005
_FOLLOW_S: Final = 0.5
_SEGMENTS_LOOK_S: Final = 0.2
# Short times for a demo: in a warehouse a segment is an hour, and so is the wait for late rows.
_SEGMENTS: Final = {"window_s": SEGMENT_S, "late_wait_s": 1, "source_idle_s": 5}
_READY_S: Final = 90.0
_STOP_S: Final = 60.0
RUN_S: Final = 600.0
_SQL: Final = "SELECT count(*) AS rows FROM logs"
_LIMIT_S: Final = 120.0


class DemoEnding(Exception):
    """The demo ends, and with it the loader."""


@dataclass(frozen=True)
class LoaderRun:
    """The report of a run. ``seconds``: time spent in batches, without Spark's start and the waits for new records."""

    run: int
    batches: int
    rows: int
    quarantined: int
    seconds: float


@dataclass(frozen=True)
class KilledRun:
    """A run killed in mid-write: the batch that the ledger has, and the files that no commit names."""

    pid: int
    batch: int
    files: int


class LoaderRuns:
    """Runs the loader, once at a time. Another thread may call `end`."""

    def __init__(self, plan: DemoPlan, bootstrap: str, urls: Sequence[str]) -> None:
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
        """Starts the loader; its process group holds also its JVM."""
        self.runs += 1
        command = [sys.executable, "-m", "logferry.loaders", "--config", str(self._config), "--json", *options]
        log, environment = self._logs / f"loader-{self.runs}.log", {**os.environ, **spark_environment()}
        child = Child(f"loader run {self.runs}", command, log, environment)
        with self._starting:
            if self._ending.is_set():
                raise DemoEnding
            child.start()
            self.child = child
        return child

    def kill(self) -> None:
        """SIGKILL to the loader and its JVM at once, as at a power failure."""
        child = self.child
        if child is not None and child.pid is not None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait_for_end()

    def end(self) -> None:
        """Kills the loader; later starts fail."""
        with self._starting:
            self._ending.set()
            self.kill()

    def kill_in_mid_write(self) -> KilledRun | LoaderRun:
        """Starts a run and kills it; returns `LoaderRun` if it had no rows to write. Raises Unavailable, DemoEnding.

        If the commit is faster than the kill, it tries the next run; no such case has been seen.
        """
        while True:
            before = self._rows_files()
            child = self.start()
            pid = child.pid or 0
            self._until(child, partial(lambda old: self._rows_files() != old, before))
            if not child.running:
                return self._report(child)
            self.kill()
            planned = Ledger(self.paths.ledger).last()
            if last_batch(open_table(self.paths.main)) < planned:
                return KilledRun(pid, planned, len(self._rows_files() - before))

    def run(self) -> LoaderRun:
        """One run to its end. Raises Unavailable, DemoEnding."""
        child = self.start()
        self._until(child, lambda: False)
        return self._report(child)

    def follow_until_ready(self, rows: int, seen: Callable[[Segments], None]) -> LoaderRun:
        """A run with ``--follow``, until the segments hold so many rows and all are READY.

        ``seen`` receives the segments at each look. Raises Unavailable, DemoEnding.
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
        return self._report(child)

    def segments(self) -> Segments:
        """The segments now; none if the table has none."""
        return read_segments(self.paths.segments, last_batch(open_table(self.paths.main)))

    def _until(self, child: Child, done: Callable[[], bool], limit_s: float = RUN_S, look_s: float = _LOOK_S) -> None:
        """Returns when ``done`` or the run has ended. Raises Unavailable after the limit."""
        waiting = BoundedWait(lambda: None, lambda: [child])
        waiting.until(lambda: not child.running or done(), f"the end of {child.name}", limit_s, look_s)

    def _rows_files(self) -> set[str]:
        """Names of the main table's data files, committed or not."""
        return {path.name for path in self.paths.main.glob("batch-*/**/*.parquet")}

    def _report(self, child: Child) -> LoaderRun:
        if self._ending.is_set():
            raise DemoEnding
        if child.exit_status != 0:
            raise failure(child)
        return run_of(self.runs, child)


def run_of(run: int, child: Child) -> LoaderRun:
    """From the JSON summary at the end of its log."""
    summary: dict[str, Any] = json.loads(child.log_tail().splitlines()[-1])
    table = summary["tables"][0]
    batches = sum(bool(batch["ranges"]) for batch in table["batches"])
    seconds = sum(batch["seconds"] for batch in table["batches"])
    return LoaderRun(run, batches, summary["rows"], summary["quarantined"], seconds)


@dataclass(frozen=True)
class QueryAnswer:
    """The result of the query. ``stored``: rows of the table alone, a moment before."""

    rows: int
    stored: int
    seconds: float

    @property
    def behind(self) -> int:
        """Rows that were not loaded yet."""
        return self.rows - self.stored


def run_query(plan: DemoPlan, urls: Sequence[str]) -> QueryAnswer:
    """Raises Unavailable with the query's error."""
    stored, started = stored_rows(plan.table), time.monotonic()
    given = [part for url in urls[:1] for part in ("--url", url)]
    command = [sys.executable, "-m", "logferry.ops", "query", _SQL, "--table", str(plan.table), *given]
    try:
        done = subprocess.run(
            [*command, "--format", "json"], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"logferry query did not end within {_LIMIT_S:.0f} s") from None
    seconds = time.monotonic() - started
    if done.returncode or done.stderr:
        raise Unavailable(f"logferry query ended with status {done.returncode}: {done.stderr.strip()}")
    return QueryAnswer(int(json.loads(done.stdout)[0]["rows"]), stored, seconds)


def stored_rows(path: Path) -> int:
    """Rows of the table, without its quarantine."""
    table = open_table(path)
    return 0 if table is None else int(table.to_pyarrow_dataset().count_rows())
