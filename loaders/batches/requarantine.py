"""Lines of the quarantine, read again after the parser was mended: each ends in the table or stays, never both.

Two tables cannot change in one commit. So a line that can be read by now is marked in the quarantine with the batch
that will bring it (``resolved``), and *stands in the quarantine as long as that batch is not in the table*: the commit
of the main table is the one instant in which it leaves the one and is in the other. Marked lines are dropped by the
next such batch. Whoever reads the quarantine leaves out what is resolved by a batch up to the table's last one.

Crash windows: after the ledger, in the rewrite of the quarantine: nothing is marked, the next run does it again. After
it: the next run takes the marked lines, which nobody else can mark, and nobody can unmark. After the main commit:
nothing is left to do.
"""

from __future__ import annotations

from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.parsing import rows as parse
from logferry.loaders.parsing.settings import ParserSettings
from logferry.loaders.storage.commit import committed, replace_files
from logferry.loaders.storage.data_files import write_files
from logferry.loaders.storage.ledger import TablePaths
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F


def resolve(spark: SparkSession, paths: TablePaths, batch: int, run: str, parser: ParserSettings) -> int | None:
    """Marks the lines that the parser can read. Returns how many; None where another loader has done so.

    Safe to call again. Records that no gateway wrote stay as they are.
    """
    if committed(paths.quarantine, batch, run) is not None:
        return None
    # What earlier batches have brought into the table is in there.
    standing = _quarantine(spark, paths).where("resolved is null")
    now_read = _read(standing.where("line is not null"), parser)
    marked = now_read.withColumns(
        {
            "parser": F.lit(parser.name),
            "resolved": F.when(F.col("reason").isNull(), F.lit(batch)).cast("long"),
        }
    )
    columns = parse.QUARANTINE.fieldNames()
    seen = Observation()
    rest = marked.select(*columns).unionByName(standing.where("line is null").select(*columns))
    watched = rest.observe(seen, F.count("resolved").alias("resolved"))
    with sorted_errors(f"reading the lines of {paths.quarantine} again"):
        written = write_files(watched, paths.quarantine, batch)
    replace_files(written, paths.quarantine, batch, run)
    return int(seen.get["resolved"])


def resolved_rows(spark: SparkSession, paths: TablePaths, batch: int, parser: ParserSettings) -> DataFrame:
    """The lines that the batch brings, parsed."""
    return _read(_quarantine(spark, paths).where(F.col("resolved") == batch), parser)


def standing_lines(spark: SparkSession, paths: TablePaths) -> int:
    """How many lines a batch could bring at most."""
    with sorted_errors(f"reading {paths.quarantine}"):
        return _quarantine(spark, paths).where("resolved is null and line is not null").count()


def _quarantine(spark: SparkSession, paths: TablePaths) -> DataFrame:
    return spark.read.format("delta").load(str(paths.quarantine))


def _read(quarantined: DataFrame, parser: ParserSettings) -> DataFrame:
    lines = quarantined.drop("reason", "parser").withColumns(
        {"text": F.expr("cast(bytes as string)"), "clean": F.lit(False)}
    )
    return parse.read_lines(lines, parser)
