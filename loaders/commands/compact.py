"""``logferry compact``: tidies tables that loaders write, as often as a scheduler likes. Without Spark or Kafka.

    logferry compact /warehouse/nginx
    logferry compact /warehouse/nginx --keep 90

Exit status: 0 done, 1 refused, 2 wrong use, 3 storage is away, or a planned batch has to be loaded before rows can be
dropped (the same call later goes on).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from logferry.loaders.batches.create_tables import add_quarantine_columns, read_state
from logferry.loaders.errors import EXIT_DONE, ConfigError, LoadError, Overtaken, StorageAway
from logferry.loaders.storage.commit import committed
from logferry.loaders.storage.compact import RETAIN, TARGET_MB, Tidied, compact
from logferry.loaders.storage.drop_rows import Old, cutoff_of, drop, old
from logferry.loaders.storage.ledger import (
    DROP,
    Ledger,
    LedgerEntry,
    TablePaths,
    new_entry,
)

_LOOK_S: Final = 0.5
_TRIES: Final = 1000


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    status, facts = EXIT_DONE, []
    for table in options.tables:
        try:
            facts.append(_one(table, options))
        except LoadError as error:
            print(f"logferry: {error}", file=sys.stderr)
            facts.append({"table": str(table.absolute()), "error": str(error)})
            status = error.exit_status if status == EXIT_DONE else min(status, error.exit_status)
    if options.json:
        print(json.dumps({"exit": status, "tables": facts}))
    return status


def _one(table: Path, options: argparse.Namespace) -> dict[str, Any]:
    facts: dict[str, Any] = {"table": str(table.absolute()), "dropped": None, "tidied": []}
    if options.keep is not None:
        entry, found = drop_old(table, timedelta(days=options.keep), wait_s=options.wait_s)
        if entry is not None and entry.cutoff is not None:
            facts["dropped"] = {"batch": entry.batch, "cutoff": entry.cutoff.isoformat(), **found._asdict()}
        _say(options, _dropped(table, entry, found))
    for tidied in compact(table, timedelta(hours=options.retain_hours), options.target_mb):
        facts["tidied"].append({**tidied._asdict(), "path": str(tidied.path)})
        _say(options, _tidied(tidied))
    return facts


def drop_old(
    table: Path, keep: timedelta, *, wait_s: float = 0.0, now: datetime | None = None
) -> tuple[LedgerEntry | None, Old]:
    """Drops what is older than ``keep``, as a batch of the ledger; None: there is nothing of it. Safe to call again.

    ``wait_s``: so long for a loader to finish a batch that is planned. Raises ConfigError where nothing was ever
    loaded, Overtaken when that took longer, Terminal, StorageAway.
    """
    paths, run = TablePaths.of(table), uuid.uuid4().hex
    before = cutoff_of(paths, now or datetime.now(UTC), keep)
    deadline = time.monotonic() + wait_s
    for _ in range(_TRIES):
        state = read_state(paths)
        if state.planned is not None and state.planned.kind == DROP:
            _do(paths, state.planned, run)
            continue
        if state.planned is not None:
            if time.monotonic() >= deadline:
                raise Overtaken(
                    f"{paths.main}: batch {state.planned.batch} is planned and not loaded; nothing was dropped. A load "
                    "finishes it, then call again"
                )
            time.sleep(_LOOK_S)
            continue
        if state.committed is None:
            raise ConfigError(f"{paths.main} holds no batch: there is nothing to drop")
        found = old(paths, state.last, before)
        if not found:
            return None, found
        last = state.committed
        entry = new_entry(
            state.last + 1,
            last.dc,
            last.parser,
            run,
            [r._replace(start=r.end) for r in last.ranges],
            kind=DROP,
            settings=last.settings,
            origin=last.origin,
            originals=last.originals,
            cutoff=before,
        )
        Ledger(paths.ledger).create()
        add_quarantine_columns(paths)
        if Ledger(paths.ledger).put(entry).run == run:
            _do(paths, entry, run)
            return entry, found
    raise StorageAway(f"{paths.main}: other loaders came first {_TRIES} times; nothing was dropped")


def _do(paths: TablePaths, entry: LedgerEntry, run: str) -> None:
    """Raises Overtaken only where the batch is not done."""
    try:
        drop(paths, entry, run)
    except Overtaken:
        if committed(paths.main, entry.batch, run) is None:
            raise


def _say(options: argparse.Namespace, text: str) -> None:
    if not options.json:
        print(text)


def _dropped(table: Path, entry: LedgerEntry | None, found: Old) -> str:
    if entry is None or entry.cutoff is None:
        return f"{table.name}: nothing is old enough to be dropped"
    return (
        f"{table.name}: batch {entry.batch} dropped what was before {entry.cutoff:%Y-%m-%dT%H:%M:%SZ}: "
        f"{found.rows:,} rows, {found.quarantined:,} lines of the quarantine, {found.windows:,} windows"
    )


def _tidied(tidied: Tidied) -> str:
    return (
        f"{tidied.path.name}: {tidied.before:,} files are {tidied.after:,}; {tidied.removed:,} removed, "
        f"{tidied.bytes / 1e6:,.1f} MB"
    )


def _days(text: str) -> float:
    days = float(text)
    if not 1 <= days <= 36_500:
        raise argparse.ArgumentTypeError("at least one day")
    return days


def _hours(text: str) -> int:
    hours = int(text)
    if hours < 1:
        raise argparse.ArgumentTypeError("at least 1: readers and loaders that are at work need their files")
    return hours


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry compact",
        description="Merges a table's small files, drops old rows if told so, and removes files that nobody needs.",
        epilog="example: logferry compact /warehouse/nginx --keep 90",
    )
    parser.add_argument("tables", nargs="+", type=Path, metavar="TABLE", help="folder of a table that loaders write")
    parser.add_argument(
        "--keep", type=_days, metavar="DAYS", help="drop rows whose time is longer ago, by whole windows or days"
    )
    parser.add_argument(
        "--retain-hours",
        type=_hours,
        default=int(RETAIN.total_seconds() // 3600),
        metavar="N",
        help="older versions of the table can be read for so long (default: %(default)s)",
    )
    parser.add_argument(
        "--target-mb", type=int, default=TARGET_MB, metavar="N", help="size of merged files (default: %(default)s)"
    )
    parser.add_argument(
        "--wait-s",
        type=float,
        default=300.0,
        metavar="S",
        help="before dropping, wait so long for a loader to finish its batch (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
