"""Notes of the chunks that a table has left out, since it has the copy that came by another data centre. Without Spark.

A note counts when the table holds its batch, and of several of one record the newest. One that names no other topic
takes the earlier one back: the chunk was loaded again, and is in the table after all.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import StorageAway
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import open_table

NOTES: Final = pa.schema(
    [
        pa.field("batch", pa.int64()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("source_id", pa.string()),
        pa.field("seqno", pa.int64()),
        pa.field("kept", pa.string()),
    ]
)


class Note(NamedTuple):
    """A chunk that was left out. ``kept``: the topic by which the other copy came; None: it is left out no more."""

    batch: int
    topic: str
    partition: int
    offset: int
    source_id: str
    seqno: int
    kept: str | None

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.partition, self.offset

    def is_in(self, r: Range) -> bool:
        return (self.topic, self.partition) == r.key and r.start <= self.offset < r.end


def notes_table(notes: Iterable[Note]) -> Any:
    return pa.Table.from_pylist([note._asdict() for note in notes], schema=NOTES)


def read_notes(path: Path, last: int) -> list[Note]:
    """The chunks that a table whose last batch this is has left out. Raises StorageAway."""
    table = open_table(path)
    if table is None:
        return []
    try:
        rows = table.to_pyarrow_table(filters=[("batch", "<=", last)]).to_pylist()
    except (DeltaError, OSError) as error:
        raise StorageAway(f"{path} cannot be read: {error}") from error
    found = {note.place: note for note in sorted((Note(**row) for row in rows), key=lambda note: note.batch)}
    return sorted(note for note in found.values() if note.kept is not None)
