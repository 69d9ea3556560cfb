"""When a name is registered in the catalog, and again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from logferry.loaders.batches.execute import Loader
from logferry.loaders.config import TableJob
from logferry.loaders.runs import table_run
from logferry.loaders.runs.table_run import CatalogNotice


def test_a_failure_is_tried_again_after_a_minute_and_a_success_never(monkeypatch: pytest.MonkeyPatch):
    """A catalog that is down does not delay each batch."""
    clock, results = [0.5], ["down", "down", None]
    monkeypatch.setattr(table_run, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(table_run, "register_table", lambda *_: results.pop(0))
    loader = Loader(cast("Any", None), cast("Any", None), "dc1", "run")
    job = TableJob.model_validate({"path": "/t", "topics": ["dc1.a"], "register": "logs.t"})
    seen = []
    for at in (0.5, 5, 59, 61, 100, 122, 900):
        clock[0] = at
        seen.append((list(table_run._registered(loader, job)), len(results)))
    down = [CatalogNotice("down")]
    assert seen == [(down, 2), (down, 2), (down, 2), (down, 1), (down, 1), ([], 0), ([], 0)]
    plain = TableJob.model_validate({"path": "/t", "topics": ["dc1.a"]})
    assert list(table_run._registered(loader, plain)) == []
