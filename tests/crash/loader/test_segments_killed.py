"""Loaders of a table with segments, killed at each step and racing: each segment counts the rows that are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.segment_states import READY
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.loaders.storage.side_tables import read_segments

from tests.support.loader import Sent, Topic, check_exact, chunks_of, stored
from tests.support.loader_faults import RacingLoaders, seeded
from tests.support.loader_process import STEPS, LoaderProcess, commits, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900), pytest.mark.long]

SETTINGS = r"""
segments = { late_wait_s = 0, source_idle_s = 1 }
[tables.parser]
format = "regex"
pattern = '(?<at>\S+) (?<what>.*)'
event_time = { column = "at", formats = ["iso"] }
"""
FIRST = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=9)
STEPS = {
    **STEPS,
    "sources": lambda paths: commits(paths.sources),
    "segments": lambda paths: commits(paths.segments),
}


def logs(round_: int) -> list[Sent]:
    """Lines of the hours 0 to 5, some of them late, and in each chunk one that is not UTF-8."""
    sent: list[Sent] = []
    for source in range(4):
        parts = []
        for part in range(15):
            times = [FIRST + timedelta(minutes=(round_ * 60 + part * 7 + line) % 360) for line in range(100)]
            parts.append(b"".join(b"%s %d\n" % (at.isoformat().encode(), source) for at in times) + b"\xff\n")
        sent += chunks_of(f"web{source}", *parts, start=round_ * 100_000_000)
    return sent


def check_segments(table: Location) -> set[str]:
    """Rows, bytes and bounds are those of what the table holds now. Returns the states."""
    found = read_segments(TablePaths.of(table).segments, last_batch(open_table(table)))
    there: dict[datetime, list[tuple[datetime, int]]] = {}
    for row in stored(table):
        at = row["event_time"]
        there.setdefault(at.replace(minute=0, second=0, microsecond=0), []).append((at, len(row["text"].encode())))
    have = {start: (one.rows, one.bytes, one.first, one.last) for start, one in found.items() if one.rows}
    want = {
        start: (len(rows), sum(size for _, size in rows), min(rows)[0], max(at for at, _ in rows))
        for start, rows in there.items()
    }
    assert have == want
    return {one.state for start, one in found.items() if one.rows}


async def test_killed_at_each_step(start: Callable[..., LoaderProcess], topic: Topic, warehouse: Location):
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    await topic.write(logs(0), partitions=2)
    status, summary, err = start(table, topic.name, SETTINGS).finish()
    assert status == 0, (summary, err)
    for round_, step in enumerate(STEPS, 1):
        await topic.write(logs(round_), partitions=2)
        seen = STEPS[step](paths)
        victim = start(table, topic.name, SETTINGS)
        wait_for(lambda seen=seen, step=step: STEPS[step](paths) > seen, step, victim)  # type: ignore[misc]
        victim.kill()
        victim.finish()
        check_segments(table)
    await settled(start, table, topic)


async def test_two_racing_and_killed_at_random(start: Callable[..., LoaderProcess], topic: Topic, warehouse: Location):
    table = warehouse / "logs"
    dice = seeded()
    racers = RacingLoaders(dice, [lambda: start(table, topic.name, SETTINGS)] * 2)
    for round_ in range(6):
        await topic.write(logs(round_), partitions=2)
        await asyncio.sleep(2 + dice.random() * 6)  # killed at any instant
        racers.kill_one()
    racers.finish()
    check_segments(table)
    await settled(start, table, topic)


async def settled(start: Callable[..., LoaderProcess], table: Location, topic: Topic) -> None:
    """Once all is loaded and the sources are silent, three checks make every hour READY."""
    states: set[str] = set()
    for _ in range(3):
        status, summary, err = start(table, topic.name, SETTINGS).finish()
        assert status == 0, (summary, err)
        states = check_segments(table)
    assert states == {READY}
    check_exact(table, topic.committed)
