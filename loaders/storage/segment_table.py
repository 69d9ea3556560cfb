"""The table of segments beside a table (``<path>_segments``): a row for each change of a window. Without Spark.

Batch n writes what it changes before the main table's commit, with the same transaction version; rows of a batch that
the main table does not hold do not count. Every so often a batch puts the newest rows in place of all, so that reading
stays as fast. Batches that came before the table of segments are counted once, out of the main table.

The windows' length is the table's for ever and stands in its description. What the last look found is kept in a file
beside, as a hint for people: it decides nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import Schema
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import ForeignTable, Overtaken, StorageAway
from logferry.loaders.known import SNAPSHOT_EVERY
from logferry.loaders.planning.segment_states import Added, Look, Rules, Segment, add_rows, said, window_of
from logferry.loaders.planning.source_facts import SourceKey
from logferry.loaders.storage.commit import put_rows
from logferry.loaders.storage.data_files import Written
from logferry.loaders.storage.ledger import TablePaths, create_table, last_batch, open_table

_TIME: Final = pa.timestamp("us", "UTC")
_SCHEMA: Final = pa.schema(
    [
        pa.field("start", _TIME),
        pa.field("version", pa.int64()),
        pa.field("state", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("bytes", pa.int64()),
        pa.field("first", _TIME),
        pa.field("last", _TIME),
        pa.field("late_rows", pa.int64()),
        pa.field("passed", _TIME),
        pa.field("touched", _TIME),
        pa.field("closed", _TIME),
        pa.field("batch", pa.int64()),
        pa.field("reason", pa.string()),
    ]
)
_LOOK: Final = "_last_look.json"
_FAR_US: Final = 10**17

Segments = dict[datetime, Segment]


def create_segments(path: Path, rules: Rules) -> None:
    """Raises ForeignTable when the table has windows of another length."""
    name = f"logferry segments of {rules.window_s} s"
    create_table(path, Schema.from_arrow(_SCHEMA), name, {})
    have = window_s(path)
    if have != rules.window_s:
        raise ForeignTable(f"{path} has windows of {have} s, the job says {rules.window_s}: that cannot be changed")


def window_s(path: Path) -> int | None:
    """The length of the table's windows; None: it has no segments. Raises ForeignTable."""
    table = open_table(path)
    if table is None:
        return None
    words = (table.metadata().name or "").split()
    if len(words) != 5 or words[:3] != ["logferry", "segments", "of"] or not words[3].isdigit():
        raise ForeignTable(f"{path} is another table")
    return int(words[3])


def read_segments(path: Path, last: int) -> Segments:
    """Each window's newest row, as a table stands whose last batch this is. Raises StorageAway."""
    found: Segments = {}
    for segment in sorted(_rows(path), key=lambda one: (one.start, one.batch)):
        if segment.batch <= last:
            found[segment.start] = segment
    return found


def _rows(path: Path) -> Iterable[Segment]:
    table = open_table(path)
    if table is None:
        return []
    try:
        return [Segment(**row) for row in table.to_pyarrow_table().to_pylist()]
    except (DeltaError, OSError) as error:
        raise StorageAway(f"{path} cannot be read: {error}") from error


def put_segments(path: Path, batch: int, run: str, changed: Iterable[Segment]) -> None:
    """What a batch changes. Safe to call again: the first one that is written stands. Raises StorageAway."""
    rows, all_of_it = [segment._asdict() for segment in changed], batch % SNAPSHOT_EVERY == 0
    if all_of_it:
        # The rows before stand until the main table holds this batch, so they stay beside the new ones.
        rows += [segment._asdict() for segment in read_segments(path, batch - 1).values()]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    put_rows(table, path, batch, run, replace=all_of_it)


def segments_before(paths: TablePaths, batch: int, run: str, rules: Rules) -> Segments:
    """As they are before the batch; counted out of the main table where nobody has done so. Raises Overtaken."""
    before = batch - 1
    if before >= 0 and last_batch(open_table(paths.segments)) < before:
        table = open_table(paths.main)
        if table is None or last_batch(table) != before:
            raise Overtaken(f"{paths.main} holds another batch than {before}: another loader goes on")
        added: dict[datetime, Added] = {}
        scanner = table.to_pyarrow_dataset().scanner(columns=["event_time", "text"], batch_readahead=2)
        for rows in scanner.to_batches():
            added = _merged(added, _added(pa.Table.from_batches([rows]), rules))
        counted = add_rows({}, added, before, datetime.now(UTC))
        table_rows = pa.Table.from_pylist([segment._asdict() for segment in counted.values()], schema=_SCHEMA)
        put_rows(table_rows, paths.segments, before, run, replace=True)
    return read_segments(paths.segments, before)


def added_by(written: Written, rules: Rules) -> tuple[dict[datetime, Added], dict[SourceKey, datetime]]:
    """What files bring into each window, and the newest event of each source in them. Raises StorageAway."""
    added: dict[datetime, Added] = {}
    newest: dict[SourceKey, datetime] = {}
    columns = ["topic", "source_id", "event_time", "text"]
    for path in written.paths:
        try:
            file = pq.ParquetFile(path)
            have = [name for name in columns if name in file.schema_arrow.names]
            if "event_time" not in have:
                # Of a batch that was planned for a parser without it.
                continue
            for batch in file.iter_batches(columns=have):
                rows = pa.Table.from_batches([batch])
                added = _merged(added, _added(rows, rules))
                each = rows.group_by(["source_id"] + ["topic"] * ("topic" in have)).aggregate([("event_time", "max")])
                for row in each.to_pylist():
                    if row["event_time_max"] is None:
                        continue
                    # Partitioned by topic, it stands in the file's name.
                    topic = row.get("topic") or path.as_posix().split("/topic=")[1].split("/")[0]
                    key = SourceKey(topic, row["source_id"])
                    newest[key] = max(newest.get(key, row["event_time_max"]), row["event_time_max"])
        except (pa.ArrowException, OSError) as error:
            raise StorageAway(f"{path} cannot be read: {error}") from error
    return added, newest


def _added(rows: Any, rules: Rules) -> dict[datetime, Added]:
    micros = pc.cast(rows["event_time"], pa.int64()) if rows.num_rows else None
    if micros is None:
        return {}
    length = rules.window_s * 1_000_000
    # Whole numbers are cut towards zero; so all are moved above it.
    windows = pc.divide(pc.add(micros, _FAR_US // length * length), length)
    each = pa.table(
        {"window": windows, "event": rows["event_time"], "bytes": pc.binary_length(pc.cast(rows["text"], pa.binary()))}
    ).group_by("window")
    found: dict[datetime, Added] = {}
    wanted = [("event", "count"), ("bytes", "sum"), ("event", "min"), ("event", "max")]
    for row in each.aggregate(wanted).to_pylist():
        if row["event_count"]:
            start = window_of(row["event_min"], rules)
            found[start] = Added(row["event_count"], row["bytes_sum"], row["event_min"], row["event_max"])
    return found


def _merged(one: Mapping[datetime, Added], other: Mapping[datetime, Added]) -> dict[datetime, Added]:
    found = dict(one)
    for start, added in other.items():
        before = found.get(start)
        if before is not None:
            added = Added(
                before.rows + added.rows,
                before.bytes + added.bytes,
                min(before.first, added.first),
                max(before.last, added.last),
            )
        found[start] = added
    return found


def keep_look(path: Path, look: Look) -> None:
    """For `logferry segments list`; one that cannot be written is no matter."""
    waits = look.low.waits_for
    text = json.dumps(
        {
            "at": said(look.now),
            "low": said(look.low.at) if look.low.at else None,
            "waits": look.low.why() if waits else "",
        }
    )
    temporary = path / f"{_LOOK}.{os.getpid()}"
    try:
        temporary.write_text(text)
        temporary.replace(path / _LOOK)
    except OSError:
        return


def last_look(path: Path) -> dict[str, Any]:
    """What `keep_look` kept: ``at``, ``low``, ``waits``; empty where there is nothing."""
    try:
        kept = json.loads((path / _LOOK).read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
