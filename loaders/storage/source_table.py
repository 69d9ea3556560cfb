"""The side tables of sources: the facts that each batch adds, and the sources that are excluded. Without Spark.

``<path>_sources``: batch n is written before the main table holds it, with the same transaction version, once whoever
writes. The facts of all batches are merged on reading, so an unfinished batch does no harm. Every so often a batch
replaces the rows of the earlier ones by the merged facts, so that the cost of reading stays constant.

``<path>_excluded``: one row per decision of an operator that segment checks do not wait for a source. Of each name the
newest row counts, from the next check on, whatever batch the table holds. A name may hold ``*`` for any text.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
from deltalake import write_deltalake
from logferry.loaders.planning.source_facts import KnownSources, SourceFacts, SourceKey, merged
from logferry.loaders.storage.commit import commit_rows
from logferry.loaders.storage.ledger import (
    arrow_schema,
    create_table,
    existing_table,
    last_batch,
    open_table,
    read_rows,
    storage_errors,
)

SNAPSHOT_EVERY: Final = 64
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SCHEMA: Final = arrow_schema(
    "batch long, topic string, source_id string, first_seqno long, last_seqno long, recorded time, event time"
)
_EXCLUDED: Final = arrow_schema("at time, source_id string, excluded string, by string")
_YES: Final = "yes"


def create_sources(path: Path) -> None:
    create_table(path, _SCHEMA, "logferry sources")


def read_sources(path: Path) -> dict[SourceKey, SourceFacts]:
    """Raises StorageUnavailable."""
    found = []
    for row in read_rows(path):
        facts = SourceFacts(row["first_seqno"], row["last_seqno"], row["recorded"], row["event"])
        found.append({SourceKey(row["topic"], row["source_id"]): facts})
    return merged(*found)


def add_sources(path: Path, batch: int, run: str, known: KnownSources, *, all_of_it: bool = False) -> None:
    """Writes the facts of a batch, or (``all_of_it``) all up to it. Safe to call again. Raises StorageUnavailable."""
    if last_batch(open_table(path)) >= batch:
        return
    if not all_of_it and batch % SNAPSHOT_EVERY == 0:
        known, all_of_it = merged(read_sources(path), known), True
    rows = [{"batch": batch, **key._asdict(), **facts._asdict()} for key, facts in sorted(known.items())]
    commit_rows(pa.Table.from_pylist(rows, schema=_SCHEMA), path, batch, run, replace=all_of_it)


def moment(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


# ---- exclusions ----------------------------------------------------------------------------------


class Exclusion(NamedTuple):
    """``by``: the user who decided."""

    at: datetime
    source_id: str
    is_excluded: bool
    by: str


def read_exclusions(path: Path) -> list[Exclusion]:
    """All decisions, oldest first. Raises StorageUnavailable."""
    rows = (Exclusion(row["at"], row["source_id"], row["excluded"] == _YES, row["by"]) for row in read_rows(path))
    return sorted(rows)


def read_excluded(path: Path) -> list[str]:
    """The names that are excluded now. Raises StorageUnavailable."""
    newest = {one.source_id: one.is_excluded for one in read_exclusions(path)}
    return sorted(name for name, is_excluded in newest.items() if is_excluded)


def exclude(path: Path, names: Iterable[str], at: datetime, by: str, *, is_excluded: bool) -> None:
    """Records a decision, after those before it, also where the clock of an earlier one was ahead. Raises
    StorageUnavailable.
    """
    create_table(path, _EXCLUDED, "logferry excluded sources")
    said = _YES if is_excluded else "no"
    before = [one.at for one in read_exclusions(path)]
    at = max([at, *(one + timedelta(microseconds=1) for one in before)])
    rows = [{"at": at, "source_id": name, "excluded": said, "by": by} for name in names]
    with storage_errors(f"{path} cannot be written"):
        write_deltalake(existing_table(path), pa.Table.from_pylist(rows, schema=_EXCLUDED), mode="append")
