"""The tail of a real HBase whose files are in a real HDFS: a DataNode, the NameNode and a region server die meanwhile.

HBase's own scan is the truth.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from logferry.ops.stack.hbase_cluster import HBaseCluster
from logferry.ops.stack.hdfs_cluster import DATA_NODE, NAME_NODE, HdfsCluster
from logferry.ops.stack.processes import free_ports

from tests.support.gateway import Gateway
from tests.support.hbase import make_topic, needs_jdk
from tests.support.hbase_log import LoggedLoad

pytestmark = [needs_jdk, pytest.mark.long, pytest.mark.timeout(900)]

RATE = 1000


def test_each_change_in_hdfs_is_written_once_while_nodes_die(workers: Gateway, tmp_path: Path) -> None:
    with HdfsCluster(tmp_path / "hdfs", data_nodes=2) as hdfs:
        settings = {"hbase.rootdir": f"{hdfs.uri}/hbase", "hbase.unsafe.stream.capability.enforce": "true"}
        with HBaseCluster(tmp_path / "hbase", settings=settings) as hbase:
            # The first NameNode that the tail knows is gone.
            root = f"webhdfs://127.0.0.1:{free_ports(1)[0]},{hdfs.web}/hbase"
            load = LoggedLoad(hbase, tmp_path, workers, root)
            make_topic(workers.urls[0], "in_hdfs")
            tail = load.tail("in_hdfs", "--positions", str(tmp_path / "positions")).start()
            tail.wait_logged(b" hbase-tailing ")
            hbase.shell(f"write 17 4 {RATE} {','.join(load.tables)} d")
            load.more(RATE)
            for table in load.tables:
                for region in load.regions(table)[::2]:
                    hbase.shell(f"move {region}")
            load.roll()
            load.more(RATE)
            hbase.shell(f"split {load.regions('first')[0]} 1000")
            for table in load.tables:
                hbase.shell(f"flush {table}")
            load.roll()  # what is flushed moves to oldWALs
            hdfs.kill(DATA_NODE)
            load.more(2 * RATE)  # into new files, with one copy
            tail.kill()
            tail.start()
            hdfs.kill(NAME_NODE)
            tail.wait_logged(b" hbase-wal-waits ")
            hdfs.restart()
            load.more(RATE)
            hbase.kill("region-server-1")
            hbase.wait_ready(servers=1)
            hbase.restart("region-server-1")
            hbase.wait_ready()
            load.more(RATE)
            hbase.shell("stop")
            load.wait("in_hdfs")
            assert tail.stop() == 0, tail.child.log_tail()
            count = load.check("in_hdfs")
            print(f"{count} changes")
            assert count > 4 * RATE

            make_topic(workers.urls[0], "in_hdfs_afterwards")
            late = load.tail("in_hdfs_afterwards").start()  # from the files alone
            load.wait("in_hdfs_afterwards")
            assert late.stop() == 0, late.child.log_tail()
            assert load.check("in_hdfs_afterwards") == count
