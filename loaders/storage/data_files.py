"""Rows into Parquet files beside a table's other files, which are no part of the table until a commit names them.

Spark writes them into a folder of their own within the table's, so nothing that another loader does gets in their way.
What a killed loader leaves is named by no commit: a vacuum of the table removes it. The commit is delta-rs's (see
`commit`), so what Delta's readers use to pass over files, the smallest and the largest value of a column, is taken from
the files' own footers.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake.transaction import AddAction
from logferry.loaders.errors import StorageAway
from pyspark.sql import DataFrame

_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
# A longer text is no bound that a reader gains by.
_TEXT: Final = 256
FOLDER: Final = "batch-"


class Written(NamedTuple):
    """Files that no commit names yet. ``rows`` in all of them."""

    folder: Path
    adds: tuple[AddAction, ...]
    rows: int

    @property
    def paths(self) -> list[Path]:
        return [self.folder.parent / unquote(add.path) for add in self.adds]


def write_files(rows: DataFrame, path: Path, batch: int, partition_by: Sequence[str] = ()) -> Written:
    """Writes the rows. Raises what reading them raises, and StorageAway; what is written is lost then."""
    folder = path / f"{FOLDER}{batch:08}-{uuid.uuid4().hex[:12]}"
    parallel = rows.sparkSession.sparkContext.defaultParallelism
    writer = rows.coalesce(parallel).write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    writer.parquet(str(folder))
    try:
        adds, counts = [], 0
        for file in sorted(folder.rglob("*.parquet")):
            add, count = _add(path, file, partition_by)
            counts += count
            if count:
                adds.append(add)
            else:
                file.unlink()
    except OSError as error:
        raise StorageAway(f"{folder} cannot be read: {error}") from error
    return Written(folder, tuple(adds), counts)


def _add(table: Path, file: Path, partition_by: Sequence[str]) -> tuple[AddAction, int]:
    relative = file.relative_to(table)
    said = dict(part.split("=", 1) for part in relative.parts[1:-1])
    values = {name: None if said[name] == _NO_VALUE else unquote(said[name]) for name in partition_by}
    meta = pq.read_metadata(file)
    stat = file.stat()
    stats = json.dumps(statistics(meta))
    add = AddAction(relative.as_posix(), stat.st_size, values, int(time.time() * 1000), True, stats)
    return add, meta.num_rows


def statistics(meta: Any) -> dict[str, Any]:
    """What a Delta log says of a file: rows, and of each column with a plain value the bounds and the nulls."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in range(meta.num_row_groups):
        for name, column in _plain(meta.row_group(group)):
            stats = column.statistics
            if stats is None or not stats.has_null_count:
                unknown.add(name)
                continue
            nulls[name] = nulls.get(name, 0) + stats.null_count
            if not stats.has_min_max:
                if stats.null_count < column.num_values:
                    unknown.add(name)
                continue
            low[name] = min(low.get(name, stats.min), stats.min)
            high[name] = max(high.get(name, stats.max), stats.max)
    said: dict[str, Any] = {"numRecords": meta.num_rows}
    said["minValues"] = {n: t for n, v in low.items() if n not in unknown and (t := _bound(v, up=False)) is not None}
    said["maxValues"] = {n: t for n, v in high.items() if n not in unknown and (t := _bound(v, up=True)) is not None}
    said["nullCount"] = {n: c for n, c in nulls.items() if n not in unknown}
    return said


# The text of lines, and what has many values, would cost time and tell nothing.
INDEXED: Final = ("topic", "source_id", "seqno", "partition", "offset", "created", "recorded", "event_time")


def _plain(group: Any) -> Iterator[tuple[str, Any]]:
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema in INDEXED:
            yield column.path_in_schema, column


def _bound(value: Any, *, up: bool) -> Any:
    """As the Delta log writes it; None where the value is no bound. Times have milliseconds there: rounded outwards."""
    if isinstance(value, datetime):
        moment = value.astimezone(UTC)
        cut = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
        if up and cut < moment:
            cut += timedelta(milliseconds=1)
        return cut.strftime("%Y-%m-%dT%H:%M:%S.") + f"{cut.microsecond // 1000:03}Z" if cut.year >= 1000 else None
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes):
        return None
    if isinstance(value, str):
        return value if len(value) <= _TEXT else None
    return value


__all__ = ["FOLDER", "INDEXED", "Written", "statistics", "write_files"]
