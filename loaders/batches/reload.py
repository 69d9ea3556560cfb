"""Carries a reload out: finds its ranges, says what it will do, and puts it into the ledger when it is agreed to.

It is a batch of the ledger like any other, so the regular job and other loaders come before it or go on after it, and
whoever finds it planned finishes it. Rows that the table holds of the ranges go and those that Kafka holds come in one
commit of the main table; the lines of the quarantine change in that same instant (see `standing`).

Crash windows: after the ledger, in mid-write, in the quarantine, after it, after the segments: nothing of the table has
changed, nor does a line of the quarantine stand otherwise; the next run of any loader reads the ranges again and does
what is not done. After the main commit: nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from logferry.loaders.batches.read import source
from logferry.loaders.errors import Overtaken
from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.known import moment
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.planning.reload_plan import Span
from logferry.loaders.planning.segment_states import Added, Recounted, Rules
from logferry.loaders.storage.commit import HOOKS, Committed, commit_once
from logferry.loaders.storage.data_files import Written
from logferry.loaders.storage.ledger import APP, LedgerEntry, TablePaths, last_batch, open_table
from logferry.loaders.storage.rewrite import Change, Rewriter, commit_rewritten, of_ranges
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from logferry.loaders.spark.kafka_offsets import KafkaTopics

# By so much the clocks of gateways may differ: what is looked for behind the end of a time ends at a record that is so
# much too young.
CLOCKS: Final = timedelta(hours=1)
_LOOK_OFFSETS: Final = 1024


def offsets_of(
    spark: SparkSession, kafka: KafkaTopics, positions: Mapping[TopicPartition, int], span: Span
) -> dict[TopicPartition, tuple[int, int]]:
    """Of each partition the offsets from the first record of the span up to behind its last one; no entry: it has none.

    Kafka's look-up by time finds the first offset that is young enough, but it may be that of a control record, which
    has the broker's clock (in a mirrored partition, that of the mirroring, maybe days later). So it is only where the
    look begins: nothing before it is young enough. Records themselves tell the rest. Behind the first one that is too
    young there may be some of the span, written by a gateway whose clock is behind.
    """
    begins = kafka.first_since(positions, _ms(span.start))
    starts: dict[TopicPartition, int] = {}
    looks = {key: at for key in positions if (at := begins.get(key)) is not None and at < positions[key]}
    for seen in _forward(spark, kafka, looks, positions, span):
        if seen.first is not None:
            starts[seen.key] = seen.first
            del looks[seen.key]
    ends = kafka.first_since(starts, _ms(span.end))
    found: dict[TopicPartition, tuple[int, int]] = {}
    for key, start in starts.items():
        at = ends.get(key)
        end = positions[key] if at is None else min(at, positions[key])
        found[key] = (start, max(start, end))
        looks[key] = max(start, end)
    for seen in _forward(spark, kafka, looks, positions, span):
        if seen.last is not None:
            found[seen.key] = (found[seen.key][0], seen.last + 1)
        if seen.newest is not None and moment(seen.newest) >= span.end + CLOCKS:
            del looks[seen.key]
    return {key: cut for key, cut in found.items() if cut[0] < cut[1]}


class _Seen(NamedTuple):
    """Of a part of a partition: the first offset that is not too old, the last that is not too young, the newest time
    (microseconds since 1970)."""

    key: TopicPartition
    first: int | None
    last: int | None
    newest: int | None


def _forward(
    spark: SparkSession,
    kafka: KafkaTopics,
    looks: dict[TopicPartition, int],
    positions: Mapping[TopicPartition, int],
    span: Span,
) -> Iterator[_Seen]:
    """Reads the partitions of ``looks`` from there on, in parts of growing size, until they are taken out of it."""
    micros, offsets = "unix_micros(timestamp)", _LOOK_OFFSETS
    while looks:
        parts = [
            Range(*key, "", at, min(at + offsets, positions[key])) for key, at in looks.items() if at < positions[key]
        ]
        looks_left = {r.key for r in parts}
        for key in [key for key in looks if key not in looks_left]:
            del looks[key]
        if not parts:
            return
        told = (
            source(spark, kafka.bootstrap_servers, parts)
            .groupBy("topic", "partition")
            .agg(
                F.expr(f"min(offset) filter (where {micros} >= {_ms(span.start) * 1000})").alias("first"),
                F.expr(f"max(offset) filter (where {micros} < {_ms(span.end) * 1000})").alias("last"),
                F.expr(f"max({micros})").alias("newest"),
            )
        )
        with sorted_errors("looking for a time"):
            rows = collected(told)
        for r in parts:
            looks[r.key] = r.end
        for row in rows:
            yield _Seen(TopicPartition(row["topic"], row["partition"]), row["first"], row["last"], row["newest"])
        offsets *= 4


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


# ---- the batch -------------------------------------------------------------------------------------------


def replace_quarantined(written: Written | None, paths: TablePaths, entry: LedgerEntry, run: str) -> int | None:
    """The lines of the ranges that stand in the quarantine go with the batch, these come with it. Safe to call again.

    Returns how many come, as far as it is known. Raises Overtaken where the reload was given up, StorageAway.
    """
    rewriter = Rewriter(paths.quarantine, entry.batch, of_ranges(entry.reload, entry.dc, resolved_by(entry.batch)))
    come = written or Written(paths.quarantine, (), 0)
    done = commit_rewritten(come, rewriter, paths.quarantine, entry.batch, run)
    if is_given_up(paths, entry.batch):
        raise Overtaken(f"batch {entry.batch} of {paths.main} was given up meanwhile: nothing is replaced")
    return done.rows


# ---- one that cannot be done any more ----------------------------------------------------------------------------

_GIVEN_UP: Final = f"{APP}.given-up"


def give_up(paths: TablePaths, batch: int, run: str) -> bool:
    """Decides for all loaders that a reload is not done. False: it is half done already. Raises StorageAway.

    The quarantine's commit of the batch is the decision: it says what is replaced there, or that nothing is.
    """

    def write(table: DeltaTable, properties: CommitProperties) -> None:
        nothing = pa.Table.from_batches([], schema=pa.schema(table.schema().to_arrow()))
        write_deltalake(table, nothing, mode="append", commit_properties=properties, post_commithook_properties=HOOKS)

    commit_once(write, paths.quarantine, batch, run, 0, beside=[Transaction(_GIVEN_UP, batch)])
    return is_given_up(paths, batch)


def is_given_up(paths: TablePaths, batch: int) -> bool:
    table = open_table(paths.quarantine)
    return table is not None and table.transaction_version(_GIVEN_UP) == batch


def resolved_by(batch: int) -> Change:
    """Rows of the quarantine as they are when they go with a batch; those that are gone already stay gone."""

    def marked(part: pa.Table, is_meant: Any) -> pa.Table:
        if "resolved" not in part.schema.names:
            # Of a batch from before the quarantine had it.
            part = part.append_column("resolved", pa.nulls(part.num_rows, pa.int64()))
        before, index = part["resolved"], part.schema.get_field_index("resolved")
        is_ours = pc.and_(is_meant, pc.is_null(before))
        return part.set_column(
            index, part.schema.field(index), pc.if_else(is_ours, pa.scalar(batch, pa.int64()), before)
        )

    return marked


def replace_main(
    written: Written, paths: TablePaths, entry: LedgerEntry, run: str, partition_by: Sequence[str]
) -> Committed:
    """The rows of the ranges go, the files come. Safe to call again. Raises StorageAway."""
    rewriter = Rewriter(paths.main, entry.batch, of_ranges(entry.reload, entry.dc))
    return commit_rewritten(written, rewriter, paths.main, entry.batch, run, partition_by)


class _Sums(NamedTuple):
    rows: int
    bytes: int
    first: int
    last: int
    sum: Any


def recounted(
    spark: SparkSession, paths: TablePaths, entry: LedgerEntry, rows: DataFrame, rules: Rules
) -> dict[datetime, Recounted]:
    """The windows of which the batch takes or brings rows, counted out of the table and the new ``rows``.

    Raises Overtaken when the table holds the batch already.
    """
    table = open_table(paths.main)
    if table is None or last_batch(table) != entry.batch - 1:
        raise Overtaken(f"{paths.main} holds another batch than {entry.batch - 1}: another loader goes on")
    stored = spark.read.format("delta").option("versionAsOf", table.version()).load(str(paths.main))
    columns = [
        (F.col(c.name) if c.name in rows.columns else F.lit(None)).cast(c.dataType).alias(c.name) for c in stored.schema
    ]
    gone = _in_ranges(entry)
    with sorted_errors(f"counting rows of {paths.main}"):
        came = _sums(rows.select(*columns), rules)
        went = _sums(stored.where(gone), rules)
        touched = sorted({*came, *went})
        stay: dict[int, _Sums] = {}
        if touched:
            length = rules.window_s * 1_000_000
            micros = F.expr("unix_micros(event_time)")
            near = stored.where(~gone & (micros >= touched[0]) & (micros < touched[-1] + length))
            stay = {start: sums for start, sums in _sums(near, rules, hashed=False).items() if start in {*touched}}
    return {
        moment(start): Recounted(
            _together(came.get(start), stay.get(start)), _what(came.get(start)) != _what(went.get(start))
        )
        for start in touched
    }


def _sums(frame: DataFrame, rules: Rules, *, hashed: bool = True) -> dict[int, _Sums]:
    """Of each window; ``sum``: the same for the same rows in whatever order."""
    length = rules.window_s * 1_000_000
    micros = F.expr("unix_micros(event_time)")
    one = F.xxhash64(F.to_json(F.struct(*frame.columns))).cast("decimal(38,0)") if hashed else F.lit(0)
    found = (
        frame.where("event_time is not null")
        .groupBy((micros - F.expr(f"pmod(unix_micros(event_time), {length})")).alias("window"))
        .agg(
            F.count(F.lit(1)).alias("rows"),
            F.sum(F.octet_length("text")).alias("bytes"),
            F.min(micros).alias("first"),
            F.max(micros).alias("last"),
            F.sum(one).cast("string").alias("sum"),
        )
    )
    return {
        row["window"]: _Sums(row["rows"], row["bytes"], row["first"], row["last"], row["sum"])
        for row in collected(found)
    }


def _together(one: _Sums | None, other: _Sums | None) -> Added | None:
    both = [sums for sums in (one, other) if sums is not None]
    if not both:
        return None
    return Added(
        sum(sums.rows for sums in both),
        sum(sums.bytes for sums in both),
        moment(min(sums.first for sums in both)),
        moment(max(sums.last for sums in both)),
    )


def _what(sums: _Sums | None) -> tuple[int, Any]:
    return (0, None) if sums is None else (sums.rows, sums.sum)


def _in_ranges(entry: LedgerEntry) -> Column:
    found = F.expr("false")
    for r in entry.reload:
        where = (F.col("topic") == r.topic) & (F.col("partition") == r.partition)
        found = found | (where & (F.col("offset") >= r.start) & (F.col("offset") < r.end))
    return found & (F.col("dc") == entry.dc)
