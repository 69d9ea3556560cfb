"""``logferry query``: SQL over a table and what of its topics is not loaded yet, by DuckDB, without Spark.

The table is pinned at one version, the tail begins where that version ends and ends where Kafka's committed records
ended when it was looked at: so every row is there once, whatever a loader commits meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import duckdb
import pyarrow as pa
from deltalake.exceptions import DeltaError
from logferry.client import Chunk
from logferry.loaders.errors import LoadError
from logferry.loaders.parsing import python_rows as plain
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import MOVED_DAYS
from logferry.loaders.storage.snapshot import Snapshot, may_hold_copies, snapshot_of
from logferry.ops.cli import gateway_client as asking
from logferry.ops.cli.problems import Problem, WrongUse
from logferry.ops.commands.tail_http import Newest
from logferry.ops.config import Defaults
from logferry.ops.results import FORMATS

_EXAMPLE = """examples:
  logferry query "SELECT source_id, count(*) FROM logs GROUP BY ALL" --table /warehouse/nginx
  logferry query "SELECT text FROM logs WHERE recorded > now() - INTERVAL 5 MINUTE" --table /warehouse/app --format csv
  logferry query "SELECT count(*) FROM logs" --table /warehouse/nginx --no-tail

The rows are in the view logs, which also has the name of the table's folder. What is not loaded yet is read from a
gateway of the data centre that the table is loaded in; of a table with a parser of its own (json, regex, …) it is
not: the answer is the table's alone then, and standard error says so.

Exit status: 0 done, 1 the answer is no (the topics do not continue the table, they may not be read), 2 wrong use
(the SQL too), 3 no gateway, or no storage.
"""
_LOGS: Final = "logs"


class Tail(Protocol):
    """What is behind a snapshot, and its chunks."""

    def ranges(self, snapshot: Snapshot, chosen: Sequence[str] | None) -> tuple[Range, ...]: ...
    def chunks(self, ranges: Iterable[Range]) -> Iterator[Chunk]: ...


# Of a chunk that two data centres' topics have, one copy stays, as the loader does it: that of the table, else the one
# whose topic comes first.
_COPIES: Final = """
    CREATE TEMP TABLE chunks AS SELECT DISTINCT substr(topic, instr(topic, '.') + 1) AS name, topic, source_id, seqno,
        recorded FROM behind WHERE topic IN (SELECT unnest($several));
    CREATE TEMP TABLE copies AS
        SELECT c.topic, c.source_id, c.seqno FROM chunks c JOIN stored s ON s.source_id = c.source_id AND
            s.seqno = c.seqno AND substr(s.topic, instr(s.topic, '.') + 1) = c.name
            WHERE s.topic <> c.topic AND s.recorded >= c.recorded - to_days($days)
        UNION SELECT c.topic, c.source_id, c.seqno FROM chunks c JOIN chunks d USING (name, source_id, seqno)
            WHERE d.topic < c.topic;
"""


def main(argv: Sequence[str]) -> int:
    """0 done. Raises Problem: the answer is no (1), wrong use or SQL (2), gateway or storage away (3)."""
    args = _arguments(list(argv))
    connection = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false", "TimeZone": "UTC"})
    try:
        _check(connection, args.sql)
        snapshot = snapshot_of(Path(args.table))
        tail = _tail(args, snapshot)
        _views(connection, snapshot, tail)
        result = connection.sql(args.sql)
        if result is not None:  # of a statement that gives rows
            FORMATS[args.format](result, sys.stdout)
    except LoadError as error:
        problem = Problem(str(error))
        problem.exit_status = error.exit_status
        raise problem from None
    except (duckdb.Error, pa.ArrowException) as error:
        raise WrongUse(f"the query cannot be answered: {error}") from None
    except (DeltaError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise Problem(f"{args.table} cannot be read: {error}") from None
    finally:
        connection.close()
    return 0


def _check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Before anything is read. Raises duckdb.Error, WrongUse."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise WrongUse(f"one statement is wanted, this is {len(statements) or 'none'}")


def _tail(args: argparse.Namespace, snapshot: Snapshot) -> tuple[pa.Table, set[str]] | None:
    """The rows behind the snapshot, and the topics of which it may hold copies; None: the table alone is asked for."""
    if args.no_tail:
        return None
    entry = snapshot.entry
    if not plain.can_read(entry.parser):
        _say(
            f"what is not loaded yet is left out: lines of the parser {entry.parser} are read by the loader only. "
            f"The answer goes up to batch {entry.batch}, planned {entry.planned:%Y-%m-%dT%H:%M:%SZ} (--no-tail: no "
            "such warning; all of it by Spark: logferry.loaders.view.realtime)"
        )
        return None
    newest = _newest(args)
    ranges = newest.ranges(snapshot, args.topics)
    schema = snapshot.table.to_pyarrow_dataset().schema
    rows = plain.rows(newest.chunks(ranges), entry.dc, entry.parser, schema)
    return rows, may_hold_copies(snapshot, ranges)


def _newest(args: argparse.Namespace) -> Tail:
    if args.bootstrap is None:
        return Newest(args)
    from logferry.ops.commands.tail_kafka import NewestOfKafka  # needs what the gateway needs

    return NewestOfKafka(args.bootstrap)


def _views(connection: duckdb.DuckDBPyConnection, snapshot: Snapshot, tail: tuple[pa.Table, set[str]] | None) -> None:
    connection.register("stored", snapshot.table.to_pyarrow_dataset())
    union = ""
    if tail is not None:
        rows, several = tail
        connection.register("behind", rows)
        union = " UNION ALL BY NAME SELECT * FROM behind"
        if several:
            origin = snapshot.entry.origin
            days = origin.moved_days if origin else MOVED_DAYS
            create, copies = _COPIES.strip().split(";\n", 1)
            connection.execute(create, {"several": sorted(several)})
            connection.execute(copies, {"days": days})
            union += " ANTI JOIN copies USING (topic, source_id, seqno)"
    connection.execute(f"CREATE VIEW {_LOGS} AS SELECT * FROM stored{union}")
    name = snapshot.path.name
    if name.lower() not in (_LOGS, "stored", "behind", "chunks", "copies"):
        quoted = name.replace('"', '""')
        connection.execute(f'CREATE VIEW "{quoted}" AS SELECT * FROM {_LOGS}')


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="logferry query",
        description="Answers SQL (DuckDB's) over a table, with the rows that are not loaded yet.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sql", metavar="SQL", help='one statement: "SELECT count(*) FROM logs"')
    option = parser.add_argument
    options = [
        option("--table", metavar="PATH", help="folder of the table"),
        option("--topics", nargs="+", metavar="PATTERN", help="the tail of these (default: those it is loaded from)"),
        option("--bootstrap", metavar="HOST:PORT", help="read the tail out of this Kafka, and ask no gateway"),
        option("--no-tail", action="store_true", help="what is loaded only; no gateway is asked"),
        option("--format", choices=tuple(FORMATS), default="table", help="how rows are written (default: table)"),
        *asking.options(parser, "any gateway worker of the data centre that the table is loaded in"),
    ]
    parser.add_argument("--gateway", dest="url", metavar="URL", default=argparse.SUPPRESS, help="the same as --url")
    Defaults("query").add_to(parser, options, argv)
    args = parser.parse_args(argv)
    if not args.table:
        parser.error("--table PATH is needed: the folder that logferry load made")
    return args


def _say(text: str) -> None:
    print(f"logferry query: {text}", file=sys.stderr)
