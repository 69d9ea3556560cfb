"""The table ``<path>_latest``: the latest state of HBase's cells, merged with the changes of each batch by Spark.

`planning.latest_cells` has the rule: what is kept of a set of changes depends on nothing but the set. A batch is merged
in one commit, before that of the main table, with the batch as its transaction version. It replaces the files that
hold a column family of a row that the batch changes, and leaves the others as they are.

Crash windows: before the commit, nothing has changed, and the next run repeats it. Between it and the commit of the
main table, the state is one batch ahead; the next run finds it there. If the batch is read again with other rows, such
as without a topic that was reset, the next one merges those that it has, and changes that came before stay: HBase did
carry them out.

A state that does not hold the batch before, because it is new or was not always wanted, is merged with all rows of the
main table. Nothing is removed for it, so rows that were dropped from the log by age stay in the state.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Final

from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.batches.file_view import NUMBER, view_of
from logferry.loaders.jvm_errors import collected, sorted_errors
from logferry.loaders.parsing.formats import extra_fields, spark_fields
from logferry.loaders.parsing.settings import HBASE, HBASE_BYTES, ParserSettings
from logferry.loaders.planning.latest_cells import DROPPED, rule
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.storage.commit import FOLDER, DataFiles, commit_files, committed_batch, new_files
from logferry.loaders.storage.files import storage_errors
from logferry.loaders.storage.ledger import create_table, last_batch, table_at
from logferry.loaders.storage.rewrite import TableFile, table_files
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, LongType, StructField, StructType

_CHANGES: Final = ParserSettings(format="hbase")
_FIELDS: Final = [*spark_fields(**HBASE), *extra_fields(_CHANGES)]
# ``place``: of the change in its edit.
_STATE: Final = StructType([*_FIELDS, StructField("place", LongType()), StructField("latest", BooleanType())])
# A file of a merge has about this many bytes.
_FILE_BYTES: Final = 64 << 20
_FAMILY: Final = ("t", "r", "f")
# What no change of another one depends on: everything that is not part of the rule.
_BODY: Final = ("row", "family", "qualifier", "value", "row_bytes", "family_bytes", "qualifier_bytes", "value_bytes")
_MORE: Final = ("tags", "write_time", "region")


def create_latest(paths: TablePaths) -> None:
    """Safe to call again. Raises StorageUnavailable."""
    schema = Schema.from_json(_STATE.json())
    create_table(paths.latest, schema, "logferry latest state", {"delta.dataSkippingNumIndexedCols": "0"})


def merge_latest(
    spark: SparkSession, written: DataFiles, paths: TablePaths, entry: LedgerEntry, parser: ParserSettings, run: str
) -> None:
    """Merges the rows of the batch, which are in the files, with the state, once. Raises LoadError."""
    if committed_batch(paths.latest, entry.batch, run) is None:
        create_latest(paths)
        merge = _Merge(spark, written, paths, entry.batch, parser.versions)
        commit_files(DataFiles(paths.latest), paths.latest, entry.batch, run, changes=merge.actions)


class _Merge:
    def __init__(self, spark: SparkSession, written: DataFiles, paths: TablePaths, batch: int, versions: int) -> None:
        self._spark, self._written, self._paths, self._batch, self._versions = spark, written, paths, batch, versions

    def actions(self, table: DeltaTable) -> list[AddAction | RemoveAction]:
        """Of the commit on top of this version. Raises LoadError."""
        path = self._paths.latest
        files = table_files(table)
        is_behind = last_batch(table) != self._batch - 1
        if not self._written.adds and not is_behind:
            return []
        with (
            sorted_errors(f"merging batch {self._batch} into {path}"),
            view_of(self._spark, path, table, list(enumerate(files))) as stored,
        ):
            changes = self._changes(is_behind=is_behind)
            hit = files
            if not is_behind:
                keys = _cells(changes).select(*_FAMILY).distinct()
                held = _cells(stored, NUMBER).join(keys, list(_FAMILY), "left_semi").select(NUMBER).distinct()
                hit = [files[row[NUMBER]] for row in collected(held)]
            numbers = [number for number, file in enumerate(files) if file in hit]
            before = _cells(stored.where(F.col(NUMBER).isin(numbers)))
            adds = self._written_state(before.unionByName(_cells(changes)), hit)
        return [*adds, *(file.removed() for file in hit)]

    def _changes(self, *, is_behind: bool) -> DataFrame:
        """The rows of the batch; if the state is behind, all those of the main table, too."""
        columns = StructType([*_FIELDS, *spark_fields(source_id="string", line="int")])
        frame = self._spark.createDataFrame([], columns)
        if self._written.adds:
            (folder,) = {name.split("/")[0] for name in self._written.names}
            frame = self._spark.read.schema(columns).parquet((self._written.table / folder).for_spark)
        if is_behind:
            main = table_at(self._paths.main, self._batch - 1)
            stored = self._spark.read.format("delta").option("versionAsOf", main.version())
            frame = frame.unionByName(stored.load(self._paths.main.for_spark).select(*columns.fieldNames()))
        # Rows of another parser are no changes.
        part = F.coalesce(F.expr("try_cast(substring_index(source_id, '/', -1) as int)"), F.lit(1))
        part = F.when(F.col("source_id").contains("/"), part).otherwise(F.lit(1))
        place = part.cast("long") * (1 << 32) + F.col("line")
        return frame.where(F.col("table").isNotNull()).withColumn("place", place)

    def _written_state(self, cells: DataFrame, hit: Sequence[TableFile]) -> Sequence[AddAction]:
        path = self._paths.latest
        name, folder = f"cells_{uuid.uuid4().hex}", f"{FOLDER}{self._batch:08}-{uuid.uuid4().hex[:12]}"
        cells.createOrReplaceTempView(name)
        seen = Observation()
        try:
            state = _rows(self._spark.sql(rule(self._versions, name)))
            size = sum(file.size for file in hit) + sum(add.size for add in self._written.adds)
            # Files of a range of rows each, so that a batch that changes few of them replaces few.
            parts = 1 + size // _FILE_BYTES
            order = ("table", "row", "row_bytes", "family")
            state = state.repartitionByRange(parts, *order) if parts > 1 else state.coalesce(1)
            state = state.observe(seen, F.count(F.lit(1)).alias("rows")).sortWithinPartitions(*order)
            writer = state.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
            writer.parquet((path / folder).for_spark)
        finally:
            self._spark.catalog.dropTempView(name)
        with storage_errors(f"{path / folder} cannot be read"):
            return new_files(path, folder, ()).check_rows(seen.get["rows"]).adds


def _cells(rows: DataFrame, *more: str) -> DataFrame:
    """Rows as the rule takes them. A name is its bytes, whether they are UTF-8 or not."""
    r, f, q = (F.coalesce(F.col(f"{n}_bytes"), F.col(n).cast("binary")) for n in HBASE_BYTES[:3])
    return rows.select(
        F.col("table").alias("t"),
        r.alias("r"),
        f.alias("f"),
        q.alias("q"),
        F.col("type").alias("kind"),
        F.col("timestamp").alias("ts"),
        F.col("sequence_id").alias("seq"),
        "place",
        F.struct(*_BODY, *_MORE).alias("body"),
        *more,
    )


def _rows(cells: DataFrame) -> DataFrame:
    """The rule's result as rows of the table."""
    found = cells.selectExpr("*", "t as `table`", "kind as type", "ts as timestamp", "seq as sequence_id", "body.*")
    kept = {name: F.when(F.col("kind") != DROPPED, F.col(name)) for name in ("value", "value_bytes", "tags")}
    return found.withColumns(kept).select(*_STATE.fieldNames())
