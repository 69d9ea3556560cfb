"""``logferry query``: SQL over a table and the records not loaded yet, by DuckDB, without Spark.

The table is pinned at one version. The tail begins at the offsets where that version ends, and ends at Kafka's
committed end offsets. So the query sees every row exactly once, whatever a loader commits meanwhile.
"""

from __future__ import annotations

import argparse
import base64
import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import date, datetime, time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TextIO

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake.exceptions import DeltaError
from logferry.client.reading.decode import ReceivedChunk
from logferry.gateway.config import ConfigError, load_as
from logferry.gateway.contract.names import visible
from logferry.loaders.config import StoreSettings
from logferry.loaders.errors import LoaderConfigError, LoadError
from logferry.loaders.location import Location, without_secrets
from logferry.loaders.planning.ledger_entry import DUPLICATE_WINDOW_DAYS
from logferry.loaders.planning.plan import Range
from logferry.loaders.query import tail_rows
from logferry.loaders.query.line_texts import UnequalLine
from logferry.loaders.storage.files import dataset
from logferry.loaders.storage.tables import TableSnapshot, copied_topics, snapshot_of
from logferry.ops.cli.gateway_client import add_gateway_options
from logferry.ops.cli.options import command_parser, parse_with_file
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError
from logferry.ops.commands.tail_file import TailFile, needed_columns
from logferry.ops.commands.tail_http import ALONE, HttpTail

if TYPE_CHECKING:
    from logferry.ops.commands.tail_kafka import KafkaTail

_EXAMPLE = """examples:
  logferry query "SELECT source_id, count(*) FROM logs GROUP BY ALL" --table /warehouse/nginx
  logferry query "SELECT text FROM logs WHERE recorded > now() - INTERVAL 5 MINUTE" --table /warehouse/app --format csv
  logferry query "SELECT count(*) FROM logs" --table /warehouse/nginx --no-tail

The view logs holds the rows; it has also the name of the table's folder. Records not loaded yet are read from a
gateway of the table's data centre, and parsed as the loader does. A pattern or a format of times that only Java can
read is refused by name.

Exit status: 0 done, 1 refused (the topics do not continue the table, or the token may not read them), 2 wrong use or
wrong SQL, 3 no gateway answers or the table cannot be read.
"""
_LOGS: Final = "logs"
_ROWS: Final = 10_000
_MEMORY_MB: Final = 1024
# The statement reads the views and nothing else: no files, no network, no extensions, no variables of this program.
_LOCKED: Final = (
    "SET python_enable_replacements = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
# Where the topics of two data centres hold the same chunk, one copy stays, as in the loader: the table's, else that of
# the first topic by name.
_CHUNKS: Final = """
    CREATE TEMP TABLE chunks (name VARCHAR, topic VARCHAR, source_id VARCHAR, seqno BIGINT, recorded TIMESTAMPTZ,
        number BIGINT)
"""
# The constants let the reader of the table pass over files that hold no copy.
_COPIES: Final = """
    CREATE TEMP TABLE copies AS
        SELECT c.number FROM chunks c JOIN stored s ON s.source_id = c.source_id AND
            s.seqno = c.seqno AND substr(s.topic, instr(s.topic, '.') + 1) = c.name
            WHERE s.topic <> c.topic AND s.recorded >= c.recorded - to_days($days)
            AND s.recorded >= CAST($oldest AS TIMESTAMPTZ) AND s.seqno BETWEEN $low AND $high
        UNION SELECT c.number FROM chunks c JOIN chunks d USING (name, source_id, seqno) WHERE d.topic < c.topic
"""
# As text: DuckDB needs another package to make a time with a zone one of Python's.
_BOUNDS: Final = "SELECT CAST(min(recorded) - to_days($days) AS VARCHAR), min(seqno), max(seqno) FROM chunks"


def main(argv: Sequence[str]) -> int:
    """0 done. Raises CommandError, with exit status 1 (refused), 2 (wrong use or SQL) or 3 (no gateway, no storage)."""
    args = _arguments(list(argv))
    # The C library's allocator reuses blocks; Arrow's own gives them back, and their pages are faulted again.
    pa.set_memory_pool(pa.system_memory_pool())
    with (
        TemporaryDirectory(prefix="logferry-query-") as spill,
        closing(_connected(spill, args.memory_mb)) as connection,
    ):
        try:
            statements = connection.extract_statements(args.sql)
            if len(statements) != 1:
                raise UsageError(f"expected one SQL statement, got {len(statements)}")
            snapshot = snapshot_of(_location(args.table, args.stores))
            _views(connection, snapshot, args.sql, None if args.no_tail else _tail(args, snapshot), Path(spill))
            for setting in _LOCKED:
                connection.execute(setting)
            result = connection.sql(args.sql)
            if result is not None:  # None: the statement returns no rows
                FORMATS[args.format](result.to_arrow_reader(_ROWS), sys.stdout)
        except UnequalLine as error:
            raise UsageError(f"{error}; {ALONE}") from None
        except LoadError as error:
            problem = CommandError(str(error))
            problem.exit_status = error.exit_status
            raise problem from None
        except (duckdb.Error, pa.ArrowException) as error:
            raise UsageError(without_secrets(f"the query failed: {error}")) from None
        except (DeltaError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            raise Unavailable(without_secrets(f"{args.table} cannot be read: {error}")) from None
    return 0


def _connected(spill: str, memory_mb: int) -> duckdb.DuckDBPyConnection:
    settings = {"autoinstall_known_extensions": "false", "TimeZone": "UTC", "preserve_insertion_order": "false"}
    limits = {"temp_directory": spill, "memory_limit": f"{memory_mb}MB"}
    return duckdb.connect(":memory:", config={**settings, **limits})


def _location(text: str, file: str | None) -> Location:
    try:
        stores = StoreSettings() if file is None else load_as(StoreSettings, Path(file))
        return Location.of(text, *stores.accesses)
    except ConfigError as error:
        raise UsageError(f"--stores: {error}") from None
    except ValueError as error:
        raise UsageError(f"--table: {error}") from None


class _Tail(NamedTuple):
    """The records behind a snapshot. ``make``: from the columns that are needed to the rows of chunks."""

    newest: HttpTail | KafkaTail
    ranges: tuple[Range, ...]
    make: Callable[[pa.Schema], tail_rows.Batches]


def _tail(args: argparse.Namespace, snapshot: TableSnapshot) -> _Tail:
    """Raises LoadError, also for a parser that only Spark can apply."""
    entry = snapshot.entry
    if entry.parser == tail_rows.CHUNK:
        make = partial(tail_rows.chunk_batches, entry.dc)
    else:
        try:
            make = partial(tail_rows.line_batches, tail_rows.line_parser(entry.parser, entry.settings), entry.dc)
        except LoaderConfigError as error:
            raise LoaderConfigError(f"{error}; {ALONE}") from None
    newest: HttpTail | KafkaTail
    if args.bootstrap is None and args.kafka is None:
        newest = HttpTail(args)
    else:
        from logferry.ops.commands.tail_kafka import KafkaTail  # needs the gateway's extra

        if args.bootstrap is not None and args.kafka is not None:
            raise UsageError("--bootstrap and --kafka exclude each other: the file holds the address")
        newest = KafkaTail(args.bootstrap, args.kafka)
    return _Tail(newest, newest.ranges(snapshot, args.topics), make)


def _views(
    connection: duckdb.DuckDBPyConnection, snapshot: TableSnapshot, sql: str, tail: _Tail | None, folder: Path
) -> None:
    """The tail is read once, into a file with the columns that the statement needs."""
    stored = dataset(snapshot.path, snapshot.table)
    connection.register("stored", stored)
    name = snapshot.path.name
    view = f"CREATE OR REPLACE VIEW {_LOGS} AS SELECT * FROM stored"
    connection.execute(view)
    if name.lower() not in (_LOGS, "stored", "behind", "chunks", "copies"):
        connection.execute(f"CREATE VIEW {_quoted(name)} AS SELECT * FROM {_LOGS}")
    if tail is None:
        return
    connection.register("behind", ds.dataset(stored.schema.empty_table()))
    connection.execute(f"{view} UNION ALL SELECT * FROM behind")
    needed = needed_columns(connection, sql, stored.schema.names)
    if not needed:
        return
    copies = copied_topics(snapshot, tail.ranges)
    schema = pa.schema([stored.schema.field(name) for name in needed])
    if copies:
        schema = schema.append(pa.field(tail_rows.TAIL_CHUNK, pa.int64()))
        connection.execute(_CHUNKS)
    noted = partial(_note, connection, copies) if copies else None
    total = sum(r.size for r in tail.ranges)
    chunks = tail.newest.chunks(tail.ranges)
    connection.register("behind", TailFile(folder / "tail.arrow", schema, tail.make(schema)).fill(chunks, total, noted))
    types = connection.execute("DESCRIBE SELECT * FROM stored").fetchall()
    columns = (_quoted(n) if n in needed else f"CAST(error('{n} is not read') AS {kind})" for n, kind, *_ in types)
    where = ""
    if copies:
        _find_copies(connection, snapshot)
        where = f" WHERE {tail_rows.TAIL_CHUNK} NOT IN (SELECT number FROM copies)"
    connection.execute(f"{view} UNION ALL SELECT {', '.join(columns)} FROM behind{where}")


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _note(connection: duckdb.DuckDBPyConnection, copies: set[str], chunks: Sequence[ReceivedChunk], first: int) -> None:
    """The identities of chunks that another data centre may have, too."""
    found = [
        (c.topic.partition(".")[2], c.topic, c.source_id, c.seqno, c.recorded_ms, number)
        for number, c in enumerate(chunks, first)
        if c.topic in copies
    ]
    names = ("name", "topic", "source_id", "seqno", "recorded", "number")
    columns = dict(zip(names, zip(*found, strict=True), strict=True)) if found else dict.fromkeys(names, ())
    columns["recorded"] = pa.array(columns["recorded"], pa.timestamp("ms", "UTC"))
    if found:
        connection.register("arriving", pa.table({name: pa.array(values) for name, values in columns.items()}))
        connection.execute("INSERT INTO chunks BY NAME FROM arriving")
        connection.unregister("arriving")


def _find_copies(connection: duckdb.DuckDBPyConnection, snapshot: TableSnapshot) -> None:
    origin = snapshot.entry.origin
    days = origin.duplicate_window_days if origin else DUPLICATE_WINDOW_DAYS
    bounds = connection.execute(_BOUNDS, {"days": days}).fetchone() or ()
    connection.execute(_COPIES, {"days": days, **dict(zip(("oldest", "low", "high"), bounds, strict=True))})


def _arguments(argv: list[str]) -> argparse.Namespace:
    description = "Runs one SQL statement (DuckDB's dialect) over a table and the records that are not loaded yet."
    parser = command_parser("query", "SQL --table PATH [OPTION ...]", description, _EXAMPLE)
    parser.add_argument("sql", metavar="SQL", help='one statement, such as "SELECT count(*) FROM logs"')
    option = parser.add_argument
    options = [
        option("--table", metavar="PATH", help="folder or URI of the table (required)"),
        option("--stores", metavar="FILE", help="access to the table: [s3], [gs] and [azure] of this file"),
        option("--topics", nargs="+", metavar="PATTERN", help="topics of the tail (default: those of the table)"),
        option("--bootstrap", metavar="HOST:PORT", help="read the tail from this Kafka, not from a gateway"),
        option("--kafka", metavar="FILE", help="the same, with the section [kafka] of this file (TLS, SASL)"),
        option("--no-tail", action="store_true", help="read the table alone"),
        option(
            "--memory-mb",
            type=int,
            metavar="MB",
            default=_MEMORY_MB,
            help=f"memory of the query, beside up to 900 MB; more goes to the temporary folder (default: {_MEMORY_MB})",
        ),
        option("--format", choices=tuple(FORMATS), default="table", help="output format (default: table)"),
        *add_gateway_options(parser, "URL of any gateway worker of the table's data centre"),
    ]
    parser.add_argument("--gateway", dest="url", metavar="URL", default=argparse.SUPPRESS, help="same as --url")
    args = parse_with_file("query", parser, options, argv)
    if not args.table:
        parser.error("--table PATH is required: the folder of a table that logferry load created")
    return args


# ---- output: times are ISO 8601 in UTC; bytes that are not UTF-8 are base64 -------------------------------------


def as_csv(reader: pa.RecordBatchReader, output: TextIO) -> None:
    csv.writer(output, lineterminator="\n").writerows(_cells(reader, output))


def as_json(reader: pa.RecordBatchReader, output: TextIO) -> None:
    """One array with one object per line."""
    start, show = "[", visible if output.isatty() else str
    for values in _values(reader):
        row = dict(zip(reader.schema.names, values, strict=True))
        output.write(start + show(json.dumps(row, ensure_ascii=False)))
        start = ",\n "
    output.write("]\n" if start != "[" else "[]\n")


def as_table(reader: pa.RecordBatchReader, output: TextIO) -> None:
    names, *rows = _cells(reader, output)
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    right = [pa.types.is_integer(t) or pa.types.is_floating(t) or pa.types.is_decimal(t) for t in reader.schema.types]
    for cells in (names, ["-" * width for width in widths], *rows):
        placed = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
        output.write("  ".join(placed).rstrip() + "\n")
    output.write(f"({len(rows):,} row{'s' * (len(rows) != 1)})\n")


_Output = Callable[[pa.RecordBatchReader, TextIO], None]
FORMATS: Final[Mapping[str, _Output]] = {"table": as_table, "csv": as_csv, "json": as_json}


def _values(reader: pa.RecordBatchReader) -> Iterator[list[Any]]:
    types = reader.schema.types
    for batch in reader:
        found = zip(batch.columns, types, strict=True)
        columns = [[_plain(value, kind) for value in column.to_pylist()] for column, kind in found]
        yield from (list(row) for row in zip(*columns, strict=True))


def _plain(value: Any, kind: pa.DataType) -> Any:
    """The value as JSON can represent it."""
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


def _cells(reader: pa.RecordBatchReader, output: TextIO) -> Iterator[list[str]]:
    """The names, then the rows. Log text has no effect on a terminal; other outputs get it as it is."""
    show = visible if output.isatty() else str
    yield [*map(show, reader.schema.names)]
    for values in _values(reader):
        texts = ("" if v is None else v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values)
        yield [*map(show, texts)]
