"""Segments of real tables: states after each check, late rows, loaders that die, and a real gateway."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from logferry.loaders.batches import execute
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.commands.table import main as table_command
from logferry.loaders.config import GatewayAccess, TableJob
from logferry.loaders.errors import ForeignTable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import ACTIVE, IMMUTABLE, READY, Segment
from logferry.loaders.planning.source_facts import SourceKey
from logferry.loaders.runs import segment_check, table_run
from logferry.loaders.runs.segment_check import ReportedSource
from logferry.loaders.runs.table_run import SegmentNotice, load_table
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import last_check, read_segments
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.gateway import Gateway
from tests.support.loader import Topic, chunks_of, stored
from tests.support.table_loads import LoaderDied, die

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]

PARSER = {"format": "regex", "pattern": r"(?<at>\S+) (?<what>.*)", "event_time": {"column": "at", "formats": ["iso"]}}
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
OLD, NEW = NOW - timedelta(hours=5), NOW - timedelta(hours=4)


def lines(hour: datetime, *minutes: int) -> bytes:
    return b"".join(f"{(hour + timedelta(minutes=m)).isoformat()} line {m}\n".encode() for m in minutes)


class Hours:
    """A topic and its table, with no wait for late rows."""

    def __init__(self, topic: Topic, table: Location, **settings: Any) -> None:
        self.topic, self.table = topic, table
        rules = {"late_wait_s": 0, "source_idle_s": 3600, **settings}
        raw = {"path": table, "topics": [topic.name], "parser": PARSER, "segments": rules}
        self.job = TableJob.model_validate(raw)
        self.sent = 0

    async def write(self, source: str, *parts: bytes) -> None:
        await self.topic.write(chunks_of(source, *parts, start=self.sent))
        self.sent += 10_000

    def load(self, loader: Loader) -> dict[datetime, Segment]:
        list(load_table(loader, self.job))
        return self.segments()

    def segments(self) -> dict[datetime, Segment]:
        """The segments, after a check that their counts are those of the rows."""
        found = read_segments(TablePaths.of(self.table).segments, last_batch(open_table(Location.of(self.table))))
        rows: dict[datetime, list[dict[str, Any]]] = {}
        for row in stored(self.table):
            start = row["event_time"].replace(minute=0, second=0, microsecond=0)
            rows.setdefault(start, []).append(row)
        assert {start: segment.rows for start, segment in found.items() if segment.rows} == {
            start: len(there) for start, there in rows.items()
        }
        for start, there in rows.items():
            assert found[start].bytes == sum(len(row["text"].encode()) for row in there)
            assert found[start].first == min(row["event_time"] for row in there)
            assert found[start].last == max(row["event_time"] for row in there)
        return found


@pytest.fixture
async def hours(kafka: KafkaCluster, topic_name: str, warehouse: Location) -> Hours:
    topic = Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create()
    return Hours(topic, warehouse / "logs")


async def test_an_hour_becomes_ready_and_gets_a_new_version(
    loader: Start, hours: Hours, capsys: pytest.CaptureFixture[str]
):
    await hours.write("web1", lines(OLD, 1, 59), lines(NEW, 10))
    await hours.write("web2", lines(OLD, 30))
    loads, command = loader(), table_command
    found = hours.load(loads)
    assert (found[OLD].state, found[OLD].rows, found[NEW].state) == (ACTIVE, 3, ACTIVE)
    window = OLD.strftime("%Y-%m-%dT%H")
    assert command(["segments", "wait", str(hours.table), window, "--timeout-s", "0"]) == 1
    assert f"is ACTIVE in version 1: waits for web2 in {hours.topic.name}" in capsys.readouterr().out
    # The one that was behind has told more: the hour is closed in one look, and READY in another.
    await hours.write("web2", lines(NEW, 5))
    states = [hours.load(loads)[OLD].state for _ in range(4)]
    assert states == [IMMUTABLE, READY, READY, READY]
    assert hours.segments()[NEW].state == ACTIVE
    last = last_batch(open_table(Location.of(hours.table)))
    assert hours.load(loads)[OLD].batch <= last == last_batch(open_table(Location.of(hours.table))), (
        "a look that changes nothing"
    )
    assert command(["segments", "wait", str(hours.table), window]) == 0
    assert "is READY: version 1, 3 rows" in capsys.readouterr().out
    # A late row opens it again, and it takes the same way.
    await hours.write("web1", lines(OLD, 2))
    late = hours.load(loads)[OLD]
    assert (late.version, late.rows, late.late_rows) == (2, 4, 1)
    assert command(["segments", "wait", str(hours.table), window, "--timeout-s", "0"]) == 1
    assert [hours.load(loads)[OLD].state for _ in range(2)][-1] == READY
    assert command(["segments", "list", str(hours.table), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])["segments"]
    assert [(one["segment"], one["state"], one["version"]) for one in shown] == [
        (window, READY, 2),
        (NEW.strftime("%Y-%m-%dT%H"), ACTIVE, 1),
    ]


@pytest.mark.parametrize("window", ["commit_files", pytest.param("put_segments", marks=pytest.mark.long)])
async def test_a_loader_that_dies_before_the_commit(
    window: str, loader: Start, hours: Hours, monkeypatch: pytest.MonkeyPatch
):
    """Segments of a batch that the table does not hold do not count, and are counted once when it does."""
    await hours.write("web1", lines(OLD, 1), lines(NEW, 10))
    hours.load(loader())
    await hours.write("web1", lines(NEW, 11, 12))
    with monkeypatch.context() as patch:
        patch.setattr(execute, window, die)
        with pytest.raises(LoaderDied):
            hours.load(loader("dies"))
    assert hours.segments()[NEW].rows == 1
    assert hours.load(loader("continues"))[NEW].rows == 3


@pytest.mark.long
async def test_a_loader_that_died_has_not_checked_the_sources(
    loader: Start, hours: Hours, monkeypatch: pytest.MonkeyPatch
):
    """Its batch is in the ledger. The loader that finishes it has not checked the sources and changes no state."""
    await hours.write("web1", lines(OLD, 1), lines(NEW, 10))
    loads = loader()
    assert hours.load(loads)[OLD].state == ACTIVE
    with monkeypatch.context() as patch:
        patch.setattr(table_run, "do_batch", die)
        with pytest.raises(LoaderDied):
            hours.load(loader("dies"))
    planned = last_batch(open_table(Location.of(hours.table))) + 1
    done = [event for event in load_table(loader("continues"), hours.job) if isinstance(event, BatchDone)]
    assert done[0].batch == planned
    assert hours.segments()[OLD].state == IMMUTABLE, "by its own look, after that"
    assert hours.load(loads)[OLD].state == READY


@pytest.mark.long
async def test_a_table_that_gets_segments_later(loader: Start, hours: Hours):
    plain = hours.job.model_copy(update={"segments": None})
    await hours.write("web1", lines(OLD, 1, 2), lines(NEW, 10))
    list(load_table(loader(), plain))
    # With nothing new to load: what the table holds is counted, and who writes into it is known.
    found = [hours.load(loader()) for _ in range(3)][-1]
    assert (found[OLD].rows, found[OLD].state) == (2, READY)
    assert (found[NEW].rows, found[NEW].state) == (1, ACTIVE), "web1 is alive, and may have more"
    await hours.write("web1", lines(NEW, 11))
    assert hours.load(loader())[NEW].rows == 2
    other = hours.job.segments.model_copy(update={"window_s": 86_400}) if hours.job.segments else None
    with pytest.raises(ForeignTable, match="segments of 3600 s, the job 86400 s"):
        list(load_table(loader(), hours.job.model_copy(update={"segments": other})))


@pytest.fixture
def hook() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """(address, posted documents). Refuses the first request."""
    came: list[tuple[str, dict[str, Any]]] = []
    refused: list[bool] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if refused:
                came.append((self.headers["Idempotency-Key"], body))
            self.send_response(204 if refused else 503)
            refused.append(True)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/ready", came
        server.shutdown()
        thread.join()


@pytest.mark.long
async def test_others_are_notified_once_for_each_version(
    loader: Start, hours: Hours, tmp_path: Path, hook: tuple[str, list[tuple[str, dict[str, Any]]]]
):
    url, came = hook
    told = Hours(hours.topic, hours.table, success=tmp_path / "ready", webhook=url)
    await told.write("web1", lines(OLD, 1), lines(NEW, 10))
    loads, waits = loader(), []
    for _ in range(5):
        waits += [event for event in load_table(loads, told.job) if isinstance(event, SegmentNotice)]
    (wait,) = waits
    assert "503" in wait.reason
    ((key, body),) = came
    window = OLD.strftime("%Y-%m-%dT%H")
    assert key == f"{told.table}/{window}-1"
    assert (body["segment"], body["version"], body["rows"]) == (window, 1, 1)
    assert json.loads((tmp_path / "ready" / window / "_SUCCESS").read_text()) == body
    await told.write("web1", lines(OLD, 2))
    for _ in range(4):
        told.load(loads)
    assert [(key, body["rows"]) for key, body in came[1:]] == [(f"{told.table}/{window}-2", 2)]


@pytest.mark.long
async def test_heartbeats_through_a_real_gateway(
    loader: Start, kafka: KafkaCluster, workers: Gateway, topic_name: str, warehouse: Location
):
    """A silent source is complete by its heartbeat. A source with unloaded chunks holds the segment open."""
    url = workers.urls[0]
    name = topic_name[-80:]
    call(f"{url}/v1/topics/{name}", {"partitions": 1}, "PUT")
    topic = Topic(kafka.bootstrap, f"dc1.{name}")
    told = Hours(topic, warehouse / "logs")
    loads = loader()
    object.__setattr__(loads, "gateways", {"dc1": GatewayAccess(urls=[url])})
    sources = f"{url}/v1/topics/{name}/sources"
    call(f"{sources}/quiet/chunks?seqno=1", lines(OLD, 1))
    call(f"{sources}/busy/chunks?seqno=1", lines(NEW, 10))
    assert told.load(loads)[OLD].state == ACTIVE
    assert told.load(loads)[OLD].state == ACTIVE, "quiet is alive, and may have more"
    soon = int(datetime.now(UTC).timestamp() * 1000)
    call(f"{sources}/quiet/heartbeat", {"watermark_ms": soon})
    states = [told.load(loads)[OLD].state for _ in range(3)]
    assert states[-1] == READY
    call(f"{sources}/silent/heartbeat", {"position": 0, "size": 100})
    await_late = told.load(loads)[NEW]
    call(f"{sources}/busy/heartbeat", {"finished": True})
    assert [told.load(loads)[NEW].state for _ in range(3)] == [ACTIVE] * 3
    assert await_late.state == ACTIVE
    call(f"{sources}/silent/heartbeat", {"position": 100, "size": 100})
    assert [told.load(loads)[NEW].state for _ in range(3)][-1] == READY


async def test_chunks_that_were_removed_from_the_copy_of_another_data_centre(
    loader: Start, kafka: KafkaCluster, topic_name: str, warehouse: Location, monkeypatch: pytest.MonkeyPatch
):
    """Their source is finished: nobody writes them again. A chunk of hours later shows that they will not come."""
    topic = Topic(kafka.bootstrap, f"dc2.{topic_name}")
    await topic.create(1)
    table = Hours(topic, warehouse / "logs")
    reported: dict[SourceKey, ReportedSource] = {}

    async def write(source: str, recorded: datetime, *parts: bytes) -> None:
        chunks = chunks_of(source, *parts, start=7000)
        await topic.write(chunks, recorded_ms=int(recorded.timestamp() * 1000))
        report = ReportedSource(chunks[-1].chunk.seqno, recorded, None, None, source == "gone", frozenset({0}))
        reported[SourceKey(topic.name, source)] = report

    monkeypatch.setattr(segment_check, "ask_gateways", lambda *_: dict(reported))
    before = datetime.now(UTC) - timedelta(hours=3)
    await write("gone", before, lines(OLD, 1))
    await topic.remove_before(0, 1)
    await write("soon", before + timedelta(minutes=10), lines(OLD, 30), lines(NEW, 5))
    loads = loader()
    assert [table.load(loads)[OLD].state for _ in range(3)] == [ACTIVE] * 3
    assert "more is recorded than loaded" in last_check(TablePaths.of(table.table).segments)["waits"]
    await write("later", datetime.now(UTC), lines(NEW, 20))
    assert [table.load(loads)[OLD].state for _ in range(2)] == [IMMUTABLE, READY]
    assert table.segments()[OLD].rows == 1


def call(url: str, body: dict[str, Any] | bytes, method: str = "POST") -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=30) as answer:
        assert answer.status in (200, 201)
