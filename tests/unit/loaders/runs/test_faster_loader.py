"""A load whose segment check loses the ledger's next batch to another loader."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from logferry.loaders.batches.execute import BatchDone
from logferry.loaders.config import TableJob
from logferry.loaders.planning.ledger_entry import RESET, LedgerEntry
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicOffsets
from logferry.loaders.runs import table_run
from logferry.loaders.storage.ledger import new_entry
from logferry.loaders.storage.tables import TableState

T = "dc1.a"


def test_after_a_reset_by_another_the_rest_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reset = new_entry(1, "dc1", "access/1", "other", [Range(T, 0, "id", 3, 3)], kind=RESET)
    entries = [new_entry(0, "dc1", "access/1", "ours", [Range(T, 0, "id", 0, 9)])]

    def put(_loader: Any, _job: Any, _paths: Any, state: TableState, ranges: Any) -> LedgerEntry:
        return reset if state.last == 0 else new_entry(state.last + 1, "dc1", "access/1", "ours", ranges)

    def do(_loader: Any, _paths: Any, entry: LedgerEntry, **_: Any) -> BatchDone:
        entries.append(entry)
        return BatchDone(entry.batch, entry.run == "ours", entry.reads)

    def state_of(*_: Any) -> TableState:
        return TableState(entries[-1].batch, entries[-1], None)

    for name in ("prepare", "create_segments", "check_parser"):
        monkeypatch.setattr(table_run, name, lambda *_: None)
    monkeypatch.setattr(table_run, "notify_ready", lambda *_: [])
    monkeypatch.setattr(table_run, "begin_check", lambda *_: SimpleNamespace(missing=""))
    monkeypatch.setattr(table_run, "finish_check", lambda *_: "a result")
    monkeypatch.setattr(table_run, "put_entry", put)
    monkeypatch.setattr(table_run, "do_batch", do)
    monkeypatch.setattr(table_run, "table_state", state_of)
    view = TopicOffsets(T, "id", {0: PartitionOffsets(0, 9)})
    kafka = SimpleNamespace(names=lambda _: [T], views=lambda _: {T: view})
    loader: Any = SimpleNamespace(kafka=kafka, run="ours", spark=None, ledger_batches=1000)
    raw = {"path": tmp_path / "t", "topics": [T], "parser": {"format": "access"}, "segments": {}}
    list(table_run.load_table(loader, TableJob.model_validate(raw)))
    assert [(e.batch, e.kind, [(r.start, r.end) for r in e.reads]) for e in entries[1:]] == [
        (1, RESET, []),
        (2, "load", [(3, 9)]),
    ]
