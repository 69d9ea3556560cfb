"""Commands on a table with the latest state of HBase's cells beside it: the state stays what HBase's scan shows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from deltalake import DeltaTable
from logferry.loaders.batches.execute import Loader
from logferry.loaders.commands.compact import drop_old
from logferry.loaders.commands.repair import reset_table
from logferry.loaders.errors import ForeignTable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import DROP, RESET, TablePaths
from logferry.loaders.planning.position_plan import ResetTarget
from logferry.loaders.runs.table_run import load_table, requarantine_table
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import existing_table, last_batch, read_ledger
from logferry.loaders.storage.retention import compact
from pyspark.sql import SparkSession

from tests.support.hbase_loads import random_edits, shown, wanted
from tests.support.hbase_state import CellChange
from tests.support.loader import Topic, stored
from tests.support.loader_faults import seeded
from tests.support.table_loads import done, job, reload

pytestmark = pytest.mark.spark

PARSER = {"format": "hbase", "latest": True, "versions": 1000}
OLD_MS = 1_700_000_000_000


class Changes:
    """Written to the topic, and as the model needs them."""

    def __init__(self, topic: Topic, table: Location) -> None:
        self._topic, self._table, self._dice = topic, table, seeded()
        self._all: list[CellChange] = []

    async def write(self, count: int = 12) -> None:
        # Recorded long ago, so that rows can be dropped by age.
        sent, more = random_edits(self._dice, len(self._all) + 1, count)
        await self._topic.write(sent, recorded_ms=OLD_MS)
        self._all += more

    def check(self) -> None:
        assert shown(self._table) == wanted(self._all)
        paths = TablePaths.of(self._table)
        assert last_batch(open_table(paths.latest)) == last_batch(open_table(paths.main))

    def __len__(self) -> int:
        return len(self._all)


@pytest.fixture
async def changes(topic: Topic, table: Location) -> Changes:
    await topic.create()
    return Changes(topic, table)


@pytest.mark.long
async def test_reset_reload_compact_and_drop(
    changes: Changes, loader: Callable[..., Loader], topic: Topic, table: Location, spark: SparkSession
):
    work, paths = job(table, topic.name, parser=PARSER), TablePaths.of(table)
    for _ in range(3):
        await changes.write()
        done(load_table(loader(), work))
    changes.check()
    state = _rows(paths)

    # Rows of a log that was damaged come back, and the state loses nothing while they are away.
    existing_table(paths.main).delete("seqno % 2 = 0")
    reload(loader(), work, topic.name)
    assert len(stored(table)) == len(changes)
    changes.check()
    assert _rows(paths) == state

    # Read again from the start: the log has each change twice, the state once.
    assert reset_table(loader(), work, [ResetTarget.parse(f"{topic.name}=earliest")], lambda _: True)
    assert read_ledger(table)[-1].kind == RESET
    changes.check()
    done(load_table(loader(), work))
    assert len(stored(table)) == 2 * len(changes)
    changes.check()
    assert _rows(paths) == state

    tidied = {one.path.name: one for one in compact(table, timedelta(0))}
    assert tidied[paths.latest.name].removed > 0
    assert len(DeltaTable(paths.latest.uri).file_uris()) == 1
    assert _rows(paths) == state

    # The log is empty then. The state is not, and takes further changes.
    entry, found = drop_old(lambda: spark, table, timedelta(days=1), is_idle=True)
    assert entry is not None
    assert (entry.kind, found.rows) == (DROP, 2 * len(changes))
    assert stored(table) == []
    changes.check()
    await changes.write()
    done(load_table(loader(), work))
    changes.check()
    assert list(compact(table, timedelta(0)))
    changes.check()


async def test_a_table_of_another_parser_gets_no_state(
    changes: Changes, loader: Callable[..., Loader], topic: Topic, table: Location
):
    """Neither by a load nor out of its quarantine: both name the columns that are missing."""
    await changes.write()
    done(load_table(loader(), job(table, topic.name, parser={"format": "regex", "pattern": "(?<word>none)"})))
    assert stored(table) == []
    work = job(table, topic.name, parser=PARSER)
    for command in (load_table, requarantine_table):
        with pytest.raises(ForeignTable, match="has other columns than the job: family_bytes"):
            done(command(loader(), work))
    assert open_table(TablePaths.of(table).latest) is None


def _rows(paths: TablePaths) -> list[str]:
    return sorted(map(repr, stored(paths.latest)))
