"""Gives columns of a table wider types. Without Spark.

Delta's own type widening leaves the files as they are. delta-rs 1.6.6 neither reads nor writes tables with it, so that
the loader itself, its queries and the audit would be shut out. So every file is rewritten, and one commit replaces all
files and the schema: each reader sees the old types with the old files, or the new types with new ones.

Guaranteed: the commit replaces exactly the files of the version before it; where another commit comes between, only the
files that are new are rewritten, and the commit is retried. A batch that was written for the old types is not committed
to the new table (see `commit.check_types`). Crash windows: before the commit nothing has changed, and `retention`
deletes the files; after it, nothing is left to do.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.column_changes import column_changes, column_types
from logferry.loaders.storage.commit import FOLDER, HOOKS, DataFiles, add_action
from logferry.loaders.storage.files import create_file, file_system, in_parallel, storage_errors
from logferry.loaders.storage.ledger import check_features, last_batch, pinned_table

_TRIES: Final = 20
_PART_BYTES: Final = 8 << 20
_PART_ROWS: Final = 1 << 16


def widen_columns(path: Location, schema: Schema) -> None:
    """Gives the table the types of ``schema`` where those are wider. Safe to call again, and by several loaders.

    Rewrites every file of the table once. Raises UnsupportedFeature, StorageUnavailable.
    """
    wanted = {field["name"]: field["type"] for field in json.loads(schema.to_json())["fields"]}
    files = _WiderFiles(path)
    for _ in range(_TRIES):
        table = pinned_table(path)
        check_features(path, table)
        have = table.schema().to_json()
        names = column_changes(column_types(have), column_types(schema.to_json())).wider
        if not names:
            return
        after = json.loads(have)
        for field in after["fields"]:
            if field["name"] in names:
                field["type"] = wanted[field["name"]]
        with storage_errors(f"{path}: columns cannot get wider types"):
            adds = files.adds(table, Schema.from_json(json.dumps(after)))
            try:
                _replace(table, adds, after, names)
            except (DeltaError, OSError):
                # Another commit was faster; or the store has this one, and its answer was lost.
                if pinned_table(path).version() == table.version():
                    raise
    raise StorageUnavailable(f"{path}: columns could not get wider types: {_TRIES} races with other writers were lost")


def _replace(table: DeltaTable, adds: list[AddAction], schema: dict[str, Any], names: Collection[str]) -> None:
    table.create_write_transaction(
        [*adds],
        "overwrite",
        Schema.from_json(json.dumps(schema)),
        partition_by=list(table.metadata().partition_columns),
        commit_properties=CommitProperties(
            max_commit_retries=0, custom_metadata={"userMetadata": json.dumps({"widened": list(names)})}
        ),
        post_commithook_properties=HOOKS,
    )


class _WiderFiles:
    """A file that is still there when the commit is retried is not rewritten a second time."""

    def __init__(self, path: Location) -> None:
        self._path, self._store = path, file_system(path)
        # Of the next batch, so that `retention` keeps the files until that one is there.
        self._folder = f"{FOLDER}{last_batch(pinned_table(path)) + 1:08}-{uuid.uuid4().hex[:12]}"
        self._done: dict[str, AddAction] = {}
        self._types: pa.Schema | None = None

    def adds(self, table: DeltaTable, schema: Schema) -> list[AddAction]:
        types = pa.schema(schema.to_arrow())
        if types != self._types:
            # Another loader has changed other columns.
            self._done, self._types = {}, types
        files = pa.table(table.get_add_actions()).to_pylist()
        new = [file for file in files if file["path"] not in self._done]
        self._done |= zip((file["path"] for file in new), in_parallel(self._rewritten, new), strict=True)
        return [self._done[file["path"]] for file in files]

    def _rewritten(self, file: dict[str, Any]) -> AddAction:
        name, target = unquote(file["path"]), f"{self._folder}/{uuid.uuid4().hex}.parquet"
        with pq.ParquetFile(name, filesystem=self._store, coerce_int96_timestamp_unit="us") as stored:
            assert self._types is not None
            types = pa.schema([field for field in self._types if field.name in stored.schema_arrow.names])
            with create_file(self._path, target) as stream, pq.ParquetWriter(stream, types, compression="zstd") as to:
                for part in _parts(stored):
                    to.write_table(
                        pa.Table.from_arrays([part[field.name].cast(field.type) for field in types], schema=types)
                    )
            rows = stored.metadata.num_rows
        size = self._store.get_file_info(target).size
        values = {key: None if value is None else str(value) for key, value in (file.get("partition") or {}).items()}
        add, written = add_action(self._store, target, size, values)
        DataFiles(self._path, (add,), written).check_rows(rows)
        return add


def _parts(stored: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    meta = stored.metadata
    size = sum(meta.row_group(number).total_byte_size for number in range(meta.num_row_groups))
    rows = max(1, min(_PART_ROWS, _PART_BYTES * max(1, meta.num_rows) // max(1, size)))
    yield from stored.iter_batches(batch_size=rows)
