"""What a connector reports of its subscription, against the gateway's model of it; and which connector reports."""

from __future__ import annotations

import copy
import json
from typing import Any, cast

import pytest
from logferry.client.hbase import progress
from logferry.client.hbase.progress import GatewayReports, add_sizes, logs_of, report_of
from logferry.client.hbase.zookeeper import Unanswered
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Dialer, Reply
from logferry.gateway.reports.hbase import HBaseReport, StoredHBaseReport, description_of, summary_of

WAIT = {"who": "10.0.0.3", "at_ms": 17, "times": 2, "reason": "not recorded in time"}
FIGURES = {"calls": 5, "failed_calls": 2, "chunks": 9, "bytes": 77, "change_age_ms": None, "oldest_call_s": 0}
SERVER = {"server": "rs1,16020,1", "shipped_operations": 9, "age_ms": 41, "oldest_wal_ms": 1200, "problem": ""}
OWN = {"taken_over_from": "", "wals": [{"wal": "a", "position": 7}, {"wal": "b", "position": 0}]}
OTHERS = {"taken_over_from": "rs0,16020,0", "wals": [{"wal": "c", "position": 7}]}
DEAD: dict[str, Any] = {
    "server": "rs2,16020,2",
    "shipped_operations": None,
    "age_ms": None,
    "oldest_wal_ms": None,
    "queues": [],
}
FOUND: dict[str, Any] = {
    "name": "orders_log",
    "state": "active",
    "topic": "orders",
    "tables": ("orders", "shop:items"),
    "connectors": ["10.0.0.5:16100", "10.0.0.6:16100"],
    "connector_figures": {"10.0.0.5:16100": {**FIGURES, "waits": [WAIT]}, "10.0.0.6:16100": {}},
    "servers": [{**SERVER, "queues": [OWN, OTHERS]}, {**DEAD, "problem": "x" * 5000}],
    "problems": ["y" * 5000],
}


def test_a_report_is_what_the_gateway_takes() -> None:
    report = HBaseReport.model_validate_json(json.dumps(report_of(FOUND, "dc1")))
    assert (report.topics, report.every_s) == (["dc1.orders"], 30.0)
    server, dead = report.servers
    assert (server.logs, server.taken_over, server.problem) == (3, 1, None)
    assert len(dead.problem or "") == len(report.problems[0]) == 2000
    busy, silent = report.connectors
    assert (busy.calls, busy.waits[0].reason) == (5, "not recorded in time")
    assert (silent.calls, silent.waits) == (None, [])
    stored = StoredHBaseReport(reported_ms=1, report=report)
    assert StoredHBaseReport.decode(stored.encode()) == stored
    summary = summary_of("orders_log", stored)
    assert (summary.logs, summary.servers, summary.age_ms, summary.oldest_wal_ms) == (3, 2, 41, 1200)
    assert description_of("orders_log", stored).connectors == report.connectors


class Connectors:
    master = None

    def __init__(self, *names: str) -> None:
        self.names: list[str] | None = list(names)

    def connectors(self, _: str) -> list[str]:
        if self.names is None:
            raise Unanswered("ZooKeeper does not answer")
        return self.names


class Answers:
    """In place of a gateway. ``asked``: methods and URLs."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.asked: list[tuple[str, str]] = []

    def exchange(self, url: str, headers: dict[str, str], body: bytes | None, method: str) -> Reply:
        self.asked.append((method, url))
        return Reply(200, {}, b'{"dc": "dc1"}') if method == "GET" else Reply(self.status, {}, b"no right")


def test_the_first_connector_reports_and_a_refusal_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "HBaseMaster", lambda _: Master())
    monkeypatch.setattr(progress, "listed", lambda *_: FOUND)
    monkeypatch.setattr(progress, "with_progress", lambda *_: FOUND)
    registry, answers = Connectors("10.0.0.4:1", "10.0.0.5:16100"), Answers(403)
    cluster = GatewayCluster(["http://gateway1:8080"], None)
    reports = GatewayReports("orders_log", "10.0.0.5:16100", cast(Any, registry), cluster, Dialer())
    reports._connections = cast(Any, answers)
    reports.report()
    assert answers.asked == []
    registry.names = ["10.0.0.5:16100"]
    reports.report()
    reports.report()
    assert [method for method, _ in answers.asked] == ["GET", "PUT", "PUT"]
    assert answers.asked[1][1] == "http://gateway1:8080/v1/hbase/orders_log"
    assert caplog.text.count("hbase-unreported") == 1
    assert "answers 403: no right" in caplog.text
    answers.status = 200
    reports.report()
    registry.names = None
    reports.report()
    assert caplog.text.count("hbase-unreported") == 2


class Master:
    def peers(self) -> dict[str, Any]:
        return {}


def test_the_bytes_that_are_left_are_counted_and_a_log_that_is_gone_is_a_problem() -> None:
    found = {**copy.deepcopy(FOUND), "problems": []}
    assert [wal["wal"] for wal in logs_of(found)] == ["a", "b", "c"]
    add_sizes(found, {"a": 10, "b": 5})
    own, others = found["servers"][0]["queues"]
    assert (own["left_bytes"], others["left_bytes"]) == (3 + 5, None)
    assert [wal["size"] for wal in logs_of(found)] == [10, 5, None]
    assert [text.partition(",")[0] for text in found["problems"]] == ["c"]
