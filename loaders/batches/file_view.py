"""Files of a table as a frame of Spark, which the executors read: exactly these files, with the values of the log.

A view is a Delta table of one version beside the files, in the table's folder: its log names them by their addresses.
So neither the files nor their folders are listed, and a column that a file lacks is null, as in the table itself. Each
file has a number, by which Spark passes over the others. A view that a killed loader leaves holds no rows; `retention`
removes it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote

from deltalake import DeltaTable
from logferry.loaders.location import Location
from logferry.loaders.storage.files import create_file, delete_folder, storage_errors
from logferry.loaders.storage.retention import VIEW
from logferry.loaders.storage.rewrite import TableFile
from pyspark.sql import DataFrame, SparkSession

# The number of the file, or of its group, as a column of the view.
NUMBER: Final = "_file"


@contextmanager
def view_of(
    spark: SparkSession, path: Location, table: DeltaTable, files: Sequence[tuple[int, TableFile]]
) -> Iterator[DataFrame]:
    """The rows of the files, and the column `NUMBER`. Valid within the block. Raises StorageUnavailable."""
    folder = path / f"{VIEW}{uuid.uuid4().hex[:12]}"
    with storage_errors(f"{folder} cannot be written"):
        lines = _log(path, table, files)
        with create_file(folder, "_delta_log/00000000000000000000.json") as stream:
            for line in lines:
                stream.write(json.dumps(line).encode() + b"\n")
    try:
        yield spark.read.format("delta").load(folder.for_spark)
    finally:
        delete_folder(folder)


def _log(path: Location, table: DeltaTable, files: Sequence[tuple[int, TableFile]]) -> Iterator[Mapping[str, Any]]:
    schema = json.loads(table.schema().to_json())
    schema["fields"].append({"name": NUMBER, "type": "integer", "nullable": True, "metadata": {}})
    metadata = {
        "id": uuid.uuid4().hex,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema),
        "partitionColumns": [*table.metadata().partition_columns, NUMBER],
        "configuration": {},
        "createdTime": 0,
    }
    yield {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}
    yield {"metaData": metadata}
    root = path.for_spark if not path.is_local else f"file://{path.uri}"
    for number, file in files:
        add = {"path": f"{quote(root, safe='/:@')}/{file.path}", "size": file.size, "modificationTime": 0}
        values = {**file.values, NUMBER: str(number)}
        yield {"add": {**add, "partitionValues": values, "dataChange": False}}
