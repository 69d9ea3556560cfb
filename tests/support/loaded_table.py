"""A table as a loader leaves it, written without Spark and Kafka: rows, quarantine, ledger and segments."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.planning.segment_states import AddedRows, SegmentRules, add_rows
from logferry.loaders.storage.commit import INDEXED
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import APP, Ledger, last_batch, new_entry
from logferry.loaders.storage.side_tables import create_segments, put_segments, read_segments
from logferry.loaders.storage.tables import QUARANTINE, active_filter

T = "dc1.nginx"
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
RULES = SegmentRules()
_TIME = pa.timestamp("us", "UTC")
_PLACE = [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("dc", pa.string())]
_PLACE += [("source_id", pa.string()), ("seqno", pa.int64())]
MAIN = pa.schema([*_PLACE, ("recorded", _TIME), ("event_time", _TIME), ("text", pa.string())])
QUARANTINE_ROWS = pa.schema(QUARANTINE.to_arrow())


def row(offset: int, event: datetime | None, recorded: datetime | None = None) -> dict[str, Any]:
    at = recorded or (event or NOON) + timedelta(minutes=1)
    place = {
        "topic": T,
        "partition": 0,
        "offset": offset,
        "dc": "dc1",
        "source_id": f"web{offset % 3}",
        "seqno": offset,
    }
    return {**place, "recorded": at, "event_time": event, "text": f"line {offset}"}


def commit(path: Path, batch: int, rows: Sequence[dict[str, Any]], schema: pa.Schema) -> None:
    properties = CommitProperties(app_transactions=[Transaction(APP, batch)])
    table = pa.Table.from_pylist(list(rows), schema=schema)
    write_deltalake(str(path), table, mode="append", commit_properties=properties)


class LoadedTable:
    """A table whose batch n holds the rows given for it, one a file."""

    def __init__(self, folder: Path, partition_by: list[str] | None = None, *, segments: bool = True) -> None:
        self.paths = TablePaths.of(folder / "logs")
        Ledger(self.paths.ledger).create()
        # As a loader makes them: statistics of these columns alone.
        indexed = [name for name in INDEXED if name in MAIN.names and name not in (partition_by or ())]
        stats: dict[str, str | None] = {"delta.dataSkippingStatsColumns": ",".join(indexed)}
        main, beside = str(self.paths.main), str(self.paths.quarantine)
        DeltaTable.create(main, Schema.from_arrow(MAIN), partition_by=partition_by, configuration=stats)
        stats = {"delta.dataSkippingStatsColumns": "topic,partition,offset,recorded"}
        DeltaTable.create(beside, Schema.from_arrow(QUARANTINE_ROWS), configuration=stats)
        self.batch, self.offset = -1, 0
        if segments:
            create_segments(self.paths.segments, RULES)

    def plan(self, rows: int) -> int:
        end = self.offset + rows
        ranges = [Range(T, 0, "id", self.offset, end)]
        Ledger(self.paths.ledger).put(new_entry(self.batch + 1, "dc1", "lines/1", "run", ranges))
        self.offset = end
        return self.batch + 1

    def load(self, *events: datetime | None, bad: Sequence[datetime] = (), recorded: Sequence[datetime] = ()) -> None:
        first = self.offset
        self.batch = self.plan(len(events))
        lines = [{**row(first, None, at), "bytes": b"?"} for at in bad]
        commit(Path(self.paths.quarantine), self.batch, lines, QUARANTINE_ROWS)
        times: Sequence[datetime | None] = recorded or [None] * len(events)
        rows = [row(first + i, event, at) for i, (event, at) in enumerate(zip(events, times, strict=True))]
        added: dict[datetime, AddedRows] = {}
        for one in rows:
            if one["event_time"]:
                start = one["event_time"].replace(minute=0, second=0, microsecond=0)
                before = added.get(start, AddedRows(0, 0, one["event_time"], one["event_time"]))
                added[start] = AddedRows(
                    before.rows + 1, before.bytes + 6, before.first, max(before.last, one["event_time"])
                )
        if open_table(self.paths.segments):
            known = read_segments(self.paths.segments, self.batch - 1)
            put_segments(self.paths.segments, self.batch, "run", add_rows(known, added, self.batch, NOON).values())
        commit(Path(self.paths.main), self.batch, rows, MAIN)

    @property
    def offsets(self) -> list[int]:
        return sorted(one["offset"] for one in DeltaTable(str(self.paths.main)).to_pyarrow_table().to_pylist())

    @property
    def quarantined(self) -> int:
        table = DeltaTable(str(self.paths.quarantine))
        stands = active_filter(last_batch(open_table(self.paths.main)))
        return int(table.to_pyarrow_dataset().count_rows(filter=stands))

    @property
    def states(self) -> dict[int, tuple[str, int, int]]:
        found = read_segments(self.paths.segments, last_batch(open_table(self.paths.main)))
        return {(start - NOON) // HOUR: (one.state, one.version, one.rows) for start, one in found.items()}
