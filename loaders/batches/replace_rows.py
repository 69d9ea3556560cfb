"""Batches that replace rows: reloads, and the lines of the quarantine that the parser can read by now.

**A reload** finds the offsets of time spans, and replaces rows or is abandoned. It is a batch of the ledger, so other
batches come before or after it, and any loader that finds it planned finishes it. One commit of the main table removes
the rows of the ranges and adds those from Kafka; the lines of the quarantine change in the same instant (see
`tables.active_filter`).

Crash windows: after the ledger, in mid-write, in or after the quarantine, after the segments: neither the table nor the
active lines of the quarantine have changed; the next run of any loader reads the ranges again and completes the batch.
After the main commit: nothing is left to do.

**Quarantined lines** are parsed again, after the parser was corrected: each moves to the table or stays, never both. A
line that can be parsed now is marked in the quarantine with the batch that will load it (``resolved``), and *stays
active until that batch is in the table*: the commit of the main table is the instant in which it moves. The next such
batch deletes marked lines.

Crash windows: after the ledger, in the rewrite of the quarantine: nothing is marked, and the next run repeats it. After
it: the next run takes the marked lines, which no other batch can mark or unmark. After the main commit: nothing is left
to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from deltalake import Transaction
from logferry.loaders.batches.records import source, write_files
from logferry.loaders.batches.rewrite_rows import MEANT, Rewriter, with_ranges
from logferry.loaders.batches.row_counts import sums_by_segment
from logferry.loaders.errors import Overtaken
from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.parsing.rows import read_lines, with_columns_of
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.planning.reload_plan import TimeSpan
from logferry.loaders.planning.segment_states import AddedRows, RecountedRows, SegmentRules
from logferry.loaders.spark.kafka_access import KafkaTopics
from logferry.loaders.storage.commit import CommittedBatch, DataFiles, commit_files, committed_batch
from logferry.loaders.storage.ledger import APP, table_at
from logferry.loaders.storage.rewrite import of_ranges
from logferry.loaders.storage.side_tables import moment
from logferry.loaders.storage.snapshots import newest_table
from logferry.loaders.storage.tables import QUARANTINE_COLUMNS
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

# The largest difference between gateways' clocks: the search after the end of a span ends at a record this much later.
CLOCKS: Final = timedelta(hours=1)
_LOOK_OFFSETS: Final = 1024


def offsets_of(
    spark: SparkSession, kafka: KafkaTopics, positions: Mapping[TopicPartition, int], span: TimeSpan
) -> dict[TopicPartition, tuple[int, int]]:
    """The offsets of each partition from the first record of the span to after its last one; no entry where none is.

    Kafka's look-up by time may find a control record, which has the broker's clock: in a mirrored partition that of the
    copy, maybe days later. So the search only starts there: no earlier record is in the span. The records' own times
    decide the rest. After the first record past the span there may be others of the span, from a gateway whose clock is
    behind.
    """
    begins = kafka.first_since(positions, _ms(span.start))
    starts: dict[TopicPartition, int] = {}
    looks = {key: at for key in positions if (at := begins.get(key)) is not None and at < positions[key]}
    for key, seen in _forward(spark, kafka, looks, positions, span):
        if seen["first"] is not None:
            starts[key] = seen["first"]
            del looks[key]
    ends = kafka.first_since(starts, _ms(span.end))
    found: dict[TopicPartition, tuple[int, int]] = {}
    for key, start in starts.items():
        at = ends.get(key)
        end = positions[key] if at is None else min(at, positions[key])
        found[key] = (start, max(start, end))
        looks[key] = max(start, end)
    for key, seen in _forward(spark, kafka, looks, positions, span):
        if seen["last"] is not None:
            found[key] = (found[key][0], seen["last"] + 1)
        if seen["newest"] is not None and moment(seen["newest"]) >= span.end + CLOCKS:
            del looks[key]
    return {key: cut for key, cut in found.items() if cut[0] < cut[1]}


def _forward(
    spark: SparkSession,
    kafka: KafkaTopics,
    looks: dict[TopicPartition, int],
    positions: Mapping[TopicPartition, int],
    span: TimeSpan,
) -> Iterator[tuple[TopicPartition, dict[str, Any]]]:
    """Reads the partitions of ``looks`` from their offsets on, in growing parts, until the caller removes them.

    Of each part: the first offset not before the span, the last not after it, the newest time in microseconds since
    1970.
    """
    micros, offsets = "unix_micros(timestamp)", _LOOK_OFFSETS
    while looks:
        parts = [
            Range(*key, "", at, min(at + offsets, positions[key])) for key, at in looks.items() if at < positions[key]
        ]
        for key in looks.keys() - {r.key for r in parts}:
            del looks[key]
        if not parts:
            return
        facts = (
            source(spark, kafka.options(), parts)
            .groupBy("topic", "partition")
            .agg(
                F.expr(f"min(offset) filter (where {micros} >= {_ms(span.start) * 1000})").alias("first"),
                F.expr(f"max(offset) filter (where {micros} < {_ms(span.end) * 1000})").alias("last"),
                F.expr(f"max({micros})").alias("newest"),
            )
        )
        with sorted_errors("searching for a time span"):
            rows = collected(facts)
        for r in parts:
            looks[r.key] = r.end
        for row in rows:
            yield TopicPartition(row["topic"], row["partition"]), row
        offsets *= 4


def _ms(at: datetime) -> int:
    return int(at.timestamp() * 1000)


# ---- the batch -------------------------------------------------------------------------------------------


def replace_quarantined(
    spark: SparkSession, written: DataFiles | None, paths: TablePaths, entry: LedgerEntry, run: str
) -> int | None:
    """Replaces the quarantined lines of the ranges with the batch. Safe to call again.

    Returns the number of new lines, None where unknown. Raises StorageUnavailable, and Overtaken where the reload was
    abandoned.
    """
    rewriter = Rewriter(lambda: spark, paths.quarantine, entry.batch, of_ranges(entry.reload, entry.dc, entry.batch))
    come = written or DataFiles(paths.quarantine)
    done = commit_files(come, paths.quarantine, entry.batch, run, changes=rewriter.actions)
    if is_abandoned(paths, entry.batch):
        raise Overtaken(f"batch {entry.batch} of {paths.main} was abandoned meanwhile: nothing is replaced")
    return done.rows


# ---- abandoned reloads -------------------------------------------------------------------------------------------

_ABANDONED: Final = f"{APP}.given-up"


def abandon_reload(paths: TablePaths, batch: int, run: str) -> bool:
    """Decides for all loaders that a reload is not executed. False: it is half done. Raises StorageUnavailable.

    The quarantine's commit of the batch is the decision: it replaces lines, or records that nothing is replaced.
    """
    nothing = DataFiles(paths.quarantine)
    commit_files(nothing, paths.quarantine, batch, run, beside=[Transaction(_ABANDONED, batch)])
    return is_abandoned(paths, batch)


def is_abandoned(paths: TablePaths, batch: int) -> bool:
    table = newest_table(paths.quarantine)
    return table is not None and table.transaction_version(_ABANDONED) == batch


def replace_main(
    spark: SparkSession, written: DataFiles, paths: TablePaths, entry: LedgerEntry, run: str
) -> CommittedBatch:
    """Replaces the rows of the ranges by the files. Safe to call again. Raises StorageUnavailable."""
    rewriter = Rewriter(lambda: spark, paths.main, entry.batch, of_ranges(entry.reload, entry.dc))
    return commit_files(written, paths.main, entry.batch, run, changes=rewriter.actions)


def recount_segments(
    spark: SparkSession, paths: TablePaths, entry: LedgerEntry, rows: DataFrame, rules: SegmentRules
) -> dict[datetime, RecountedRows]:
    """The segments whose rows the batch replaces, counted from the table and the new ``rows``.

    Raises Overtaken when the table holds the batch already.
    """
    table = table_at(paths.main, entry.batch - 1)
    stored = spark.read.format("delta").option("versionAsOf", table.version()).load(paths.main.for_spark)
    with sorted_errors(f"counting rows of {paths.main}"):
        there = with_ranges(stored, entry.reload, entry.dc)
        came = sums_by_segment(with_columns_of(rows, stored.schema), rules)
        went = sums_by_segment(there.where(MEANT).drop(MEANT), rules)
        touched = sorted({*came, *went})
        stay: dict[int, tuple[AddedRows, str]] = {}
        if touched:
            length = rules.window_s * 1_000_000
            micros = F.expr("unix_micros(event_time)")
            near = there.where(f"NOT {MEANT}").where((micros >= touched[0]) & (micros < touched[-1] + length))
            stay = sums_by_segment(near, rules, hashed=False)
    found: dict[datetime, RecountedRows] = {}
    nothing = (None, "")
    for start in touched:
        (new, new_hash), (old, old_hash) = came.get(start, nothing), went.get(start, nothing)
        kept = stay.get(start, nothing)[0]
        is_changed = (new and new.rows, new_hash) != (old and old.rows, old_hash)
        found[moment(start)] = RecountedRows(new.plus(kept) if new else kept, is_changed)
    return found


def resolve(spark: SparkSession, paths: TablePaths, batch: int, run: str, parser: ParserSettings) -> None:
    """Marks the lines that the parser can read, unless another loader has done so.

    Safe to call again. Records that no gateway wrote stay as they are. Raises StorageUnavailable.
    """
    if committed_batch(paths.quarantine, batch, run) is not None:
        return
    # Lines resolved by earlier batches are in the table.
    active = _quarantine(spark, paths).where("resolved is null")
    now_read = _read(active.where("line is not null"), parser)
    resolved = F.when(F.col("reason").isNull(), F.lit(batch)).cast("long")
    marked = now_read.withColumns({"parser": F.lit(parser.name), "resolved": resolved})
    seen = Observation()
    whole = active.where("line is null").select(*QUARANTINE_COLUMNS)
    rest = marked.select(*QUARANTINE_COLUMNS).unionByName(whole)
    watched = rest.observe(seen, F.count(F.lit(1)).alias("rows"))
    with sorted_errors(f"parsing the lines of {paths.quarantine} again"):
        written = write_files(watched, paths.quarantine, batch)
    # They replace all of it.
    commit_files(written.check_rows(seen.get["rows"]), paths.quarantine, batch, run, replace=True)


def resolved_rows(spark: SparkSession, paths: TablePaths, batch: int, parser: ParserSettings) -> DataFrame:
    """The lines that the batch loads, parsed."""
    return _read(_quarantine(spark, paths).where(F.col("resolved") == batch), parser)


def _quarantine(spark: SparkSession, paths: TablePaths) -> DataFrame:
    return spark.read.format("delta").load(paths.quarantine.for_spark)


def _read(quarantined: DataFrame, parser: ParserSettings) -> DataFrame:
    lines = quarantined.drop("reason", "parser").withColumns(
        {"text": F.expr("cast(bytes as string)"), "clean": F.lit(False)}
    )
    return read_lines(lines, parser)
