"""Writes the files of small tables: a few rows, as one file with its column bounds. Without Spark.

`deltalake.write_deltalake` reads the log since the last checkpoint with each call. Here the file is written first, and
the caller's commit names it; a file that no commit names is deleted by `retention`.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.location import Location
from logferry.loaders.storage.files import create_file

_TEXT: Final = 256


def written_rows(folder: Location, rows: pa.Table, *, changes_data: bool = True) -> list[AddAction | RemoveAction]:
    """The action that adds the rows; none where there are none. Raises OSError, ArrowException, DeltaError.

    ``changes_data``: False where the table holds the same before and after.
    """
    if not rows.num_rows:
        return []
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    data, name = sink.getvalue(), f"rows-{uuid.uuid4().hex}.parquet"
    with create_file(folder, name) as stream:
        stream.write(data)
    stats = json.dumps(_statistics(rows))
    return [AddAction(name, data.size, {}, int(time.time() * 1000), changes_data, stats)]


def _statistics(rows: pa.Table) -> dict[str, Any]:
    """Bounds as in a file of Spark's; of values without useful ones none."""
    said: dict[str, Any] = {"numRecords": rows.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        said["nullCount"][name] = column.null_count
        if column.null_count < rows.num_rows and not pa.types.is_nested(column.type):
            bounds = pc.min_max(column).as_py()
            low, high = bound(bounds["min"], up=False), bound(bounds["max"], up=True)
            if low is not None and high is not None:
                said["minValues"][name], said["maxValues"][name] = low, high
    return said


def bound(value: Any, *, up: bool) -> Any:
    """As in the Delta log; None where the value is useless as a bound. Times are rounded outwards to milliseconds."""
    if isinstance(value, datetime):
        moment = value.astimezone(UTC)
        cut = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
        if up and cut < moment:
            cut += timedelta(milliseconds=1)
        return cut.strftime("%Y-%m-%dT%H:%M:%S.") + f"{cut.microsecond // 1000:03}Z" if cut.year >= 1000 else None
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        return value if len(value) <= _TEXT else None
    return value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else None
