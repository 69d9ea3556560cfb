"""The store of the tables is killed in mid-load and started again: a following load continues, the rows are exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from logferry.loaders.errors import StorageUnavailable
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch
from logferry.ops.stack.hdfs_cluster import DATA_NODE, NAME_NODE, HdfsCluster
from logferry.ops.stack.s3_server import BUCKET, S3Proxy

from tests.support.loader import Topic, check_kept
from tests.support.loader_faults import logs, seeded
from tests.support.loader_process import STEPS, LoaderProcess, wait_for

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]
AWAY_S: Final = 3.0


class KillableStore(NamedTuple):
    table: Location
    kill: Callable[[], None]
    restart: Callable[[], object]


@pytest.fixture(params=["s3proxy", NAME_NODE, DATA_NODE])
def killable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KillableStore]:
    if request.param == "s3proxy":
        with S3Proxy(tmp_path / "s3") as server, pytest.MonkeyPatch.context() as patch:
            for variable, value in server.environment.items():
                patch.setenv(variable, value)
            yield KillableStore(Location.of(f"s3://{BUCKET}/logs"), server.kill, server.__enter__)
    else:
        with HdfsCluster(tmp_path / "hdfs") as cluster:
            kill = lambda: cluster.kill(request.param)  # noqa: E731
            yield KillableStore(Location.of(f"{cluster.uri}/logs"), kill, cluster.restart)


async def test_killed_in_a_batch_and_started_again(
    killable: KillableStore, start: Callable[..., LoaderProcess], topic: Topic
):
    table, paths, dice = killable.table, TablePaths.of(killable.table), seeded()
    await topic.write(logs(4, 50), partitions=2)
    follower = start(table, topic.name, "", "--follow")
    wait_for(lambda: last_batch(open_table(table)) >= 0, "the first batch", follower)
    for round_, step in enumerate(STEPS, 1):
        before = STEPS[step](paths)
        await topic.write(logs(4, 50, round_), partitions=2)
        wait_for(lambda step=step, before=before: STEPS[step](paths) > before, step, follower)  # type: ignore[misc]
        await asyncio.sleep(dice.random() * 0.3 * (round_ > 1))  # at the step, or somewhat later
        killable.kill()
        await asyncio.sleep(AWAY_S)  # the fault itself
        await asyncio.to_thread(killable.restart)
    await topic.write(logs(4, 50, 9), partitions=2)
    rows = sum(chunk.data.count(b"\n") - 1 for _, chunk in topic.committed)
    wait_for(lambda: rows_in(table) == rows, "all rows", follower)
    follower.process.terminate()
    status, summary, err = follower.finish()
    assert status == 0, (summary, err)
    check_kept(table, topic.committed)


def rows_in(table: Location) -> int:
    """0 while the store, which was started again just now, cannot give them."""
    try:
        found = open_table(table)
    except StorageUnavailable:
        return 0
    return 0 if found is None else int(found.to_pyarrow_dataset().count_rows())
