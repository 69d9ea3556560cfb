"""The decisions of the demo: what the reader keeps account of, what is no proof, what is shown."""

from __future__ import annotations

import dataclasses
import io
import json
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest
from logferry.client import Chunk
from logferry.loaders.planning.segment_states import ACTIVE, READY, Segment
from logferry.loaders.storage.side_tables import Segments
from logferry.ops.audit.compare.report import Report, TableAuditReport
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.log.original_files import FileReport
from logferry.ops.demo import verdict
from logferry.ops.demo.loader_runs import LoaderRun, run_of
from logferry.ops.demo.plan import DemoPlan, PushClient
from logferry.ops.demo.readers import FileGrowth, ReaderAccount, SeenSource, percentile
from logferry.ops.demo.story import unread_bytes
from logferry.ops.demo.view import View, ages_text, body_of, flow_text, picture, process_row, source_rows
from logferry.ops.stack.processes import Child
from rich.console import Console, RenderableType


def account_of(*chunks: tuple[str, int, int | None, int]) -> ReaderAccount:
    """Of (source, seqno, prev, size), one a second, each read half a second after it was made."""
    account = ReaderAccount()
    for number, (source, seqno, prev, size) in enumerate(chunks):
        created_ms = 1_000_000 + number * 1000
        place = ("dc1", "dc1.nginx", 0, number)
        attributes = {"path": f"/logs/{source}"}
        chunk = Chunk(*place, source, seqno, prev, created_ms, created_ms, attributes, b"x" * size)
        account.take(chunk, created_ms + 500.0)
    return account


class TestAccount:
    def test_counts_and_times(self) -> None:
        account = account_of(("a", 10, 0, 10), ("b", 7, 0, 7), ("a", 30, 10, 20))
        assert (account.chunks, account.bytes, account.breaks) == (3, 37, 0)
        assert account.ages_ms == [500.0] * 3
        assert account.seconds == pytest.approx(2.5)
        assert account.sources["a"].arrivals == [(10, 1_000_500.0), (30, 1_002_500.0)]

    @pytest.mark.parametrize(
        "second", [("a", 30, 20, 10), ("a", 10, 0, 10), ("a", 30, None, 20)], ids=["a gap", "again", "without a place"]
    )
    def test_what_does_not_follow_is_a_break(self, second: tuple[str, int, int | None, int]) -> None:
        assert account_of(("a", 10, 0, 10), second).breaks == 1

    def test_nothing_came(self) -> None:
        assert (ReaderAccount().seconds, ReaderAccount().chunks) == (0.0, 0)


@pytest.mark.parametrize(
    ("share", "wanted"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.501, 51), (0.99, 99), (0.999, 100), (1.0, 100)]
)
def test_percentile(share: float, wanted: int) -> None:
    assert percentile(list(range(1, 101)), share) == wanted


def test_percentile_of_one() -> None:
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def shown_sources(sources: list[SeenSource], sizes: dict[str, int]) -> list[list[str]]:
    """Name, chunks, readable and behind of each row."""
    return [[str(cell) for cell in row] for row in source_rows(sources, sizes)]


class TestSourceRows:
    def test_a_rotated_file_counts_with_the_one_that_follows_it(self) -> None:
        sources = [
            SeenSource("/logs/a.log", 8_000_000, [(80, 0.0)]),
            SeenSource("/logs/a.log", 500_000, [(5, 0.0)]),
            SeenSource("/logs/b.log", 700_000),
        ]
        sizes = {"/logs/a.log": 900_000, "/logs/a.log.1": 10_000_000, "/logs/b.log": 700_000}
        assert shown_sources(sources, sizes) == [
            ["a.log", "2", "8.5 MB", "2.4 MB"],
            ["b.log", "0", "0.7 MB", "0.0 MB"],
        ]

    def test_between_the_renaming_and_the_new_file(self) -> None:
        found = shown_sources([SeenSource("/logs/a.log", 8_000_000)], {"/logs/a.log.1": 9_000_000})
        assert found == [["a.log", "0", "8.0 MB", "1.0 MB"]]

    def test_a_file_of_the_user_with_such_a_name_is_one_of_its_own(self) -> None:
        sources = [SeenSource("/logs/a.log", 8_000_000), SeenSource("/logs/a.log.1", 500_000)]
        found = shown_sources(sources, {"/logs/a.log": 9_000_000, "/logs/a.log.1": 600_000})
        assert [row[3] for row in found] == ["1.0 MB", "0.1 MB"]


class TestGrowth:
    def test_a_chunk_waits_from_when_its_end_was_written(self, tmp_path: Path) -> None:
        growth, path = FileGrowth(), tmp_path / "a.log"
        for size, at_ms in ((10, 1000.0), (10, 1050.0), (25, 1100.0), (40, 1200.0)):
            path.write_bytes(b"x" * size)
            growth.note([path], at_ms)
        seen = SeenSource("a", arrivals=[(5, 1300.0), (10, 1300.0), (11, 1400.0), (40, 1500.0), (41, 1600.0)])
        assert growth.waits_ms(path, seen) == [300.0, 300.0, 300.0, 300.0]

    def test_a_renamed_file_is_the_same(self, tmp_path: Path) -> None:
        growth, path = FileGrowth(), tmp_path / "a.log"
        path.write_bytes(b"x" * 10)
        growth.note([path], 1000.0)
        old = path.rename(tmp_path / "a.log.1")
        growth.note([path], 1500.0)
        path.write_bytes(b"x" * 4)
        growth.note([path, old], 2000.0)
        assert growth.waits_ms(old, SeenSource("a", arrivals=[(10, 3000.0)])) == [2000.0]
        assert growth.waits_ms(path, SeenSource("a", arrivals=[(4, 3000.0)])) == [1000.0]


def report(**changes: object) -> Report:
    """One file of 30 bytes in two chunks and three lines, all well."""
    table = TableAuditReport("/warehouse/nginx", batches=1, rows=3, compared=3, not_comparable=0, not_loaded=0)
    file = FileReport("/logs/a", "dc1.nginx", "a", 30, 0, 30, 0, "")
    good = Report("dc1", ["dc1.nginx"], 2, 3, 30, [], [table], [file], Findings(), 0.1)
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


def segment(state: str, rows: int) -> Segment:
    return Segment(NOON, 1, state, rows, 100 * rows, None, None, 0, None, NOON, None, 0)


NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
GOOD = account_of(("a", 10, 0, 10), ("a", 30, 10, 20))


class TestShortfalls:
    def test_none(self) -> None:
        assert list(verdict.shortfalls(report(), {"the live reader": GOOD})) == []

    @pytest.mark.parametrize(
        ("changed", "account", "word"),
        [
            (report(tables=[]), GOOD, "not audited"),
            (report(tables=[report().table._replace(not_loaded=1)]), GOOD, "1 chunks are not loaded"),  # type: ignore[union-attr]
            (report(tables=[report().table._replace(rows=4)]), GOOD, "4 rows for 3 lines"),  # type: ignore[union-attr]
            (report(files=[report().files[0]._replace(not_sent_bytes=9)]), GOOD, "9 bytes of the files"),
            (report(chunks=3), GOOD, "live reader got 2 chunks"),
            (report(size_bytes=31), GOOD, "30 bytes"),
            (report(), account_of(("a", 10, 0, 10), ("a", 30, 11, 20)), "out of the order"),
        ],
    )
    def test_each(self, changed: Report, account: ReaderAccount, word: str) -> None:
        (found,) = verdict.shortfalls(changed, {"the live reader": account})
        assert word in found

    @pytest.mark.parametrize(
        ("asked", "segments", "words"),
        [
            (3, None, []),
            (2, None, ["the query returned 2 rows, the table has 3"]),
            (3, {NOON: segment(READY, 3)}, []),
            (3, {NOON: segment(READY, 2)}, ["the segments count 2 rows"]),
            (3, {NOON: segment(ACTIVE, 3)}, ["1 segments are not READY"]),
        ],
    )
    def test_of_the_query_and_the_segments(self, asked: int, segments: Segments | None, words: list[str]) -> None:
        found = list(verdict.query_shortfalls(asked, segments, 3))
        assert [word in text for word, text in zip(words, found, strict=True)] == [True] * len(words)


def test_the_verdict_names_what_was_killed() -> None:
    killed = ["a gateway worker", "a loader"]
    assert verdict.verdict(report(), killed, True).startswith("YES:")
    assert "a gateway worker, a loader" in verdict.verdict(report(), killed, True)
    findings = Findings()
    findings.add(Finding("row-missing", "dc1.nginx-0", "a line is not there"))
    assert verdict.verdict(report(findings=findings), killed, False).startswith("NO:")


def test_waits_are_shown_by_shares() -> None:
    ms = sorted([10.0] * 89 + [900.0] * 10 + [6000.0])
    assert verdict.wait_columns(ms) == ["0.01 s", "0.90 s", "0.90 s", "6.00 s", "99.0%", "99.0%"]


def test_a_loader_run_counts_the_time_of_its_batches_alone(tmp_path: Path) -> None:
    """Not the start of Spark, nor the wait for segments."""
    batches = [{"ranges": [{}], "seconds": 0.5}, {"ranges": [], "seconds": 0.1}, {"ranges": [{}], "seconds": 1.4}]
    summary = {"rows": 400_000, "quarantined": 1, "tables": [{"seconds": 48.0, "batches": batches}]}
    child = Child("loader", ["true"], tmp_path / "loader.log")
    child.log.write_text(f"a line of Spark\n{json.dumps(summary)}\n", encoding="utf-8")
    assert run_of(3, child) == LoaderRun(3, batches=2, rows=400_000, quarantined=1, seconds=2.0)


class TestPushClient:
    def client(self, tmp_path: Path, log: str) -> PushClient:
        client = PushClient(DemoPlan(tmp_path, (tmp_path / "[a]*.log",), 1, 1, 0), ["http://127.0.0.1:1"])
        client.child.log.parent.mkdir()
        client.child.log.write_text(log, encoding="utf-8")
        return client

    def test_the_new_data_centre_is_read_from_the_log(self, tmp_path: Path) -> None:
        at = "2026-11-21T12:00:00.000Z DEBUG"
        log = (
            f"{at} session source=host:/logs/a.log#1 session=7 recorded=4096 url=http://127.0.0.1:1\n"
            f'{at} retry source=host:/logs/a.log#1 status=0 type="" detail="http://x: [Errno 111] Connection refused"\n'
            f'{at} retry source=host:/logs/a.log#1 status=0 type="" detail="closed without \\"an answer\\""\n'
            f'{at} retry source=host:/logs/a.log#1 status=503 type=not-owner-yet detail="lane 4 moves"\n'
            f'{at} session source="host:/logs/b c.log#2" session=8 recorded=None url=http://127.0.0.1:1\n'
            f"{at} session source=host:/logs/half.log#3 ses"
        )
        client = self.client(tmp_path, log)
        assert client.resumed() == {"host:/logs/a.log#1": 4096, "host:/logs/b c.log#2": 0}
        assert client.repeated() == (1, 2)

    def test_before_it_has_a_log(self, tmp_path: Path) -> None:
        client = PushClient(DemoPlan(tmp_path, (), 1, 1, 0), ["http://127.0.0.1:1"])
        assert (client.resumed(), client.repeated()) == ({}, (0, 0))


class TestView:
    def drawn(self, body: RenderableType) -> list[str]:
        console = Console(file=io.StringIO(), width=100, height=30, force_terminal=True, color_system=None)
        console.print(picture("gateway-0 is dead; its lanes go to the others", body, 1234.5, 97))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().splitlines()

    def test_the_picture_fits_into_half_a_terminal(self) -> None:
        body = body_of(
            flow_text(123_456_789_012, 120_000_000_000, 123.4, 99.9),
            ages_text([12_345.0, *[51.0] * 98, 12_345.0]),
            source_rows([SeenSource(f"a rather long name of a file {n}.log", 98_765_432_000) for n in range(40)], {}),
            [process_row(f"gateway-{n}", None if n else 4_194_303, "4 lanes") for n in range(6)],
            [0, 1, None, 1, 0, None, 0, 1],
        )
        lines = self.drawn(body)
        assert len(lines) <= 18
        assert {len(line) for line in lines} == {97}
        text = "\n".join(lines)
        assert "and 30 more" in text
        assert "behind 3,456.8 MB" in text
        assert "p50 0.05 s, p99 12.35 s" in text

    def test_the_picture_of_nothing(self) -> None:
        assert "nothing is readable yet" in "\n".join(self.drawn(body_of("", ages_text([]), [], [], [])))

    def test_without_a_terminal_an_event_is_one_line_as_it_is(self) -> None:
        console = Console(file=io.StringIO(), width=40)
        view = View(console)
        text = "SIGKILL: [bold]gateway-0[/] " + "x" * 100
        view.say(text, "red")
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue().endswith(f"s  {text}\n")


def test_what_a_process_does_not_read_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with socket.create_connection(server.getsockname()) as client:
            inside, _ = server.accept()
            with inside:
                assert unread_bytes(url) == 0
                client.sendall(b"x" * 511)
                assert unread_bytes(url) == 0
                client.sendall(b"x" * 489)
                assert unread_bytes(url) == 1000
                assert inside.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
                assert unread_bytes(url) == 0
