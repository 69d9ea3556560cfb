"""Old rows dropped by a command that is killed, beside loads: exactly those rows go, and their segments are DROPPED."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import DROP, TablePaths
from logferry.loaders.planning.segment_states import DROPPED
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch, read_ledger
from logferry.loaders.storage.side_tables import read_segments
from logferry.ops.stack.kafka_cluster import KafkaCluster

from tests.support.loader import WAIT_S, Topic, chunks_of, stored
from tests.support.loader_faults import seeded
from tests.support.loader_process import LoaderProcess, loader_env

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900), pytest.mark.long]

SETTINGS = r"""segments = { late_wait_s = 0 }
parser.format = "regex"
parser.pattern = '(?<at>\S+) .*'
parser.event_time = { column = "at", formats = ["iso"] }
"""
NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
OLD = NOW - timedelta(days=10)


def lines(start: datetime, count: int, word: str) -> list[bytes]:
    return [f"{(start + timedelta(seconds=13 * n)).isoformat()} {word} {n}".encode() for n in range(count)]


def drops(table: Location) -> int:
    return sum(entry.kind == DROP for entry in read_ledger(table))


def drop(table: Location) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "logferry.loaders.commands.table",
        "compact",
        str(table),
        "--retain-days",
        "5",
        "--json",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=loader_env())


async def test_killed_while_loads_continue(
    start: Callable[..., LoaderProcess], kafka: KafkaCluster, topic_name: str, warehouse: Location
):
    table, topic = warehouse / "logs", Topic(kafka.bootstrap, f"dc1.{topic_name}")
    await topic.create(partitions=2)
    dice = seeded()
    new: list[bytes] = []
    for round_ in range(5):
        fresh = lines(NOW - timedelta(hours=2), 400, f"new {round_}")
        new += fresh
        # A row is never taken to be older than a day before it was recorded.
        for name, at, sent in (("old", OLD, lines(OLD, 400, f"old {round_}")), ("web", datetime.now(UTC), fresh)):
            mixed = [line + b"\n" for line in sent]
            dice.shuffle(mixed)
            parts = [b"".join(mixed[i : i + 50]) for i in range(0, len(mixed), 50)]
            recorded_ms = int(at.timestamp() * 1000)
            await topic.write(chunks_of(f"{name}{round_}", *parts), partitions=2, recorded_ms=recorded_ms)
        loader = start(table, topic.name, SETTINGS)
        if round_ == 0:
            assert loader.finish()[0] == 0
        before, victim, deadline = drops(table), drop(table), time.monotonic() + WAIT_S
        while drops(table) == before and victim.poll() is None:
            assert time.monotonic() < deadline
        await asyncio.sleep(dice.random() * 0.05 * (round_ > 1))  # killed at the step, or somewhat later
        victim.kill()
        victim.communicate()
        assert loader.process.poll() is not None or loader.finish()[0] == 0
        # Whatever was planned is done by the next load, and no row of now goes with it.
        status, summary, err = start(table, topic.name, SETTINGS).finish()
        assert status == 0, (summary, err)
        have = Counter(row["text"].encode() for row in stored(table))
        assert all(have[line] == 1 for line in new)
    last = drop(table)
    _, said = last.communicate()
    assert last.returncode == 0, said
    assert Counter(row["text"].encode() for row in stored(table)) == Counter(new)
    assert drops(table) > 1
    cutoffs = {entry.cutoff for entry in read_ledger(table) if entry.kind == DROP}
    assert all(at is not None and OLD + timedelta(hours=3) < at < NOW - timedelta(days=4) for at in cutoffs)
    segments = read_segments(TablePaths.of(table).segments, last_batch(open_table(table))).values()
    assert sum(segment.rows for segment in segments) == len(new)
    assert {s.state for s in segments if s.start < NOW - timedelta(days=5)} == {DROPPED}
