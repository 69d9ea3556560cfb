"""A job moves between two data centres while writers write in both, killed at every step: each row is there once.

Real clusters, real mirrors, which are killed, too. What must be in the table is read by plain consumers of the
originals.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LOAD, MOVE, TablePaths
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch, read_ledger
from logferry.ops.stack.stack import Stack

from tests.support.checker import committed_records
from tests.support.loader import Sent, check_exact, chunks_of, stored
from tests.support.loader_faults import seeded
from tests.support.loader_process import LoaderProcess, commits, end_all, wait_for
from tests.support.mirror import Places, both_ways

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]

OTHER = {"dc1": "dc2", "dc2": "dc1"}
Start = Callable[..., LoaderProcess]


@pytest.fixture
def stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    """Processes that die are started again, unless the test is about those that never return."""
    restart = "dead" not in request.node.name
    with Stack(tmp_path / "centres", dcs=("dc1", "dc2"), mirrors=1, restart=restart) as stack:
        yield stack


@pytest.fixture
async def places(stack: Stack, topic_name: str, warehouse: Location) -> Places:
    found = Places(stack, topic_name[-40:].lstrip("-"), warehouse / "logs")
    await both_ways(found, partitions=2)
    return found


@pytest.fixture
def start(places: Places, tmp_path: Path) -> Iterator[Start]:
    """``start("dc1", *options)``: a loader there."""
    started: list[LoaderProcess] = []

    def begin(dc: str, *options: str) -> LoaderProcess:
        bootstrap, topic = places.stack.cluster(dc).bootstrap, places.job.topics[0]
        started.append(LoaderProcess(bootstrap, places.table, topic, *options, scratch=tmp_path, dc=dc))
        return started[-1]

    yield begin
    end_all(started)


async def write(places: Places, dc: str, is_over: asyncio.Event, seed: int) -> None:
    """Small transactions, some of which are aborted, until it is over."""
    dice, topic, position = random.Random(seed), places.topics[dc], 0
    while not is_over.is_set():
        parts = [b"%d of %d\n" % (position, number) * dice.randint(1, 4) + b"\xff\n" for number in range(2)]
        chunks = [one for n in range(3) for one in chunks_of(f"{dc}-{n}", *parts, start=position)]
        await topic.write(chunks, partitions=2, commit=dice.random() < 0.8)
        position += 1000
        await asyncio.sleep(dice.random() * 0.4)  # the pace of the writer


async def truth(places: Places) -> list[Sent]:
    """What plain readers find in the originals."""
    return [
        Sent((record.key or b"").decode(), chunk_of_record(record.value or b"", record.headers))
        for topic in places.topics.values()
        for record in await committed_records(topic.bootstrap, topic.name)
    ]


def place_of(table: Location) -> str:
    return read_ledger(table)[-1].dc


def ended(loader: LoaderProcess) -> None:
    """Checks its exit status: killed, stopped, finished, or refused because another loader was first."""
    status, summary, err = loader.finish()
    said = [table["error"] or "" for table in summary.get("tables", [])]
    raced = any("this is dc" in text or "wrote batch" in text for text in said)
    assert status in (0, 3, -9, 130) or raced, (status, summary, err)


async def until(loader: LoaderProcess, condition: Callable[[], bool], seconds: float) -> None:
    """Returns when the condition holds, the loader has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while loader.process.poll() is None and not condition() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def test_to_and_fro_under_load_killed_at_random(places: Places, start: Start):
    dice, table = seeded(), places.table
    paths = TablePaths.of(table)
    is_over = asyncio.Event()
    seed = dice.randrange(1 << 32)
    writers = [asyncio.create_task(write(places, dc, is_over, seed)) for dc in OTHER]
    first = start("dc1")
    await asyncio.to_thread(wait_for, lambda: last_batch(open_table(paths.main)) >= 0, "the first batch", first)
    first.kill()
    first.finish()
    for round_ in range(10):
        here = place_of(table)
        racer = start(here, "--follow")
        # Killed where a batch is planned, or anywhere.
        entries = commits(paths.ledger)
        await until(racer, lambda entries=entries: commits(paths.ledger) > entries, 30)  # type: ignore[misc]
        await asyncio.sleep(dice.random() * 2 if round_ % 2 else 0)
        if dice.random() < 0.7:
            racer.kill()
        if dice.random() < 0.4:
            places.stack.kill(f"{dice.choice(['dc1', 'dc2'])}/mirror-0")
        mover = start(OTHER[here], "move", "--to", OTHER[here], "--wait", "60", "--yes")
        if round_ % 3:
            # Just as its entry is written, or the planned batch before it, or somewhere.
            entries = commits(paths.ledger)
            await until(mover, lambda entries=entries: commits(paths.ledger) > entries, 60)  # type: ignore[misc]
            await asyncio.sleep(dice.choice([0, dice.random()]))
            mover.kill()
        else:
            await asyncio.to_thread(mover.process.wait)
        ended(mover)
        racer.kill()
        ended(racer)
    is_over.set()
    await asyncio.gather(*writers)
    await places.mirrored()
    here = place_of(table)
    status, summary, err = await asyncio.to_thread(start(here).finish)
    assert status == 0, (summary, err)
    sent = await truth(places)
    assert sorted(sent, key=str) == sorted(places.sent, key=str)
    check_exact(table, sent)
    moves = [entry.dc for entry in read_ledger(table) if entry.kind == MOVE]
    assert len(moves) >= 4, "it has hardly moved"
    assert {row["dc"] for row in stored(table)} == {"dc1", "dc2"}


async def test_a_move_out_of_a_dead_data_centre(places: Places, start: Start, stack: Stack):
    """Its loader is killed with a batch planned, its Kafka never returns: the batch is finished out of the copies."""
    table, paths = places.table, TablePaths.of(places.table)
    is_over = asyncio.Event()
    writers = [asyncio.create_task(write(places, dc, is_over, 5)) for dc in OTHER]
    first = start("dc1")
    await asyncio.to_thread(wait_for, lambda: last_batch(open_table(paths.main)) >= 0, "the first batch", first)
    first.finish()
    second = start("dc1")
    last = last_batch(open_table(paths.main))
    await asyncio.to_thread(wait_for, lambda: last_batch(open_table(paths.ledger)) > last, "a planned batch", second)
    second.kill()
    second.finish()
    planned = read_ledger(table)[-1]
    assert (planned.kind, planned.dc, last_batch(open_table(paths.main))) == (LOAD, "dc1", planned.batch - 1)
    is_over.set()
    await asyncio.gather(*writers)
    await places.mirrored()
    sent = await truth(places)
    stack.kill("dc1/kafka-1")
    status, summary, err = await asyncio.to_thread(start("dc2", "move", "--to", "dc2", "--yes").finish)
    assert status == 0, (summary, err)
    status, summary, err = await asyncio.to_thread(start("dc2").finish)
    assert status == 0, (summary, err)
    check_exact(table, sent)
    assert {row["dc"] for row in stored(table) if row["offset"] is not None} == {"dc1", "dc2"}
    assert any(r.size for r in read_ledger(table)[planned.batch + 1].ranges), "the ledger says what was read in dc2"
