"""Old rows dropped from tables that a loader writes: exactly those, and what comes late for them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from logferry.loaders.batches import drop_rows
from logferry.loaders.batches.execute import BatchDone, Loader
from logferry.loaders.commands.compact import drop_old
from logferry.loaders.commands.table import main as table_command
from logferry.loaders.config import TableJob
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import DROP, TablePaths
from logferry.loaders.planning.segment_states import DROPPED
from logferry.loaders.query.realtime_view import realtime
from logferry.loaders.runs.table_run import load_table
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import Ledger, add_columns, last_batch, new_entry, read_ledger
from logferry.loaders.storage.retention import compact
from logferry.loaders.storage.side_tables import read_segments
from logferry.loaders.storage.tables import QUARANTINE
from logferry.ops.stack.kafka_cluster import KafkaCluster
from pyspark.sql import SparkSession

from tests.support.loader import Topic, chunks_of, quarantine, stored
from tests.support.table_loads import LoaderDied

pytestmark = pytest.mark.spark

PARSER = {"format": "regex", "pattern": r"(?<at>\S+) (?<what>.*)", "event_time": {"column": "at", "formats": ["iso"]}}
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
OLD = NOW - timedelta(days=10)


def lines(*times: datetime) -> bytes:
    return b"".join(f"{at.isoformat()} x\n".encode() for at in times)


@pytest.mark.long
@pytest.mark.parametrize("parted", [[], ["event_date"]])
async def test_old_rows_go_by_a_batch_that_any_loader_ends(
    parted: list[str],
    loader: Callable[..., Loader],
    spark: SparkSession,
    kafka: KafkaCluster,
    topic_name: str,
    warehouse: Location,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    topic, table = Topic(kafka.bootstrap, f"dc1.{topic_name}"), warehouse / "logs"
    await topic.create()
    raw: dict[str, Any] = {"path": table, "topics": [topic.name], "parser": PARSER, "partition_by": parted}
    job = TableJob.model_validate({**raw, "segments": {"late_wait_s": 0, "source_idle_s": 3600}})
    times = [OLD + timedelta(minutes=20 * n) for n in range(9)] + [NOW - timedelta(minutes=n) for n in range(3)]
    recorded_ms = int(OLD.timestamp() * 1000)
    chunks = chunks_of("a", lines(*times[:9:2]), lines(*times[1:9:2]), lines(*times[9:]), b"?\n")
    await topic.write(chunks[:2], recorded_ms=recorded_ms)
    await topic.write(chunks[2:])
    list(load_table(loader(), job))
    before = last_batch(open_table(table))
    # The command dies before the rows go: nothing has, and the regular load does what was planned.
    with monkeypatch.context() as patch:
        patch.setattr(drop_rows, "_rule", lambda *_, **__: (_ for _ in ()).throw(LoaderDied))
        with pytest.raises(LoaderDied):
            drop_rows.drop_rows(lambda: spark, TablePaths.of(table), planned(table, OLD + timedelta(hours=2)), "dies")
    assert len(stored(table)) == 12
    late = chunks_of("b", lines(OLD + timedelta(minutes=5)), lines(NOW))
    await topic.write(late[:1], recorded_ms=recorded_ms)
    await topic.write(late[1:])
    done = [event for event in load_table(loader(), job) if isinstance(event, BatchDone)]
    assert (done[0].batch, done[1].rows) == (before + 1, 2)
    kept = sorted([*times[6:], OLD + timedelta(minutes=5), NOW])
    assert sorted(row["event_time"] for row in stored(table)) == kept
    assert [row["bytes"] for row in quarantine(table)] == [b"?"]
    entry = read_ledger(table)[before + 1]
    assert (entry.kind, entry.cutoff) == (DROP, OLD + timedelta(hours=2))
    states = [s.state for _, s in sorted(read_segments(TablePaths.of(table).segments, before + 2).items())][:3]
    assert states[:2] == [DROPPED, DROPPED]
    assert states[2] != DROPPED
    window = OLD.strftime("%Y-%m-%dT%H")
    assert table_command(["segments", "wait", str(table), window]) == 1
    assert f"{window} was dropped: 3 rows, " in capsys.readouterr().out
    # Late rows of that time go with the next one; the view and the loads continue.
    keep = timedelta(days=8) if parted else timedelta(days=10) - timedelta(hours=3)
    _, found = drop_old(lambda: spark, table, keep, now=NOW, is_idle=True)
    assert found.rows == 4, "hours two and three, and the late row"
    assert len(list(compact(table, timedelta(0)))) > 3
    kept = [at for at in kept if at >= NOW - timedelta(days=9)]
    assert sorted(row["event_time"] for row in stored(table)) == kept
    await topic.write(chunks_of("c", lines(NOW)))
    assert realtime(spark, table).count() == len(kept) + 1
    list(load_table(loader(), job))
    assert len(stored(table)) == len(kept) + 1


def planned(table: Location, cutoff: datetime) -> Any:
    """What `drop_old` puts into the ledger."""
    paths, last = TablePaths.of(table), read_ledger(table)[-1]
    add_columns(paths.quarantine, QUARANTINE)
    resting = [r._replace(start=r.end) for r in last.ranges]
    entry = new_entry(last.batch + 1, "dc1", last.parser, "dies", resting, kind=DROP, origin=last.origin, cutoff=cutoff)
    return Ledger(paths.ledger).put(entry)
