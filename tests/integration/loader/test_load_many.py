"""Many tables in one run: in parallel, bounded, followed, reported, and moved to other positions by command."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from logferry.loaders.batches.execute import Loader
from logferry.loaders.commands.inspection import show
from logferry.loaders.commands.repair import reset_table
from logferry.loaders.config import Config
from logferry.loaders.errors import KafkaUnavailable, LoaderConfigError
from logferry.loaders.location import Location
from logferry.loaders.planning.plan import Limits
from logferry.loaders.planning.position_plan import PositionChange, ResetTarget
from logferry.loaders.runs import table_run
from logferry.loaders.runs.table_facts import table_facts
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.runs.table_runner import Reporter, TableRunner
from logferry.loaders.storage.ledger import read_ledger
from logferry.ops.stack.kafka_cluster import KafkaCluster
from rich.console import Console

from tests.support.loader import Topic, check_exact, chunks_of, stored
from tests.support.table_loads import LoaderDied, die

pytestmark = pytest.mark.spark

Start = Callable[..., Loader]
WAIT_S = 120


def config(kafka: KafkaCluster, *tables: dict[str, Any], **more: Any) -> Config:
    raw = {"kafka": {"bootstrap_servers": kafka.bootstrap}, "tables": list(tables), "follow_s": 0.1, **more}
    return Config.model_validate(raw)


def reporter() -> Reporter:
    return Reporter(Console(file=io.StringIO()), as_json=True)


def said(report: Reporter) -> dict[str, Any]:
    report.finish()
    found: dict[str, Any] = json.loads(report.console.file.getvalue())  # type: ignore[attr-defined]
    return found


async def topics(kafka: KafkaCluster, *names: str) -> list[Topic]:
    made = [Topic(kafka.bootstrap, name) for name in names]
    for topic in made:
        await topic.create()
        await topic.write(chunks_of(topic.name, *(b"%d\n" % i for i in range(20))))
    return made


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


async def test_a_table_of_each_topic_and_one_that_fails(
    loader: Start, kafka: KafkaCluster, topic_name: str, tmp_path: Path
):
    name = topic_name[:60]
    one, other, moved = await topics(kafka, f"dc1.{name}-x", f"dc1.{name}-y", f"dc2.{name}-y")
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused" / "letter.txt").write_text("dear")
    settings = config(
        kafka,
        {"path": tmp_path / "{topic}", "topics": [f"*.{name}-*"]},
        {"path": tmp_path / "refused", "topics": [one.name]},
        parallel=3,
    )
    report = reporter()
    TableRunner(loader(), settings, report, threading.Event()).once(Limits())
    check_exact(tmp_path / f"{name}-x", one.committed)
    check_exact(tmp_path / f"{name}-y", other.committed + moved.committed)
    tables = {Path(table["table"]).name: table for table in said(report)["tables"]}
    assert "not a Delta table" in tables["refused"]["error"]
    assert [tables[f"{name}-{c}"]["error"] for c in "xy"] == [None, None]


@pytest.mark.long
async def test_a_bounded_run_and_the_next(loader: Start, kafka: KafkaCluster, topic_name: str, tmp_path: Path):
    (topic,) = await topics(kafka, f"dc1.{topic_name}")
    settings = config(kafka, {"path": tmp_path / "t", "topics": [topic.name], "max_records": 4})
    report = reporter()
    TableRunner(loader(), settings, report, threading.Event()).once(Limits(offsets=6))
    assert [r.size for entry in read_ledger(Location.of(tmp_path / "t")) for r in entry.reads] == [4, 2]
    found = said(report)
    assert (found["exit"], found["tables"][0]["left"]) == (0, 15), "20 chunks, and the end of their transaction"
    assert "the limit of 6 records" in found["tables"][0]["ended"]
    TableRunner(loader(), settings, report, threading.Event()).once(Limits())
    check_exact(tmp_path / "t", topic.committed)


async def test_following_waits_for_an_absent_service_and_continues(
    loader: Start, kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (topic,) = await topics(kafka, f"dc1.{topic_name}")
    settings = config(
        kafka, {"path": tmp_path / "t", "topics": [topic.name]}, {"path": tmp_path / "u", "topics": ["dc1.z"]}
    )
    report, stop, loads = reporter(), threading.Event(), loader()
    views, fails = loads.kafka.views, threading.Event()
    fails.set()

    def away(wanted: Any) -> Any:
        if fails.is_set():
            raise KafkaUnavailable("no broker")
        return views(wanted)

    monkeypatch.setattr(loads.kafka, "views", away)
    thread = threading.Thread(target=TableRunner(loads, settings, report, stop).follow)
    thread.start()
    try:
        wait_for(lambda: len(report.tables) == 2 and all(isinstance(t.error, KafkaUnavailable) for t in report.tables))
        fails.clear()
        wait_for(lambda: report.tables[0].rows == 20)
        await topic.write(chunks_of("b", b"more\n"))
        wait_for(lambda: report.tables[0].rows == 21)
        assert thread.is_alive()
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert not thread.is_alive()
    check_exact(tmp_path / "t", topic.committed)
    found = said(report)
    assert (found["exit"], found["tables"][0]["error"]) == (1, None), "dc1.z does not exist: the operator must act"
    assert [stop["reason"] for stop in found["tables"][1]["stopped"]] == ["dc1.z does not exist"]


async def test_the_state_reports_the_content_of_a_table(
    loader: Start, kafka: KafkaCluster, topic_name: str, tmp_path: Path
):
    (topic,) = await topics(kafka, f"dc1.{topic_name}")
    await topic.write(chunks_of("b", b"\xff\n\xff\nx\n"))
    (job,) = config(kafka, {"path": tmp_path / "t", "topics": [topic.name]}).tables
    list(load_table(loader(), job))
    facts = table_facts(Location.of(tmp_path / "t"))
    assert [(p["topic"], p["partition"], p["offset"]) for p in facts["positions"]] == [(topic.name, 0, 23)]
    assert facts["quarantine"] == {"the line is not UTF-8": 2}
    assert (facts["last"]["batch"], facts["last"]["parser"], facts["planned"]) == (0, "lines/1", None)
    out = io.StringIO()
    show(facts, Console(file=out, width=200))
    assert "holds batch 0 (load, lines/1, offsets of dc1" in out.getvalue()
    assert "quarantined: 2 · the line is not UTF-8" in out.getvalue()
    with pytest.raises(LoaderConfigError, match="no batch was ever loaded: check the path"):
        table_facts(Location.of(tmp_path / "nothing"))


@pytest.mark.long
async def test_a_reset_moves_positions_by_command(
    loader: Start, kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A table is stuck in a batch of a topic that was recreated; the other topic's part of it is loaded."""
    gone, stays = await topics(kafka, f"dc1.{topic_name}-gone", f"dc1.{topic_name}-stays")
    (job,) = config(kafka, {"path": tmp_path / "t", "topics": [gone.name, stays.name]}).tables
    with monkeypatch.context() as patch:
        patch.setattr(table_run, "do_batch", die)
        with pytest.raises(LoaderDied):
            list(load_table(loader(), job))
    await gone.delete()
    await gone.create()
    await gone.write(chunks_of("new", b"new 1\n", b"new 2\n"))
    told: list[Sequence[PositionChange]] = []
    targets = [ResetTarget.parse(f"{gone.name}=earliest")]

    def refuse(moves: Sequence[PositionChange]) -> bool:
        told.append(moves)
        return False

    assert reset_table(loader(), job, targets, refuse) is None
    assert [(move.before, move.after) for move in told[0]] == [(21, 0)]
    assert "another topic of that name" in told[0][0].means
    assert len(read_ledger(Location.of(tmp_path / "t"))) == 1, "nothing was changed"
    done = reset_table(loader(), job, targets, lambda moves: True)
    assert done is not None
    assert (done.batch, done.rows) == (1, 0)
    check_exact(tmp_path / "t", stays.committed)
    list(load_table(loader(), job))
    new = chunks_of("new", b"new 1\n", b"new 2\n")
    check_exact(tmp_path / "t", [*stays.committed, *new])
    assert [entry.kind for entry in read_ledger(Location.of(tmp_path / "t"))] == ["load", "reset", "load"]
    # And back: what is loaded again stands twice, as it was said.
    (back,) = [ResetTarget.parse(f"{stays.name}:0=18")]
    reset_table(loader(), job, [back], lambda moves: "2 offsets will be" not in moves[0].means)
    list(load_table(loader(), job))
    assert len(stored(tmp_path / "t")) == 20 + 2 + 2
