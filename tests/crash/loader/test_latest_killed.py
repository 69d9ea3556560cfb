"""A loader of HBase's latest state that is killed at each step of a batch: the state is that of its last batch.

Nothing in the loader helps: the tables' folders are watched. After each kill, the state must be what HBase shows after
the changes of the batches that it says to hold, no more and no less; at the end the log must be exact, too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from logferry.client.hbase.changes import line_of
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch, read_ledger
from logferry.loaders.storage.retention import compact

from tests.support.hbase_loads import random_edits, shown, wanted
from tests.support.hbase_state import CellChange
from tests.support.loader import Topic, check_kept, stored
from tests.support.loader_faults import RacingLoaders, seeded
from tests.support.loader_process import LoaderProcess, Watch, commits, data_files, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

SETTINGS = 'parser = { format = "hbase", latest = true, versions = 1000, msgpack = false }'
# What grows at a step. Creating a table is its first commit.
LATEST_STEPS: dict[str, Watch] = {
    "ledger": lambda paths: commits(paths.ledger) - 1,
    "mid-write": lambda paths: data_files(paths.main),
    "mid-merge": lambda paths: data_files(paths.latest),
    "merge": lambda paths: commits(paths.latest) - 1,
    "commit": lambda paths: commits(paths.main) - 1,
}
Begin = Callable[..., LoaderProcess]


class Changes:
    """What was written to the topic, and what the state showed after which of its batches."""

    def __init__(self, topic: Topic, table: Location, dice: random.Random) -> None:
        self._topic, self._table, self._dice = topic, table, dice
        self._all: list[CellChange] = []
        self._seen: list[tuple[int, dict[tuple[str, ...], tuple[Any, ...]]]] = []

    async def write(self) -> None:
        first = self._all[-1].seq + 1 if self._all else 1
        sent, changes = random_edits(self._dice, first, 20, (line_of,))
        await self._topic.write(sent)
        self._all += changes

    def look(self) -> None:
        """The state as it is now. A batch that is committed meanwhile, by a loader that races, is no wrong answer."""
        while (batch := self._batch()) >= 0:
            found = shown(self._table)
            if self._batch() == batch:
                self._seen.append((batch, found))
                return

    def check(self) -> int:
        """The log and each state that was seen. Returns how many of them were ahead of the log or behind the end."""
        check_kept(self._table, self._topic.committed)
        assert shown(self._table) == wanted(self._all)
        offsets = {row["seqno"]: row["offset"] for row in stored(self._table)}
        ends = {entry.batch: entry.ranges[0].end for entry in read_ledger(self._table) if entry.ranges}
        for batch, found in self._seen:
            assert found == wanted([one for one in self._all if offsets[one.seq] < ends[batch]]), batch
        return sum(batch < self._batch() for batch, _ in self._seen)

    def _batch(self) -> int:
        return last_batch(open_table(TablePaths.of(self._table).latest))


async def killed_at(step: str, start: Begin, table: Location, topic: Topic, later_s: float = 0.0) -> None:
    watch, paths = LATEST_STEPS[step], TablePaths.of(table)
    before = max(watch(paths), 0)
    victim = start(table, topic.name, SETTINGS)
    wait_for(lambda: watch(paths) > before, step, victim)
    await asyncio.sleep(later_s)
    victim.kill()
    victim.finish()


async def finished(start: Begin, table: Location, topic: Topic) -> None:
    status, summary, err = start(table, topic.name, SETTINGS).finish()
    assert status == 0, (summary, err)


@pytest.mark.long
async def test_killed_between_the_state_and_the_log(start: Begin, topic: Topic, warehouse: Location):
    table, paths = warehouse / "logs", TablePaths.of(warehouse / "logs")
    changes = Changes(topic, table, seeded())
    await changes.write()
    await killed_at("merge", start, table, topic)
    assert last_batch(open_table(paths.latest)) == 0
    changes.look()
    await changes.write()
    await finished(start, table, topic)
    assert changes.check() == 1


@pytest.mark.long
@pytest.mark.parametrize("step", LATEST_STEPS)
async def test_killed_repeatedly_at_one_step(step: str, start: Begin, topic: Topic, warehouse: Location):
    table, dice = warehouse / "logs", seeded()
    changes = Changes(topic, table, dice)
    for round_ in range(4):
        await changes.write()
        # Not at the very instant only: somewhere in the step and the next one.
        await killed_at(step, start, table, topic, later_s=dice.random() * 0.3 * (round_ % 2))
        changes.look()
    await finished(start, table, topic)
    changes.check()


@pytest.mark.long
async def test_two_racing_and_killed_at_random_while_it_is_compacted(start: Begin, topic: Topic, warehouse: Location):
    table, dice = warehouse / "logs", seeded()
    changes = Changes(topic, table, dice)
    await changes.write()
    await finished(start, table, topic)
    racers = RacingLoaders(dice, [lambda: start(table, topic.name, SETTINGS)] * 2)
    for _ in range(8):
        await changes.write()
        await asyncio.sleep(3 + dice.random() * 9)  # killed at any instant
        racers.kill_one()
        list(compact(table, timedelta(hours=1)))
        changes.look()
    racers.finish()
    await finished(start, table, topic)
    changes.check()
    assert sum(tidied.removed for tidied in compact(table, timedelta(0))) > 0
    changes.check()
