"""``logferry table state``: the last batch of a table, its positions and its quarantine. ``logferry table segments``:
which segments are complete, why others are not, and which sources are not waited for. Without Spark; only the lag of
``state`` needs Kafka.

    logferry table segments list /warehouse/nginx
    logferry table segments wait /warehouse/nginx 2026-11-20T10 && spark-submit hourly.py 2026-11-20T10
    logferry table segments exclude /warehouse/nginx 'web7:*'

Exit status of ``wait``: 0 the segment is READY, 1 it is not after ``--timeout-s``, or its rows were dropped, 2 wrong
use or a table without segments, 3 the table cannot be read.
"""

from __future__ import annotations

import argparse
import getpass
import json
import time
from datetime import UTC, datetime
from typing import Any

from logferry.gateway.contract.names import visible
from logferry.loaders.commands.options import table_paths
from logferry.loaders.config import load_config
from logferry.loaders.errors import EXIT_DONE, EXIT_REFUSED, KafkaUnavailable, LoaderConfigError
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import DROPPED, READY, Segment, SegmentRules
from logferry.loaders.planning.source_facts import moment_of, utc_text
from logferry.loaders.runs.table_facts import table_facts, why_not_ready
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import exclude, last_check, read_excluded, read_segments, segment_length
from logferry.loaders.storage.tables import snapshot_of
from logferry.loaders.terminal import escape
from rich.console import Console
from rich.table import Table

_LOOK_S = 1.0


def run_state(options: argparse.Namespace) -> int:
    """Prints the state of each table. Raises LoaderConfigError, Terminal, StorageUnavailable."""
    paths = table_paths(options, options.paths)
    facts = [table_facts(path) for path in paths]
    if options.bootstrap is not None or options.config is not None:
        _add_lag(facts, paths, options)
    if options.json:
        print(json.dumps(facts))
        return EXIT_DONE
    console = Console()
    for found in facts:
        show(found, console)
    return EXIT_DONE


def _add_lag(facts: list[dict[str, Any]], paths: list[Location], options: argparse.Namespace) -> None:
    """The lag by topic, where Kafka can be reached. Raises LoaderConfigError."""
    from logferry.loaders.batches.topic_lag import kafka_settings, lag_of

    settings = None if options.config is None else load_config(options.config)
    if settings is not None and options.bootstrap is not None:
        raise LoaderConfigError("--config excludes --bootstrap: the file has the address")
    # What was never loaded has no positions to compare.
    loaded = [(found, path) for found, path in zip(facts, paths, strict=True) if found["last"] is not None]
    try:
        lags = lag_of([snapshot_of(path) for _, path in loaded], kafka_settings(settings, options.bootstrap))
    except KafkaUnavailable as error:
        for found, _ in loaded:
            found["lag_unknown"] = str(error)
        return
    for (found, _), lag in zip(loaded, lags, strict=True):
        found["lag"] = [one._asdict() for one in lag]


def show(facts: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{escape(facts['table'])}[/]", highlight=False)
    for word, entry in (("holds", facts["last"]), ("planned", facts["planned"])):
        if entry is not None:
            said = f"  {word} batch {entry['batch']} ({entry['kind']}, {entry['parser']}, offsets of {entry['dc']}"
            console.print(f"{said}, planned {entry['planned']})", highlight=False, soft_wrap=True)
    shown = Table("topic", "partition", "next offset", box=None, pad_edge=False)
    for column in shown.columns[1:]:
        column.justify = "right"
    for position in facts["positions"]:
        shown.add_row(escape(position["topic"]), str(position["partition"]), f"{position['offset']:,}")
    console.print(shown)
    for lag in facts.get("lag", ()):
        console.print(f"  {escape(lag['topic'])}: {escape(_lag_text(lag))}", highlight=False, soft_wrap=True)
    if "lag_unknown" in facts:
        console.print(f"  lag unknown: {escape(facts['lag_unknown'])}", highlight=False, soft_wrap=True)
    for reason, count in facts["quarantine"].items():
        console.print(f"  quarantined: {count:,} · {escape(reason)}", highlight=False, soft_wrap=True)


def _lag_text(lag: dict[str, Any]) -> str:
    if lag["stopped"] is not None:
        return f"stopped: {lag['stopped']}"
    if not lag["records"]:
        return "up to date"
    age = "" if lag["seconds"] is None else f", the oldest is {lag['seconds']:,.0f} s old"
    return f"{lag['records']:,} offsets behind{age}"


def run_segments(options: argparse.Namespace) -> int:
    """Lists segments, waits for one, or excludes a source; of several tables one after the other. Raises LoadError."""
    if options.action == "list":
        for path in table_paths(options, options.paths):
            _list(TablePaths.of(path), options)
        return EXIT_DONE
    *paths, name = options.names
    if len(paths) > 1:
        what = "SEGMENT" if options.action == "wait" else "SOURCE"
        raise LoaderConfigError(f"segments {options.action} takes the PATH of one table, then the {what}")
    tables = [TablePaths.of(path) for path in table_paths(options, [Location.of(path) for path in paths])]
    if options.action == "wait":
        deadline = None if options.timeout_s is None else time.monotonic() + options.timeout_s
        return max(_wait(table, name, options.version, deadline) for table in tables)
    for table in tables:
        _exclude(table, name, is_excluded=options.action == "exclude")
    return EXIT_DONE


def _list(paths: TablePaths, options: argparse.Namespace) -> None:
    rules = _rules(paths)
    segments = sorted(_segments(paths).values())[-options.last :]
    look = last_check(paths.segments)
    if options.json:
        rows: list[dict[str, Any]] = []
        for segment in segments:
            row = {name: utc_text(v) if isinstance(v, datetime) else v for name, v in segment._asdict().items()}
            rows.append({**row, "segment": segment.name, "reason": why_not_ready(segment, rules, look)})
        facts = {"table": str(paths.main), "look": look or None, "segments": rows}
        print(json.dumps({**facts, "excluded": read_excluded(paths.excluded)}))
        return
    console = Console()
    shown = Table("segment", "state", "version", "rows", "MB", "late", "last event", "", box=None, pad_edge=False)
    for column in shown.columns[2:6]:
        column.justify = "right"
    for segment in segments:
        shown.add_row(
            segment.name,
            segment.state,
            str(segment.version),
            f"{segment.rows:,}",
            f"{segment.bytes / 1e6:.1f}",
            f"{segment.late_rows:,}",
            utc_text(segment.last) if segment.last else "",
            escape(why_not_ready(segment, rules, look)),
        )
    console.print(shown)
    if excluded := read_excluded(paths.excluded):
        console.print(f"excluded: {escape(', '.join(excluded))}", soft_wrap=True)


def _exclude(paths: TablePaths, name: str, *, is_excluded: bool) -> None:
    _rules(paths)
    if not is_excluded and name not in read_excluded(paths.excluded):
        raise LoaderConfigError(f"{name} is not excluded from {paths.main}")
    exclude(paths.excluded, [name], datetime.now(UTC), getpass.getuser(), is_excluded=is_excluded)
    print(f"{name} is {'excluded from' if is_excluded else 'included in'} {paths.main}, from the next check on")


def _wait(paths: TablePaths, name: str, version: int, deadline: float | None) -> int:
    rules = _rules(paths)
    start = _start_of(name, rules)
    while True:
        segment = _segments(paths).get(start)
        if segment is not None and segment.state == READY and segment.version >= version:
            print(f"{name} is READY: version {segment.version}, {segment.rows:,} rows")
            return EXIT_DONE
        if segment is not None and segment.state == DROPPED:
            print(f"{name} was dropped: {visible(segment.reason)}")
            return EXIT_REFUSED
        if deadline is not None and time.monotonic() >= deadline:
            look = last_check(paths.segments)
            if segment is None:
                why = f"no rows of it are known{', and the table ' + look['waits'] if look.get('waits') else ''}"
            elif segment.state == READY:
                why = f"it is READY in version {segment.version} only"
            else:
                why = f"it is {segment.state} in version {segment.version}: {why_not_ready(segment, rules, look)}"
            print(f"{name} is not READY: {visible(why)}")
            return EXIT_REFUSED
        time.sleep(_LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic())))


def _segments(paths: TablePaths) -> dict[datetime, Segment]:
    """As the main table stands; what is planned only does not count."""
    return read_segments(paths.segments, last_batch(open_table(paths.main)))


def _rules(paths: TablePaths) -> SegmentRules:
    length = segment_length(paths.segments)
    if length is None:
        raise LoaderConfigError(f"{paths.main} has no segments: set [tables.segments] in the loader's configuration")
    return SegmentRules(length)


def _start_of(text: str, rules: SegmentRules) -> datetime:
    start = moment_of(text)
    if start is None:
        raise LoaderConfigError(f"{text!r} is not like 2026-11-20T10 (UTC)")
    if rules.start_of(start) != start:
        raise LoaderConfigError(f"{text} is not the start of a segment: segments are {rules.window_s} s long, in UTC")
    return start
