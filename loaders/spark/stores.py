"""Spark's settings for the stores of the tables, and keys that change while it runs."""

from __future__ import annotations

from typing import Any

from logferry.loaders.config import Config
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.jvm_errors import sorted_errors
from pyspark.sql import SparkSession

_HADOOP = "spark.hadoop."


def store_settings(settings: Config) -> dict[str, str]:
    """Spark's settings for the stores of the tables, keys included. Raises LoaderConfigError."""
    if not any(job.path.scheme == "s3" for job in settings.tables):
        return {}
    try:
        return settings.s3.access.hadoop_options()
    except (OSError, ValueError) as error:
        raise LoaderConfigError(f"s3: {error}") from None


def renew_keys(spark: SparkSession, settings: Config) -> None:
    """Lets the driver use the keys that the files hold now. Raises LoaderConfigError, SparkUnavailable.

    Its connections to the stores are closed where a key has changed: a batch in progress fails, and is repeated.
    Executors on other hosts keep the connections that they have.
    """
    wanted = {name.removeprefix(_HADOOP): value for name, value in store_settings(settings).items()}
    keys = {name: value for name, value in wanted.items() if name.endswith(("access.key", "secret.key", ".token"))}
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
