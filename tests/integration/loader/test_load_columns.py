"""Columns that change while a table is loaded, and the name of a table in a catalog."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from logferry.loaders.batches import execute
from logferry.loaders.batches.execute import Loader
from logferry.loaders.batches.records import write_files
from logferry.loaders.config import TableJob
from logferry.loaders.errors import ForeignTable, Overtaken
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import CatalogNotice, load_table, prepare
from logferry.loaders.storage.commit import DataFiles
from logferry.loaders.storage.ledger import read_ledger
from pyspark.sql import DataFrame, SparkSession

from tests.support.loader import Topic, check_exact, chunks_of, stored
from tests.support.loader_process import loader_env, run_module
from tests.support.table_loads import LoaderDied, die, done, job

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]
NARROW = {"n": "int", "f": "float", "d": "decimal(6,2)", "items": "array<struct<n:int>>", "m": "map<string,int>"}
WIDE = {
    "n": "bigint",
    "f": "double",
    "d": "decimal(12,4)",
    "items": "array<struct<n:bigint,s:string>>",
    "m": "map<string,bigint>",
}
OLD = b'{"n": 1, "f": 0.5, "d": 1.25, "items": [{"n": 7, "s": "x"}, null], "m": {"a": 1}, "other": [1.50]}\n'
NEW = b'{"n": 1099511627776, "f": 0.1, "d": 12345678.1234, "items": [{"n": 1099511627776, "s": "x"}], "m": {}}\n'


def json_job(table: Location, topic: Topic, columns: dict[str, str], **more: Any) -> TableJob:
    parser = {"format": "json", "columns": columns, **more.pop("parser", {})}
    return job(table, topic.name, parser=parser, **more)


def values(table: Location) -> list[tuple[Any, ...]]:
    rows = sorted(stored(table), key=lambda row: (row["source_id"], row["seqno"], row["line"]))
    return [(row["n"], row["f"], row["d"], row["items"], row["m"]) for row in rows]


OLD_ROW: tuple[Any, ...] = (1, 0.5, Decimal("1.25"), [{"n": 7, "s": None}, None], [("a", 1)])
NEW_ROW: tuple[Any, ...] = (2**40, 0.1, Decimal("12345678.1234"), [{"n": 2**40, "s": "x"}], [])


async def test_wider_types_by_configuration(loader: Start, topic: Topic, table: Location):
    """Old rows and new ones are read alike by pyarrow and by Spark; without the change the new line has no row."""
    await topic.create()
    await topic.write(chunks_of("a", OLD))
    done(load_table(loader(), json_job(table, topic, NARROW)))
    await topic.write(chunks_of("b", NEW))
    done(load_table(loader(), json_job(table, topic, WIDE)))
    check_exact(table, topic.committed)
    assert values(table) == [OLD_ROW, NEW_ROW]
    columns = loader().spark.read.format("delta").load(table.for_spark).orderBy("source_id").select(*WIDE)
    assert [json.loads(row[0]) for row in columns.selectExpr("to_json(struct(*))").collect()] == [
        {"n": 1, "f": 0.5, "d": 1.25, "items": [{"n": 7}, None], "m": {"a": 1}},
        {"n": 2**40, "f": 0.1, "d": 12345678.1234, "items": [{"n": 2**40, "s": "x"}], "m": {}},
    ]


async def test_a_batch_of_the_old_types_is_finished_in_the_wider_table(
    loader: Start, topic: Topic, table: Location, monkeypatch: pytest.MonkeyPatch
):
    """Planned for the old parser, so that a line which fits the new one only is quarantined, as planned."""
    await topic.create()
    await topic.write(chunks_of("a", OLD))
    with monkeypatch.context() as patch:
        patch.setattr("logferry.loaders.runs.table_run.do_batch", die)
        with pytest.raises(LoaderDied):
            list(load_table(loader("dies"), json_job(table, topic, NARROW)))
    await topic.write(chunks_of("b", NEW))
    first, second = done(load_table(loader(), json_job(table, topic, WIDE)))
    assert (first.rows, second.rows) == (1, 1)
    assert values(table) == [OLD_ROW, NEW_ROW]
    check_exact(table, topic.committed)


async def test_a_table_that_gets_wider_while_a_batch_is_written(
    loader: Start, topic: Topic, table: Location, monkeypatch: pytest.MonkeyPatch
):
    """Two loaders with different configurations: the files of the old one are not committed to the new table."""
    await topic.create()
    await topic.write(chunks_of("a", OLD))
    old, new = json_job(table, topic, NARROW), json_job(table, topic, WIDE)

    def widened_afterwards(rows: DataFrame, path: Location, *more: Any) -> DataFiles:
        written = write_files(rows, path, *more)
        prepare(TablePaths.of(table), new.parser)
        return written

    with monkeypatch.context() as patch:
        patch.setattr(execute, "write_files", widened_afterwards)
        with pytest.raises(Overtaken, match="changed the type of d, f, items, m, n"):
            done(load_table(loader("old"), old))
    assert stored(table) == []
    said = r"n \(bigint, not int\)"
    with pytest.raises(ForeignTable, match=said):
        done(load_table(loader("old"), old))
    done(load_table(loader("new"), new))
    assert values(table) == [OLD_ROW]
    check_exact(table, topic.committed)


async def test_keys_are_rescued_from_one_batch_on(loader: Start, topic: Topic, table: Location):
    await topic.create()
    await topic.write(chunks_of("a", OLD))
    done(load_table(loader(), json_job(table, topic, NARROW)))
    await topic.write(chunks_of("b", OLD))
    done(load_table(loader(), json_job(table, topic, NARROW, parser={"rescued": True})))
    rows = {row["source_id"]: row["rescued"] for row in stored(table)}
    assert rows == {"a": None, "b": '{"other": [1.50]}'}
    assert [entry.parser.partition(":")[0] for entry in read_ledger(table)] == ["json/2", "json/2"]


# ---- catalogs ----------------------------------------------------------------------------------------------


@pytest.fixture
def catalog(spark: SparkSession, warehouse: Location, topic_name: str) -> Iterator[str]:
    """A schema of Spark's own catalog."""
    name = "".join(letter if letter.isalnum() else "_" for letter in topic_name).lower()
    spark.sql(f"CREATE SCHEMA {name} LOCATION '{(warehouse / 'schema').for_spark}'")
    yield name
    spark.sql(f"DROP SCHEMA {name} CASCADE")


async def test_a_name_in_the_catalog_follows_the_table(loader: Start, topic: Topic, table: Location, catalog: str):
    await topic.create()
    await topic.write(chunks_of("a", OLD))
    work = json_job(table, topic, {"n": "int"}, register=f"{catalog}.orders")
    done(load_table(loader(), work))
    spark = loader().spark
    assert [row.n for row in spark.table(f"{catalog}.orders").collect()] == [1]
    versions = len(read_ledger(table))
    await topic.write(chunks_of("b", NEW))
    done(load_table(loader(), json_job(table, topic, {"n": "bigint", "f": "double"}, register=f"{catalog}.orders")))
    rows = spark.table(f"{catalog}.orders").orderBy("source_id").collect()
    assert [(row.n, row.f) for row in rows] == [(1, None), (2**40, 0.1)]
    assert len(read_ledger(table)) == versions + 1
    check_exact(table, topic.committed)
    spark.sql(f"DROP TABLE {catalog}.orders")
    done(load_table(loader("next"), json_job(table, topic, {"n": "bigint"}, register=f"{catalog}.orders")))
    assert spark.table(f"{catalog}.orders").count() == 2, "it is kept"


async def test_a_name_that_stands_for_something_else_is_refused(
    loader: Start, topic: Topic, table: Location, catalog: str
):
    await topic.create()
    await topic.write(chunks_of("a", OLD))
    spark, other = loader().spark, table.with_name("other")
    done(load_table(loader(), json_job(other, topic, {"n": "int"}, register=f"{catalog}.taken")))
    spark.sql(f"CREATE VIEW {catalog}.seen AS SELECT 1 AS n")
    for name, said in {"taken": f"a table of delta at .*{other.name}", "seen": "a view"}.items():
        with pytest.raises(ForeignTable, match=f"cannot be registered as {catalog}.{name}: that is {said}"):
            done(load_table(loader(), json_job(table, topic, {"n": "int"}, register=f"{catalog}.{name}")))
        assert stored(table) == []
    done(load_table(loader(), json_job(table, topic, {"n": "int"}, register=f"{catalog}.free")))
    assert spark.table(f"{catalog}.taken").count() == spark.table(f"{catalog}.free").count() == 1


async def test_a_catalog_that_fails_does_not_stop_a_load(loader: Start, topic: Topic, table: Location, catalog: str):
    await topic.create()
    await topic.write(chunks_of("a", OLD))
    run, work = loader(), json_job(table, topic, {"n": "int"}, register="nowhere.orders")
    events = list(load_table(run, work))
    (notice,) = [event for event in events if isinstance(event, CatalogNotice)]
    assert "cannot be registered as nowhere.orders" in notice.reason
    assert "SCHEMA_NOT_FOUND" in notice.reason
    check_exact(table, topic.committed)
    run.spark.sql(f"CREATE SCHEMA nowhere LOCATION '{(table.parent / 'nowhere').for_spark}'")
    try:
        assert [event for event in load_table(run, work) if isinstance(event, CatalogNotice)] == [notice], "not yet"
        events = list(load_table(loader("next"), work))
        assert not [event for event in events if isinstance(event, CatalogNotice)], "tried again"
        assert run.spark.table("nowhere.orders").count() == 1
    finally:
        run.spark.sql("DROP SCHEMA nowhere CASCADE")


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_hive_metastore_by_the_command(kafka: Any, topic: Topic, table: Location, tmp_path: Any):
    """Derby's, which Spark brings; the loader's settings of the session stay beside the operator's."""
    await topic.create()
    await topic.write(chunks_of("a", b"1\n"))
    conf = {
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": str(tmp_path / "hive"),
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={tmp_path}/metastore;create=true",
        "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
        "spark.hadoop.hive.metastore.schema.verification": "false",
    }
    # Derby's log is in the working folder otherwise.
    env = {**loader_env(), "JAVA_TOOL_OPTIONS": f"-Dderby.stream.error.file={tmp_path}/derby.log"}
    command = ["--table", str(table), "--topics", topic.name, "--bootstrap", kafka.bootstrap, "--master", "local[1]"]
    command += [part for name, value in conf.items() for part in ("--spark-conf", f"{name}={value}")]
    ended = run_module([*command, "--json", "--register", "default.orders"], env)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout)["tables"][0]["catalog_failure"] is None
    # Another process finds the name in the metastore, and that it is not this table.
    command[1] = str(table.with_name("other"))
    ended = run_module([*command, "--json", "--register", "default.orders"], env)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"a table of delta at file:{table}" in json.loads(ended.stdout)["tables"][0]["error"]
