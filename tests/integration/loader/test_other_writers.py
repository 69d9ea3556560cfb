"""Tables that Spark's Delta has changed: features that the loader cannot keep, and commits beside a running load."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable
from logferry.loaders.batches import execute
from logferry.loaders.batches.execute import Loader
from logferry.loaders.errors import LedgerBroken, UnsupportedFeature
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import load_table, prepare
from logferry.loaders.storage.commit import DataFiles, commit_files
from logferry.loaders.storage.files import open_table
from pyspark.sql import SparkSession

from tests.support.loader import Topic, check_exact, chunks_of, stored
from tests.support.table_loads import done, job

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]
# Feature → the statement by which Spark gives it to a table.
ENABLED = {
    "deletionVectors": "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')",
    "checkConstraints": "ALTER TABLE {} ADD CONSTRAINT positive CHECK (seqno > 0)",
    "rowTracking": "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')",
    "clustering": "ALTER TABLE {} CLUSTER BY (source_id)",
    "inCommitTimestamp": "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true')",
    "columnMapping": "ALTER TABLE {} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')",
    "typeWidening": "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')",
    "v2Checkpoint": "ALTER TABLE {} SET TBLPROPERTIES ('delta.checkpointPolicy' = 'v2')",
}


def sql(spark: SparkSession, statement: str, table: Location) -> None:
    spark.sql(statement.format(f"delta.`{table.for_spark}`")).count()


@pytest.mark.parametrize("feature", ENABLED)
def test_a_feature_that_spark_gave_to_a_table_is_refused_by_name(feature: str, spark: SparkSession, table: Location):
    """Before a row is read, by every command that writes; and the table stays as it is."""
    paths = TablePaths.of(table)
    prepare(paths)
    sql(spark, ENABLED[feature], table)
    version = DeltaTable(table.uri, storage_options=table.options).version()
    with pytest.raises(UnsupportedFeature, match=feature):
        prepare(paths)
    with pytest.raises(UnsupportedFeature, match=feature):
        commit_files(DataFiles(table), table, 0, "run")
    assert DeltaTable(table.uri, storage_options=table.options).version() == version


def test_generated_columns_of_a_table_that_spark_created(spark: SparkSession, table: Location):
    sql(spark, "CREATE TABLE {} (seqno bigint, twice bigint GENERATED ALWAYS AS (seqno * 2)) USING delta", table)
    with pytest.raises(UnsupportedFeature, match=r"generatedColumns \(column twice\)"):
        prepare(TablePaths.of(table))


async def test_the_load_resumes_once_a_constraint_is_dropped(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    prepare(TablePaths.of(table))
    sql(loader().spark, ENABLED["checkConstraints"], table)
    with pytest.raises(UnsupportedFeature, match=r"checkConstraints \(positive: seqno > 0\)"):
        done(load_table(loader(), job(table, topic.name)))
    sql(loader().spark, "ALTER TABLE {} DROP CONSTRAINT positive", table)
    done(load_table(loader(), job(table, topic.name)))
    check_exact(table, topic.committed)


# Statements that may run beside a load; a source named nobody has no rows.
BESIDE = (
    "OPTIMIZE {}",
    "ALTER TABLE {} SET TBLPROPERTIES ('team' = 'analysts')",
    "DELETE FROM {} WHERE source_id = 'gone' AND line < 3",
    "VACUUM {}",
    "UPDATE {} SET newline = newline WHERE source_id = 'a'",
)


@pytest.mark.long
async def test_spark_changes_a_table_while_it_is_loaded(loader: Start, topic: Topic, table: Location):
    await topic.create()
    for number in range(4):
        await topic.write(chunks_of("a", b"%d\n\xff\n" % number, start=99 * number))
    await topic.write(chunks_of("gone", b"1\n2\n3\n"))
    del topic.committed[-1]
    work, ended = job(table, topic.name, max_records=2), threading.Event()
    batches = load_table(loader(), work)
    # The table is there, and its first rows.
    while not stored(table) if open_table(table) else True:
        next(batches)
    failures: list[BaseException] = []
    statements: list[str] = []

    def beside() -> None:
        while len(statements) < len(BESIDE) or not ended.is_set():
            statement = BESIDE[len(statements) % len(BESIDE)]
            try:
                sql(loader().spark, statement, table)
            except Exception as error:  # noqa: BLE001 - Spark's own conflicts are no failure of the load
                if "concurrent" not in str(error).lower():
                    failures.append(error)
                    return
            statements.append(statement)

    other = threading.Thread(target=beside)
    other.start()
    done(batches)
    ended.set()
    other.join()
    assert failures == []
    done(load_table(loader("again"), work))
    sql(loader().spark, "DELETE FROM {} WHERE source_id = 'gone'", table)
    check_exact(table, topic.committed)


def overwrite_last_commit(table: Location) -> None:
    """As Spark does on a mounted folder, when it looked before the loader's commit was there, and renamed after it."""
    newest = max(Path(table).glob("_delta_log/*.json"))
    newest.write_text(json.dumps({"commitInfo": {"timestamp": 0, "operation": "SET TBLPROPERTIES"}}) + "\n")


async def test_a_commit_that_spark_overwrites_is_repeated(loader: Start, topic: Topic, table: Location, store: str):
    if store:
        pytest.skip("stores refuse the second commit")
    await topic.create()
    for number in range(2):
        await topic.write(chunks_of("a", b"%d\n\xff\n" % number, start=99 * number))
        done(load_table(loader(), job(table, topic.name)))
        overwrite_last_commit(table)
        assert len(stored(table)) == number, "the batch is gone"
        done(load_table(loader("again"), job(table, topic.name)))
        check_exact(table, topic.committed)


async def test_no_batch_is_committed_after_one_that_is_gone(
    loader: Start, topic: Topic, table: Location, store: str, monkeypatch: pytest.MonkeyPatch
):
    """Spark overwrites the commit of a batch while the next one is written: that one must not hide the gap."""
    if store:
        pytest.skip("stores refuse the second commit")
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    done(load_table(loader(), job(table, topic.name)))
    await topic.write(chunks_of("b", b"2\n"))
    plain = execute._files

    def overwritten_meanwhile(*given: object) -> DataFiles:
        written = plain(*given)  # type: ignore[arg-type]
        overwrite_last_commit(table)
        return written

    monkeypatch.setattr(execute, "_files", overwritten_meanwhile)
    with pytest.raises(LedgerBroken, match="holds batch -1 and no longer 0: another program has replaced a commit"):
        done(load_table(loader(), job(table, topic.name)))
    assert stored(table) == []
    with pytest.raises(LedgerBroken, match=r"has batch 1, .* only -1"):
        done(load_table(loader(), job(table, topic.name)))
