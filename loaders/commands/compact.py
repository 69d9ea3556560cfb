"""``logferry table compact``: merges small files, drops old rows on request, removes unused files.

It may run at any time, beside loaders too, and may be interrupted: what is committed stays, the next call continues.
Without Spark, unless files must be read to drop rows, or Spark is to merge them. Exit status: 0 done, 1 refused, 2
wrong use, 3 storage or Spark is unavailable, or a planned batch must be loaded before rows can be dropped; the same
call can be repeated; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from logferry.gateway.contract.names import visible
from logferry.loaders.commands.options import table_paths
from logferry.loaders.config import SparkSettings, jar_files, load_config
from logferry.loaders.errors import (
    EXIT_DONE,
    EXIT_SIGNAL,
    ClockAhead,
    LoaderConfigError,
    LoadError,
    Overtaken,
    StorageUnavailable,
)
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import DROP, LedgerEntry, TablePaths
from logferry.loaders.planning.source_facts import utc_text
from logferry.loaders.storage.commit import committed_batch
from logferry.loaders.storage.files import STORAGE_ERRORS, storage_errors
from logferry.loaders.storage.ledger import Ledger, add_columns
from logferry.loaders.storage.merge import Merge, Progress
from logferry.loaders.storage.retention import compact, cutoff_of, newest_recorded
from logferry.loaders.storage.tables import QUARANTINE, read_state
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

if TYPE_CHECKING:
    from logferry.loaders.batches.drop_rows import OldRows
    from pyspark.sql import SparkSession

_POLL_S: Final = 0.5
_TRIES: Final = 1000
# The newest row of a table that is loaded is younger.
_CLOCK_AHEAD: Final = timedelta(days=7)
Session = Callable[[], "SparkSession"]


def run_compact(options: argparse.Namespace) -> int:
    """Compacts the tables one after the other; a failure stops no other. Raises LoaderConfigError."""
    status, facts = EXIT_DONE, []
    tables = table_paths(options, options.paths)
    try:
        with lazy_session(options, tables) as session, _bars(options) as progress:
            for table in tables:
                try:
                    with storage_errors(f"{table} cannot be accessed", STORAGE_ERRORS):
                        facts.append(_one(table, options, session, progress))
                except LoadError as error:
                    print("logferry:", visible(str(error), "\n"), file=sys.stderr)
                    facts.append({"table": str(table), "error": str(error)})
                    status = error.exit_status if status == EXIT_DONE else min(status, error.exit_status)
    except KeyboardInterrupt:
        print("interrupted; what is merged stays, the next call continues", file=sys.stderr)
        return EXIT_SIGNAL
    if options.json:
        print(json.dumps({"exit": status, "tables": facts}))
    return status


@contextmanager
def _bars(options: argparse.Namespace) -> Iterator[Progress]:
    """A bar for each table that is being merged, at a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=options.json or not console.is_terminal) as bars:
        tasks: dict[Location, Any] = {}

        def show(path: Location, done: int, total: int) -> None:
            if path not in tasks:
                tasks[path] = bars.add_task(f"{visible(path.name)}: files merged")
            bars.update(tasks[path], completed=done, total=total)

        yield show


def _settings(options: argparse.Namespace) -> SparkSettings:
    settings = SparkSettings() if options.config is None else load_config(options.config).spark
    given = {"master": options.master, "driver_memory": options.driver_memory}
    return settings.model_copy(update={name: value for name, value in given.items() if value is not None})


@contextmanager
def lazy_session(options: argparse.Namespace, tables: list[Location]) -> Iterator[Session]:
    """A function that starts Spark when it is called for the first time; it raises LoadError."""
    with ExitStack() as stack:
        started: list[SparkSession] = []

        def session() -> SparkSession:
            if not started:
                try:
                    from logferry.loaders.spark.session import is_submitted, scratch_folder, spark_session
                    from logferry.loaders.spark.stores import settings_for
                except ImportError as error:
                    raise LoaderConfigError(
                        f"Spark must read files of the table, but pyspark is missing: {error}"
                    ) from None
                options.provide_java()
                settings = _settings(options)
                try:
                    scratch = stack.enter_context(scratch_folder(settings.scratch))
                except OSError as error:
                    raise StorageUnavailable(f"no scratch folder can be created: {error}") from error
                jars = [] if is_submitted() else jar_files(options.jars)
                started.append(stack.enter_context(spark_session(settings, jars, scratch, settings_for(tables))))
            return started[0]

        yield session


def _merge(options: argparse.Namespace, session: Session) -> Merge:
    """By Spark on a cluster, or where rows are sorted; else this process is faster: many small files are opened."""
    if not options.cluster and _settings(options).master.startswith("local"):
        return Merge(options.target_mb)
    from logferry.loaders.batches.merge_files import spark_merge

    return spark_merge(session, options.target_mb, cluster=options.cluster)


def _one(table: Location, options: argparse.Namespace, session: Session, progress: Progress) -> dict[str, Any]:
    facts: dict[str, Any] = {"table": str(table), "dropped": None, "compacted": []}
    show = (lambda _: None) if options.json else print
    if options.retain_days is not None:
        keep = timedelta(days=options.retain_days)
        entry, found = drop_old(session, table, keep, wait_s=options.wait_s, is_idle=options.idle)
        said = "no rows are old enough to be dropped"
        if entry is not None and entry.cutoff is not None:
            facts["dropped"] = {"batch": entry.batch, "cutoff": entry.cutoff.isoformat(), **found._asdict()}
            said = (
                f"batch {entry.batch} dropped rows before {utc_text(entry.cutoff)}: "
                f"{found.rows:,} rows, {found.quarantined:,} quarantined lines, {found.segments:,} segments"
            )
        show(f"{table.name}: {said}")
    hours = timedelta(hours=options.version_retention_hours)
    for compacted in compact(table, hours, _merge(options, session), progress):
        facts["compacted"].append({**compacted._asdict(), "path": str(compacted.path)})
        files = f"{compacted.before:,} files merged to {compacted.after:,}; {compacted.removed:,} deleted"
        show(f"{compacted.path.name}: {files}, {compacted.bytes / 1e6:,.1f} MB")
    return facts


def drop_old(
    session: Session,
    table: Location,
    keep: timedelta,
    *,
    wait_s: float = 0.0,
    now: datetime | None = None,
    is_idle: bool = False,
) -> tuple[LedgerEntry | None, OldRows]:
    """Drops rows older than ``keep``, as a batch of the ledger; None: there are none. Safe to call again.

    ``wait_s``: the time for a loader to finish a planned batch. ``now``: by this host's clock. ``is_idle``: the table
    gets no new rows, so that they cannot confirm this clock. Raises LoaderConfigError where nothing was ever loaded,
    Overtaken when a batch stays planned for longer, ClockAhead, Terminal, StorageUnavailable.
    """
    from logferry.loaders.batches.drop_rows import count_old

    paths, run = TablePaths.of(table), uuid.uuid4().hex
    now = now or datetime.now(UTC)
    newest = None if is_idle else newest_recorded(paths.main)
    if newest is not None and now - newest > _CLOCK_AHEAD:
        raise ClockAhead(
            f"{paths.main}: this host's clock says {utc_text(now)}, but a gateway recorded the newest row at "
            f"{utc_text(newest)}. Nothing was dropped: a clock that is ahead would drop rows too early. Correct the "
            "clock; if the table gets no rows any more, repeat with --idle"
        )
    before = cutoff_of(paths, now, keep)
    deadline = time.monotonic() + wait_s
    for _ in range(_TRIES):
        state = read_state(paths)
        if state.planned is not None:
            if state.planned.kind == DROP:
                _do(session, paths, state.planned, run)
            elif time.monotonic() < deadline:
                time.sleep(_POLL_S)
            else:
                raise Overtaken(
                    f"{paths.main}: batch {state.planned.batch} is planned and not loaded; nothing was dropped. Run "
                    "logferry load to finish it, then repeat this command"
                )
            continue
        if state.committed is None:
            raise LoaderConfigError(f"{paths.main} holds no batch: there is nothing to drop")
        found = count_old(session, paths, state.last, before)
        if not found:
            return None, found
        rest = tuple(r.at_rest for r in state.committed.ranges)
        entry = state.committed._replace(
            batch=state.last + 1, run=run, planned=datetime.now(UTC), ranges=rest, kind=DROP, reload=(), cutoff=before
        )
        Ledger(paths.ledger).create()
        add_columns(paths.quarantine, QUARANTINE)
        if Ledger(paths.ledger).put(entry).run == run:
            _do(session, paths, entry, run)
            return entry, found
    raise StorageUnavailable(f"{paths.main}: other loaders were faster {_TRIES} times; nothing was dropped. Try again")


def _do(session: Session, paths: TablePaths, entry: LedgerEntry, run: str) -> None:
    """Raises Overtaken only where the batch is not committed."""
    from logferry.loaders.batches.drop_rows import drop_rows

    try:
        drop_rows(session, paths, entry, run)
    except Overtaken:
        if committed_batch(paths.main, entry.batch, run) is None:
            raise
