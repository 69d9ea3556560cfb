"""Deduplication across data centres: a chunk is loaded once by (topic without the data centre, source_id, seqno).

A source whose data centre fails continues in another one and repeats the chunks that were not acknowledged. When the
first one is back, its copy of the same chunk arrives, maybe days later. The copy in the table stays; of two in one
batch the one whose topic sorts first. The other is left out with all its lines, and recorded with its offset in
``<path>_moved``.

Which chunks a batch leaves out depends only on the ledger and on the table before that batch. So every loader that
executes the batch leaves out the same chunks, and a late one finds the batch committed. The side table is written
before the main table's commit, with the batch as transaction version, like everything of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
from logferry.loaders.batches.row_counts import table_sources
from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.source_facts import KnownSources, SourceFacts, SourceKey, possible_copies, shared_topics
from logferry.loaders.storage.rewrite import SQL_TIME, rows_of, text
from logferry.loaders.storage.side_tables import (
    LeftOutChunk,
    known_before,
    left_out_changes,
    left_out_rows,
    moment,
    read_left_out,
    stored_rows,
)
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

_CHUNK: Final = ("topic", "partition", "offset")


@dataclass(frozen=True)
class Deduplicated:
    """A batch's records without the copies. ``facts``: of its sources. ``left_out``: the chunks left out."""

    frame: DataFrame
    facts: KnownSources
    left_out: tuple[LeftOutChunk, ...]


def batch_facts(records: DataFrame) -> dict[SourceKey, SourceFacts]:
    """The facts of each source in a batch."""
    found = (
        records.where("flaw is null")
        .groupBy("topic", "source_id")
        .agg(
            F.min("seqno").alias("first_seqno"),
            F.max("seqno").alias("last_seqno"),
            F.expr("unix_micros(max(recorded))").alias("recorded"),
        )
    )
    with sorted_errors("reading the sources of a batch"):
        rows = collected(found)
    return {
        SourceKey(row["topic"], row["source_id"]): SourceFacts(
            row["first_seqno"], row["last_seqno"], moment(row["recorded"])
        )
        for row in rows
    }


def without_copies(paths: TablePaths, entry: LedgerEntry, records: DataFrame, within: timedelta) -> Deduplicated:
    """The records of the batch without second copies, of chunks in the table or in the batch itself.

    ``within``: the longest time between the recording of both copies.
    """
    facts = batch_facts(records)
    counted = partial(table_sources, records.sparkSession)
    known = known_before(paths, entry.batch, entry.run, counted, {key.source_id for key in facts})
    suspects = possible_copies(known, facts, shared_topics(r.topic for r in entry.ranges))
    if not suspects and not entry.reload:
        return Deduplicated(records, facts, ())
    notes = _copies(paths, entry, records, suspects, within)
    before = read_left_out(paths.left_out, entry.batch - 1, entry.reload) if entry.reload else ()
    told = left_out_changes(before, notes, entry)
    if not notes:
        return Deduplicated(records, facts, told)
    left_out = records.sparkSession.createDataFrame(left_out_rows(notes).select(list(_CHUNK)))
    kept = records.join(F.broadcast(left_out), list(_CHUNK), "left_anti")
    return Deduplicated(kept, facts, told)


def _copies(
    paths: TablePaths,
    entry: LedgerEntry,
    records: DataFrame,
    suspects: Mapping[SourceKey, tuple[int, int]],
    within: timedelta,
) -> tuple[LeftOutChunk, ...]:
    """The chunks of the batch whose copy is in the table, or in the batch under a topic that sorts first."""
    rows = [{**key._asdict(), "low": low, "high": high} for key, (low, high) in suspects.items()]
    asked = records.sparkSession.createDataFrame(pa.Table.from_pylist(rows))
    mine = (
        records.where("flaw is null")
        .join(F.broadcast(asked), ["topic", "source_id"])
        .where("seqno between low and high")
        .select(*_CHUNK, "source_id", "seqno", F.expr("unix_micros(recorded)").alias("recorded"))
    )
    with sorted_errors(f"looking for duplicate chunks in {paths.main}"):
        chunks = collected(mine)
    stored: set[tuple[str, str, int]] = set()
    if chunks and entry.batch > 0:
        oldest = moment(min(chunk["recorded"] for chunk in chunks)) - within
        seqnos = [chunk["seqno"] for chunk in chunks]
        wanted = (
            text("topic").isin(sorted(shared_topics(r.topic for r in entry.ranges)))
            & (ds.field("seqno") >= min(seqnos))
            & (ds.field("seqno") <= max(seqnos))
            & (ds.field("recorded") >= pa.scalar(oldest, pa.timestamp("us", "UTC")))
            & text("source_id").isin(sorted({chunk["source_id"] for chunk in chunks}))
        )
        if entry.reload:
            # Rows that the reload replaces do not count.
            wanted = wanted & ~rows_of(entry.reload, entry.dc)
        for rows_there in stored_rows(
            paths, entry.batch - 1, ["topic", "source_id", "seqno"], wanted, near(seqnos, oldest)
        ):
            distinct = pa.Table.from_batches([rows_there]).group_by(["topic", "source_id", "seqno"]).aggregate([])
            stored.update((row["topic"], row["source_id"], row["seqno"]) for row in distinct.to_pylist())
    return copies(entry.batch, chunks, stored)


def near(seqnos: Sequence[int], oldest: datetime) -> str:
    """SQL that holds for all rows with one of the seqnos, recorded at that moment or later."""
    return f"seqno >= {min(seqnos)} AND seqno <= {max(seqnos)} AND recorded >= '{oldest:{SQL_TIME}}'"


def copies(
    batch: int, chunks: Iterable[dict[str, Any]], stored: Collection[tuple[str, str, int]]
) -> tuple[LeftOutChunk, ...]:
    """The chunks of a batch to leave out. ``stored``: (topic, source_id, seqno) of rows in the table."""
    topics: dict[tuple[str, str, int], set[str]] = {}
    for topic, source_id, seqno in stored:
        topics.setdefault((*SourceKey(topic, source_id).anywhere, seqno), set()).add(topic)
    by_chunk: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for chunk in chunks:
        key = SourceKey(chunk["topic"], chunk["source_id"])
        by_chunk.setdefault((*key.anywhere, chunk["seqno"]), []).append(chunk)
    notes: list[LeftOutChunk] = []
    for name, same in by_chunk.items():
        first = min(chunk["topic"] for chunk in same)
        for chunk in same:
            others = topics.get(name, set()) - {chunk["topic"]}
            kept = min(others) if others else first
            if kept != chunk["topic"]:
                place = (chunk["topic"], chunk["partition"], chunk["offset"])
                notes.append(LeftOutChunk(batch, *place, chunk["source_id"], chunk["seqno"], kept))
    return tuple(sorted(notes))
