"""Names of tables in the catalog of the session: Spark's own, a Hive metastore, or one that the operator configured.

A name only leads to the folder: columns, rows and batches are those of the Delta log there, whoever reads it. So
nothing that a load guarantees depends on the catalog, and a catalog that is unavailable does not stop a load.
"""

from __future__ import annotations

import re
from typing import Final

from logferry.loaders.errors import ForeignTable, LoadError, SparkUnavailable
from logferry.loaders.jvm_errors import JVM_ERRORS, collected, sorted_error
from logferry.loaders.location import Location
from pyspark.sql import SparkSession

_SCHEME: Final = re.compile(r"(?:file:/*(?=/)|s3a?(?=://))")


def register_table(spark: SparkSession, name: str, path: Location) -> str | None:
    """Creates the name unless the catalog has it. Returns why that is impossible now, None where it is done.

    Safe to call again, and by several loaders. Raises ForeignTable where the name stands for something else, and
    SparkUnavailable.
    """
    quoted = ".".join(f"`{part}`" for part in name.split("."))
    try:
        spark.sql(f"CREATE TABLE IF NOT EXISTS {quoted} USING delta LOCATION '{_literal(path.for_spark)}'")
        said = collected(spark.sql(f"DESCRIBE TABLE EXTENDED {quoted}"))
    except JVM_ERRORS as error:
        found = sorted_error(error, f"{path} cannot be registered as {name}")
        if isinstance(found, SparkUnavailable):
            raise found from None
        return _first_line(found)
    facts = {row["col_name"]: row["data_type"] for row in said}
    place, kind = facts.get("Location"), facts.get("Provider")
    if place is None or _plain(place) != _plain(path.for_spark) or (kind or "").lower() != "delta":
        what = f"a table of {kind or 'another kind'} at {place}" if place else "a view, or a table without a location"
        raise ForeignTable(
            f"{path} cannot be registered as {name}: that is {what}. Drop it, or change `register` of the table"
        )
    return None


def _literal(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _plain(place: str) -> str:
    """One spelling of a location: Hadoop writes a folder as ``file:/a``, and both names of S3 are the same."""
    return _SCHEME.sub(lambda found: "s3" if found[0].startswith("s3") else "", place, count=1).rstrip("/")


def _first_line(error: LoadError) -> str:
    return str(error).splitlines()[0]
