"""Rows of an answer as a table for eyes, CSV or JSON. Times in UTC, as ISO 8601; bytes that are no text in base64."""

from __future__ import annotations

import base64
import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from typing import Any, Final, Protocol, TextIO

import pyarrow as pa

_ROWS: Final = 10_000


class Result(Protocol):
    def to_arrow_reader(self, batch_size: int = ..., /) -> pa.RecordBatchReader: ...


def as_csv(result: Result, output: TextIO) -> None:
    reader = result.to_arrow_reader(_ROWS)
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(reader.schema.names)
    for values in _values(reader):
        writer.writerow(["" if value is None else _text(value) for value in values])


def as_json(result: Result, output: TextIO) -> None:
    """One array, an object a line."""
    reader = result.to_arrow_reader(_ROWS)
    start = "["
    for values in _values(reader):
        row = dict(zip(reader.schema.names, values, strict=True))
        output.write(f"{start}{json.dumps(row, ensure_ascii=False)}")
        start = ",\n "
    output.write("]\n" if start != "[" else "[]\n")


def as_table(result: Result, output: TextIO) -> None:
    reader = result.to_arrow_reader(_ROWS)
    rows = [["" if value is None else _text(value) for value in values] for values in _values(reader)]
    names = list(reader.schema.names)
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    right = [pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t) for t in reader.schema.types]
    for cells in (names, ["-" * width for width in widths], *rows):
        placed = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        output.write("  ".join(placed).rstrip() + "\n")
    output.write(f"({len(rows):,} row{'s' * (len(rows) != 1)})\n")


FORMATS: Final[Mapping[str, Callable[[Result, TextIO], None]]] = {"table": as_table, "csv": as_csv, "json": as_json}


def _values(reader: pa.RecordBatchReader) -> Iterator[list[Any]]:
    for batch in reader:
        columns = [[_plain(value, field.type) for value in column.to_pylist()] for column, field in _columns(batch)]
        yield from (list(row) for row in zip(*columns, strict=True))


def _columns(batch: pa.RecordBatch) -> Iterator[tuple[pa.Array, pa.Field]]:
    yield from zip(batch.columns, batch.schema, strict=True)


def _plain(value: Any, kind: pa.DataType) -> Any:
    """What JSON can say."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode()
    if pa.types.is_map(kind):
        return {str(_plain(k, kind.key_type)): _plain(v, kind.item_type) for k, v in value}
    if isinstance(value, list):
        return [_plain(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item, kind.field(name).type) for name, item in value.items()}
    return str(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
