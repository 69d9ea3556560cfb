"""Spark's settings for the stores of the tables, and keys that change while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from logferry.loaders.config import Config
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.jvm_errors import sorted_errors
from logferry.loaders.location import Location
from pyspark.sql import SparkSession

_HADOOP = "spark.hadoop."


def store_settings(settings: Config) -> dict[str, str]:
    """As `settings_for`, for all tables of the configuration."""
    return settings_for(job.path for job in settings.tables)


def settings_for(tables: Iterable[Location]) -> dict[str, str]:
    """Spark's settings for the stores of the tables, keys included. Raises LoaderConfigError."""
    found: dict[str, str] = {}
    for table in tables:
        try:
            found |= {} if table.access is None else table.access.hadoop_options()
        except (OSError, ValueError) as error:
            raise LoaderConfigError(f"{table.scheme}: {error}") from None
    return found


def renew_keys(spark: SparkSession, settings: Config) -> None:
    """Lets the driver use the keys that the files hold now. Raises LoaderConfigError, SparkUnavailable.

    Its connections to the stores are closed where a key has changed: a batch in progress fails, and is repeated.
    Executors on other hosts keep the connections that they have.
    """
    wanted = {name.removeprefix(_HADOOP): value for name, value in store_settings(settings).items()}
    keys = {name: value for name, value in wanted.items() if name.endswith((".key", ".token"))}
    if not keys:
        return
    with sorted_errors("renewing the keys of the store"):
        context: Any = spark.sparkContext
        conf = context._jsc.hadoopConfiguration()
        changed = {name: value for name, value in keys.items() if conf.get(name) != value}
        for name, value in changed.items():
            conf.set(name, value)
        if changed:
            context._jvm.org.apache.hadoop.fs.FileSystem.closeAll()
