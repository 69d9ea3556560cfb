"""What a thread keeps of tables between the batches of a run: the work of a batch does not grow with its table.

Only new commits of a table are read, and only new files of a side table. What is kept is never trusted beyond the next
look at storage: a table that was recreated, or a side table whose rows were replaced, is read again as a whole.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable
from logferry.loaders.location import Location
from logferry.loaders.storage.files import file_system, open_table, read_text, storage_errors

T = TypeVar("T")


class _Held(threading.local):
    """Of a thread. ``tables``: with the stamp of each one's newest commit, by address and options. ``states``: as kept
    by `kept_state`, with the files that they are made of. ``places``: by delta-rs's own addresses."""

    def __init__(self) -> None:
        self.places: dict[str, Location] = {}
        self.tables: dict[str, tuple[DeltaTable, tuple[int, int]]] = {}
        self.states: dict[str, tuple[set[str], Any]] = {}


_HELD: Final = _Held()


def newest_table(place: Location | Path) -> DeltaTable | None:
    """As `open_table`, but the thread's own object, of which only the new commits are read.

    The next call brings the same object to the newest version, so nothing may rely on its version beyond that. A table
    that was removed or replaced meanwhile is opened again. Raises StorageUnavailable, UnsupportedFeature.
    """
    at = Location.of(place)
    with storage_errors(f"{at} cannot be read"):
        name = f"{at.uri} {sorted((at.options or {}).items())}"
        held, stamp = _HELD.tables.pop(name, (None, None))
        if held is None or stamp is None or _stamp(at, held.version()) != stamp:
            held, stamp = open_table(at), None
        else:
            version = held.version()
            held.update_incremental()
            stamp = stamp if held.version() == version else None
        if held is not None and (stamp := stamp or _stamp(at, held.version())):
            _HELD.tables[name] = held, stamp
            _HELD.places[held.table_uri] = at
    return held


def read_commit(table_uri: str, version: int) -> str:
    """A commit of a table that this thread has read. Raises FileNotFoundError where either is unknown, OSError,
    DeltaError.
    """
    if (place := _HELD.places.get(table_uri)) is None:
        raise FileNotFoundError(table_uri)
    return read_text(place / "_delta_log" / f"{version:020}.json")


def _stamp(at: Location, version: int) -> tuple[int, int] | None:
    """Size and time of the commit: a table that was recreated in the same place has another one. None: later versions
    may not follow from it, because it is missing, or older than the last checkpoint: it may be one in the past."""
    commit = file_system(at).get_file_info(f"_delta_log/{version:020}.json")
    with suppress(FileNotFoundError):
        if int(json.loads(read_text(at / "_delta_log/_last_checkpoint"))["version"]) > version:
            return None
    return (commit.size, commit.mtime_ns) if commit.is_file else None


def kept_state(path: Location, empty: Callable[[], T], add: Callable[[T, pa.Table], None]) -> T:
    """What ``add`` makes of the rows of a small table, from ``empty`` on; each file is read once. Not to be changed.

    Raises StorageUnavailable.
    """
    table = newest_table(path)
    if table is None:
        return empty()
    with storage_errors(f"{path} cannot be read"):
        named = {unquote(name) for name in pa.table(table.get_add_actions())["path"].to_pylist()}
        seen, state = _HELD.states.pop(path.uri, (set(), None))
        if state is None or not seen <= named:
            seen, state = set(), empty()
        if new := sorted(named - seen):
            schema = pa.schema(table.schema().to_arrow())
            add(state, ds.dataset(new, schema=schema, format="parquet", filesystem=file_system(path)).to_table())
    _HELD.states[path.uri] = named, state
    kept: T = state
    return kept
