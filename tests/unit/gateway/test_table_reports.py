"""Reports of tables at the gateway: who may see and replace them, what a list says of them, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from logferry.gateway.access.rights import ANYBODY, Caller, Patterns
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call
from logferry.gateway.reports import routes as tables_routes
from logferry.gateway.reports.routes import TABLES, ReportsApi, may_see
from logferry.gateway.reports.tables import StoredTableReport, TableReport, summary_of
from pydantic import ValidationError

SEGMENT = {"version": 1, "rows": 5, "since": "2026-11-20T12:00:00Z", "waits_for": []}
HOLDS = {"source_id": "web1:a", "topic": "dc1.nginx", "at": "2026-11-20T10:30:00Z", "seen": None, "owes": False}
REPORT: dict[str, Any] = {
    "location": "/warehouse/nginx",
    "dc": "dc1",
    "topics": ["dc1.nginx", "dc2.nginx"],
    "every_s": 60.0,
    "batch": {"batch": 7, "kind": "load", "planned": "2026-11-20T12:00:00+00:00", "rows": 100},
    "lag": [
        {"topic": "dc1.nginx", "records": 30, "seconds": 2.0},
        {"topic": "dc2.nginx", "records": None, "seconds": None, "stopped": "recreated", "way": "table reset"},
    ],
    "quarantine": {"no number": 3, "no time": 4},
    "segments": {
        "checked": "2026-11-20T12:00:00Z",
        "complete": "2026-11-20T09",
        "failure": None,
        "newest": [
            {**SEGMENT, "segment": "2026-11-20T09", "state": "READY", "why": ""},
            {**SEGMENT, "segment": "2026-11-20T10", "state": "ACTIVE", "why": "waits", "waits_for": [HOLDS]},
            {**SEGMENT, "segment": "2026-11-20T11", "state": "ACTIVE", "why": "not over"},
        ],
    },
}


def stored(**changes: Any) -> StoredTableReport:
    return StoredTableReport(reported_ms=1000, report=TableReport.model_validate({**REPORT, **changes}))


def caller(**rights: list[str]) -> Caller:
    def patterns(name: str) -> Patterns:
        return Patterns(rights.get(name, []), frozenset({"dc1", "dc2"}))

    return Caller("loader", patterns("write"), patterns("read"), patterns("admin"), report=patterns("report"))


def test_a_list_has_figures_and_whom_the_oldest_open_segment_waits_for() -> None:
    found = summary_of("nginx", stored())
    assert (found.lag_records, found.stopped, found.quarantined, found.open_segments) == (30, 1, 7, 2)
    assert found.waits_for is not None
    assert (found.waits_for.segment, found.waits_for.waits_for[0].source_id) == ("2026-11-20T10", "web1:a")
    assert summary_of("nginx", stored(lag=[], segments=None)).lag_records is None
    assert StoredTableReport.decode(stored().encode()) == stored()


@pytest.mark.parametrize(
    ("rights", "is_seen"),
    [
        ({"read": ["nginx"]}, True),
        ({"admin": ["*"]}, True),
        ({"read": ["dc1.nginx"], "admin": ["dc2.nginx"]}, True),
        ({"report": ["nginx"]}, True),
        ({"read": ["dc1.nginx"]}, False),
        ({"write": ["nginx"]}, False),
        ({}, False),
    ],
)
def test_a_table_is_seen_with_a_right_to_each_of_its_topics(rights: dict[str, list[str]], is_seen: bool) -> None:
    assert may_see(caller(**rights), stored()) is is_seen
    assert may_see(ANYBODY, stored())


class Store:
    """The topic, as a store that was read to its end shows it."""

    def __init__(self, **entries: StoredTableReport) -> None:
        self.entries, self.held_bytes = entries, sum(len(one.encode()) for one in entries.values())

    async def refresh(self) -> dict[str, StoredTableReport]:
        return self.entries

    async def put(self, name: str, entry: StoredTableReport | None) -> None:
        self.entries = {**self.entries, name: entry} if entry else {}


def call(who: Caller, name: str = "nginx") -> Call:
    found = Call(cast(Any, SimpleNamespace()), ["", "v1", "tables", name], {})
    found.caller = who
    return found


def api(store: Store, report: dict[str, Any] | None = None) -> ReportsApi:
    async def document(*_: object) -> TableReport:
        return TableReport.model_validate(report)

    kafka = SimpleNamespace(clock=SimpleNamespace(now_ms=lambda: 2000))
    return ReportsApi(cast(Any, kafka), cast(Any, SimpleNamespace(document=document)), cast(Any, store), TABLES)


async def test_nobody_takes_over_the_name_of_a_table_of_others() -> None:
    store = Store(nginx=stored())
    other = {**REPORT, "topics": ["dc1.squid"], "lag": []}
    with pytest.raises(Problem) as problem:
        await api(store, other).put(call(caller(report=["squid"])))
    assert problem.value.kind == "forbidden"
    with pytest.raises(Problem) as problem:
        await api(store, REPORT).put(call(caller(read=["*"], admin=["*"])))
    assert problem.value.kind == "forbidden"
    assert store.entries["nginx"] == stored()
    await api(store, other).put(call(caller(report=["squid", "nginx"])))
    assert store.entries["nginx"].report.topics == ["dc1.squid"]
    assert store.entries["nginx"].reported_ms == 2000


async def test_a_report_is_removed_by_its_loader_or_an_operator_alone() -> None:
    for who, kind in ((caller(read=["nginx"]), "forbidden"), (caller(write=["*"]), "not-found")):
        with pytest.raises(Problem) as problem:
            await api(Store(nginx=stored())).delete(call(who))
        assert problem.value.kind == kind
    for who in (caller(report=["nginx"]), caller(admin=["*"])):
        store = Store(nginx=stored())
        await api(store).delete(call(who))
        assert store.entries == {}


async def test_all_reports_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker holds them; the report of a known table is accepted all the same."""
    monkeypatch.setattr(tables_routes, "HELD_BYTES", 1500)
    store, who = Store(nginx=stored()), caller(report=["nginx"])
    with pytest.raises(Problem) as problem:
        await api(store, REPORT).put(call(who, "second"))
    assert problem.value.kind == "conflict"
    await api(store, REPORT).put(call(who))


@pytest.mark.parametrize(
    "wrong", [{"topics": []}, {"topics": ["nginx"]}, {"every_s": -1}, {"location": ""}, {"more": 1}, {"batch": {}}]
)
def test_what_is_no_report_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TableReport.model_validate({**REPORT, **wrong})


def test_the_handler_checks_rights_itself() -> None:
    declared: list[Right] = []
    api(Store()).add_to(cast(Any, SimpleNamespace(add=lambda *route: declared.append(route[-1]))))
    assert declared == [Right.KNOWN] * 4
