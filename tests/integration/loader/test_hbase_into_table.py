"""From a put in a real HBase to a row: the table of the latest state shows what HBase's own scan shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from logferry.loaders.batches.execute import Loader
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import load_table
from logferry.ops.stack.hbase_cluster import HBaseCluster

from tests.support.gateway import Gateway
from tests.support.hbase import Change, HBaseConnector, make_topic, needs_jdk, scanned, wait_shipped
from tests.support.loader import stored
from tests.support.loader_faults import seeded
from tests.support.table_loads import done, job

pytestmark = [needs_jdk, pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.long]

DELETES = ("delete", "delete_column", "delete_family", "delete_family_version")
_CHANGES = 80


@pytest.fixture(scope="module")
def hbase(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HBaseCluster]:
    with HBaseCluster(tmp_path_factory.mktemp("hbase"), servers=1) as running:
        yield running


def shown_by(table: Location) -> set[Change]:
    found = set()
    for row in stored(TablePaths.of(table).latest):
        if row["latest"]:
            cell = [
                row[f"{name}_bytes"] if row[name] is None else row[name].encode()
                for name in ("row", "family", "qualifier", "value")
            ]
            change = Change._make((*cell, row["timestamp"], row["type"]))
            assert change not in found
            found.add(change)
    return found


def log_of(table: Location, cells: set[Change]) -> list[object]:
    """What the log of changes has of the rows of these cells, in order, to tell why they differ."""
    rows = {one.row for one in cells}
    log = [row for row in stored(table) if (row["row_bytes"] or (row["row"] or "").encode()) in rows]
    names = (
        "row",
        "family",
        "qualifier",
        "type",
        "timestamp",
        "sequence_id",
        "line",
        "region",
        "value_bytes",
        "offset",
    )
    return [sorted(cells), *sorted((row["sequence_id"], [row.get(name) for name in names]) for row in log)]


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_the_latest_state_is_hbases_own(
    encoding: str, hbase: HBaseCluster, workers: Gateway, loader: Callable[..., Loader], table: Location, tmp_path: Path
):
    """Few cells and timestamps, so that puts and every kind of delete meet, also those that come too late."""
    name, dice = f"latest_{encoding}", seeded()
    topic = make_topic(workers.urls[0], name)
    hbase.shell(f"create {name} d,e 1 2")
    connector = HBaseConnector(hbase, workers.urls, name, name, tmp_path / "log", name, "--format", encoding).start()
    work = job(table, topic, parser={"format": "hbase", "latest": True, "versions": 1000})
    try:
        for turn in range(3):
            for number in range(_CHANGES):
                row, family, qualifier = dice.choice(["0\\xFF", "1", "f"]), dice.choice("de"), f"q{dice.randint(0, 2)}"
                ts = dice.randint(1, 12)
                if dice.random() < 0.7:
                    hbase.shell(f"put {name} {row} {family} {qualifier} {turn}.{number}\\x80 {ts}")
                else:
                    hbase.shell(f"delete {name} {row} {dice.choice(DELETES)} {family} {qualifier} {ts}")
            if turn == 1:
                first = hbase.shell(f"regions {name}").split()[0].partition("@")[0]
                hbase.shell(f"split {first} 1")
            wait_shipped(hbase, workers.kafka.bootstrap, topic, [name], tmp_path)
            done(load_table(loader(), work))
            want = scanned(hbase, name, tmp_path, "shown")
            found = shown_by(table)
            assert found == want, log_of(table, found ^ want)
            assert want
    finally:
        connector.kill()
