"""The files of tables in any store: the one module that lists, reads, writes and deletes them. Without Spark.

Mounted folders and S3 are accessed by pyarrow; the other stores by delta-rs's own client, which needs no libraries of
Hadoop but holds the interpreter while it waits. Names are relative to the table's folder, with ``/``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction
from logferry.loaders.errors import StorageUnavailable, UnsupportedFeature
from logferry.loaders.location import Location, S3Access, without_secrets

# Requests of a store that wait for answers at the same time.
_REQUESTS: Final = 16
_TRIES: Final = 10
_BLOCK: Final = 8 << 20
T = TypeVar("T")
U = TypeVar("U")


# What a store's failure can be, whichever library met it.
STORAGE_ERRORS: Final = (DeltaError, OSError)


@contextmanager
def storage_errors(
    failure: str, kinds: tuple[type[Exception], ...] = (*STORAGE_ERRORS, pa.ArrowException, ValueError)
) -> Iterator[None]:
    """Turns errors of delta-rs, pyarrow and the file system into StorageUnavailable, without secrets."""
    try:
        yield
    except kinds as error:
        raise StorageUnavailable(without_secrets(f"{failure}: {error}")) from None


def open_table(place: Location | Path) -> DeltaTable | None:
    """The Delta table at its newest version; None when there is none. Raises StorageUnavailable, UnsupportedFeature."""
    at = Location.of(place)
    with storage_errors(f"{at} cannot be read"), suppress(TableNotFoundError):
        try:
            return DeltaTable(at.uri, storage_options=at.options)
        except DeltaError as error:
            if "Unsupported: Feature" in str(error):
                raise UnsupportedFeature(f"{at} cannot be read: {error}") from None
            raise
    return None


def dataset(folder: Location, table: DeltaTable, where: str | None = None) -> ds.Dataset:
    """The rows of the table at its version. ``where``: SQL, by which files are passed over. Raises DeltaError.

    delta-rs 1.6 takes a bound that a file lacks for null, and a filter of that column then skips the whole file. Such
    files are read without their bounds.
    """
    found = table.to_pyarrow_dataset(filesystem=file_system(folder), file_pruning_predicate=where)
    lacking = _without_some_bounds(table)
    if not lacking:
        return found

    def unbounded(file: ds.ParquetFileFragment) -> ds.ParquetFileFragment:
        known = ds.scalar(True)
        for name, value in ds.get_partition_keys(file.partition_expression).items():
            column = ds.field(name)
            known &= column.is_null() if value is None else column == pa.scalar(value, found.schema.field(name).type)
        return found.format.make_fragment(file.path, file.filesystem, partition_expression=known)

    files = [unbounded(file) if file.path in lacking else file for file in found.get_fragments()]
    return ds.FileSystemDataset(files, found.schema, found.format, file_system(folder))


def _without_some_bounds(table: DeltaTable) -> set[str]:
    """The files that lack a bound of a column which has values in them."""
    files = pa.table(table.get_add_actions(flatten=True))
    lacks = pa.chunked_array([pa.repeat(False, files.num_rows)])
    for name in pa.schema(table.schema().to_arrow()).names:
        if f"min.{name}" in files.column_names:
            low, high, nulls = (files[f"{kind}.{name}"] for kind in ("min", "max", "null_count"))
            has_values = pc.fill_null(pc.not_equal(nulls, files["num_records"]), True)
            lacks_one = pc.or_(pc.is_null(nulls), pc.or_(pc.is_null(low), pc.is_null(high)))
            lacks = pc.or_(lacks, pc.and_(has_values, lacks_one))
    return {unquote(path) for path in files.filter(lacks)["path"].to_pylist()}


class StoredFile(NamedTuple):
    """``name``: below the folder that was listed. ``modified_ns``: since 1970."""

    name: str
    size: int
    modified_ns: int


class _Store(DeltaStorageHandler):
    """Its output streams take bytes only."""

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> Any:
        return pa.PythonFile(_Bytes(self._handler.open_output_stream(path, metadata)), "wb")


class _Bytes:
    """A stream to write, in blocks: a store takes a request for each."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._parts, self._size = stream, list[bytes](), 0
        self.closed = False

    def write(self, data: Any) -> int:
        part = bytes(data)
        self._parts.append(part)
        self._size += len(part)
        if self._size >= _BLOCK:
            self.flush()
        return len(part)

    def flush(self) -> None:
        if self._parts:
            self._stream.write(b"".join(self._parts))
            self._parts, self._size = [], 0

    def close(self) -> None:
        if not self.closed:
            self.flush()
            self.closed = True
            self._stream.close()


def file_system(folder: Location) -> pa_fs.FileSystem:
    """For the files in the folder, by their names below it. Raises OSError, ValueError, DeltaError."""
    if folder.is_local:
        return pa_fs.SubTreeFileSystem(folder.uri, pa_fs.LocalFileSystem())
    if isinstance(folder.access, S3Access):
        retries = pa_fs.AwsStandardS3RetryStrategy(max_attempts=_TRIES)
        store = pa_fs.S3FileSystem(**folder.access.arrow_options(), retry_strategy=retries)
        return pa_fs.SubTreeFileSystem(folder.uri.removeprefix("s3://"), store)
    return pa_fs.PyFileSystem(_Store(folder.uri, folder.options))


def list_files(folder: Location) -> list[StoredFile]:
    """All files below the folder, hidden ones too; none where there is no folder. Raises OSError, DeltaError.

    A folder that is removed meanwhile is no error; one that may not be read is.
    """
    if not folder.is_local:
        found = file_system(folder).get_file_info(pa_fs.FileSelector("", recursive=True, allow_not_found=True))
        return sorted(StoredFile(f.path, f.size, f.mtime_ns) for f in found if f.type == pa_fs.FileType.File)
    files: list[StoredFile] = []
    for inside, _, names in os.walk(folder.uri, onerror=_unless_gone):
        for name in names:
            path = Path(inside, name)
            with suppress(FileNotFoundError):
                stat = path.lstat()
                files.append(StoredFile(path.relative_to(folder.uri).as_posix(), stat.st_size, stat.st_mtime_ns))
    return sorted(files)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def folders(folder: Location) -> dict[str, int]:
    """The folders in a folder, with the time of their last change in nanoseconds since 1970.

    Only mounted folders and HDFS have empty ones, and only the former a time. Raises OSError, DeltaError.
    """
    if folder.is_local:
        with os.scandir(folder.uri) as inside:
            return {entry.name: entry.stat().st_mtime_ns for entry in inside if entry.is_dir(follow_symlinks=False)}
    found = file_system(folder).get_file_info(pa_fs.FileSelector("", allow_not_found=True))
    return {f.path: f.mtime_ns or 0 for f in found if f.type == pa_fs.FileType.Directory}


def is_empty(folder: Location) -> bool:
    """Whether there is nothing in the folder, or no folder. Raises OSError, DeltaError."""
    if folder.is_local:
        with suppress(FileNotFoundError), os.scandir(folder.uri) as inside:
            return not any(True for _ in inside)
        return True
    return not file_system(folder).get_file_info(pa_fs.FileSelector("", allow_not_found=True))


def read_text(file: Location) -> str:
    """Raises FileNotFoundError, OSError, DeltaError."""
    store = file_system(file.parent)
    for left in reversed(range(_TRIES)):
        try:
            with store.open_input_file(file.name) as stream:
                return bytes(stream.readall()).decode("utf-8")
        except FileNotFoundError:
            raise
        except OSError:
            # pyarrow does not repeat what a busy S3 refuses with more words than the file has.
            if not left:
                raise
    raise AssertionError("the last try returns or raises")


def write_text(file: Location, text: str) -> None:
    """Replaces the file as a whole: a reader sees the old or the new text. Raises OSError, DeltaError."""
    if file.scheme in ("", "hdfs"):
        hidden = f".{file.name}.{os.getpid()}"
        _write(file.with_name(hidden), text)
        if file.is_local:
            Path(file.with_name(hidden)).replace(file)
        else:
            file_system(file.parent).move(hidden, file.name)
    else:
        _write(file, text)


def _write(file: Location, text: str) -> None:
    if file.is_local:
        Path(file.parent).mkdir(parents=True, exist_ok=True)
        with Path(file).open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        return
    with file_system(file.parent).open_output_stream(file.name) as stream:
        stream.write(text.encode())


def create_file(folder: Location, name: str) -> Any:
    """A stream to write a new file below the folder. Raises OSError, ValueError, DeltaError."""
    if folder.is_local:
        Path(folder / name).parent.mkdir(parents=True, exist_ok=True)
    return file_system(folder).open_output_stream(name)


def delete_files(folder: Location, names: Sequence[str]) -> None:
    """Those that exist. Raises OSError, DeltaError."""
    store = file_system(folder)

    def delete(name: str) -> None:
        with suppress(FileNotFoundError):
            store.delete_file(name)

    list(in_parallel(delete, names))


def delete_folder(folder: Location) -> None:
    """With all that is in it; what cannot be deleted stays."""
    if folder.is_local:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(OSError, DeltaError):
        if folder.scheme == "s3":
            file_system(folder.parent).delete_dir(folder.name)
        else:
            delete_files(folder, [file.name for file in list_files(folder)])


def in_parallel(work: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
    """The results in the order of the items, several at a time: a store answers after milliseconds."""
    with ThreadPoolExecutor(_REQUESTS) as pool:
        yield from pool.map(work, items)


# ---- the files of small tables -----------------------------------------------------------------------------------


_TEXT: Final = 256


def written_rows(folder: Location, rows: pa.Table, *, changes_data: bool = True) -> list[AddAction | RemoveAction]:
    """Writes a few rows as one file with its column bounds, without Spark. Returns the action that adds it; none where
    there are no rows. Raises OSError, ArrowException, DeltaError.

    ``changes_data``: False where the table holds the same before and after.
    """
    if not rows.num_rows:
        return []
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd")
    data, name = sink.getvalue(), f"rows-{uuid.uuid4().hex}.parquet"
    with create_file(folder, name) as stream:
        stream.write(data)
    stats = json.dumps(_statistics(rows))
    return [AddAction(name, data.size, {}, int(time.time() * 1000), changes_data, stats)]


def _statistics(rows: pa.Table) -> dict[str, Any]:
    """Bounds as in a file of Spark's; of values without useful ones none."""
    said: dict[str, Any] = {"numRecords": rows.num_rows, "minValues": {}, "maxValues": {}, "nullCount": {}}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        said["nullCount"][name] = column.null_count
        if column.null_count < rows.num_rows and not pa.types.is_nested(column.type):
            bounds = pc.min_max(column).as_py()
            low, high = bound(bounds["min"], up=False), bound(bounds["max"], up=True)
            if low is not None and high is not None:
                said["minValues"][name], said["maxValues"][name] = low, high
    return said


def bound(value: Any, *, up: bool) -> Any:
    """As in the Delta log; None where the value is useless as a bound. Times are rounded outwards to milliseconds."""
    if isinstance(value, datetime):
        moment = value.astimezone(UTC)
        cut = moment.replace(microsecond=moment.microsecond // 1000 * 1000)
        if up and cut < moment:
            cut += timedelta(milliseconds=1)
        return cut.strftime("%Y-%m-%dT%H:%M:%S.") + f"{cut.microsecond // 1000:03}Z" if cut.year >= 1000 else None
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        return value if len(value) <= _TEXT else None
    return value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else None
