"""The state of a table: its version, its last batch and its partition columns. Refuses foreign or damaged tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from deltalake import Field, Schema
from deltalake.schema import ArrayType, MapType, PrimitiveType, StructType
from logferry.loaders.errors import ForeignTable, LedgerBroken
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.storage.ledger import Ledger, last_batch, open_table, refuse_features

_STRING: Final = PrimitiveType("string")
_HEADER: Final = StructType([Field("key", _STRING), Field("value", PrimitiveType("binary"))])

# Where a line is quarantined, ``line`` and ``newline`` are set; where a whole record is, ``key`` and ``headers``.
# ``parser`` could not read the line. ``since`` is the batch that added the row in a reload, ``resolved`` the batch that
# moved its line into the table or dropped it: between the two the row is active (see `storage.quarantine`).
_QUARANTINE: Final[dict[str, Any]] = {
    "topic": "string",
    "source_id": "string",
    "seqno": "long",
    "line": "integer",
    "prev": "long",
    "dc": "string",
    "partition": "integer",
    "offset": "long",
    "created": "timestamp",
    "recorded": "timestamp",
    "attributes": MapType(_STRING, _STRING),
    "bytes": "binary",
    "newline": "boolean",
    "reason": "string",
    "key": "binary",
    "headers": ArrayType(_HEADER, contains_null=True),
    "parser": "string",
    "resolved": "long",
    "since": "long",
}
QUARANTINE: Final = Schema([Field(name, kind) for name, kind in _QUARANTINE.items()])
QUARANTINE_COLUMNS: Final = tuple(_QUARANTINE)


class TableState(NamedTuple):
    """The batches of a table. ``planned``: the batch after ``last``, if its entry is written and its rows are not."""

    last: int
    committed: LedgerEntry | None
    planned: LedgerEntry | None

    @property
    def newest(self) -> LedgerEntry | None:
        """The newest entry of the ledger; None: no batch was ever planned."""
        return self.planned or self.committed


def read_state(paths: TablePaths) -> TableState:
    """The state in storage. Raises LedgerBroken, ForeignTable, UnsupportedFeature, StorageUnavailable.

    Other loaders may write meanwhile, so the tables are read in the reverse order of writing: the quarantine and the
    ledger are never seen in a newer state than the table.
    """
    quarantine = open_table(paths.quarantine)
    refuse_features(paths.quarantine, quarantine)
    sorted_out = last_batch(quarantine)
    ledger = Ledger(paths.ledger)
    entered = ledger.last()
    main = open_table(paths.main)
    refuse_features(paths.main, main)
    last = last_batch(main)
    if last < 0 and main is not None and main.file_uris():
        raise ForeignTable(f"{paths.main} contains rows but no batch ledger entry; it was not created by logferry load")
    if last >= 0 and open_table(paths.quarantine) is None:
        raise LedgerBroken(f"{paths.quarantine} is missing, though {paths.main} holds batch {last}")
    committed = ledger.get(last) if last >= 0 else None
    if entered > last + 1:
        raise LedgerBroken(
            f"{paths.ledger} has batch {entered}, {paths.main} only {last}: the table was restored or recreated"
        )
    if sorted_out > entered:
        raise LedgerBroken(f"{paths.quarantine} holds batch {sorted_out}, which is not in {paths.ledger}")
    return TableState(last, committed, ledger.get(entered) if entered > last else None)


def partition_columns(path: Path) -> list[str]:
    table = open_table(path)
    return list(table.metadata().partition_columns) if table is not None else []
