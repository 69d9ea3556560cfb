"""Writes the files of small tables: a few rows, as one file with its column bounds. Without Spark.

`deltalake.write_deltalake` reads the log since the last checkpoint with each call. Here the file is written first, and
the caller's commit names it; a file that no commit names is deleted by `retention`.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.location import Location
from logferry.loaders.storage.files import create_file


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
    """Bounds of numbers and texts."""
    said: dict[str, Any] = {"numRecords": rows.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        said["nullCount"][name] = column.null_count
        if column.null_count < rows.num_rows and (pa.types.is_integer(column.type) or pa.types.is_string(column.type)):
            bounds = pc.min_max(column).as_py()
            if len(str(bounds["max"])) <= 256:
                said["minValues"][name], said["maxValues"][name] = bounds["min"], bounds["max"]
    return said
