"""Claims: of several loaders one does a thing that is no row, such as sending a notification. Without Spark.

A claim is a table without rows, whose versions are the claims: each is created by delta-rs where there is none of that
number, which every store can do. Whose it is says what is stored, also where the answer of the store was lost.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import DeltaError
from logferry.loaders.location import Location
from logferry.loaders.storage.commit import HOOKS, commit_facts, write_log
from logferry.loaders.storage.files import open_table, storage_errors

_NOTHING = pa.schema([pa.field("nothing", pa.string())])


def claim(place: Location, valid_s: float, now: float | None = None) -> bool:
    """Whether the caller has the claim. One that is older than ``valid_s`` belongs to a process that died.

    Raises StorageUnavailable.
    """
    now, own = time.time() if now is None else now, uuid.uuid4().hex
    properties = CommitProperties(
        custom_metadata={"userMetadata": json.dumps({"claim": own, "at": now})}, max_commit_retries=0
    )
    table = open_table(place)
    if table is not None and now - _newest(place, table).get("at", 0.0) < valid_s:
        return False
    with storage_errors(f"{place} cannot be claimed"):
        try:
            if table is None:
                DeltaTable.create(
                    place.uri,
                    Schema.from_arrow(_NOTHING),
                    storage_options=place.options,
                    commit_properties=properties,
                    post_commithook_properties=HOOKS,
                )
            else:
                write_log(table, [], properties)
        except (DeltaError, OSError):
            if open_table(place) is None:
                raise
    table = open_table(place)
    return table is not None and _newest(place, table).get("claim") == own


def _newest(place: Location, table: DeltaTable) -> dict[str, Any]:
    return next(commit_facts(place, table.version()), {})
