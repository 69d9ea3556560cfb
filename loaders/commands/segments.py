"""``logferry segments``: which windows of a table are complete, and why others are not. Without Spark or Kafka.

    logferry segments list /warehouse/nginx
    logferry segments wait /warehouse/nginx 2026-11-20T10 && spark-submit hourly.py 2026-11-20T10

Exit status of ``wait``: 0 the window is READY, 1 it is not after ``--timeout-s``, or its rows were dropped, 2 wrong use
or a table without segments, 3 the table cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from logferry.loaders.errors import EXIT_DONE, EXIT_REFUSED, ConfigError, LoadError
from logferry.loaders.planning.segment_states import ACTIVE, DROPPED, READY, Rules, Segment, end_of, said, window_of
from logferry.loaders.runs.notify import window_name
from logferry.loaders.storage.ledger import TablePaths, last_batch, open_table
from logferry.loaders.storage.segment_table import last_look, read_segments, window_s
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_FORMS = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H", "%Y-%m-%d")
_LOOK_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        if options.command == "list":
            return _list(TablePaths.of(options.table), options)
        return _wait(TablePaths.of(options.table), options)
    except LoadError as error:
        print(f"logferry: {error}", file=sys.stderr)
        return error.exit_status


def _list(paths: TablePaths, options: argparse.Namespace) -> int:
    rules = _rules(paths)
    segments = sorted(_segments(paths).values())[-options.last :]
    look = last_look(paths.segments)
    if options.json:
        rows = [_as_json(segment, rules, look) for segment in segments]
        print(json.dumps({"table": str(paths.main), "look": look or None, "segments": rows}))
        return EXIT_DONE
    console = Console()
    shown = Table("window", "state", "version", "rows", "MB", "late", "last event", "", box=None, pad_edge=False)
    for column in shown.columns[2:6]:
        column.justify = "right"
    for segment in segments:
        shown.add_row(
            window_name(segment),
            segment.state,
            str(segment.version),
            f"{segment.rows:,}",
            f"{segment.bytes / 1e6:.1f}",
            f"{segment.late_rows:,}",
            said(segment.last) if segment.last else "",
            escape(_why(segment, rules, look)),
        )
    console.print(shown)
    return EXIT_DONE


def _wait(paths: TablePaths, options: argparse.Namespace) -> int:
    rules = _rules(paths)
    start = _window(options.window, rules)
    deadline = None if options.timeout_s is None else time.monotonic() + options.timeout_s
    while True:
        segment = _segments(paths).get(start)
        if segment is not None and segment.state == READY and segment.version >= options.version:
            print(f"{options.window} is READY: version {segment.version}, {segment.rows:,} rows")
            return EXIT_DONE
        if segment is not None and segment.state == DROPPED:
            print(f"{options.window} was dropped: {segment.reason}")
            return EXIT_REFUSED
        if deadline is not None and time.monotonic() >= deadline:
            look = last_look(paths.segments)
            if segment is None:
                why = f"no rows of it are known{', and the table ' + look['waits'] if look.get('waits') else ''}"
            elif segment.state == READY:
                why = f"it is READY in version {segment.version} only"
            else:
                why = f"it is {segment.state} in version {segment.version}: {_why(segment, rules, look)}"
            print(f"{options.window} is not READY: {why}")
            return EXIT_REFUSED
        time.sleep(_LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic())))


def _segments(paths: TablePaths) -> dict[datetime, Segment]:
    """As the main table stands; what is planned only does not count."""
    return read_segments(paths.segments, last_batch(open_table(paths.main)))


def _rules(paths: TablePaths) -> Rules:
    length = window_s(paths.segments)
    if length is None:
        raise ConfigError(f"{paths.main} has no segments: set [tables.segments] in the loader's configuration")
    return Rules(length)


def _window(text: str, rules: Rules) -> datetime:
    for form in _FORMS:
        try:
            start = datetime.strptime(text.removesuffix("Z"), form).replace(tzinfo=UTC)
        except ValueError:
            continue
        if window_of(start, rules) != start:
            raise ConfigError(f"{text} is not the start of a window: these are {rules.window_s} s long, in UTC")
        return start
    raise ConfigError(f"{text!r} is not like 2026-11-20T10 (UTC)")


def _why(segment: Segment, rules: Rules, look: dict[str, Any]) -> str:
    """What is between the window and READY, as of the last look."""
    if segment.state == READY:
        return ""
    if segment.state == DROPPED:
        return segment.reason
    if not look:
        return "no look was made yet"
    low = look.get("low")
    if look.get("waits") and (low is None or low < said(end_of(segment.start, rules))):
        return str(look["waits"])
    if low is not None and low < said(end_of(segment.start, rules)):
        return f"it is not over: the table is at {low}"
    return segment.reason if segment.state == ACTIVE and segment.reason else "waits for the next look"


def _as_json(segment: Segment, rules: Rules, look: dict[str, Any]) -> dict[str, Any]:
    times = ("start", "first", "last", "passed", "touched", "closed")
    facts = {name: said(value) if name in times and value else value for name, value in segment._asdict().items()}
    return {**facts, "window": window_name(segment), "reason": _why(segment, rules, look)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="logferry segments",
        description="Which windows of a table's event time are complete.",
        epilog="example: logferry segments wait /warehouse/nginx 2026-11-20T10 --timeout-s 7200",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shows = commands.add_parser("list", help="the newest windows, their states, and why they are not READY")
    shows.add_argument("table", type=Path, metavar="TABLE", help="folder of the table")
    shows.add_argument("--last", type=int, default=48, metavar="N", help="so many windows (default: %(default)s)")
    shows.add_argument("--json", action="store_true")
    waits = commands.add_parser("wait", help="returns when a window is READY")
    waits.add_argument("table", type=Path, metavar="TABLE")
    waits.add_argument("window", metavar="WINDOW", help="its start in UTC: 2026-11-20T10, 2026-11-20, 2026-11-20T10:15")
    waits.add_argument("--timeout-s", type=float, metavar="S", help="0 asks once (default: for ever)")
    waits.add_argument("--version", type=int, default=1, metavar="N", help="at least this version")
    return parser


if __name__ == "__main__":
    sys.exit(main())
