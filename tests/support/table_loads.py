"""What tests of loads in this process share: jobs, the batches of a load, and a loader that dies at a chosen step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet as pq
import pytest
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.commands.repair import ReloadPreview, reload_table
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LedgerEntry
from logferry.loaders.planning.plan import StoppedTopic
from logferry.loaders.planning.reload_plan import ReloadTarget
from logferry.loaders.runs import table_run
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.storage import commit
from logferry.loaders.storage.commit import is_data
from logferry.loaders.storage.files import StoredFile, file_system, list_files
from logferry.loaders.storage.ledger import read_ledger


class LoaderDied(Exception):
    """Raised by `die`, which a test puts in the place of a step."""


def die(*_: object, **__: object) -> Any:
    raise LoaderDied


@contextmanager
def losing_a_file(table: Location) -> Iterator[None]:
    """The first file with rows that a batch writes into this folder is missing when the batch lists its files."""
    lost: list[StoredFile] = []

    def losing(folder: Location) -> list[StoredFile]:
        found = list_files(folder)
        if not lost and folder.parent == table:
            store = file_system(folder)
            data = [file for file in found if is_data(file.name)]
            lost.extend([file for file in data if pq.read_metadata(file.name, filesystem=store).num_rows][:1])
        return [file for file in found if file not in lost]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "list_files", losing)
        yield
    assert len(lost) == 1


def job(table: Location, *topics: str, **settings: Any) -> TableJob:
    return TableJob.model_validate({"path": table, "topics": list(topics), **settings})


def done(events: Iterable[object]) -> list[BatchDone]:
    return [event for event in events if isinstance(event, BatchDone)]


def stops(events: Iterable[object]) -> list[StoppedTopic]:
    return [event for event in events if isinstance(event, StoppedTopic)]


def planned(loader: Loader, table: Location, max_records: int, *topics: str) -> LedgerEntry:
    """Leaves the table as a loader does that dies after it has written the ledger."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_run, "do_batch", die)
        with pytest.raises(LoaderDied):
            list(load_table(loader, job(table, *topics, max_records=max_records)))
    return read_ledger(Location.of(table))[-1]


def reload(loader: Loader, work: TableJob, *targets: str) -> tuple[BatchDone, ReloadPreview]:
    """Reloads the targets; returns the batch, and the preview that the operator was shown."""
    previews: list[ReloadPreview] = []

    def confirm(preview: ReloadPreview) -> bool:
        previews.append(preview)
        return True

    found = reload_table(loader, work, [ReloadTarget.parse(target) for target in targets], confirm)
    assert found is not None
    return found, previews[0]
