"""The report of a run, and its exit status."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from logferry.loaders.batches.execute import BatchDone
from logferry.loaders.errors import KafkaUnavailable, LoaderConfigError, TopicChanged
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import Range, StoppedTopic
from logferry.loaders.runs.table_run import Backlog, LoadEvent, RunEnded, SegmentNotice
from logferry.loaders.runs.table_runner import Reporter
from rich.console import Console

OURS = BatchDone(3, True, (Range("dc1.a", 0, "id", 5, 9),), 4, 2_000_000, 1234, 2, 1.0)
THEIRS = BatchDone(4, False, (Range("dc1.a", 0, "id", 9, 11),), 2, 10, 77, 0, 0.2)


def run(*events: LoadEvent, error: Exception | None = None, as_json: bool = False) -> tuple[int, str]:
    def load() -> Iterator[LoadEvent]:
        yield from events
        if error:
            raise error

    out = io.StringIO()
    reporter = Reporter(Console(file=out, width=200), as_json=as_json)
    reporter.table(Location.of(Path("/data/a")), load())
    return reporter.finish(), out.getvalue()


def test_batches_are_reported():
    status, text = run(Backlog(6), OURS, THEIRS)
    assert status == 0
    assert "batch 3: 1,234 rows, 2 quarantined, 2.0 MB in 1.0 s" in text
    assert "dc1.a 0: 5–9" in text
    assert "batch 4: another loader wrote it" in text
    assert re.search(r"1,234 rows, 2 quarantined, 2 batches, 1 by another loader in \d+\.\d s; up to date", text)


def test_a_stopped_topic_is_reported_with_its_way_on():
    _, text = run(StoppedTopic("dc1.b", "dc1.b was recreated"))
    assert "stopped dc1.b was recreated; the way on: logferry table reset /data/a --to dc1.b=…" in text


def test_json_is_one_line_that_counts_our_rows_only():
    status, text = run(Backlog(6), OURS, THEIRS, as_json=True)
    summary = json.loads(text)
    assert text.count("\n") == 1
    assert (status, summary["exit"], summary["rows"], summary["quarantined"]) == (0, 0, 1234, 2)
    (table,) = summary["tables"]
    assert [(b["batch"], b["ours"]) for b in table["batches"]] == [(3, True), (4, False)]
    assert table["batches"][0]["ranges"] == [{"topic": "dc1.a", "partition": 0, "topic_id": "id", "start": 5, "end": 9}]


ENDS: dict[str, tuple[list[LoadEvent], Exception | None, int, str]] = {
    "stopped topic": ([OURS, StoppedTopic("dc1.b", "dc1.b was recreated")], None, 1, "dc1.b was recreated"),
    "refused": ([OURS], TopicChanged("gone [3]"), 1, "gone [3]"),
    "away": ([], KafkaUnavailable("no broker"), 3, "no broker"),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("case", ENDS)
def test_ends_that_are_not_good(case: str, as_json: bool):
    events, error, status, said = ENDS[case]
    got, text = run(*events, error=error, as_json=as_json)
    assert got == status
    assert said in text
    assert "up to date" not in text


def test_an_error_for_the_operator_outranks_a_passing_one():
    out = io.StringIO()
    reporter = Reporter(Console(file=out), as_json=True)

    def away() -> Iterator[LoadEvent]:
        yield Backlog(1)
        raise KafkaUnavailable("no broker")

    def refused() -> Iterator[LoadEvent]:
        yield StoppedTopic("dc1.a", "gone")

    reporter.table(Location.of(Path("/a")), away())
    reporter.table(Location.of(Path("/b")), refused())
    reporter.table(Location.of(Path("/c")), iter([Backlog(0)]))
    assert reporter.finish() == 1
    assert [t["error"] for t in json.loads(out.getvalue())["tables"]] == ["no broker", None, None]


def test_a_run_that_could_not_start():
    out = io.StringIO()
    reporter = Reporter(Console(file=out), as_json=True)
    assert reporter.finish(LoaderConfigError("no jars")) == 2
    assert json.loads(out.getvalue()) == {"exit": 2, "error": "no jars", "rows": 0, "quarantined": 0, "tables": []}


def test_a_stopped_run_reports_the_rest():
    status, text = run(Backlog(10), OURS, RunEnded("the limit of 4 records is reached"))
    assert status == 0
    assert "the limit of 4 records is reached, 6 offsets are left" in text
    assert "up to date" not in text


def test_left_out_chunks_are_reported():
    status, text = run(Backlog(4), replace(OURS, left_out=1200))
    assert "1,200 duplicate chunks from another data centre left out" in text
    assert status == 0


def test_an_unchanged_notice_is_printed_once_while_following():
    out = io.StringIO()
    reporter = Reporter(Console(file=out, width=200), as_json=False)
    report = reporter.begin(Location.of(Path("/data/a")))
    for _ in range(3):
        reporter.follow(
            report, [SegmentNotice("the gateway of dc1 is away"), StoppedTopic("dc1.b", "dc1.b was recreated")]
        )
    assert out.getvalue().count("the gateway of dc1 is away") == 1
    assert out.getvalue().count("dc1.b was recreated") == 1
    assert report.exit_status == 1
    reporter.follow(report, [RunEnded("stopped")])
    assert report.exit_status == 1, "told to end before it looked, it knows nothing better"
    reporter.follow(report, [Backlog(0)])
    assert report.exit_status == 0


def test_programming_errors_are_raised():
    with pytest.raises(ZeroDivisionError):
        run(error=ZeroDivisionError())
