"""The settings of Spark: those that rows depend on cannot be configured, and a cluster's driver is not on loopback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from logferry.loaders.config import OWN, SparkSettings, check_config
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.location import AzureAccess, S3Access
from logferry.loaders.spark.session import check_version, launch_conf, spark_conf

JARS = [Path("/jars/a.jar"), Path("/jars/b.jar")]


def told(tmp_path: Path, **settings: object) -> dict[str, str]:
    conf = spark_conf(SparkSettings.model_validate(settings), JARS, tmp_path)
    return dict(conf.getAll())


def test_a_local_session_stays_on_this_machine(tmp_path: Path):
    conf = told(tmp_path)
    assert conf["spark.master"] == "local[*]"
    assert conf["spark.driver.host"] == conf["spark.driver.bindAddress"] == "127.0.0.1"
    assert conf["spark.local.dir"] == str(tmp_path / "blocks")


def test_executors_elsewhere_reach_the_driver_and_keep_batches_on_disks_of_their_own(tmp_path: Path):
    conf = told(tmp_path, master="spark://master:7077")
    assert conf["spark.master"] == "spark://master:7077"
    assert conf["spark.jars"] == "/jars/a.jar,/jars/b.jar"
    assert conf.keys() & {"spark.driver.host", "spark.driver.bindAddress", "spark.local.dir"} == set()
    assert conf["spark.executor.extraJavaOptions"] == "-Xss128m"


def test_settings_of_sparks_own(tmp_path: Path):
    more = {
        "spark.executor.memory": "4g",
        "spark.ui.enabled": "true",
        "spark.executor.extraJavaOptions": "-XX:+UseG1GC",
    }
    conf = told(tmp_path, conf=more)
    assert (conf["spark.executor.memory"], conf["spark.ui.enabled"]) == ("4g", "true")
    assert conf["spark.executor.extraJavaOptions"] == "-XX:+UseG1GC -Xss128m"
    assert OWN.items() <= conf.items()


def test_extensions_and_catalogs_of_the_operator_stay(tmp_path: Path):
    more = {
        "spark.sql.extensions": "org.example.Extensions",
        "spark.sql.catalog.spark_catalog": "org.example.SessionCatalog",
        "spark.sql.catalog.unity": "org.example.UnityCatalog",
        "spark.sql.catalogImplementation": "hive",
        "spark.sql.warehouse.dir": "s3a://warehouse",
    }
    conf = told(tmp_path, conf=more)
    delta = "io.delta.sql.DeltaSparkSessionExtension"
    assert {name: conf[name] for name in more} == {**more, "spark.sql.extensions": f"org.example.Extensions,{delta}"}
    plain = told(tmp_path)
    assert plain["spark.sql.catalog.spark_catalog"] == "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    assert plain["spark.sql.warehouse.dir"] == str(tmp_path / "warehouse")


@pytest.mark.parametrize("name", [*OWN, "spark.master", "spark.jars", "spark.driver.memory", "master", "spark.a b"])
def test_settings_that_the_loader_sets_are_refused(name: str):
    raw = {
        "kafka": {"bootstrap_servers": "127.0.0.1:1"},
        "spark": {"conf": {name: "x"}},
        "tables": [{"path": "/t", "topics": ["dc1.a"]}],
    }
    with pytest.raises(LoaderConfigError, match=r"spark\.conf"):
        check_config(raw, "file")


@pytest.mark.parametrize("version", ["4.0.0", "4.1.3", "4.1.4.dev1"])
def test_any_patch_of_a_tested_version_is_taken(version: str):
    check_version(version)


@pytest.mark.parametrize("version", ["3.5.8", "4.2.0", "4.10.0"])
def test_another_spark_is_refused_by_name(version: str):
    with pytest.raises(LoaderConfigError, match=f"Spark {version} is not supported: install one of pyspark==4.1.3"):
        check_version(version)


def test_extensions_and_the_session_catalog_of_the_user_stay(tmp_path: Path):
    name, catalog = "spark.sql.extensions", "spark.sql.catalog.spark_catalog"
    delta = "io.delta.sql.DeltaSparkSessionExtension"
    assert told(tmp_path)[name] == delta
    conf = told(tmp_path, conf={name: "org.example.One,org.example.Two", catalog: "org.example.Catalog"})
    assert conf[name] == f"org.example.One,org.example.Two,{delta}"
    assert conf[catalog] == "org.example.Catalog"
    assert told(tmp_path, conf={name: f"{delta},org.example.One"})[name] == f"{delta},org.example.One"


def test_no_key_is_an_argument_of_a_process(tmp_path: Path):
    """What the JVM is started with can be read by every user of the host."""
    hidden = {
        **{f"spark.hadoop.fs.s3a.{name}": "sEcReT" for name in ("access.key", "secret.key", "session.token")},
        **dict.fromkeys(("spark.hadoop.fs.azure.account.key.a", "spark.ssl.keyPassword", "spark.my.token"), "sEcReT"),
    }
    conf = spark_conf(SparkSettings.model_validate({"conf": {"spark.executor.memory": "4g"}}), JARS, tmp_path, hidden)
    assert hidden.items() <= dict(conf.getAll()).items(), "the session has them"
    started = dict(launch_conf(conf).getAll())
    assert "sEcReT" not in started.values()
    assert set(dict(conf.getAll())) - set(started) == set(hidden), "and all others are there from the start"


def test_the_page_and_the_event_log_hide_the_keys_of_all_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Under spark-submit they are settings of Spark as well, which it shows but for the names that match."""
    (tmp_path / "secret").write_text("sEcReT")
    file = tmp_path / "secret"
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "sEcReT")
    stores = (S3Access(None, None, file, file, file), AzureAccess(file), AzureAccess())
    keys = [name for store in stores for name, value in store.hadoop_options().items() if value == "sEcReT"]
    assert len(keys) == 5
    hidden = re.compile(told(tmp_path)["spark.redaction.regex"])
    assert [name for name in keys if not hidden.search(name)] == []
