"""The tail of a real HBase's write-ahead log, under load, while regions move and servers die.

Two truths decide: HBase's own scan (`judge`), and the files of its log, read without any order (`compare`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from logferry.ops.stack.hbase_cluster import HBaseCluster

from tests.support.gateway import Gateway
from tests.support.hbase import make_topic, needs_jdk
from tests.support.hbase_log import LoggedLoad

pytestmark = [needs_jdk, pytest.mark.timeout(400)]

RATE = 2000


@pytest.fixture(scope="module")
def load(workers: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedLoad]:
    folder = tmp_path_factory.mktemp("tail")
    with HBaseCluster(folder / "hbase") as hbase:
        yield LoggedLoad(hbase, folder, workers)


@pytest.mark.long
def test_each_change_is_written_once_while_regions_move_and_servers_die(load: LoggedLoad) -> None:
    hbase, url = load.hbase, load.workers.urls[0]
    make_topic(url, "tailed")
    tail = load.tail("tailed").start()
    tail.wait_logged(b" hbase-tailing ")
    hbase.shell(f"write 17 4 {RATE} {','.join(load.tables)} d")
    load.more(RATE)
    for table in load.tables:
        for region in load.regions(table)[::2]:
            hbase.shell(f"move {region}")
    load.roll()
    load.more(RATE)
    hbase.shell(f"split {load.regions('first')[0]} 1000")
    tail.kill()
    hbase.shell("merge {} {}".format(*load.regions("second")[-2:]))
    load.more(RATE)
    tail.start()
    for table in load.tables:
        hbase.shell(f"flush {table}")
    load.roll()  # what is flushed moves to oldWALs
    load.more(RATE)
    hbase.kill("region-server-1")
    hbase.wait_ready(servers=1)
    hbase.restart("region-server-1")
    hbase.wait_ready()
    load.more(RATE)
    for region in load.regions("first"):
        hbase.shell(f"move {region}")
    load.more(RATE)
    hbase.shell("stop")
    load.wait("tailed")
    assert tail.stop() == 0
    count = load.check("tailed")
    print(f"{count} changes")
    assert count > 5 * RATE

    make_topic(url, "afterwards")
    late = load.tail("afterwards").start()  # from the files alone: most of them are in oldWALs
    load.wait("afterwards")
    assert late.stop() == 0
    assert load.check("afterwards") == count

    again = load.tail("tailed").start()
    again.wait_logged(b" hbase-tailing ")
    hbase.shell("put first 0 d q last 1795341498000")
    load.wait("tailed")
    assert again.stop() == 0
    assert load.check("tailed") == count + 1
