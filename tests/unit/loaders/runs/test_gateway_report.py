"""What a loader reports of a table: whom each segment waits for, what fits, and what a gateway that is away costs."""

from __future__ import annotations

import json
import socket
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from logferry.gateway.reports.tables import REPORT_BYTES, TableReport
from logferry.gateway.subscriptions import NAME
from logferry.loaders.config import ReportSettings
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.segment_states import ACTIVE, DROPPED, READY, Segment, SegmentRules, WatermarkCheck
from logferry.loaders.planning.source_facts import LISTED, SourceView, low_watermark
from logferry.loaders.runs import gateway_report
from logferry.loaders.runs.gateway_report import TableReports, fitted, report_of, send, table_name
from logferry.loaders.runs.table_facts import complete_to, holding_sources
from logferry.loaders.storage.side_tables import create_segments, last_check, save_check

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
ENTRY = {"batch": 7, "kind": "load", "dc": "dc1", "parser": "lines", "planned": NOON.isoformat(), "reads": 5}
LAG = {"topic": "dc1.nginx", "records": 3, "seconds": 1.5, "stopped": None}
FACTS: dict[str, Any] = {
    "table": "/warehouse/nginx",
    "last": {**ENTRY, "cutoff": None},
    "planned": None,
    "quarantine": {"no number": 3},
    "positions": [{"topic": "dc1.nginx", "partition": 0, "offset": 5, "topic_id": "x"}],
    "lag": [LAG, {"topic": "dc2.nginx", "records": None, "seconds": None, "stopped": "was recreated"}],
}


def segment(hour: int, state: str) -> Segment:
    return Segment(NOON.replace(hour=hour), 1, state, 0, 0, None, None, 0, None, NOON, None, 1)


def view(name: str, at: datetime, **more: Any) -> SourceView:
    return SourceView("dc1.nginx", name, at, NOON, **more)


def check_of(tmp_path: Path, *views: SourceView) -> dict[str, Any]:
    """As the next program reads it."""
    path = Location.of(tmp_path / "segments")
    create_segments(path, SegmentRules())
    save_check(path, WatermarkCheck(NOON, low_watermark(views, NOON, 900)))
    return last_check(path)


def test_a_segment_waits_for_each_source_that_is_before_its_end(tmp_path: Path) -> None:
    silent = view("silent", NOON - 5 * HOUR)._replace(recorded=NOON - 4 * HOUR)
    owes = view("owes", NOON - 2 * HOUR, owes=True)
    behind = view("behind", NOON - timedelta(minutes=90))
    far = view("far", NOON - timedelta(days=8))
    look = check_of(tmp_path, silent, owes, behind, far, view("live", NOON), view("done", NOON - HOUR, finished=True))

    def whom(end: datetime) -> list[str]:
        return [source["source_id"] for source in holding_sources(look, end)]

    assert whom(NOON - 3 * HOUR) == []
    assert whom(NOON - HOUR) == ["owes", "behind"]
    assert whom(NOON - timedelta(hours=1, minutes=45)) == ["owes"]
    assert whom(NOON - timedelta(days=7, hours=20)) == ["far"]
    assert holding_sources(look, NOON)[0] == {
        "source_id": "owes",
        "topic": "dc1.nginx",
        "at": "2026-11-20T10:00:00Z",
        "seen": "2026-11-20T12:00:00Z",
        "owes": True,
    }
    assert holding_sources({"at": "2026-11-20T12:00:00Z", "low": None, "waits": ""}, NOON) == []


def test_of_many_sources_those_furthest_behind_are_kept(tmp_path: Path) -> None:
    views = [view(f"s{n:03}", NOON - timedelta(minutes=n % 100)) for n in range(300)]
    nothing_known = SourceView("dc1.nginx", "new", None, None, beat=NOON)
    found = holding_sources(check_of(tmp_path, *views, nothing_known), NOON)
    assert len(found) == LISTED
    assert [one["source_id"] for one in found[:4]] == ["new", "s099", "s199", "s299"]


def test_complete_ends_at_the_first_segment_that_is_open() -> None:
    ready, dropped, open_one = segment(9, READY), segment(8, DROPPED), segment(10, ACTIVE)
    assert complete_to([dropped, ready, open_one, segment(11, READY)]) == "2026-11-20T09"
    assert complete_to([open_one, segment(11, READY)]) is None
    assert complete_to([]) is None


def test_the_gateway_accepts_what_a_loader_sends_with_the_way_on_of_a_stop() -> None:
    one = {"segment": "2026-11-20T10", "state": ACTIVE, "version": 1, "rows": 5, "since": "x", "why": "waits"}
    segments = {"checked": None, "complete": None, "newest": [{**one, "waits_for": []}]}
    report = TableReport.model_validate_json(fitted(report_of(FACTS, segments, "dc1", 60.0)))
    assert report.topics == ["dc1.nginx", "dc2.nginx"]
    assert [one.way for one in report.lag] == [None, "logferry table reset /warehouse/nginx --to dc2.nginx=…"]
    assert report.segments is not None
    assert TableReport.model_validate_json(fitted(report_of(FACTS, None, "dc1", None))).segments is None


def test_a_report_that_is_too_large_loses_sources_first() -> None:
    source = {"source_id": "s" * 500, "topic": "dc1.nginx", "at": None, "seen": None, "owes": False}
    one = {"state": ACTIVE, "version": 1, "rows": 5, "since": "x", "why": "w" * 9000, "waits_for": [source] * 20}
    newest = [{"segment": f"{hour}", **one} for hour in range(60)]
    body = fitted(report_of(FACTS, {"checked": None, "complete": None, "newest": newest}, "dc1", 60.0))
    assert len(body) <= REPORT_BYTES
    report = TableReport.model_validate_json(body)
    assert report.segments is not None
    assert len(report.segments.newest) == 60
    assert len(report.segments.newest[0].waits_for) == 1
    assert len(report.segments.newest[0].why) == 2000


@pytest.mark.parametrize("path", ["/a/nginx", "/b/nginx", "s3://bucket/nginx", "/a/" + "n" * 200, "/a/ä b"])
def test_a_name_is_one_of_the_gateway(path: str) -> None:
    assert NAME.match(table_name(Location.of(path)))
    others = {"/a/nginx", "/b/nginx", "s3://bucket/nginx"} - {path}
    assert table_name(Location.of(path)) not in {table_name(Location.of(other)) for other in others}


def test_a_gateway_that_is_away_costs_no_load_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody accepts on the port: each attempt waits for its time-out."""
    monkeypatch.setattr(gateway_report, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(gateway_report, "_LEAST_S", 0.0)
    said: list[str] = []
    tried = threading.Semaphore(0)

    def attempt(*args: Any) -> str | None:
        tried.release()
        return send(*args)

    monkeypatch.setattr(gateway_report, "send", attempt)
    monkeypatch.setattr(TableReports, "_document", lambda *_: b"{}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        to = ReportSettings(urls=[f"http://127.0.0.1:{silent.getsockname()[1]}"])
        reports = TableReports(cast(Any, SimpleNamespace()), to, follows=True, say=said.append)
        path = Location.of("/warehouse/nginx")
        for number in range(3):
            reports.load_ended(path, StorageUnavailable(f"error {number}"), None)
            assert tried.acquire(timeout=30)
        reports.close()
    assert len(said) == 1
    assert "timed out" in said[0]
    assert reports.failed is not None


def test_a_report_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    to = ReportSettings(urls=["http://127.0.0.1:9"])
    settings: Any = SimpleNamespace(dc="dc1", kafka=None)
    reports = TableReports(settings, to, follows=False, say=said.append)
    reports.load_ended(Location.of(tmp_path / "none"), None, None)
    reports.close()
    assert said == [], "nothing was loaded yet"
    assert json.loads(fitted(report_of({**FACTS, "lag": []}, None, "dc1", None)))["every_s"] is None
