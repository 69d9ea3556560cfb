"""A loader that spark-submit has started: its JVM is there already, with a master, memory and jars that are not ours.

What the rows depend on is set all the same, see `session`; what spark-submit was told of the rest stays.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from logferry.loaders.errors import ConfigError
from pyspark import SparkConf, SparkContext

_SCRIPT: Final = Path(__file__).absolute().parent / "submit" / "logferry_load.py"
_PORT: Final = "PYSPARK_GATEWAY_PORT"
_NEEDED: Final = ("org.apache.spark.sql.kafka010.KafkaSourceProvider", "io.delta.sql.DeltaSparkSessionExtension")


def is_submitted() -> bool:
    """Whether this process was started by spark-submit."""
    return _PORT in os.environ


def submit_options(jars: Sequence[Path]) -> str:
    """What stands behind ``spark-submit --master …``: the jars, the driver's stack, and the program."""
    return shlex.join(["--jars", ",".join(map(str, jars)), "--driver-java-options", "-Xss128m", str(_SCRIPT)])


def submitted_conf(gateway: Any, ours: Mapping[str, str], forced: Mapping[str, str], stack: str) -> SparkConf:
    """What spark-submit was told, with ``ours`` where it was told nothing. Raises ConfigError where jars are missing.

    ``stack``: of the executors' threads, unless they were told of another.
    """
    SparkContext._ensure_initialized(gateway=gateway)
    jvm: Any = SparkContext._jvm
    _check_jars(jvm)
    conf = SparkConf(loadDefaults=True, _jvm=jvm)
    for name, value in ours.items():
        if not conf.contains(name):
            conf.set(name, value)
    conf.setAll(list(forced.items()))
    name = "spark.executor.extraJavaOptions"
    said = conf.get(name, "") or ""
    if "-Xss" not in said:
        conf.set(name, f"{said} {stack}".strip())
    return conf


def _check_jars(jvm: Any) -> None:
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    for name in _NEEDED:
        if loader.getResource(name.replace(".", "/") + ".class") is None:
            raise ConfigError(
                f"spark-submit was given no jar that holds {name}: give it what `logferry load --print-submit` says"
            )


__all__ = ["is_submitted", "submit_options", "submitted_conf"]
