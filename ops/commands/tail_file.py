"""The rows of a tail in a file of Arrow's, with the columns that a statement needs. Memory holds a few batches.

Chunks are fetched by the calling thread, and parsed by two more: Arrow parses without Python's lock.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from logferry.client.reading.decode import ReceivedChunk
from logferry.loaders.query.tail_rows import Batches, portions

_THREADS: Final = 2
# Portions that wait to be parsed or written, 4 MiB each.
_AHEAD: Final = 4
# A scan of the file reads some batches ahead, so they are small.
_ROWS: Final = 16_384
_REPORT_S: Final = 5.0

# The chunks of a portion, and the number of the first one.
Seen = Callable[[Sequence[ReceivedChunk], int], None]


class TailFile:
    """Rows of ``schema`` in ``path``, which is created by `fill` if there are any."""

    def __init__(self, path: Path, schema: pa.Schema, make: Batches) -> None:
        self._path, self._schema, self._make = path, schema, make

    def fill(self, chunks: Iterable[ReceivedChunk], total: int, seen: Seen | None = None) -> ds.Dataset:
        """Reads all chunks, ``total`` offsets of Kafka. Raises what reading and parsing raise."""
        waiting: deque[Future[list[pa.RecordBatch]]] = deque()
        number, rows, report = 0, 0, _Report(total)
        with ThreadPoolExecutor(_THREADS) as pool, pa.ipc.new_file(str(self._path), self._schema) as writer:

            def write() -> int:
                found = waiting.popleft().result()
                for batch in found:
                    for start in range(0, batch.num_rows, _ROWS):
                        writer.write_batch(batch.slice(start, _ROWS))
                return sum(batch.num_rows for batch in found)

            try:
                for portion in portions(chunks):
                    if seen is not None:
                        seen(portion, number)
                    waiting.append(pool.submit(self._make, portion, number))
                    number += len(portion)
                    while len(waiting) > _AHEAD or (waiting and waiting[0].done()):
                        rows += write()
                    report.show(number, rows)
                while waiting:
                    rows += write()
            finally:
                pool.shutdown(cancel_futures=True)
        return ds.dataset(self._path, schema=self._schema, format="ipc")


class _Report:
    """Progress on standard error, of work that takes long."""

    def __init__(self, total: int) -> None:
        self._total, self._next = total, time.monotonic() + _REPORT_S

    def show(self, chunks: int, rows: int) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REPORT_S
            share = min(100, 100 * chunks // max(1, self._total))
            print(f"logferry query: {rows:,} rows of the tail are read ({share} %)", file=sys.stderr, flush=True)


def needed_columns(connection: duckdb.DuckDBPyConnection, sql: str, names: Sequence[str]) -> list[str]:
    """The columns that the statement reads of any Arrow scan, in the order of ``names``; all where that is unknown.

    The plan of the statement names them. Whatever this misses is noticed: the view has an error in its place.
    """
    found: set[str] = set()
    if "pivot" in sql.lower():  # its columns are values of the tail, which is not read yet
        return list(names)
    try:
        plans = connection.execute(f"EXPLAIN (FORMAT json) {sql}").fetchall()
    except duckdb.ParserException:  # such as of EXPLAIN itself
        return list(names)
    for _, plan in plans:
        try:
            nodes: list[Any] = json.loads(plan)
        except ValueError:
            return list(names)
        while nodes:
            node = nodes.pop()
            nodes += node.get("children", [])
            if "ARROW_SCAN" not in node.get("name", ""):
                continue
            extra = node.get("extra_info", {})
            read = extra.get("Projections", list(names))
            found.update([read] if isinstance(read, str) else read)
            said = str(extra.get("Filters", ""))
            found.update(name for name in names if name in said)
    return [name for name in names if name in found]
