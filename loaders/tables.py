"""The tables of a job: made beforehand, and looked at before every batch.

What is refused here: a table with rows that no ledger accounts for, a ledger or quarantine that was removed or does
not fit, another table's columns. A load never goes back to the earliest offsets of a topic that it has loaded from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from deltalake import Schema
from logferry.loaders import parse
from logferry.loaders.errors import ForeignTable, LedgerBroken, StorageAway
from logferry.loaders.ledger import Ledger, LedgerEntry, TablePaths, create_table, last_batch, open_table
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


def prepare(paths: TablePaths) -> None:
    """Makes what is missing of a table that holds nothing yet. Several loaders may do so at once."""
    if open_table(paths.main) is None and paths.main.exists() and any(paths.main.iterdir()):
        raise ForeignTable(f"{paths.main} is not empty, and not a Delta table")
    read_state(paths)
    Ledger(paths.ledger).create()
    # Statistics over the text would cost time and tell nothing.
    keys: dict[str, str | None] = {
        "delta.dataSkippingStatsColumns": "topic,source_id,seqno,partition,offset,created,recorded"
    }
    _create(paths.quarantine, parse.QUARANTINE, "logferry quarantine", keys)
    _create(paths.main, parse.ROWS, "logferry rows", keys)


def _create(path: Path, schema: StructType, name: str, configuration: dict[str, str | None]) -> None:
    """Creates the table unless it is there, and checks its columns in either case."""
    create_table(path, Schema.from_json(schema.json()), name, configuration)
    made = open_table(path)
    if made is None:
        raise StorageAway(f"{path} was created, but is not there")
    have, want = _columns(made.schema().to_json()), _columns(schema.json())
    if have != want:
        names = sorted(name for name in {*have, *want} if have.get(name) != want.get(name))
        raise ForeignTable(f"{path} is another table: its column(s) {', '.join(names)} differ from ours")


def _columns(schema_json: str) -> dict[str, Any]:
    """Name → type. Delta and Spark write a schema alike, but for what is said of nulls."""
    return {field["name"]: _without_nulls(field["type"]) for field in json.loads(schema_json)["fields"]}


def _without_nulls(node: Any) -> Any:
    if isinstance(node, dict):
        ignored = ("nullable", "containsNull", "valueContainsNull", "metadata")
        return {key: _without_nulls(value) for key, value in node.items() if key not in ignored}
    return [_without_nulls(item) for item in node] if isinstance(node, list) else node
