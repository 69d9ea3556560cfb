"""``logferry table compact``: merges small files, drops old rows on request, removes unused files. Without Spark.

It may run at any time, beside loaders too. Exit status: 0 done, 1 refused, 2 wrong use, 3 storage is unavailable, or
a planned batch must be loaded before rows can be dropped; the same call can be repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from logferry.gateway.contract.names import visible
from logferry.loaders.commands.options import table_paths
from logferry.loaders.errors import EXIT_DONE, ClockAhead, LoaderConfigError, LoadError, Overtaken, StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import DROP, LedgerEntry, TablePaths
from logferry.loaders.planning.source_facts import utc_text
from logferry.loaders.storage.commit import committed_batch
from logferry.loaders.storage.files import STORAGE_ERRORS, storage_errors
from logferry.loaders.storage.ledger import Ledger, add_columns
from logferry.loaders.storage.retention import OldRows, compact, count_old, cutoff_of, drop_rows, newest_recorded
from logferry.loaders.storage.tables import QUARANTINE, read_state

_POLL_S: Final = 0.5
_TRIES: Final = 1000
# The newest row of a table that is loaded is younger.
_CLOCK_AHEAD: Final = timedelta(days=7)


def run_compact(options: argparse.Namespace) -> int:
    """Compacts the tables one after the other; a failure stops no other. Raises LoaderConfigError."""
    status, facts = EXIT_DONE, []
    for table in table_paths(options, options.paths):
        try:
            with storage_errors(f"{table} cannot be accessed", STORAGE_ERRORS):
                facts.append(_one(table, options))
        except LoadError as error:
            print("logferry:", visible(str(error), "\n"), file=sys.stderr)
            facts.append({"table": str(table), "error": str(error)})
            status = error.exit_status if status == EXIT_DONE else min(status, error.exit_status)
    if options.json:
        print(json.dumps({"exit": status, "tables": facts}))
    return status


def _one(table: Location, options: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {"table": str(table), "dropped": None, "compacted": []}
    show = (lambda _: None) if options.json else print
    if options.retain_days is not None:
        keep = timedelta(days=options.retain_days)
        entry, found = drop_old(table, keep, wait_s=options.wait_s, is_idle=options.idle)
        said = "no rows are old enough to be dropped"
        if entry is not None and entry.cutoff is not None:
            facts["dropped"] = {"batch": entry.batch, "cutoff": entry.cutoff.isoformat(), **found._asdict()}
            said = (
                f"batch {entry.batch} dropped rows before {utc_text(entry.cutoff)}: "
                f"{found.rows:,} rows, {found.quarantined:,} quarantined lines, {found.segments:,} segments"
            )
        show(f"{table.name}: {said}")
    for compacted in compact(table, timedelta(hours=options.version_retention_hours), options.target_mb):
        facts["compacted"].append({**compacted._asdict(), "path": str(compacted.path)})
        files = f"{compacted.before:,} files merged to {compacted.after:,}; {compacted.removed:,} deleted"
        show(f"{compacted.path.name}: {files}, {compacted.bytes / 1e6:,.1f} MB")
    return facts


def drop_old(
    table: Location, keep: timedelta, *, wait_s: float = 0.0, now: datetime | None = None, is_idle: bool = False
) -> tuple[LedgerEntry | None, OldRows]:
    """Drops rows older than ``keep``, as a batch of the ledger; None: there are none. Safe to call again.

    ``wait_s``: the time for a loader to finish a planned batch. ``now``: by this host's clock. ``is_idle``: the table
    gets no new rows, so that they cannot confirm this clock. Raises LoaderConfigError where nothing was ever loaded,
    Overtaken when a batch stays planned for longer, ClockAhead, Terminal, StorageUnavailable.
    """
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
                _do(paths, state.planned, run)
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
        found = count_old(paths, state.last, before)
        if not found:
            return None, found
        rest = tuple(r.at_rest for r in state.committed.ranges)
        entry = state.committed._replace(
            batch=state.last + 1, run=run, planned=datetime.now(UTC), ranges=rest, kind=DROP, reload=(), cutoff=before
        )
        Ledger(paths.ledger).create()
        add_columns(paths.quarantine, QUARANTINE)
        if Ledger(paths.ledger).put(entry).run == run:
            _do(paths, entry, run)
            return entry, found
    raise StorageUnavailable(f"{paths.main}: other loaders were faster {_TRIES} times; nothing was dropped. Try again")


def _do(paths: TablePaths, entry: LedgerEntry, run: str) -> None:
    """Raises Overtaken only where the batch is not committed."""
    try:
        drop_rows(paths, entry, run)
    except Overtaken:
        if committed_batch(paths.main, entry.batch, run) is None:
            raise
