"""Creates the tables of a job, and checks them before every load.

Refused are: a table with rows that no ledger accounts for, a ledger or quarantine that was removed or does not match,
and other columns. A load never starts over at the earliest offsets of a topic that it has loaded from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltalake import Schema
from logferry.loaders.errors import ForeignTable
from logferry.loaders.parsing.columns import DATES
from logferry.loaders.parsing.rows import row_schema
from logferry.loaders.parsing.settings import LINES, ParserSettings
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.commit import INDEXED
from logferry.loaders.storage.ledger import Ledger, add_columns, create_table, existing_table, open_table
from logferry.loaders.storage.tables import QUARANTINE, read_state


def prepare(paths: TablePaths, parser: ParserSettings = LINES, partition_by: Sequence[str] = ()) -> None:
    """Creates the tables that are missing. Several loaders may do so at once.

    A table gets the parser's new columns; one that has them with other types is refused.
    """
    if open_table(paths.main) is None and paths.main.exists() and any(paths.main.iterdir()):
        raise ForeignTable(f"{paths.main} is not empty, and not a Delta table")
    read_state(paths)
    Ledger(paths.ledger).create()
    _create(paths.quarantine, QUARANTINE, "logferry quarantine", (), {"parser", "resolved", "since"})
    dates = [name for name in partition_by if name in DATES]
    own = set(parser.kinds) | {"fields", "event_time"}
    _create(paths.main, Schema.from_json(row_schema(parser, dates).json()), "logferry rows", partition_by, own)


def _create(path: Path, schema: Schema, name: str, partition_by: Sequence[str], addable: set[str]) -> None:
    """Creates the table unless it exists, and checks its columns in either case; adds those of ``addable``."""
    # Statistics of the text would cost time and skip no file.
    indexed = [
        column for column in INDEXED if column in {field.name for field in schema.fields} and column not in partition_by
    ]
    configuration: dict[str, str | None] = {"delta.dataSkippingStatsColumns": ",".join(indexed)}
    create_table(path, schema, name, configuration, partition_by)
    made = existing_table(path)
    have, want = _columns(made.schema().to_json()), _columns(schema.to_json())
    wrong = {column for column in want if column in have and have[column] != want[column]}
    wrong |= {column for column in want if column not in have and column not in addable}
    if wrong:
        raise ForeignTable(f"{path} has other columns than the job: {', '.join(sorted(wrong))}")
    parted = list(made.metadata().partition_columns)
    if parted != list(partition_by):
        said = [", ".join(columns) or "nothing" for columns in (parted, list(partition_by))]
        raise ForeignTable(
            f"{path} is partitioned by {said[0]}, the job by {said[1]}: the partitioning cannot be changed"
        )
    add_columns(path, schema)


def _columns(schema_json: str) -> dict[str, Any]:
    """Name → type. Schemas of Delta and Spark differ only in nullability."""
    ignored = {"nullable", "containsNull", "valueContainsNull", "metadata"}
    schema = json.loads(schema_json, object_hook=lambda node: {key: node[key] for key in node.keys() - ignored})
    return {field["name"]: field["type"] for field in schema["fields"]}
