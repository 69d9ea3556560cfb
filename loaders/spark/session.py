"""The Spark session of a loader: one JVM, started here, ended with this process; or that of spark-submit.

The JVM reads our end of a pipe and exits when it closes, so it does not outlive a killed loader for long; what it may
still commit in between is a batch of the ledger, and the table takes each batch once. Jars are given by name, for
Spark must not fetch anything.

With a master that is not local, the executors are processes elsewhere: they get the jars from the driver, write into
the table's folder, which must be mounted there under the same path, and keep a batch on disks of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyspark
from logferry.loaders.config import SparkSettings
from logferry.loaders.errors import SparkAway
from logferry.loaders.jvm_errors import released, sorted_errors
from logferry.loaders.submitted import is_submitted, submitted_conf
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

# Only errors, and those into the log of the run: a terminal shows what the loader says.
_LOGGING: Final = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n%ex
"""

# For regular expressions, see `parsing.formats`; what is not used of it costs nothing.
_STACK: Final = "-Xss128m"
_EXECUTOR: Final = "spark.executor.extraJavaOptions"

# What rows and tables depend on, whoever configures the rest.
OWN: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # The older default holds nanoseconds: it ends in the year 2262.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A text that an older Spark would have read as another time is no time, and no error.
    "spark.sql.legacy.timeParserPolicy": "CORRECTED",
    # Of two headers of one name the last one counts, as everywhere else.
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
}

_SETTINGS: Final = {
    "spark.app.name": "logferry-load",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A table's state is small; more partitions made small commits take seconds.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    # Spark keeps consumers, and what they have fetched too much, for minutes; no later batch takes them up again, and
    # after ten batches the heap was full.
    "spark.kafka.consumer.cache.capacity": "1",
    "spark.kafka.consumer.cache.timeout": "2s",
    "spark.kafka.consumer.cache.evictorThreadRunInterval": "1s",
    "spark.kafka.consumer.fetchedData.cache.timeout": "2s",
    "spark.kafka.consumer.fetchedData.cache.evictorThreadRunInterval": "1s",
    "spark.sql.parquet.compression.codec": "zstd",
    # Tables that are loaded at the same time share the tasks.
    "spark.scheduler.mode": "FAIR",
}


def spark_conf(settings: SparkSettings, jars: Sequence[Path], scratch: Path) -> SparkConf:
    """Of a JVM of our own."""
    logging = scratch / "log4j2.properties"
    conf = SparkConf(loadDefaults=False).setAll([*_SETTINGS.items(), *settings.conf.items(), *OWN.items()])
    conf.setMaster(settings.master)
    conf.set("spark.driver.memory", settings.driver_memory)
    conf.set("spark.jars", ",".join(map(str, jars)))
    conf.set("spark.driver.extraClassPath", os.pathsep.join(map(str, jars)))
    conf.set("spark.driver.extraJavaOptions", f"{_STACK} -Dlog4j2.configurationFile={logging.as_uri()}")
    conf.set(_EXECUTOR, f"{settings.conf.get(_EXECUTOR, '')} {_STACK}".strip())
    if settings.master.startswith("local"):
        conf.set("spark.driver.host", "127.0.0.1")
        conf.set("spark.driver.bindAddress", "127.0.0.1")
        conf.set("spark.local.dir", str(scratch / "blocks"))
    conf.set("spark.sql.warehouse.dir", str(scratch / "warehouse"))
    return conf


@contextmanager
def spark_session(settings: SparkSettings, jars: Sequence[Path], scratch: Path) -> Iterator[SparkSession]:
    """A session with Kafka's and Delta's jars; at most one in a process. Raises SparkAway, ConfigError.

    Takes Java from JAVA_HOME, else from PATH, as Spark's own launcher does. Under spark-submit, Java, master, memory
    and jars are what that was told.
    """
    if is_submitted():
        gateway = launch_gateway()  # type: ignore[no-untyped-call]
        conf = submitted_conf(gateway, {**_SETTINGS, **settings.conf}, OWN, _STACK)
        with _session(conf, gateway) as session:
            yield session
        return
    for name, value in (("SPARK_HOME", str(Path(pyspark.__file__).parent)), ("PYSPARK_PYTHON", sys.executable)):
        os.environ[name] = value
    (scratch / "log4j2.properties").write_text(_LOGGING)
    log = scratch / "spark.log"
    conf = spark_conf(settings, jars, scratch)
    with log.open("wb") as stderr:
        gateway = _launch(conf, log, {"stderr": stderr, "stdout": stderr})
    try:
        with _session(conf, gateway) as session:
            yield session
    finally:
        _end(gateway)


@contextmanager
def _session(conf: SparkConf, gateway: Any) -> Iterator[SparkSession]:
    with sorted_errors("starting Spark"):
        context = SparkContext(conf=conf, gateway=gateway)
    try:
        yield SparkSession(context)
    finally:
        with released():
            context.stop()


def _launch(conf: SparkConf, log: Path, popen: dict[str, Any]) -> Any:
    try:
        return launch_gateway(conf, popen)  # type: ignore[no-untyped-call]
    except (PySparkRuntimeError, OSError) as error:
        lines = log.read_text(errors="replace").strip().splitlines()
        why = lines[-1] if lines else str(error)
        raise SparkAway(f"Spark cannot start (JAVA_HOME is {os.environ.get('JAVA_HOME', 'not set')}): {why}") from None


def _end(gateway: Any) -> None:
    """Ends the JVM and waits for it, so that nothing writes any more when the loader has returned."""
    SparkContext._gateway = None
    SparkContext._jvm = None
    gateway.shutdown()
    jvm: subprocess.Popen[bytes] = gateway.proc
    if jvm.stdin is not None:
        jvm.stdin.close()
    try:
        jvm.wait(timeout=30)
    except subprocess.TimeoutExpired:
        jvm.kill()
        jvm.wait()
