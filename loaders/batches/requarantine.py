"""Parses the quarantined lines again, after the parser was corrected: each moves to the table or stays, never both.

Two tables cannot change in one commit. So a line that can be parsed now is marked in the quarantine with the batch that
will load it (``resolved``), and *stays active until that batch is in the table*: the commit of the main table is the
instant in which it moves. The next such batch deletes marked lines. Readers of the quarantine skip lines resolved by a
batch up to the table's last one.

Crash windows: after the ledger, in the rewrite of the quarantine: nothing is marked, and the next run repeats it. After
it: the next run takes the marked lines, which no other batch can mark or unmark. After the main commit: nothing is left
to do.
"""

from __future__ import annotations

from logferry.loaders.batches.records import write_files
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.parsing.rows import read_lines
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.commit import commit_files, committed_batch
from logferry.loaders.storage.tables import QUARANTINE_COLUMNS
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F


def resolve(spark: SparkSession, paths: TablePaths, batch: int, run: str, parser: ParserSettings) -> int | None:
    """Marks the lines that the parser can read. Returns their number; None where another loader has done so.

    Safe to call again. Records that no gateway wrote stay as they are.
    """
    if committed_batch(paths.quarantine, batch, run) is not None:
        return None
    # Lines resolved by earlier batches are in the table.
    active = _quarantine(spark, paths).where("resolved is null")
    now_read = _read(active.where("line is not null"), parser)
    resolved = F.when(F.col("reason").isNull(), F.lit(batch)).cast("long")
    marked = now_read.withColumns({"parser": F.lit(parser.name), "resolved": resolved})
    seen = Observation()
    whole = active.where("line is null").select(*QUARANTINE_COLUMNS)
    rest = marked.select(*QUARANTINE_COLUMNS).unionByName(whole)
    watched = rest.observe(seen, F.count("resolved").alias("resolved"))
    with sorted_errors(f"parsing the lines of {paths.quarantine} again"):
        written = write_files(watched, paths.quarantine, batch)
    commit_files(written, paths.quarantine, batch, run, replace=True)
    return int(seen.get["resolved"])


def resolved_rows(spark: SparkSession, paths: TablePaths, batch: int, parser: ParserSettings) -> DataFrame:
    """The lines that the batch loads, parsed."""
    return _read(_quarantine(spark, paths).where(F.col("resolved") == batch), parser)


def count_lines(spark: SparkSession, paths: TablePaths) -> int:
    """The largest number of lines that a batch could load."""
    with sorted_errors(f"reading {paths.quarantine}"):
        return _quarantine(spark, paths).where("resolved is null and line is not null").count()


def _quarantine(spark: SparkSession, paths: TablePaths) -> DataFrame:
    return spark.read.format("delta").load(str(paths.quarantine))


def _read(quarantined: DataFrame, parser: ParserSettings) -> DataFrame:
    lines = quarantined.drop("reason", "parser").withColumns(
        {"text": F.expr("cast(bytes as string)"), "clean": F.lit(False)}
    )
    return read_lines(lines, parser)
