"""The Spark session of a loader: one JVM that ends with this process, or that of spark-submit; and its folder.

The JVM reads a pipe from this process and exits when it closes, so it does not outlive a killed loader for long. It may
still commit a batch of the ledger then, but the table takes each batch once. Jars are named, so that Spark downloads
nothing.

With a master that is not local, executors run on other hosts: they get the jars from the driver, write into the table's
folder, which must be mounted there under the same path unless it is in a store, and keep a batch on their own disks.

Under spark-submit the JVM already runs, with the master, memory and jars of spark-submit. The settings that rows depend
on are set in any case; all other settings of spark-submit stay.

Batches between reading and writing, and Spark's log, are in a scratch folder of the run, which holds a lock on it. A
run that was killed cannot clean up, so the next one removes every folder without a lock holder: a loader that dies
repeatedly does not fill the disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pyspark
from logferry.loaders.config import OWN, TESTED_PYSPARK, WHICH_PYSPARK, SparkSettings
from logferry.loaders.errors import LoaderConfigError, SparkUnavailable
from logferry.loaders.jvm_errors import released, sorted_errors
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

_LOCK: Final = "lock"
_PREFIX: Final = "run-"


@contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder, removed at the end. Raises OSError when none can be made."""
    base = parent if parent is not None else Path(tempfile.gettempdir()) / f"logferry-loader-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.lstat()
    # In the shared temporary folder, another user may have made the folder, or a link, before.
    if parent is None and (not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022):
        raise PermissionError(errno.EPERM, "it is a link, or others may write into it: remove it", str(base))
    remove_stale(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_stale(base: Path) -> list[Path]:
    """Removes the folders of runs that are gone; returns them. A folder without a lock yet is left alone."""
    removed = []
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            with (folder / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        except (FileNotFoundError, BlockingIOError):
            continue
    return removed


_LOGGING: Final = Path(__file__).absolute().with_name("log4j2.properties")
# For regular expressions, see `parsing.formats`; unused stack costs nothing.
_STACK: Final = "-Xss128m"
_EXTENSIONS: Final = "spark.sql.extensions"
_CATALOG: Final = "spark.sql.catalog.spark_catalog"
_DELTA: Final = "io.delta.sql.DeltaSparkSessionExtension"
_EXECUTOR: Final = "spark.executor.extraJavaOptions"
_SCRIPT: Final = Path(__file__).absolute().parents[1] / "submit" / "logferry_load.py"
_PORT: Final = "PYSPARK_GATEWAY_PORT"
_HIDDEN: Final = re.compile(r"^spark\.hadoop\.|secret|password|token", re.IGNORECASE)
_NEEDED: Final = ("org.apache.spark.sql.kafka010.KafkaSourceProvider", _DELTA)

# Settings of a store that name a class of its jars.
_CLASSES: Final = (".impl", ".commitProtocolClass")

_SETTINGS: Final = {
    "spark.app.name": "logferry-load",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A table's state is small; with more partitions small commits take seconds.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    # Spark keeps consumers and their surplus records for minutes; no later batch uses them, and after ten batches the
    # heap was full.
    "spark.kafka.consumer.cache.capacity": "1",
    "spark.kafka.consumer.cache.timeout": "2s",
    "spark.kafka.consumer.cache.evictorThreadRunInterval": "1s",
    "spark.kafka.consumer.fetchedData.cache.timeout": "2s",
    "spark.kafka.consumer.fetchedData.cache.evictorThreadRunInterval": "1s",
    "spark.sql.parquet.compression.codec": "zstd",
    # Spark's own, and the keys of Azure's accounts: what its page and event log hide.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|account[.]?key",
    # Tables that are loaded at the same time share the tasks.
    "spark.scheduler.mode": "FAIR",
}


def _with_delta(conf: SparkConf) -> None:
    """Adds Delta to the extensions; another session catalog stays."""
    said = [name for name in (conf.get(_EXTENSIONS, "") or "").split(",") if name.strip()]
    if _DELTA not in said:
        conf.set(_EXTENSIONS, ",".join([*said, _DELTA]))
    if not conf.contains(_CATALOG):
        conf.set(_CATALOG, "org.apache.spark.sql.delta.catalog.DeltaCatalog")


def spark_conf(
    settings: SparkSettings, jars: Sequence[Path], scratch: Path, stores: Mapping[str, str] | None = None
) -> SparkConf:
    """The settings of a JVM that the loader starts. ``stores``: those for access to the tables."""
    given = {**_SETTINGS, **(stores or {}), **settings.conf, **OWN}
    conf = SparkConf(loadDefaults=False).setAll(list(given.items()))
    _with_delta(conf)
    conf.setMaster(settings.master)
    conf.set("spark.driver.memory", settings.driver_memory)
    conf.set("spark.jars", ",".join(map(str, jars)))
    conf.set("spark.driver.extraClassPath", os.pathsep.join(map(str, jars)))
    conf.set("spark.driver.extraJavaOptions", f"{_STACK} -Dlog4j2.configurationFile={_LOGGING.as_uri()}")
    conf.set(_EXECUTOR, f"{settings.conf.get(_EXECUTOR, '')} {_STACK}".strip())
    if settings.master.startswith("local"):
        conf.set("spark.driver.host", "127.0.0.1")
        conf.set("spark.driver.bindAddress", "127.0.0.1")
        conf.set("spark.local.dir", str(scratch / "blocks"))
    if not conf.contains("spark.sql.warehouse.dir"):
        conf.set("spark.sql.warehouse.dir", str(scratch / "warehouse"))
    return conf


def check_version(version: str) -> None:
    """Any patch of a tested minor version. Raises LoaderConfigError."""
    if ".".join(version.split(".")[:2]) not in TESTED_PYSPARK:
        raise LoaderConfigError(
            f"Spark {version} is not supported: {WHICH_PYSPARK}, or use spark-submit of that version"
        )


def launch_conf(conf: SparkConf) -> SparkConf:
    """What the JVM is started with. These become arguments of a process, which every user of the host can read: keys of
    stores and passwords go to the session only, when the JVM runs."""
    shown = [(name, value) for name, value in conf.getAll() if not _HIDDEN.search(name)]
    return SparkConf(loadDefaults=False).setAll(shown)


def is_submitted() -> bool:
    """Whether this process was started by spark-submit."""
    return _PORT in os.environ


def submit_options(jars: Sequence[Path]) -> str:
    """The arguments after ``spark-submit --master …``: the jars, the driver's stack size, and the program."""
    return shlex.join(["--jars", ",".join(map(str, jars)), "--driver-java-options", _STACK, str(_SCRIPT)])


def _submitted_conf(gateway: Any, settings: SparkSettings, stores: Mapping[str, str]) -> SparkConf:
    """The settings of spark-submit, completed by ours. Raises LoaderConfigError where jars are missing."""
    SparkContext._ensure_initialized(gateway=gateway)
    conf = SparkConf(loadDefaults=True, _jvm=SparkContext._jvm)
    for name, value in {**_SETTINGS, **stores, **settings.conf}.items():
        if not conf.contains(name):
            conf.set(name, value)
    conf.setAll(list(OWN.items()))
    _with_delta(conf)
    said = conf.get(_EXECUTOR, "") or ""
    if "-Xss" not in said:
        conf.set(_EXECUTOR, f"{said} {_STACK}".strip())
    return conf


@contextmanager
def spark_session(
    settings: SparkSettings, jars: Sequence[Path], scratch: Path, stores: Mapping[str, str] | None = None
) -> Iterator[SparkSession]:
    """A session with Kafka's and Delta's jars; at most one in a process. Raises SparkUnavailable, LoaderConfigError.

    Java is taken from JAVA_HOME, else from PATH, as by Spark's own launcher. Under spark-submit, Java, master, memory
    and jars are those of spark-submit.
    """
    check_version(pyspark.__version__)
    if is_submitted():
        gateway = launch_gateway()  # type: ignore[no-untyped-call]
        with _session(_submitted_conf(gateway, settings, stores or {}), gateway, stores) as session:
            yield session
        return
    os.environ |= {"SPARK_HOME": str(Path(pyspark.__file__).parent), "PYSPARK_PYTHON": sys.executable}
    log = scratch / "spark.log"
    conf = spark_conf(settings, jars, scratch, stores)
    with log.open("wb") as stderr:
        try:
            gateway = launch_gateway(launch_conf(conf), {"stderr": stderr, "stdout": stderr})  # type: ignore[no-untyped-call]
        except (PySparkRuntimeError, OSError) as error:
            lines = log.read_text(errors="replace").strip().splitlines()
            why, home = lines[-1] if lines else str(error), os.environ.get("JAVA_HOME", "not set")
            raise SparkUnavailable(f"Spark cannot start (JAVA_HOME is {home}): {why}") from None
    try:
        with _session(conf, gateway, stores) as session:
            yield session
    finally:
        _end(gateway)


@contextmanager
def _session(conf: SparkConf, gateway: Any, stores: Mapping[str, str] | None) -> Iterator[SparkSession]:
    SparkContext._ensure_initialized(gateway=gateway)
    _check_jars([*_NEEDED, *(value for name, value in (stores or {}).items() if name.endswith(_CLASSES))])
    with sorted_errors("starting Spark"):
        context = SparkContext(conf=conf, gateway=gateway)
    try:
        yield SparkSession(context)
    finally:
        with released():
            context.stop()


def _check_jars(needed: Sequence[str]) -> None:
    """Raises LoaderConfigError where a class is missing."""
    jvm: Any = SparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in needed:
        if loader.getResource(name.replace(".", "/") + ".class") is None:
            raise LoaderConfigError(
                f"no jar holds {name}: `logferry load` finds the jars by itself; for spark-submit pass the arguments "
                "that `logferry load --print-submit` prints"
            )


def _end(gateway: Any) -> None:
    """Ends the JVM and waits for it, so that nothing writes after the loader has returned."""
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
