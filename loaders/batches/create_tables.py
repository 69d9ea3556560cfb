"""The tables of a job: made beforehand, and looked at before every batch.

What is refused here: a table with rows that no ledger accounts for, a ledger or quarantine that was removed or does
not fit, another table's columns. A load never goes back to the earliest offsets of a topic that it has loaded from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deltalake import Schema
from logferry.loaders.errors import ForeignTable, LedgerBroken, StorageAway
from logferry.loaders.parsing import rows as parse
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.storage.data_files import INDEXED
from logferry.loaders.storage.ledger import (
    Ledger,
    LedgerEntry,
    TablePaths,
    add_columns,
    create_table,
    last_batch,
    open_table,
)
from pyspark.sql.types import StructType


class TableState(NamedTuple):
    """Where a table stands. ``planned``: the batch after ``last``, if its entry is written and its rows are not."""

    last: int
    committed: LedgerEntry | None
    planned: LedgerEntry | None


def read_state(paths: TablePaths) -> TableState:
    """What the stored tables say. Raises LedgerBroken, ForeignTable, StorageAway.

    Others may be loading meanwhile, so the order of looking is the reverse of that of writing: what is seen of the
    quarantine and the ledger is never newer than what is seen of the table.
    """
    sorted_out = last_batch(open_table(paths.quarantine))
    ledger = Ledger(paths.ledger)
    entered = ledger.last()
    main = open_table(paths.main)
    last = last_batch(main)
    if last < 0 and main is not None and main.file_uris():
        raise ForeignTable(f"{paths.main} holds rows, but no batch of this loader: give it a table of its own")
    if last >= 0 and open_table(paths.quarantine) is None:
        raise LedgerBroken(f"{paths.quarantine} is missing, though {paths.main} holds batch {last}")
    committed = ledger.get(last) if last >= 0 else None
    if entered > last + 1:
        raise LedgerBroken(
            f"{paths.ledger} goes up to batch {entered}, {paths.main} to {last}: the table was put back or made anew"
        )
    if sorted_out > entered:
        raise LedgerBroken(f"{paths.quarantine} holds batch {sorted_out}, which {paths.ledger} does not know")
    return TableState(last, committed, ledger.get(entered) if entered > last else None)


def partition_columns(path: Path) -> list[str]:
    table = open_table(path)
    return list(table.metadata().partition_columns) if table is not None else []


def prepare(paths: TablePaths, parser: ParserSettings = parse.LINES, partition_by: Sequence[str] = ()) -> None:
    """Makes what is missing of the tables. Several loaders may do so at once.

    A table takes on new columns of the parser; one that has them with other types is another table.
    """
    if open_table(paths.main) is None and paths.main.exists() and any(paths.main.iterdir()):
        raise ForeignTable(f"{paths.main} is not empty, and not a Delta table")
    read_state(paths)
    Ledger(paths.ledger).create()
    _create(paths.quarantine, parse.QUARANTINE, "logferry quarantine", (), {"parser", "resolved", "since"})
    dates = [name for name in partition_by if name in parse.DATES]
    own = set(parser.kinds) | {"fields", "event_time"}
    _create(paths.main, parse.schema(parser, dates), "logferry rows", partition_by, own)


def add_quarantine_columns(paths: TablePaths) -> None:
    """Gives an older quarantine the columns that it lacks. Raises StorageAway."""
    add_columns(paths.quarantine, Schema.from_json(parse.QUARANTINE.json()))


def _create(path: Path, schema: StructType, name: str, partition_by: Sequence[str], addable: set[str]) -> None:
    """Creates the table unless it is there, and checks its columns in either case; adds those of ``addable``."""
    # Statistics over the text would cost time and tell nothing.
    indexed = [column for column in INDEXED if column in schema.fieldNames() and column not in partition_by]
    configuration: dict[str, str | None] = {"delta.dataSkippingStatsColumns": ",".join(indexed)}
    want_schema = Schema.from_json(schema.json())
    create_table(path, want_schema, name, configuration, partition_by)
    made = open_table(path)
    if made is None:
        raise StorageAway(f"{path} was created, but is not there")
    have, want = _columns(made.schema().to_json()), _columns(schema.json())
    wrong = {column for column in want if column in have and have[column] != want[column]}
    wrong |= {column for column in want if column not in have and column not in addable}
    if wrong:
        raise ForeignTable(f"{path} is another table: its column(s) {', '.join(sorted(wrong))} differ from ours")
    parted = list(made.metadata().partition_columns)
    if parted != list(partition_by):
        said = [", ".join(columns) or "nothing" for columns in (parted, list(partition_by))]
        raise ForeignTable(f"{path} is partitioned by {said[0]}, the job says by {said[1]}: that cannot be changed")
    add_columns(path, want_schema)


def _columns(schema_json: str) -> dict[str, Any]:
    """Name → type. Delta and Spark write a schema alike, but for what is said of nulls."""
    return {field["name"]: _without_nulls(field["type"]) for field in json.loads(schema_json)["fields"]}


def _without_nulls(node: Any) -> Any:
    if isinstance(node, dict):
        ignored = ("nullable", "containsNull", "valueContainsNull", "metadata")
        return {key: _without_nulls(value) for key, value in node.items() if key not in ignored}
    return [_without_nulls(item) for item in node] if isinstance(node, list) else node
