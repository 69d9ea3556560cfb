"""Removes or changes rows of a table by rewriting the files that hold them (copy on write), by Spark's executors.

Guaranteed: files that hold selected rows are replaced by their remaining rows, changed as demanded, and all
replacements are one commit together with the added files; other files are not touched. The files are those of the
version that the commit builds on: where a compaction comes between, they are searched again and the commit is retried
(see `commit_once`). The driver holds names and counts of files, and no rows.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.batches.file_view import NUMBER, view_of
from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.commit import FOLDER, new_files
from logferry.loaders.storage.files import storage_errors
from logferry.loaders.storage.rewrite import Rule, TableFile, selected_files
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

Session = Callable[[], SparkSession]
MEANT: Final = "_meant"
_RANGES: Final = "array<struct<_topic: string, _partition: int, _start: bigint, _end: bigint>>"
# A task writes one file, of about this many bytes of the files that it replaces.
_FILE_BYTES: Final = 128 << 20


def with_ranges(frame: DataFrame, ranges: Sequence[Range], dc: str) -> DataFrame:
    """The frame with the column `MEANT`: whether the row is of these offsets, which do not overlap, and of ``dc``.

    A join, so that ten thousand ranges cost a row no more than one does.
    """
    rows = [{"_topic": r.topic, "_partition": r.partition, "_start": r.start, "_end": r.end} for r in ranges]
    bounds = frame.sparkSession.range(1).select(F.inline(F.from_json(F.lit(json.dumps(rows)), _RANGES)))
    is_inside = F.expr("topic = _topic AND partition = _partition AND offset >= _start AND offset < _end")
    joined = frame.join(F.broadcast(bounds), is_inside & (F.col("dc") == F.lit(dc)), "left")
    return joined.withColumn(MEANT, F.col("_topic").isNotNull()).drop("_topic", "_partition", "_start", "_end")


def marked(frame: DataFrame, rule: Rule) -> DataFrame:
    """The frame with the column `MEANT`: whether the rule selects the row; never null."""
    if rule.ranges:
        found = with_ranges(frame, rule.ranges, rule.dc)
    else:
        found = frame.withColumn(MEANT, F.coalesce(F.expr(rule.meant), F.lit(False)))
    # What an earlier batch has resolved stays as it is.
    return found if rule.resolved_by is None else found.withColumn(MEANT, F.expr(f"{MEANT} AND resolved IS NULL"))


class _Counted(NamedTuple):
    meant: int
    rows: int


class _Replaced(NamedTuple):
    """Files, by their names in the log, and what was written in their place."""

    paths: frozenset[str]
    adds: tuple[AddAction, ...]


class Rewriter:
    """Applies a rule; when the commit is retried, files that are still there are not rewritten a second time.

    ``session``: called only where the bounds of some file do not suffice.
    """

    def __init__(self, session: Session, path: Location, batch: int, rule: Rule) -> None:
        self._session, self._path, self._batch, self._rule = session, path, batch, rule
        self._counted: dict[str, _Counted] = {}
        self._replaced: list[_Replaced] = []

    def actions(self, table: DeltaTable) -> list[AddAction | RemoveAction]:
        """The actions that apply the rule to this version. Raises LoadError."""
        files = self._count_files(table)
        hit = [file for file in files if self._counted[file.path].meant]
        removes = [file.removed() for file in hit]
        mixed = {file.path: file for file in hit if self._needs_rows(file)}
        # Rows of files that another commit has replaced meanwhile are in other files now.
        self._replaced = [done for done in self._replaced if done.paths <= mixed.keys()]
        known = {path for done in self._replaced for path in done.paths}
        if new := [file for path, file in mixed.items() if path not in known]:
            self._replaced.append(self._rewritten(table, new))
        return [*(add for done in self._replaced for add in done.adds), *removes]

    def count(self, table: DeltaTable) -> int:
        """The number of selected rows in this version; writes nothing. Raises LoadError."""
        return sum(self._counted[file.path].meant for file in self._count_files(table))

    def _needs_rows(self, file: TableFile) -> bool:
        counted = self._counted[file.path]
        return self._rule.resolved_by is not None or counted.meant < counted.rows

    def _count_files(self, table: DeltaTable) -> list[TableFile]:
        """The files that may hold selected rows, which are counted."""
        with storage_errors(f"{self._path} cannot be read"):
            found = selected_files(table, self._rule)
        for file, is_whole in found:
            if is_whole and file.rows is not None and self._rule.resolved_by is None:
                self._counted[file.path] = _Counted(file.rows, file.rows)
        new = [file for file, _ in found if file.path not in self._counted]
        if new:
            with (
                sorted_errors(f"searching rows of {self._path}"),
                view_of(self._session(), self._path, table, list(enumerate(new))) as view,
            ):
                each = marked(view, self._rule).groupBy(NUMBER)
                rows = collected(each.agg(F.count_if(MEANT).alias("meant"), F.count(F.lit(1)).alias("rows")))
            by_number = {row[NUMBER]: _Counted(row["meant"], row["rows"]) for row in rows}
            for number, file in enumerate(new):
                self._counted[file.path] = by_number.get(number, _Counted(0, 0))
        return [file for file, _ in found]

    def _rewritten(self, table: DeltaTable, files: Sequence[TableFile]) -> _Replaced:
        folder = f"{FOLDER}{self._batch:08}-{uuid.uuid4().hex[:12]}"
        parted = list(table.metadata().partition_columns)
        with (
            sorted_errors(f"replacing rows of {self._path}"),
            view_of(self._session(), self._path, table, list(enumerate(files))) as view,
        ):
            rows = marked(view, self._rule)
            if self._rule.resolved_by is None:
                rows = rows.where(f"NOT {MEANT}")
            else:
                batch = F.lit(self._rule.resolved_by).cast("long")
                rows = rows.withColumn("resolved", F.when(F.col(MEANT), batch).otherwise(F.col("resolved")))
            tasks = max(rows.sparkSession.sparkContext.defaultParallelism, sum(f.size for f in files) // _FILE_BYTES)
            writer = rows.drop(NUMBER, MEANT).coalesce(tasks).write
            if parted:
                writer = writer.partitionBy(*parted)
            writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(
                (self._path / folder).for_spark
            )
        with storage_errors(f"{self._path / folder} cannot be read"):
            written = new_files(self._path, folder, parted)
        counts = [self._counted[file.path] for file in files]
        gone = self._rule.resolved_by is None
        written.check_rows(sum(one.rows - one.meant * gone for one in counts))
        return _Replaced(frozenset(file.path for file in files), written.adds)
