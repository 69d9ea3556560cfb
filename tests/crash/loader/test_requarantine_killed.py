"""Loaders that read the quarantine again, killed at each step and racing: each line is in exactly one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch

from tests.support.loader import Topic, chunks_of, quarantine, stored
from tests.support.loader_process import STEPS, LoaderProcess, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900), pytest.mark.long]

BROKEN = r"""parser = { format = "regex", pattern = '(?<word>\w+) (?<n>\d+)' }"""
MENDED = r"""parser = { format = "regex", pattern = '(?<word>\w+) (?<n>\d+)( .*)?' }"""
SOURCES, CHUNKS, LINES = 6, 10, 300


@pytest.fixture
async def topic(topic: Topic) -> Topic:
    """Every third line can be read by the mended parser only, and every 50th by none."""
    for source in range(SOURCES):
        parts = [
            b"".join(b"? %d" % n * (n % 50 == 7) + b"word %d" % n + b" more" * (n % 3 == 0) + b"\n" for n in numbers)
            for numbers in (range(i * LINES, (i + 1) * LINES) for i in range(CHUNKS))
        ]
        await topic.write(chunks_of(f"web{source}", *parts), partitions=2)
    return topic


def counted(table: Location, topic: Topic) -> tuple[int, int]:
    """Checks that each line is once in one of the tables. Returns (rows, lines in the quarantine)."""
    sent = Counter(
        (source_id, chunk.seqno, line) for source_id, chunk in topic.committed for line in chunk.data.splitlines()
    )
    rows = [(row["source_id"], row["seqno"], row["text"].encode()) for row in stored(table)]
    bad = [(row["source_id"], row["seqno"], row["bytes"]) for row in quarantine(table)]
    assert Counter(rows + bad) == sent
    return len(rows), len(bad)


TOTAL = SOURCES * CHUNKS * LINES
HOPELESS = SOURCES * sum(n % 50 == 7 for n in range(CHUNKS * LINES))


async def test_killed_at_each_step(start: Callable[..., LoaderProcess], topic: Topic, warehouse: Location):
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    status, _, err = start(table, topic.name, BROKEN).finish()
    assert status == 0, err
    before = counted(table, topic)
    assert before[1] > TOTAL / 3
    for step in ("ledger", "quarantine", "mid-write", "commit"):
        seen = STEPS[step](paths)
        batch = last_batch(open_table(table))
        victim = start(table, topic.name, MENDED, "requarantine")
        wait_for(lambda seen=seen, step=step: STEPS[step](paths) > seen, step, victim)  # type: ignore[misc]
        victim.kill()
        victim.finish()
        found = counted(table, topic)
        if last_batch(open_table(table)) == batch:
            assert found == before, f"{step}: the batch is not in the table, so nothing has moved"
    status, summary, err = start(table, topic.name, MENDED, "requarantine").finish()
    assert status == 0, (summary, err)
    assert counted(table, topic) == (TOTAL - HOPELESS, HOPELESS)


async def test_racing_beside_a_load(start: Callable[..., LoaderProcess], topic: Topic, warehouse: Location):
    table = warehouse / "logs"
    status, _, err = start(table, topic.name, BROKEN).finish()
    assert status == 0, err
    await topic.write(chunks_of("late", *(b"late %d\n" % n for n in range(600))), partitions=2)
    racers = [start(table, topic.name, MENDED, "requarantine") for _ in range(2)]
    racers.append(start(table, topic.name, MENDED))
    for racer in racers:
        status, summary, err = racer.finish()
        assert status == 0, (summary, err)
    assert counted(table, topic) == (TOTAL - HOPELESS + 600, HOPELESS)
