"""With thousands of files nearly all are quiet: what an answer, a look and a save cost depends on the busy ones."""

from __future__ import annotations

import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from logferry.client.agent.looks import LiveFiles
from logferry.client.agent.main import run
from logferry.client.agent.schedule import NEVER, TimeQueue
from logferry.client.agent.search import Search
from logferry.client.agent.source import FileSource
from logferry.client.agent.status import MetricsPage
from logferry.client.agent.workers import Workers
from logferry.client.files.checkpoint import FILE
from logferry.client.files.tail import FileTail
from logferry.client.inputs.inputs import Inputs
from logferry.client.transport.cluster import Credentials, GatewayCluster
from logferry.client.transport.connections import Dialer
from logferry.ops.stack.processes import free_ports

from tests.support.fake_gateway import FakeGateway, Served

QUIET = 200
SILENT = pytest.mark.parametrize("client", [{"heartbeat_s": 0.0}], indirect=True)


def test_a_queue_gives_what_has_been_due_for_longest_and_each_item_once() -> None:
    queue: TimeQueue[str] = TimeQueue()
    for item, due in (("late", 9.0), ("b", 2.0), ("a", 1.0), ("moved", 1.5), ("gone", 0.0), ("c", 2.0)):
        queue.put(item, due)
    queue.put("moved", 3.0)
    queue.put("gone", NEVER)
    assert [queue.pop(3.0) for _ in range(5)] == ["a", "b", "c", "moved", None]
    assert queue.pop(9.0) == "late"


def test_a_queue_keeps_no_more_than_a_few_stale_times() -> None:
    queue: TimeQueue[int] = TimeQueue()
    for turn in range(100):  # the last time of each item counts, and they come in the order of that
        for item in range(1000):
            queue.put(item, 1000.0 * turn + (item * 7) % 1000)
        assert len(queue._heap) <= 1.25 * (item + 1) + 64
    assert [queue.pop(1e9) for _ in range(1001)] == [*sorted(range(1000), key=lambda item: item * 7 % 1000), None]


def counted(monkeypatch: pytest.MonkeyPatch, of: type, name: str) -> list[object]:
    calls: list[object] = []
    original = getattr(of, name)

    def call(self: object, *arguments: Any) -> Any:
        calls.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(of, name, call)
    return calls


def with_quiet_files(client: Any) -> None:
    """All sent, and quiet for so long that they are looked at once a second."""
    for number in range(QUIET):
        client.write(f"{number}.log", b"quiet\n")
    client.write("hot.log", b"begin\n")
    client.settle()
    client.step(100.0)
    client.settle()


@SILENT
def test_an_answer_asks_only_sources_that_may_have_a_request(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_quiet_files(client)
    client.write("hot.log", b"x" * 999 + b"\n")
    client.step()
    calls = counted(monkeypatch, FileSource, "next_job")
    for _ in range(20):
        client.write("hot.log", b"x" * 999 + b"\n")
        client.step(0.0)
    assert 0 < len(calls) <= 60
    assert {call.name.partition("#")[0].rpartition("/")[2] for call in calls} == {"hot.log"}  # type: ignore[attr-defined]


@SILENT
@pytest.mark.parametrize("name", ["{}.log", "app.log.{}", "app-2026-{}.log"])
def test_a_file_is_not_compared_with_all_others(client: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """But with those from whose names its own comes by rotation."""
    for number in range(100, QUIET):
        client.write(name.format(number), b"%d\n" % number)
    calls = counted(monkeypatch, LiveFiles, "values")
    client.settle()
    assert len(client.stored()) == QUIET - 100
    assert not calls


@SILENT
def test_a_quiet_file_is_looked_at_once_a_second(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no inotify; else every ten seconds."""
    with_quiet_files(client)
    calls = counted(monkeypatch, FileTail, "look")
    for _ in range(100):
        client.step(0.2)
    assert QUIET <= len(calls) <= 4 * QUIET
    client.agent.watch.looks.hints.close()
    for key in client.agent.watch._live:
        client.agent.watch.looks.hints.disarm(key)
    client.step(20.0)
    calls.clear()
    for _ in range(10):
        client.step(0.2)
    assert QUIET <= len(calls) <= 4 * QUIET


@SILENT
def test_lines_of_every_file_are_sent_however_many_there_are(client: Any) -> None:
    with_quiet_files(client)
    for number in range(0, QUIET, 3):
        client.write(f"{number}.log", b"more\n")
    client.settle()
    assert sorted(client.stored()) == sorted(path.read_bytes() for path in client.root.glob("*.log"))


@SILENT
def test_a_save_writes_the_entries_that_changed(client: Any) -> None:
    with_quiet_files(client)
    assert client.agent.remember(client.now)
    before = (client.root / "state" / FILE).read_bytes()
    client.write("hot.log", b"x" * 2000 + b"\n")
    client.settle()
    assert client.agent.remember(client.now)
    after = (client.root / "state" / FILE).read_bytes()
    assert after.startswith(before)
    assert b"hot.log" in after[len(before) :]
    assert b"/7.log" not in after[len(before) :]
    client.restart()
    client.write("hot.log", b"more\n")
    client.settle()
    assert len(client.stored()) == QUIET + 1
    assert b"begin\n" + b"x" * 2000 + b"\nmore\n" in client.stored()


@pytest.mark.parametrize("client", [{"once": True}], indirect=True)
def test_with_once_every_source_is_asked_a_few_times_whether_it_is_done(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(QUIET):
        client.write(f"{number}.log", b"line\n")
    client.restart()
    calls = counted(monkeypatch, FileSource, "is_done")
    rounds = 0
    client.step()
    while not client.agent.is_done():
        client.step(0.2)
        rounds += 1
    assert rounds >= QUIET // 5  # as five requests fit into a round
    assert len(calls) <= 12 * QUIET


@pytest.mark.parametrize("client", [{"once": True}], indirect=True)
def test_metrics_that_nobody_asks_for_cost_nothing(
    client: Any, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main loop, from the first file to the end of the last one."""
    for number in range(QUIET):
        client.write(f"{number}.log", b"line\n")
    calls = counted(monkeypatch, FileSource, "status")
    clusters, dialer, signals = [], Dialer(None), SimpleNamespace(end=False, reread=False)
    client.agent.close()
    with Served(gateway) as served, closing(MetricsPage(*free_ports(1))) as page:
        clusters.append(GatewayCluster([served.url], None))
        workers = Workers(client.config.threads, clusters, "none", dialer)
        credentials = Credentials(clusters, [None], dialer)
        assert run(client.config, client.checkpoint, signals, workers, credentials, page) == 0  # type: ignore[arg-type]
        workers.close(5.0)
    assert len(client.stored()) == QUIET
    assert calls == []
    client.checkpoint.close()
    client.begin()


@SILENT
def test_metrics_ask_the_sources_that_are_behind_once_a_scrape_and_at_most_once_a_second(
    client: Any, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_quiet_files(client)
    gateway.is_away = True
    client.write("hot.log", b"more\n")
    client.step()
    client.agent.metrics(client.now)
    calls = counted(monkeypatch, FileSource, "status")
    (port,) = free_ports(1)

    def scrape() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            body: bytes = answer.read()
        return body

    with closing(MetricsPage(port)) as page, ThreadPoolExecutor(1) as thread:
        for number in (1, 2):
            scraped = thread.submit(scrape)
            while not scraped.done():
                page.refresh(100.0 * number, client.agent.metrics)
            assert b'logferry_push_files{topic="t"} %d\n' % (QUIET + 1) in scraped.result()
            assert b'logferry_push_lag_bytes{topic="t"} 5\n' in scraped.result()
            assert len(calls) == number
        scraped = thread.submit(scrape)
        while not page.is_asked:
            pass
        page.refresh(200.5, client.agent.metrics)
        assert len(calls) == 2
        page.refresh(201.0, client.agent.metrics)
        assert scraped.result()
        assert len(calls) == 3


def test_a_client_that_hangs_shows_its_last_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or 503, before there are any: a scrape does not hang with it."""
    monkeypatch.setattr("logferry.client.agent.status.PAGE_PATIENCE_S", 0.0)
    (port,) = free_ports(1)
    with closing(MetricsPage(port)) as page:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
        page.refresh(0.0, lambda now: f"at {now}\n")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert answer.read() == b"at 0.0\n"


@pytest.mark.parametrize(
    ("unusable", "took_s", "next_s"),
    [("no inotify", 0.0, 1.0), ("no inotify", 1.0, 50.0), ("", 0.0, 10.0), ("", 0.01, 20.0), ("", 9.0, 60.0)],
)
def test_a_search_takes_a_small_share_of_the_time(
    client: Any, monkeypatch: pytest.MonkeyPatch, unusable: str, took_s: float, next_s: float
) -> None:
    monkeypatch.undo()  # of `searches_take_no_time`
    clock = iter([0.0, took_s])
    monkeypatch.setattr("logferry.client.agent.search.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    hints: Any = SimpleNamespace(unusable=unusable, watch_folders=lambda folders, now: True)
    search = Search(client.config._replace(linger_s=1.0), hints, Inputs())
    search.all(0.0)
    search.done(0.0, False)
    assert (search.is_due(next_s - 0.01), search.is_due(next_s)) == (False, True)
