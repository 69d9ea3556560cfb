"""Changes of HBase for the loader: random ones as chunks and for the model, and what the latest state shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from logferry.client.hbase.cells import HBaseCell
from logferry.client.hbase.changes import line_of, map_of
from logferry.gateway.contract.chunk import Chunk
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths

from tests.support.hbase_state import CellChange, scan
from tests.support.loader import Sent, stored

REGION = "0123456789abcdef0123456789abcdef"
WRITTEN_MS = 1_700_000_000_123
KINDS = ("put", "put", "put", "delete", "delete_column", "delete_family", "delete_family_version")


def edit(cells: Sequence[HBaseCell], seqno: int, write: Callable[..., bytes] = line_of, part: int = 1) -> Sent:
    data = b"".join(write(cell, "orders", REGION, seqno, WRITTEN_MS) for cell in cells)
    attributes = {"table": "orders", **({"format": "msgpack"} if write is map_of else {})}
    return Sent(REGION if part == 1 else f"{REGION}/{part}", Chunk(seqno, None, WRITTEN_MS, attributes, data))


def random_edits(
    dice: random.Random, first: int, count: int, writes: Sequence[Callable[..., bytes]] = (line_of, map_of)
) -> tuple[list[Sent], list[CellChange]]:
    """Edits of several cells, each in one of the formats, and the same as changes for the model."""
    sent, changes = [], []
    for seqno in range(first, first + count):
        cells = []
        for place in range(dice.randint(1, 5)):
            kind = dice.choice(KINDS)
            qualifier = "" if kind.startswith("delete_family") else dice.choice(["", "a", "b"])
            row, family, ts = dice.choice("xyz"), dice.choice("de"), dice.randint(0, 12)
            value = f"{seqno}.{place}" if kind == "put" else ""
            cells.append(HBaseCell(row.encode(), family.encode(), qualifier.encode(), ts, kind, value.encode()))
            changes.append(CellChange(row, family, qualifier, kind, ts, seqno, place, value))
        sent.append(edit(cells, seqno, dice.choice(writes)))
    return sent, changes


def shown(table: Location) -> dict[tuple[str, ...], tuple[Any, ...]]:
    rows = [row for row in stored(TablePaths.of(table).latest) if row["latest"]]
    names = ("type", "timestamp", "sequence_id", "value")
    found: dict[tuple[str, ...], tuple[Any, ...]] = {
        (row["row"], row["family"], row["qualifier"]): tuple(row[name] for name in names) for row in rows
    }
    assert len(found) == len(rows)
    return found


def wanted(changes: Sequence[CellChange]) -> dict[tuple[str, ...], tuple[Any, ...]]:
    return {key: ("put", one[0].ts, one[0].seq, one[0].value) for key, one in scan(changes).items()}
