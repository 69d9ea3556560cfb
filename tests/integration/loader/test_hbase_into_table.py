"""From a put in a real HBase to a row: the table of the latest state shows what HBase's own scan shows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from logferry.loaders.batches.execute import Loader
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.runs.table_run import load_table
from logferry.ops.stack.hbase_cluster import HBaseCluster

from tests.support.gateway import Gateway
from tests.support.hbase import Change, HBaseConnector, Written, chunks_of, make_topic, needs_jdk, scanned
from tests.support.hbase_log import Logged, compare, logged
from tests.support.loader import quarantine, stored
from tests.support.loader_faults import seeded
from tests.support.table_loads import done, job

pytestmark = [needs_jdk, pytest.mark.spark, pytest.mark.timeout(600), pytest.mark.long]

DELETES = ("delete", "delete_column", "delete_family", "delete_family_version")
_CHANGES = 80
_PATIENCE_S = 120.0


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


def wait_recorded(hbase: HBaseCluster, bootstrap: str, topic: str, table: str) -> list[Written]:
    """Until the topic has every change of HBase's log, by region and sequence id; a change of the same bytes before it
    does not count. What the topic has then."""
    log, deadline = logged(hbase.data, [table]), time.monotonic() + _PATIENCE_S
    while True:
        found = chunks_of(bootstrap, topic)
        there = {Logged(one.table, one.source_id, one.sequence_id, one.change) for one in found}
        if not log - there:
            compare(found, log)
            return found
        assert time.monotonic() < deadline, f"{len(log - there)} of {len(log)} changes are not shipped"
        time.sleep(0.5)


def check_log(table: Location, topic: Sequence[Written]) -> None:
    """The log of changes has what the topic had before the load, once: so what the state lacks, the merge has lost."""
    assert quarantine(table) == []
    rows = Counter((row["region"], row["sequence_id"], row["line"]) for row in stored(table))
    assert rows == Counter((one.source_id, one.sequence_id, 0) for one in topic)


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_the_latest_state_is_hbases_own(
    encoding: str, hbase: HBaseCluster, workers: Gateway, loader: Callable[..., Loader], table: Location, tmp_path: Path
):
    """Few cells and timestamps, so that puts and every kind of delete meet, also those that come too late.

    Each step is judged by itself: HBase's log against the topic, the topic against the log of changes, the state
    against HBase's scan.
    """
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
            sent = wait_recorded(hbase, workers.kafka.bootstrap, topic, name)
            assert len(sent) >= (turn + 1) * _CHANGES
            done(load_table(loader(), work))
            check_log(table, sent)
            want = scanned(hbase, name, tmp_path, "shown")
            assert shown_by(table) == want
            assert want
    finally:
        connector.kill()
