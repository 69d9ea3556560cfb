"""What a run says, and its exit status."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from logferry.loaders.batches.execute import BatchDone
from logferry.loaders.errors import ConfigError, KafkaAway, TopicChanged
from logferry.loaders.planning.plan import Range, Stopped
from logferry.loaders.runs.report import Reporter
from logferry.loaders.runs.table_run import Backlog, Ended, LoadEvent, Waits
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
    reporter.table(Path("/data/a"), load())
    return reporter.finish(), out.getvalue()


def test_batches_are_said():
    status, text = run(Backlog(6), OURS, THEIRS)
    assert status == 0
    assert "batch 3: 1,234 rows, 2 quarantined, 2.0 MB in 1.0 s" in text
    assert "dc1.a 0: 5–9" in text
    assert "batch 4: another loader wrote it" in text
    assert "1,234 rows, 2 quarantined, 2 batches, 1 by another loader in 0.0 s; up to date" in text


def test_json_is_one_line_that_counts_our_rows_only():
    status, text = run(Backlog(6), OURS, THEIRS, as_json=True)
    summary = json.loads(text)
    assert text.count("\n") == 1
    assert (status, summary["exit"], summary["rows"], summary["quarantined"]) == (0, 0, 1234, 2)
    (table,) = summary["tables"]
    assert [(b["batch"], b["ours"]) for b in table["batches"]] == [(3, True), (4, False)]
    assert table["batches"][0]["ranges"] == [{"topic": "dc1.a", "partition": 0, "topic_id": "id", "start": 5, "end": 9}]


ENDS = {
    "stopped topic": ([OURS, Stopped("dc1.b", "dc1.b was created anew")], None, 1, "dc1.b was created anew"),
    "refused": ([OURS], TopicChanged("gone [3]"), 1, "gone [3]"),
    "away": ([], KafkaAway("no broker"), 3, "no broker"),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("case", ENDS)
def test_ends_that_are_not_good(case: str, as_json: bool):
    events, error, status, said = ENDS[case]
    got, text = run(*events, error=error, as_json=as_json)
    assert got == status
    assert said in text
    assert "up to date" not in text


def test_what_somebody_must_look_at_comes_before_what_passes():
    out = io.StringIO()
    reporter = Reporter(Console(file=out), as_json=True)

    def away() -> Iterator[LoadEvent]:
        yield Backlog(1)
        raise KafkaAway("no broker")

    def refused() -> Iterator[LoadEvent]:
        yield Stopped("dc1.a", "gone")

    reporter.table(Path("/a"), away())
    reporter.table(Path("/b"), refused())
    reporter.table(Path("/c"), iter([Backlog(0)]))
    assert reporter.finish() == 1
    assert [t["error"] for t in json.loads(out.getvalue())["tables"]] == ["no broker", None, None]


def test_a_run_that_could_not_start():
    out = io.StringIO()
    reporter = Reporter(Console(file=out), as_json=True)
    assert reporter.finish(ConfigError("no jars")) == 2
    assert json.loads(out.getvalue()) == {"exit": 2, "error": "no jars", "rows": 0, "quarantined": 0, "tables": []}


def test_a_run_that_was_told_to_end_says_what_is_left():
    status, text = run(Backlog(10), OURS, Ended("the limit of 4 records is reached"))
    assert status == 0
    assert "the limit of 4 records is reached, 6 offsets are left" in text
    assert "up to date" not in text


def test_chunks_that_are_left_out_are_said():
    status, text = run(Backlog(4), replace(OURS, left_out=1200))
    assert "1,200 chunks that came before by another data centre" in text
    assert status == 0


def test_what_does_not_change_is_said_once_while_following():
    out = io.StringIO()
    reporter = Reporter(Console(file=out, width=200), as_json=False)
    report = reporter.begin(Path("/data/a"))
    for _ in range(3):
        reporter.follow(report, [Waits("the gateway of dc1 is away"), Stopped("dc1.b", "dc1.b was created anew")])
    assert out.getvalue().count("the gateway of dc1 is away") == 1
    assert out.getvalue().count("dc1.b was created anew") == 1
    assert report.exit_status == 1
    reporter.follow(report, [Ended("stopped")])
    assert report.exit_status == 1, "told to end before it looked, it knows nothing better"
    reporter.follow(report, [Backlog(0)])
    assert report.exit_status == 0


def test_mistakes_of_ours_are_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        run(error=ZeroDivisionError())
