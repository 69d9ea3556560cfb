"""A segment check asks the gateways: their time counts, their token stays with them, and exclusions apply."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from logferry.loaders.batches.execute import GatewayClock
from logferry.loaders.commands.table import main as table_command
from logferry.loaders.config import GatewayAccess, TableJob
from logferry.loaders.errors import GatewayUnavailable
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range, TopicPartition
from logferry.loaders.planning.segment_states import ACTIVE, DROPPED, Segment, SegmentRules
from logferry.loaders.planning.source_facts import SourceFacts, SourceKey
from logferry.loaders.runs.segment_check import (
    ReportedSource,
    SegmentCheck,
    ask_gateways,
    begin_check,
    difference,
    finish_check,
)
from logferry.loaders.storage.side_tables import add_sources, create_segments, create_side_tables, put_segments

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
Serve = Callable[[Callable[[http.server.BaseHTTPRequestHandler], None]], str]

# All side tables hold the last batch, so nothing is counted by Spark.
LOADER: Any = SimpleNamespace(run="run", spark=None)


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        def begin(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> str:
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    answer(self)

                def log_message(self, *_: Any) -> None:
                    pass

            server = stack.enter_context(http.server.HTTPServer(("127.0.0.1", 0), Handler))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield begin


def page(handler: http.server.BaseHTTPRequestHandler, sources: list[dict[str, Any]], at: datetime) -> None:
    body = json.dumps({"sources": sources, "next": None}).encode()
    handler.send_response_only(200)
    handler.send_header("Date", format_datetime(at, usegmt=True))
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class NoKafka:
    def ends(self, topics: list[str]) -> dict[TopicPartition, int]:
        return {TopicPartition(topic, 0): 7 for topic in topics}


class FakeLoader:
    """The parts of a loader that a check needs."""

    def __init__(self, gateways: dict[str, GatewayAccess]) -> None:
        self.gateways, self.clock, self.dc, self.kafka = gateways, GatewayClock(), "dc1", NoKafka()


@pytest.mark.parametrize("ahead", [-20 * MINUTE, 20 * MINUTE])
def test_the_time_of_a_check_is_the_gateway_s(serve: Serve, ahead: timedelta):
    url = serve(lambda handler: page(handler, [], datetime.now(UTC) + ahead))
    loader: Any = FakeLoader({"dc1": GatewayAccess(urls=[url])})
    before = datetime.now(UTC)
    check = begin_check(loader, ["dc1.a"])
    assert check.missing == ""
    assert before - 2 * timedelta(seconds=1) <= check.began - ahead <= datetime.now(UTC) + timedelta(seconds=1)
    assert check.ends == {TopicPartition("dc1.a", 0): 7}
    assert abs(loader.clock.now() - datetime.now(UTC) - ahead) < MINUTE


def test_whole_seconds_are_no_difference():
    later = NOW + timedelta(milliseconds=900)
    assert difference(format_datetime(NOW, usegmt=True), later, later) == timedelta(0)
    assert difference(format_datetime(NOW, usegmt=True), NOW - MINUTE, NOW + MINUTE) == timedelta(0)
    assert difference(format_datetime(NOW, usegmt=True), NOW - MINUTE, NOW - MINUTE) == MINUTE
    assert difference(format_datetime(NOW, usegmt=True), NOW + MINUTE, NOW + MINUTE) == timedelta(seconds=-59)
    assert difference(None, NOW, NOW) is None
    assert difference("yesterday", NOW, NOW) is None


def test_of_several_gateways_the_earliest_time_counts(serve: Serve):
    def at(ahead: timedelta) -> GatewayAccess:
        return GatewayAccess(urls=[serve(lambda handler: page(handler, [], datetime.now(UTC) + ahead))])

    clock = GatewayClock()
    gateways = {"dc1": at(20 * MINUTE), "dc2": at(-20 * MINUTE)}
    assert ask_gateways(gateways, ["dc1.a", "dc2.a"], clock) == {}
    assert -21 * MINUTE < clock.ahead < -19 * MINUTE
    ask_gateways({}, ["dc1.a"], clock)
    assert clock.ahead == timedelta(0)


def test_a_token_does_not_follow_a_redirect(serve: Serve, tmp_path: Path):
    seen: list[str | None] = []

    def other(handler: http.server.BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Authorization"])
        page(handler, [{"source_id": "s", "partition": 2, "written_ms": 5}], NOW)

    elsewhere = serve(other)

    def redirect(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(307)
        handler.send_header("Location", f"{elsewhere}{handler.path}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    (tmp_path / "token").write_text("secret")
    away = serve(redirect)
    with pytest.raises(GatewayUnavailable, match=f"{away} answers 307"):
        ask_gateways({"dc1": GatewayAccess(urls=[away], token_file=tmp_path / "token")}, ["dc1.a"], GatewayClock())
    assert seen == []
    access = {"dc1": GatewayAccess(urls=[away, elsewhere], token_file=tmp_path / "token")}
    (report,) = ask_gateways(access, ["dc1.b"], GatewayClock()).values()
    assert report.partitions == {2}
    assert seen == ["Bearer secret"], "the next of the URLs is asked with it"


def test_an_excluded_source_and_lost_records_do_not_hold_up_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    job = TableJob.model_validate(
        {"path": tmp_path / "t", "topics": ["dc1.a"], "parser": {"format": "access"}, "segments": {}}
    )
    paths = TablePaths.of(job.path)
    create_segments(paths.segments, SegmentRules())
    create_side_tables(paths)
    start = NOW - 240 * MINUTE
    put_segments(paths.segments, 0, "run", [Segment(start, 1, ACTIVE, 1, 9, start, start, 0, None, start, None, 0)])
    facts = {SourceKey("dc1.a", "web7:/x#1"): SourceFacts(0, 5, NOW, start)}
    add_sources(paths.sources, 0, "run", facts)
    position = Range("dc1.a", 0, "id", 7, 7)
    reported = {SourceKey("dc1.a", "web7:/x#1"): _report(5), SourceKey("dc1.a", "lost"): _report(99)}
    check = SegmentCheck(NOW, ("dc1.a",), reported, {position.key: 7}, "")
    assert finish_check(LOADER, job, paths, 0, check, [position._replace(end=6)]) is None
    command = ["segments", "exclude", str(job.path)]
    assert table_command([*command, "web7:*"]) == 0
    assert finish_check(LOADER, job, paths, 0, check, [position._replace(end=6)]) is None, "not all is loaded"
    done = finish_check(LOADER, job, paths, 0, check, [position])
    assert done is not None
    assert (done.check.low.at, done.check.low.waits_for) == (NOW, None)
    assert "web7:* is excluded from" in capsys.readouterr().out
    assert table_command(["segments", "list", str(job.path)]) == 0
    assert "excluded: web7:*" in capsys.readouterr().out
    assert table_command(["segments", "include", str(job.path), "web7:*"]) == 0
    assert table_command(["segments", "include", str(job.path), "web7:*"]) == 2
    assert "is not excluded" in capsys.readouterr().err
    assert finish_check(LOADER, job, paths, 0, check, [position]) is None


def test_sources_without_heartbeats_hold_a_table_that_usually_has_rows(tmp_path: Path):
    """All of them fell silent at once: an outage. Each hour waits for `max_wait_s` after its end at most."""
    job, paths, rows = _hourly(tmp_path, {})
    facts = {SourceKey("dc1.a", f"s{n}"): SourceFacts(0, 5, NOW - 40 * MINUTE, NOW - 45 * MINUTE) for n in range(3)}
    add_sources(paths.sources, 0, "run", facts)
    assert _low(job, paths, 0, 0) == _low(job, paths, 0, 11) == NOW - 45 * MINUTE
    assert _low(job, paths, 0, 12) == NOW
    assert _low(job, paths, 0, 60) == NOW + timedelta(hours=48)
    add_sources(paths.sources, 1, "run", {})
    for batch, (many, want) in enumerate([(1, NOW - 45 * MINUTE), (7, NOW)], 1):
        add_sources(paths.sources, batch, "run", {})
        empty = [row._replace(state=DROPPED, rows=0, batch=batch) for row in rows[7 : 7 + many]]
        put_segments(paths.segments, batch, "run", empty)
        assert _low(job, paths, batch, 0) == want, f"{many} of the hours had no rows"


@pytest.mark.parametrize(("settings", "held"), [({}, True), ({"silent_share": 0.6}, False), ({"max_wait_s": 0}, False)])
def test_a_rack_of_ten_holds_a_table_of_twenty_hosts(tmp_path: Path, settings: dict[str, float], held: bool):
    """Half of the hosts with heartbeats fell silent, the others live."""
    job, paths, _ = _hourly(tmp_path, settings)
    seen = {SourceKey("dc1.a", f"s{n}"): NOW - (20 if n < 10 else 1) * MINUTE for n in range(20)}
    add_sources(paths.sources, 0, "run", {key: SourceFacts(0, 5, at, at) for key, at in seen.items()})
    reported = {key: ReportedSource(5, at, at, at) for key, at in seen.items()}
    assert _low(job, paths, 0, 0, reported) == NOW - (20 if held else 1) * MINUTE


def _hourly(tmp_path: Path, settings: dict[str, float]) -> tuple[TableJob, TablePaths, list[Segment]]:
    """A table with rows in each of the last 25 hours."""
    job = TableJob.model_validate(
        {"path": tmp_path / "t", "topics": ["dc1.a"], "parser": {"format": "access"}, "segments": settings}
    )
    paths = TablePaths.of(job.path)
    create_segments(paths.segments, SegmentRules())
    create_side_tables(paths)
    hours = [NOW - timedelta(hours=n) for n in range(1, 26)]
    rows = [Segment(at, 1, ACTIVE, 1, 9, at, at, 0, None, at, None, 0) for at in hours]
    put_segments(paths.segments, 0, "run", rows)
    return job, paths, rows


def _low(
    job: TableJob,
    paths: TablePaths,
    last: int,
    hours: float,
    reported: Mapping[SourceKey, ReportedSource] = MappingProxyType({}),
) -> datetime | None:
    """The low watermark of a check after so many hours."""
    check = SegmentCheck(NOW + timedelta(hours=hours), ("dc1.a",), reported, {}, "")
    done = finish_check(LOADER, job, paths, last, check, [])
    return None if done is None else done.check.low.at


def _report(seqno: int) -> ReportedSource:
    return ReportedSource(seqno, NOW, None, None, False, frozenset({0}))
