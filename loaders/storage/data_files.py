"""Parquet files in the folder of a table, which are not part of the table until a commit names them.

Spark writes them into a separate folder in the table's, so other loaders do not interfere. A killed loader's files are
in no commit, and `compact` deletes them. delta-rs makes the commit (see `commit`), so the column bounds by which
Delta's readers skip files are taken from the files' own footers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake.transaction import AddAction
from logferry.loaders.errors import StorageUnavailable

_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
# Longer texts are useless as bounds.
_TEXT: Final = 256
FOLDER: Final = "batch-"


class DataFiles(NamedTuple):
    """Files that no commit names yet. ``rows`` in all of them."""

    folder: Path
    adds: tuple[AddAction, ...]
    rows: int

    def check_rows(self, expected: int) -> DataFiles:
        """To be called before the commit: a stale listing of the folder can lack a file. Raises StorageUnavailable."""
        if self.rows != expected:
            raise StorageUnavailable(
                f"{self.folder}: {expected:,} rows were written, but its files hold {self.rows:,}: the listing of the "
                "folder may be stale. Nothing is committed; the next load repeats the batch"
            )
        return self

    @property
    def paths(self) -> list[Path]:
        return [self.folder.parent / unquote(add.path) for add in self.adds]


def add_action(table: Path, file: Path, values: Mapping[str, str | None]) -> tuple[AddAction, int]:
    """The action that adds a file with these values of the partition columns, and the number of its rows."""
    meta = pq.read_metadata(file)
    path, size, stats = file.relative_to(table).as_posix(), file.stat().st_size, json.dumps(statistics(meta))
    return AddAction(path, size, dict(values), int(time.time() * 1000), True, stats), meta.num_rows


def partition_values(table: Path, file: Path, partition_by: Sequence[str]) -> dict[str, str | None]:
    """From the names of the file's folders."""
    said = dict(part.split("=", 1) for part in file.relative_to(table).parts[1:-1])
    return {name: None if said[name] == _NO_VALUE else unquote(said[name]) for name in partition_by}


def statistics(meta: Any) -> dict[str, Any]:
    """A file's statistics for the Delta log: rows, and bounds and nulls of each indexed column."""
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unknown: set[str] = set()
    for group in map(meta.row_group, range(meta.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name = column.path_in_schema
            if name not in INDEXED:
                continue
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


# Statistics of the text, and of nested values, would cost time and skip no file.
INDEXED: Final = ("topic", "source_id", "seqno", "partition", "offset", "created", "recorded", "event_time")


def _bound(value: Any, *, up: bool) -> Any:
    """As in the Delta log; None where the value is useless as a bound. Times are rounded outwards to milliseconds."""
    if isinstance(value, datetime):
        moment = value.astimezone(UTC)
        cut = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
        if up and cut < moment:
            cut += timedelta(milliseconds=1)
        return cut.strftime("%Y-%m-%dT%H:%M:%S.") + f"{cut.microsecond // 1000:03}Z" if cut.year >= 1000 else None
    if isinstance(value, date):
        return value.isoformat()
    return None if isinstance(value, bytes) or (isinstance(value, str) and len(value) > _TEXT) else value
