"""A batch's rows into the tables: the quarantine first, the main table last, each once whoever writes.

Rows are in files before (see `files`); what makes them rows of the table is one commit, which is one atomic creation
of a file by delta-rs. It carries the batch as Delta's transaction version, so a second one of the same batch is
refused. Who won is read back, from the commit's user metadata.

Crash windows: before the quarantine, in it, between it and the main table, in mid-write: the next run does the same
batch of the ledger again, and what is committed already is skipped. After the main commit: nothing is left to do. A
loader that was frozen anywhere in here and goes on days later finds its batch done; where the history was dropped
meanwhile, its commit lands in the past, which is no part of the table, and the table's newest state says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from logferry.loaders.errors import StorageAway
from logferry.loaders.storage.data_files import Written
from logferry.loaders.storage.ledger import APP, last_batch, open_table

_TRIES: Final = 10
_HISTORY: Final = 100
_CHECKPOINT: Final = 50
# A commit that lands in the past must not leave a checkpoint there: that is made apart, of the newest state.
HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)

Write = Callable[[DeltaTable, CommitProperties], None]


class Committed(NamedTuple):
    """A batch that a table holds. ``ours``: this run wrote it. ``rows``: as far as the table's history still tells."""

    ours: bool
    rows: int | None


def commit_files(written: Written, path: Path, batch: int, run: str, partition_by: Sequence[str] = ()) -> Committed:
    """Makes the files part of the table, unless it holds the batch already. Safe to call again. Raises StorageAway."""

    def write(table: DeltaTable, properties: CommitProperties) -> None:
        table.create_write_transaction(
            list(written.adds),
            "append",
            table.schema(),
            partition_by=list(partition_by),
            commit_properties=properties,
            post_commithook_properties=HOOKS,
        )

    return commit_once(write, path, batch, run, written.rows)


def replace_files(written: Written, path: Path, batch: int, run: str) -> Committed:
    """Puts the files in place of all that the table holds, unless it holds the batch already. Raises StorageAway."""

    def write(table: DeltaTable, properties: CommitProperties) -> None:
        table.create_write_transaction(
            list(written.adds),
            "overwrite",
            table.schema(),
            commit_properties=properties,
            post_commithook_properties=HOOKS,
        )

    return commit_once(write, path, batch, run, written.rows, alone=True)


def put_rows(rows: pa.Table, path: Path, batch: int, run: str, *, replace: bool = False) -> Committed:
    """A few rows, without Spark: appended, or in place of all; once for each batch. Raises StorageAway."""

    mode: Literal["append", "overwrite"] = "overwrite" if replace else "append"

    def write(table: DeltaTable, properties: CommitProperties) -> None:
        given: dict[str, Any] = {"mode": mode, "commit_properties": properties, "post_commithook_properties": HOOKS}
        write_deltalake(table, rows, **given)

    return commit_once(write, path, batch, run, rows.num_rows, alone=replace)


def commit_once(
    write: Write,
    path: Path,
    batch: int,
    run: str,
    rows: int,
    *,
    alone: bool = False,
    beside: Sequence[Transaction] = (),
) -> Committed:
    """One commit with the batch as its transaction version. ``write`` makes it; it may be called again.

    ``alone``: no other commit may come between the version that ``write`` was given and its own. What removes files
    needs it: delta-rs lets a removal pass whose files a compaction has just replaced, and their rows would stay.
    ``beside``: what else the table is to hold of the batch, for ever.
    """
    said = json.dumps({"app": APP, "batch": batch, "run": run, "rows": rows})
    for _ in range(_TRIES):
        failure: Exception | None = None
        table = open_table(path)
        if table is None:
            raise StorageAway(f"{path} is not there any more")
        if last_batch(table) < batch:
            properties = CommitProperties(
                app_transactions=[Transaction(APP, batch), *beside],
                custom_metadata={"userMetadata": said},
                max_commit_retries=0 if alone else None,
            )
            try:
                write(table, properties)
            except CommitFailedError as error:
                # Another loader did the batch, or a race was lost to a commit that is no batch, a compaction say.
                failure = error
            except (DeltaError, OSError) as error:
                raise StorageAway(f"{path}: batch {batch} cannot be written: {error}") from error
        # Whatever was answered, the table has the last word: where the history is gone, a commit can land in the past.
        if done := committed(path, batch, run):
            if failure is None:
                _checkpoint(path)
            return done
    raise StorageAway(f"{path}: batch {batch} lost {_TRIES} races with other writers")


def _checkpoint(path: Path) -> None:
    """Now and then, so that opening the table stays fast. One that fails is made by a later batch."""
    table = open_table(path)
    if table is not None and table.version() % _CHECKPOINT == 0:
        try:
            table.create_checkpoint()
        except (DeltaError, OSError) as error:
            raise StorageAway(f"{path}: no checkpoint can be written: {error}") from error


def committed(path: Path, batch: int, run: str) -> Committed | None:
    """Who wrote the batch; None while the table does not hold it."""
    table = open_table(path)
    if table is None or last_batch(table) < batch:
        return None
    for commit in _history(path, table.version()):
        said = _metadata(commit.get("userMetadata"))
        if said.get("app") == APP and said.get("batch") == batch:
            rows = said.get("rows")
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
