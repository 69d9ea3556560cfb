"""The side table of segments (``<path>_segments``): one row per change of a segment. Without Spark.

Batch n writes its changes before the main table's commit, with the same transaction version; rows of a batch that the
main table does not hold do not count. Every so often a batch replaces all rows by the newest ones, so that reading
stays fast. Batches before the segments were enabled are counted once, from the main table.

The length of the segments is part of the table's description and cannot change. The result of the last check is kept in
a file beside, for people: no decision depends on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import Schema
from logferry.loaders.errors import ForeignTable
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import (
    AddedRows,
    Segment,
    SegmentRules,
    WatermarkCheck,
    add_rows,
    segment_start,
)
from logferry.loaders.planning.source_facts import SourceKey, utc_text
from logferry.loaders.storage.commit import commit_rows
from logferry.loaders.storage.data_files import DataFiles
from logferry.loaders.storage.ledger import (
    add_columns,
    arrow_schema,
    create_table,
    last_batch,
    open_table,
    read_rows,
    storage_errors,
    table_at,
)
from logferry.loaders.storage.source_table import SNAPSHOT_EVERY

_SCHEMA: Final = arrow_schema(
    "start time, version long, state string, rows long, bytes long, first time, last time, late_rows long, "
    "passed time, touched time, closed time, batch long, reason string, "
    # Null in the rows of older loaders.
    "sources long, silent_sources long, watermark time"
)
_LOOK: Final = "_last_look.json"
_FAR_US: Final = 10**17

Segments = dict[datetime, Segment]


def create_segments(path: Path, rules: SegmentRules) -> None:
    """Raises ForeignTable when the table has segments of another length."""
    create_table(path, _SCHEMA, f"logferry segments of {rules.window_s} s")
    have = segment_length(path)
    if have != rules.window_s:
        raise ForeignTable(f"{path} has segments of {have} s, the job {rules.window_s} s: the length cannot be changed")


def segment_length(path: Path) -> int | None:
    """The length of the table's segments in seconds; None: it has none. Raises ForeignTable."""
    table = open_table(path)
    if table is None:
        return None
    words = (table.metadata().name or "").split()
    if len(words) != 5 or words[:3] != ["logferry", "segments", "of"] or not words[3].isdigit():
        raise ForeignTable(f"{path} is not a table of segments")
    return int(words[3])


def read_segments(path: Path, last: int) -> Segments:
    """The newest row of each segment up to this batch. Raises StorageUnavailable."""
    rows = sorted((Segment(**row) for row in read_rows(path)), key=lambda one: (one.start, one.batch))
    return {segment.start: segment for segment in rows if segment.batch <= last}


def put_segments(path: Path, batch: int, run: str, changed: Iterable[Segment]) -> None:
    """What a batch changes. Safe to call again: the first one that is written stands. Raises StorageUnavailable."""
    add_columns(path, Schema.from_arrow(_SCHEMA))
    rows, all_of_it = [segment._asdict() for segment in changed], batch % SNAPSHOT_EVERY == 0
    if all_of_it:
        # The earlier rows count until the main table holds this batch, so they stay beside the new ones.
        rows += [segment._asdict() for segment in read_segments(path, batch - 1).values()]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    commit_rows(table, path, batch, run, replace=all_of_it)


def segments_before(paths: TablePaths, batch: int, run: str, rules: SegmentRules) -> Segments:
    """The segments before the batch; counted from the main table where the side table has none. Raises Overtaken."""
    before = batch - 1
    if before >= 0 and last_batch(open_table(paths.segments)) < before:
        scanner = (
            table_at(paths.main, before).to_pyarrow_dataset().scanner(columns=["event_time", "text"], batch_readahead=2)
        )
        added = rows_by_segment(scanner.to_batches(), rules)
        counted = add_rows({}, added, before, datetime.now(UTC))
        add_columns(paths.segments, Schema.from_arrow(_SCHEMA))
        table_rows = pa.Table.from_pylist([segment._asdict() for segment in counted.values()], schema=_SCHEMA)
        commit_rows(table_rows, paths.segments, before, run, replace=True)
    return read_segments(paths.segments, before)


def rows_by_segment(batches: Iterable[pa.RecordBatch], rules: SegmentRules) -> dict[datetime, AddedRows]:
    """Counts rows by ``event_time`` and ``text``."""
    added: dict[datetime, AddedRows] = {}
    for rows in batches:
        added = _merged(added, _added(pa.Table.from_batches([rows]), rules))
    return added


def added_by(written: DataFiles, rules: SegmentRules) -> tuple[dict[datetime, AddedRows], dict[SourceKey, datetime]]:
    """The rows that files add to each segment, and the newest event of each source. Raises StorageUnavailable."""
    added: dict[datetime, AddedRows] = {}
    newest: dict[SourceKey, datetime] = {}
    columns = ["topic", "source_id", "event_time", "text"]
    for path in written.paths:
        with storage_errors(f"{path} cannot be read"):
            file = pq.ParquetFile(path)
            have = [name for name in columns if name in file.schema_arrow.names]
            if "event_time" not in have:
                # The batch was planned for a parser without event time.
                continue
            for batch in file.iter_batches(columns=have):
                rows = pa.Table.from_batches([batch])
                added = _merged(added, _added(rows, rules))
                each = rows.group_by(["source_id"] + ["topic"] * ("topic" in have)).aggregate([("event_time", "max")])
                for row in each.to_pylist():
                    if row["event_time_max"] is None:
                        continue
                    # Partitioned by topic: the topic is in the file's name.
                    topic = row.get("topic") or path.as_posix().split("/topic=")[1].split("/")[0]
                    key = SourceKey(topic, row["source_id"])
                    newest[key] = max(newest.get(key, row["event_time_max"]), row["event_time_max"])
    return added, newest


def _added(rows: Any, rules: SegmentRules) -> dict[datetime, AddedRows]:
    if not rows.num_rows:
        return {}
    micros = pc.cast(rows["event_time"], pa.int64())
    length = rules.window_s * 1_000_000
    # Integer division truncates towards zero; so all are shifted above it.
    windows = pc.divide(pc.add(micros, _FAR_US // length * length), length)
    each = pa.table(
        {"window": windows, "event": rows["event_time"], "bytes": pc.binary_length(pc.cast(rows["text"], pa.binary()))}
    ).group_by("window")
    found: dict[datetime, AddedRows] = {}
    wanted = [("event", "count"), ("bytes", "sum"), ("event", "min"), ("event", "max")]
    for row in each.aggregate(wanted).to_pylist():
        if row["event_count"]:
            start = segment_start(row["event_min"], rules)
            found[start] = AddedRows(row["event_count"], row["bytes_sum"], row["event_min"], row["event_max"])
    return found


def _merged(one: Mapping[datetime, AddedRows], other: Mapping[datetime, AddedRows]) -> dict[datetime, AddedRows]:
    return {**one, **{start: rows.plus(one.get(start)) for start, rows in other.items()}}


def save_check(path: Path, look: WatermarkCheck) -> None:
    """For `logferry table segments list`; a failure to write it is ignored."""
    low = utc_text(look.low.at) if look.low.at else None
    text = json.dumps({"at": utc_text(look.now), "low": low, "waits": look.low.why()})
    temporary = path / f"{_LOOK}.{os.getpid()}"
    with suppress(OSError):
        temporary.write_text(text)
        temporary.replace(path / _LOOK)


def last_check(path: Path) -> dict[str, Any]:
    """The file of `save_check`: ``at``, ``low``, ``waits``; empty where there is none."""
    try:
        kept = json.loads((path / _LOOK).read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
