"""The tables of a job, without Spark: what a newer loader adds to those of an older one."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable, Schema
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import prepare
from logferry.loaders.storage.tables import QUARANTINE


def test_the_quarantine_of_an_older_loader_gets_the_new_columns(tmp_path: Path):
    paths = TablePaths.of(tmp_path / "t")
    later = ("parser", "resolved", "since")
    DeltaTable.create(str(paths.quarantine), Schema([f for f in QUARANTINE.fields if f.name not in later]))
    prepare(paths)
    assert [field.name for field in DeltaTable(str(paths.quarantine)).schema().fields][-3:] == list(later)
