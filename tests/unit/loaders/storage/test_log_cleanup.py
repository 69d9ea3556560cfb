"""Old commits leave the log of a table at its checkpoints, by Delta's own retention of the log."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from logferry.loaders.location import Location
from logferry.loaders.storage import commit
from logferry.loaders.storage.commit import commit_rows, committed_batch

DAY_S = 86_400


def load(place: Path, batches: range) -> None:
    for batch in batches:
        commit_rows(pa.table({"text": [str(batch)]}), Location.of(place), batch, "run")


def age(place: Path, days: float) -> None:
    """What is in the log now was written so long ago."""
    for file in (place / "_delta_log").iterdir():
        os.utime(file, (time.time() - days * DAY_S,) * 2)


def versions(place: Path) -> list[int]:
    return sorted(int(file.stem) for file in (place / "_delta_log").glob("*.json") if file.stem.isdigit())


@pytest.mark.parametrize(
    ("days", "cleanup", "kept"),
    [
        (31, None, range(6, 13)),  # from the last checkpoint that the retention covers
        (29, None, range(13)),
        (31, "false", range(13)),
    ],
)
def test_expired_commits_are_removed_at_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, cleanup: str | None, kept: range
) -> None:
    monkeypatch.setattr(commit, "_CHECKPOINT", 3)
    monkeypatch.setattr(commit, "_CLEANING", 12)
    place = tmp_path / "t"
    configuration = {} if cleanup is None else {"delta.enableExpiredLogCleanup": cleanup}
    DeltaTable.create(str(place), pa.schema([("text", pa.string())]), configuration=configuration)
    load(place, range(7))
    age(place, days)
    load(place, range(7, 11))
    assert versions(place) == list(range(12))  # not at a checkpoint between
    load(place, range(11, 12))
    assert versions(place) == list(kept)
    # Nothing of the table is lost, and the batches are known.
    assert sorted(DeltaTable(str(place)).to_pyarrow_table()["text"].to_pylist()) == sorted(map(str, range(12)))
    done = committed_batch(Location.of(place), 11, "run")
    assert done is not None
    assert done.ours
    load(place, range(12, 14))
    assert DeltaTable(str(place)).version() == 14
