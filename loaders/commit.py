"""A batch's rows into the tables: the quarantine first, the main table last, each once whoever writes.

Both commits carry the batch as Delta's transaction version, so a second one of the same batch is not possible: one that
comes later is skipped by Delta in silence, one that comes at the same time fails. Who won is therefore read back, from
the commit's user metadata.

Crash windows: before the quarantine, in it, between it and the main table, in mid-write: the next run does the same
batch of the ledger again, and what is committed already is skipped. After the main commit: nothing is left to do. A
loader that was frozen anywhere in here and goes on days later finds its batch done. On a local folder two commits at
the very same instant can replace one another; both hold the same rows of the same ledger entry, so the table is the
same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.loaders.errors import StorageAway
from logferry.loaders.jvm import JVM_ERRORS, lost_race, sorted_error
from logferry.loaders.ledger import APP, last_batch, open_table
from pyspark.sql import DataFrame

_TRIES: Final = 10
_HISTORY: Final = 100


class Committed(NamedTuple):
    """A batch that a table holds. ``ours``: this run wrote it. ``rows``: as far as the table's history still tells."""

    ours: bool
    rows: int | None


def append_once(rows: DataFrame, path: Path, batch: int, run: str) -> Committed:
    """Writes the rows unless the table holds the batch already, and says who wrote it. Safe to call again.

    Raises StorageAway, or what reading the rows raises; the batch may be written all the same.
    """
    metadata = json.dumps({"app": APP, "batch": batch, "run": run})
    for _ in range(_TRIES):
        failure: Exception | None = None
        try:
            _append(rows, path, batch, metadata)
        except JVM_ERRORS as error:
            failure = error
        # Whatever Delta said, the table has the last word: an error may come after the commit, or because the history
        # that a late loader goes by is gone. And a race may be lost to a commit that is no batch, a compaction say.
        if done := committed(path, batch, run):
            return done
        if failure is not None and not lost_race(failure):
            raise sorted_error(failure, f"writing batch {batch} to {path}") from failure
    raise StorageAway(f"{path}: batch {batch} lost {_TRIES} races with other writers")


def _append(rows: DataFrame, path: Path, batch: int, metadata: str) -> None:
    parallel = rows.sparkSession.sparkContext.defaultParallelism
    writer = rows.coalesce(parallel).write.format("delta").mode("append")
    writer.option("txnAppId", APP).option("txnVersion", batch).option("userMetadata", metadata).save(str(path))


def committed(path: Path, batch: int, run: str) -> Committed | None:
    """Who wrote the batch; None while the table does not hold it."""
    table = open_table(path)
    if table is None or last_batch(table) < batch:
        return None
    for commit in _history(path, table.version()):
        said = _metadata(commit.get("userMetadata"))
        if said.get("app") == APP and said.get("batch") == batch:
            metrics: dict[str, Any] = commit.get("operationMetrics") or {}
            rows = metrics.get("numOutputRows")
            return Committed(said.get("run") == run, None if rows is None else int(rows))
    return Committed(False, None)


def _history(path: Path, version: int) -> Iterator[dict[str, Any]]:
    """What the commits up to ``version`` say of themselves, newest first, up to the first that is not there.

    Read from the files, whose names are the versions: where the history was dropped, a late loader can write a commit
    into the past, which is no part of the table, and delta-rs's `history` would number it as if it were.
    """
    for number in range(version, max(-1, version - _HISTORY), -1):
        try:
            actions = (path / "_delta_log" / f"{number:020}.json").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return
        yield from (action["commitInfo"] for action in map(json.loads, actions) if "commitInfo" in action)


def _metadata(text: str | None) -> dict[str, Any]:
    try:
        said = json.loads(text or "{}")
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}
