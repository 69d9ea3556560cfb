"""The rows of a Delta table by the text of the protocol alone: neither our code nor delta-rs reads here.

Files of S3 and of Google Cloud Storage come by pyarrow's clients, a folder of HDFS by Hadoop's own shell, and those of
other stores by delta-rs.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from logferry.loaders.location import AzureAccess, GsAccess, Location, S3Access
from logferry.loaders.storage.files import file_system
from logferry.ops.runtime.jars import hdfs_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.azure_server import client_of

_TYPES: Final[dict[str, Callable[[str], Any]]] = {"string": str, "integer": int, "date": date.fromisoformat}


@contextmanager
def _folder(place: Location) -> Iterator[pa_fs.FileSystem]:
    """The files below the table's folder."""
    if place.is_local:
        yield pa_fs.SubTreeFileSystem(place.uri, pa_fs.LocalFileSystem())
    elif isinstance(place.access, S3Access):
        access = place.access.values()
        scheme, _, host = access["endpoint"].partition("://")
        keys = {name: access[name] for name in ("access_key", "secret_key")}
        store = pa_fs.S3FileSystem(endpoint_override=host, scheme=scheme, region="us-east-1", **keys)
        yield pa_fs.SubTreeFileSystem(place.uri.removeprefix("s3://"), store)
    elif isinstance(place.access, GsAccess):
        host = (place.access.url() or "").removeprefix("http://")
        gcs = pa_fs.GcsFileSystem(anonymous=True, endpoint_override=host, scheme="http")
        yield pa_fs.SubTreeFileSystem(place.uri.removeprefix("gs://"), gcs)
    elif isinstance(place.access, AzureAccess):
        store = client_of(place.access.emulator() or "", (place.options or {})["azure_storage_account_key"])
        container, _, rest = place.uri.removeprefix("abfss://").partition("@")
        yield pa_fs.SubTreeFileSystem(f"{container}/{rest.partition('/')[2]}", store)
    elif place.scheme == "hdfs":
        with TemporaryDirectory() as copy:
            # The jar of HDFS's servers insists on the file.
            Path(copy, "core-site.xml").write_text("<configuration/>")
            jars, java = os.pathsep.join([copy, *map(str, hdfs_jars())]), str(find_java().executable)
            shell = [java, "-Xmx256m", "-XX:TieredStopAtLevel=1", "-cp", jars, "org.apache.hadoop.fs.FsShell"]
            done = subprocess.run(
                [*shell, "-get", place.uri, copy], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
            )
            assert done.returncode == 0, done.stderr[-2000:]
            yield pa_fs.SubTreeFileSystem(f"{copy}/{place.name}", pa_fs.LocalFileSystem())
    else:
        yield file_system(place)


def rows_by_log(place: Location) -> list[dict[str, Any]]:
    """All rows of the newest version: the newest checkpoint, the commits after it, and the files that they name."""
    with _folder(place) as folder:
        return _read(place, folder)


def _read(place: Location, folder: pa_fs.FileSystem) -> list[dict[str, Any]]:
    def content(name: str) -> bytes:
        with folder.open_input_file(name) as stream:
            return bytes(stream.read())

    stored = [file.base_name for file in folder.get_file_info(pa_fs.FileSelector("_delta_log"))]
    checkpoints = [int(name[:20]) for name in stored if re.fullmatch(r"[0-9]{20}\.checkpoint\.parquet", name)]
    base = max(checkpoints, default=-1)
    commits = sorted(int(name[:20]) for name in stored if re.fullmatch(r"[0-9]{20}\.json", name))
    later = [version for version in commits if version > base]
    assert later == list(range(base + 1, base + 1 + len(later))), f"{place}: versions {later} after {base}"
    actions: list[dict[str, Any]] = []
    if base >= 0:
        actions += pq.read_table(io.BytesIO(content(f"_delta_log/{base:020}.checkpoint.parquet"))).to_pylist()
    for version in later:
        actions += map(json.loads, content(f"_delta_log/{version:020}.json").splitlines())
    schema: list[dict[str, Any]] = []
    files: dict[str, dict[str, Any]] = {}
    for action in actions:
        if added := action.get("add"):
            assert not added.get("deletionVector"), "not read here"
            files[added["path"]] = dict(added["partitionValues"] or {})
        if removed := action.get("remove"):
            files.pop(removed["path"], None)
        if meta := action.get("metaData"):
            schema = json.loads(meta["schemaString"])["fields"]
    found: list[dict[str, Any]] = []
    for path, values in files.items():
        rows = pq.ParquetFile(io.BytesIO(content(unquote(path))), coerce_int96_timestamp_unit="us").read()
        found += _rows(rows, schema, values)
    return found


def _rows(content: pa.Table, schema: list[dict[str, Any]], values: dict[str, str | None]) -> list[dict[str, Any]]:
    columns: dict[str, Any] = {}
    for field in schema:
        name = field["name"]
        if name in values:
            said = values[name]
            columns[name] = [None if said is None else _TYPES[field["type"]](said)] * content.num_rows
        elif name in content.column_names:
            column = content[name]
            if field["type"] == "timestamp" and column.type.tz is None:
                column = pc.assume_timezone(column, "UTC")
            columns[name] = column.to_pylist()
        else:
            columns[name] = [None] * content.num_rows
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
