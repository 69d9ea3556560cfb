"""The table of sources beside a table (``<path>_sources``): what each batch adds to what is known. Without Spark.

Batch n is written here before the main table holds it, with the same transaction version, once whoever writes. What the
batches say is merged on reading, so a batch that was begun and not ended does no harm. Every so often a batch writes
all that is known in place of what the earlier ones wrote, so that reading it costs the same for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import Schema
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import StorageAway
from logferry.loaders.planning.source_facts import Known, SourceFacts, SourceKey, merged
from logferry.loaders.storage.commit import put_rows
from logferry.loaders.storage.ledger import create_table, last_batch, open_table

SNAPSHOT_EVERY: Final = 64
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_TIME: Final = pa.timestamp("us", "UTC")
_SCHEMA: Final = pa.schema(
    [
        pa.field("batch", pa.int64()),
        pa.field("topic", pa.string()),
        pa.field("source_id", pa.string()),
        pa.field("first_seqno", pa.int64()),
        pa.field("last_seqno", pa.int64()),
        pa.field("recorded", _TIME),
        pa.field("event", _TIME),
    ]
)


def create_sources(path: Path) -> None:
    create_table(path, Schema.from_arrow(_SCHEMA), "logferry sources", {})


def known_up_to(path: Path) -> int:
    """The last batch that the table of sources speaks of; -1: none."""
    return last_batch(open_table(path))


def read_known(path: Path) -> dict[SourceKey, SourceFacts]:
    """Raises StorageAway."""
    table = open_table(path)
    if table is None:
        return {}
    try:
        rows: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
    except (DeltaError, OSError) as error:
        raise StorageAway(f"{path} cannot be read: {error}") from error
    return merged(*({_key(row): _facts(row)} for row in rows))


def put_known(path: Path, batch: int, run: str, known: Known, *, all_of_it: bool = False) -> None:
    """What a batch adds, or (``all_of_it``) all that is known up to it. Safe to call again. Raises StorageAway."""
    if known_up_to(path) >= batch:
        return
    if not all_of_it and batch % SNAPSHOT_EVERY == 0:
        known, all_of_it = merged(read_known(path), known), True
    rows = [{"batch": batch, **key._asdict(), **facts._asdict()} for key, facts in sorted(known.items())]
    put_rows(pa.Table.from_pylist(rows, schema=_SCHEMA), path, batch, run, replace=all_of_it)


def facts_of(rows: Iterable[Any]) -> dict[SourceKey, SourceFacts]:
    """Of Spark's rows with the columns of the table of sources, times as microseconds since 1970."""
    return merged(*({_key(row): _of_spark(row)} for row in rows))


def _of_spark(row: Any) -> SourceFacts:
    event = None if row["event"] is None else moment(row["event"])
    return SourceFacts(row["first_seqno"], row["last_seqno"], moment(row["recorded"]), event)


def moment(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def _key(row: Any) -> SourceKey:
    return SourceKey(row["topic"], row["source_id"])


def _facts(row: Any) -> SourceFacts:
    return SourceFacts(row["first_seqno"], row["last_seqno"], row["recorded"], row["event"])
