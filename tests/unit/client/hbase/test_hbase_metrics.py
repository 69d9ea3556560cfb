"""What a connector says of itself: calls, waits and their reasons, the age of changes, and the page for Prometheus."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from contextlib import closing

import pytest
from logferry.client.hbase import frames
from logferry.client.hbase.frames import RemoteCall
from logferry.client.hbase.metrics import Figures, figures_of, render
from logferry.client.hbase.server import CallRefused, PeerServer, ServerLimits
from logferry.client.transport.metrics_page import MetricsServer

from tests.support.hbase_calls import REGION, RegionServer, put, shipped

EDITS = [(REGION, 5, [put("a")])]
LIMITS = ServerLimits(call_bytes=4000, memory_bytes=6000, threads=2)


def test_the_reason_of_the_last_wait_is_kept_for_each_host() -> None:
    figures = Figures()
    for who, reason in (("10.0.0.3:5000", "first"), ("10.0.0.4:5000", "other"), ("10.0.0.3:5001", "second")):
        figures.call_ended(figures.call_came(time.monotonic()), who, reason)
    found = figures_of(figures.note())
    assert [(wait["who"], wait["times"], wait["reason"]) for wait in found["waits"]] == [
        ("10.0.0.4", 1, "other"),
        ("10.0.0.3", 2, "second"),
    ]
    assert (found["calls"], found["failed_calls"]) == (0, 3)


def test_a_note_is_small_whatever_happens() -> None:
    """A node of ZooKeeper holds a megabyte."""
    figures = Figures()
    for number in range(1000):
        figures.call_ended(figures.call_came(0), f"10.0.{number}.1:1", "x" * 100_000)
    assert len(figures.note()) < 20_000


def test_a_note_does_not_change_while_nothing_happens() -> None:
    figures = Figures()
    figures.recorded(3, 100, int(time.time() * 1000))
    assert figures.note() == figures.note()


@pytest.mark.parametrize("note", [None, b"", b"[]", b"\xff", b"{"])
def test_a_note_of_another_kind_is_empty(note: bytes | None) -> None:
    assert figures_of(note) == {}


def test_the_server_counts_calls_and_knows_what_waits() -> None:
    began, go, figures = threading.Event(), threading.Event(), Figures()
    texts = ["", "not now"]

    def carry_out(call: RemoteCall) -> None:
        began.set()
        assert go.wait(20)
        if text := texts.pop(0):
            raise CallRefused(text)

    served = PeerServer("127.0.0.1", 0, carry_out, LIMITS, figures)
    served.start()
    with closing(served), RegionServer(served.port) as source:
        source.link.sendall(frames.request(9, "ReplicateWALEntry", *shipped(EDITS)))
        assert began.wait(20)
        assert figures.oldest_call_s() > 0
        assert served.held_bytes > 0
        assert served.connection_count == 1
        go.set()
        assert source.answer() == ""
        assert source.ship(EDITS) == "logferry: not now"
        assert "at most 4000" in source.ship([(REGION, 6, [put("a", b"x" * 9000)])])
    assert (figures.calls, figures.failed_calls, figures.oldest_call_s(), served.held_bytes) == (1, 2, 0.0, 0)


def test_a_call_that_is_cut_off_does_not_wait_any_more() -> None:
    figures = Figures()
    served = PeerServer("127.0.0.1", 0, lambda call: None, LIMITS, figures)
    served.start()
    with closing(served):
        with RegionServer(served.port) as source:
            source.link.sendall(frames.LENGTH.pack(3000) + b"x" * 10)
        with RegionServer(served.port) as source:
            assert source.ship([(REGION, 5, [put("a", b"x" * 3600)])]) == ""
    assert figures.oldest_call_s() == 0.0


def test_the_page_has_every_figure() -> None:
    figures = Figures()
    figures.recorded(3, 100, int(time.time() * 1000) - 2500)
    figures.call_ended(figures.call_came(time.monotonic()), "10.0.0.3:5000", "")
    with closing(MetricsServer(0, lambda: render("orders_log", figures, 17, 2, True))) as server:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    found = dict(re.findall(r'^logferry_hbase_(\w+){subscription="orders_log"} (\S+)$', text, re.M))
    assert 2.5 <= float(found.pop("change_age_seconds")) < 60
    assert found == {
        "calls_total": "1", "failed_calls_total": "0", "recorded_chunks_total": "3", "recorded_bytes_total": "100",
        "oldest_call_seconds": "0", "held_bytes": "17", "connections": "2", "announced": "1",
    }  # fmt: skip
    json.loads(figures.note())


def test_the_age_of_changes_is_left_out_before_the_first_one() -> None:
    assert "change_age" not in render("orders_log", Figures(), 0, 0, False)
