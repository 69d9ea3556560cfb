"""Chunks that came by two data centres, kept once: by (topic without the data centre, source_id, seqno).

A source whose data centre is gone goes on in another, and sends again what it has no answer for; when the first one is
back, its copy of the same chunk comes up, maybe days later. The copy that is in the table stays, of two in one batch
the one whose topic comes first; the other is left out, with all its lines, and noted in ``<path>_moved`` with where it
stands in Kafka.

Which chunks a batch leaves out depends on the ledger and on what the table held before that batch, on nothing else: so
every loader that does the batch leaves out the same ones, and one that comes late finds its batch done. Notes are
written before the main table's commit, with the batch as transaction version, like all that belongs to a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import Schema
from deltalake.exceptions import DeltaError
from logferry.loaders.errors import Overtaken, StorageAway
from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.known import create_sources, facts_of, known_up_to, moment, put_known, read_known
from logferry.loaders.notes import NOTES, Note, notes_table, read_notes
from logferry.loaders.planning.source_facts import Known, SourceFacts, SourceKey, maybe_twice, merged, several_centres
from logferry.loaders.standing import standing
from logferry.loaders.storage.ledger import LedgerEntry, TablePaths, create_table, last_batch, open_table
from logferry.loaders.storage.rewrite import rows_of, text
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

_CHUNKS: Final = ~ds.field("source_id").is_null() & ~ds.field("seqno").is_null()
_CHUNK: Final = ("topic", "partition", "offset")


@dataclass(frozen=True)
class Once:
    """A batch's records without the copies. ``notes``: what was left out."""

    frame: DataFrame
    facts: Known
    notes: tuple[Note, ...]


def create_moved(paths: TablePaths) -> None:
    create_sources(paths.sources)
    create_table(paths.moved, Schema.from_arrow(NOTES), "logferry chunks that came twice", {})


def batch_facts(records: DataFrame) -> dict[SourceKey, SourceFacts]:
    """What a batch says of each source."""
    found = (
        records.where("flaw is null")
        .groupBy("topic", "source_id")
        .agg(
            F.min("seqno").alias("first_seqno"),
            F.max("seqno").alias("last_seqno"),
            F.expr("unix_micros(max(recorded))").alias("recorded"),
            F.lit(None).cast("bigint").alias("event"),
        )
    )
    with sorted_errors("looking at the sources of a batch"):
        return facts_of(collected(found))


def once(paths: TablePaths, entry: LedgerEntry, records: DataFrame, within: timedelta) -> Once:
    """The records of the batch without chunks that the table holds from another data centre, or that come by two in it.

    ``within``: how much later the second copy may have been recorded than the first.
    """
    facts = batch_facts(records)
    known = known_before(paths, entry.batch, entry.run)
    topics = several_centres(r.topic for r in entry.ranges)
    suspects = maybe_twice(_of(known, topics), _of(facts, topics))
    if not suspects and not entry.reload:
        return Once(records, facts, ())
    notes = _copies(paths, entry, records, suspects, within)
    told = told_of(read_notes(paths.moved, entry.batch - 1), notes, entry)
    if not notes:
        return Once(records, facts, told)
    left_out = records.sparkSession.createDataFrame(
        notes_table(notes).select(list(_CHUNK)),
    )
    kept = records.join(F.broadcast(left_out), list(_CHUNK), "left_anti")
    return Once(kept, facts, told)


def told_of(before: Iterable[Note], now: Sequence[Note], entry: LedgerEntry) -> tuple[Note, ...]:
    """The notes that a batch writes. A reload repeats none, and takes back those that hold no more. Pure."""
    if not entry.reload:
        return tuple(now)
    left_out = {note.place: note for note in now}
    known = {note.place: note for note in before if any(note.is_in(r) for r in entry.reload)}
    new = [note for place, note in left_out.items() if place not in known or known[place].kept != note.kept]
    back = [note._replace(batch=entry.batch, kept=None) for place, note in known.items() if place not in left_out]
    return tuple(sorted([*new, *back], key=lambda note: note.place))


def known_before(paths: TablePaths, batch: int, run: str) -> dict[SourceKey, SourceFacts]:
    """What is known of the sources before the batch; found out of the table itself where nobody has kept it."""
    before = batch - 1
    if before >= 0 and known_up_to(paths.sources) < before:
        found: dict[SourceKey, SourceFacts] = {}
        columns = ["topic", "source_id", "seqno", "recorded", "event_time"]
        for rows in _stored(paths, before, columns, _CHUNKS):
            wanted = [("seqno", "min"), ("seqno", "max"), ("recorded", "max")]
            wanted += [("event_time", "max")] * ("event_time" in rows.schema.names)
            each = pa.Table.from_batches([rows]).group_by(["topic", "source_id"]).aggregate(wanted)
            facts = {
                SourceKey(row["topic"], row["source_id"]): SourceFacts(
                    row["seqno_min"], row["seqno_max"], row["recorded_max"], row.get("event_time_max")
                )
                for row in each.to_pylist()
            }
            found = merged(found, facts)
        put_known(paths.sources, before, run, found, all_of_it=True)
    return read_known(paths.sources)


def _copies(
    paths: TablePaths,
    entry: LedgerEntry,
    records: DataFrame,
    suspects: Mapping[SourceKey, tuple[int, int]],
    within: timedelta,
) -> tuple[Note, ...]:
    """The chunks of the batch that came before by another data centre, or come by one that goes first."""
    rows = [{**key._asdict(), "low": low, "high": high} for key, (low, high) in suspects.items()]
    asked = records.sparkSession.createDataFrame(pa.Table.from_pylist(rows))
    mine = (
        records.where("flaw is null")
        .join(F.broadcast(asked), ["topic", "source_id"])
        .where("seqno between low and high")
        .select(*_CHUNK, "source_id", "seqno", F.expr("unix_micros(recorded)").alias("recorded"))
    )
    with sorted_errors(f"looking for chunks of {paths.main} that came twice"):
        chunks = collected(mine)
    stored: set[tuple[str, str, int]] = set()
    if chunks and entry.batch > 0:
        oldest = moment(min(chunk["recorded"] for chunk in chunks)) - within
        seqnos = [chunk["seqno"] for chunk in chunks]
        wanted = (
            text("topic").isin(sorted(several_centres(r.topic for r in entry.ranges)))
            & (ds.field("seqno") >= min(seqnos))
            & (ds.field("seqno") <= max(seqnos))
            & (ds.field("recorded") >= pa.scalar(oldest, pa.timestamp("us", "UTC")))
            & text("source_id").isin(sorted({chunk["source_id"] for chunk in chunks}))
        )
        if entry.reload:
            # What is replaced says nothing of what is to stand there.
            wanted = wanted & ~rows_of(entry.reload, entry.dc)
        for rows_there in _stored(paths, entry.batch - 1, ["topic", "source_id", "seqno"], wanted):
            distinct = pa.Table.from_batches([rows_there]).group_by(["topic", "source_id", "seqno"]).aggregate([])
            stored.update((row["topic"], row["source_id"], row["seqno"]) for row in distinct.to_pylist())
    return copies(entry.batch, chunks, stored)


def copies(batch: int, chunks: Iterable[dict[str, Any]], stored: Collection[tuple[str, str, int]]) -> tuple[Note, ...]:
    """Which chunks of a batch are left out. ``stored``: (topic, source_id, seqno) of what the table holds. Pure."""
    topics: dict[tuple[str, str, int], set[str]] = {}
    for topic, source_id, seqno in stored:
        topics.setdefault((*SourceKey(topic, source_id).anywhere, seqno), set()).add(topic)
    by_chunk: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for chunk in chunks:
        key = SourceKey(chunk["topic"], chunk["source_id"])
        by_chunk.setdefault((*key.anywhere, chunk["seqno"]), []).append(chunk)
    notes: list[Note] = []
    for name, same in by_chunk.items():
        first = min(chunk["topic"] for chunk in same)
        for chunk in same:
            others = topics.get(name, set()) - {chunk["topic"]}
            kept = min(others) if others else first
            if kept != chunk["topic"]:
                place = (chunk["topic"], chunk["partition"], chunk["offset"])
                notes.append(Note(batch, *place, chunk["source_id"], chunk["seqno"], kept))
    return tuple(sorted(notes))


def _stored(paths: TablePaths, batch: int, columns: list[str], wanted: Any) -> Iterator[Any]:
    """Rows of table and quarantine, the table's as of just this batch. Raises Overtaken, StorageAway."""
    for path in (paths.main, paths.quarantine):
        table = open_table(path)
        if table is None:
            continue
        if path == paths.main and last_batch(table) != batch:
            raise Overtaken(f"{path} holds batch {last_batch(table)} and not {batch}: another loader goes on")
        try:
            stored = table.to_pyarrow_dataset()
            if path == paths.quarantine:
                wanted = wanted & standing(stored.schema.names, batch)
            have = [name for name in columns if name in stored.schema.names]
            scanner = stored.scanner(columns=have, filter=wanted, batch_readahead=4)
            yield from (rows for rows in scanner.to_batches() if rows.num_rows)
        except (DeltaError, pa.ArrowException, OSError) as error:
            raise StorageAway(f"{path} cannot be read: {error}") from error


def _of(known: Known, topics: Collection[str]) -> dict[SourceKey, SourceFacts]:
    return {key: facts for key, facts in known.items() if key.topic in topics}
