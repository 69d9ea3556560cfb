"""The rows of a Delta table by the text of the protocol alone: neither our code nor delta-rs reads here.

Files of S3 come by pyarrow's client, those of HDFS by WebHDFS of the NameNode, which no loader uses.
"""

from __future__ import annotations

import io
import json
import re
import urllib.request
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from logferry.loaders.location import Location

# The NameNode's HTTP address by its URI.
WEB_HDFS: Final[dict[str, str]] = {}
_TYPES: Final[dict[str, Callable[[str], Any]]] = {"string": str, "integer": int, "date": date.fromisoformat}


class _Folder:
    """Files below a table's folder, by name."""

    def __init__(self, place: Location) -> None:
        self._place = place
        if place.scheme == "s3":
            access = place.access.values()
            scheme, _, host = access["endpoint"].partition("://")
            keys = {name: access[name] for name in ("access_key", "secret_key")}
            self._s3 = pa_fs.S3FileSystem(endpoint_override=host, scheme=scheme, region="us-east-1", **keys)

    def _web(self, name: str, operation: str) -> bytes:
        root, _, path = self._place.uri.removeprefix("hdfs://").partition("/")
        url = f"http://{WEB_HDFS['hdfs://' + root]}/webhdfs/v1/{quote(path)}/{quote(name)}?op={operation}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            content: bytes = answer.read()
        return content

    def names(self, folder: str) -> list[str]:
        if self._place.is_local:
            return [file.name for file in Path(self._place.uri, folder).iterdir()]
        if self._place.scheme == "s3":
            root = f"{self._place.uri.removeprefix('s3://')}/{folder}"
            return [file.base_name for file in self._s3.get_file_info(pa_fs.FileSelector(root))]
        found = json.loads(self._web(folder, "LISTSTATUS"))["FileStatuses"]["FileStatus"]
        return [file["pathSuffix"] for file in found]

    def read(self, name: str) -> bytes:
        if self._place.is_local:
            return Path(self._place.uri, name).read_bytes()
        if self._place.scheme == "s3":
            with self._s3.open_input_file(f"{self._place.uri.removeprefix('s3://')}/{name}") as stream:
                return bytes(stream.read())
        return self._web(name, "OPEN")


def rows_by_log(place: Location) -> list[dict[str, Any]]:
    """All rows of the newest version: the newest checkpoint, the commits after it, and the files that they name."""
    folder = _Folder(place)
    stored = folder.names("_delta_log")
    checkpoints = [int(name[:20]) for name in stored if re.fullmatch(r"[0-9]{20}\.checkpoint\.parquet", name)]
    base = max(checkpoints, default=-1)
    commits = sorted(int(name[:20]) for name in stored if re.fullmatch(r"[0-9]{20}\.json", name))
    later = [version for version in commits if version > base]
    assert later == list(range(base + 1, base + 1 + len(later))), f"{place}: versions {later} after {base}"
    actions: list[dict[str, Any]] = []
    if base >= 0:
        actions += pq.read_table(io.BytesIO(folder.read(f"_delta_log/{base:020}.checkpoint.parquet"))).to_pylist()
    for version in later:
        actions += map(json.loads, folder.read(f"_delta_log/{version:020}.json").splitlines())
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
        content = pq.ParquetFile(io.BytesIO(folder.read(unquote(path))), coerce_int96_timestamp_unit="us").read()
        found += _rows(content, schema, values)
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
