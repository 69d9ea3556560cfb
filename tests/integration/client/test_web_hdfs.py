"""WebHDFS of a real NameNode and two DataNodes: folders, files that are being written, and what dies meanwhile."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from logferry.client.hbase.definition import Unfit
from logferry.client.hbase.wal.folders import FolderEntry
from logferry.client.hbase.wal.web_hdfs import WebHdfs, web_hdfs
from logferry.client.transport.connections import Dialer
from logferry.ops.runtime.jars import hdfs_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.hdfs_cluster import DATA_NODE, NAME_NODE, HdfsCluster
from logferry.ops.stack.processes import free_ports

from tests.support.hbase import needs_jdk

pytestmark = [needs_jdk, pytest.mark.timeout(400)]

NAME = "one.example%2C16020%2C1700000000000.1700000000100"
BLOCK = 1 << 20
_WRITER = Path(__file__).parents[2] / "support" / "HdfsWriter.java"


@pytest.fixture(scope="module")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with HdfsCluster(tmp_path_factory.mktemp("hdfs"), data_nodes=2) as cluster:
        yield cluster


@pytest.fixture
def store(hdfs: HdfsCluster) -> Iterator[WebHdfs]:
    """The first NameNode that it knows is gone."""
    root = f"webhdfs://127.0.0.1:{free_ports(1)[0]},{hdfs.web}/hbase"
    urls = [f"{root}/{name}" for name in ("WALs", "oldWALs")]
    found, wals, old_wals = web_hdfs(urls, "hbase", None, Dialer())
    assert (wals, old_wals) == ("/hbase/WALs", "/hbase/oldWALs")
    yield found
    found.close()


def change(hdfs: HdfsCluster, path: str, question: str, data: bytes | None = None, method: str = "PUT") -> None:
    """By WebHDFS, with another client."""
    url = f"http://{hdfs.web}/webhdfs/v1{quote(path)}?user.name=hbase&{question}"
    if data is not None:
        with urllib.request.urlopen(urllib.request.Request(f"{url}&noredirect=true", method=method)) as answer:
            url = answer.read().decode().partition('"Location":"')[2].partition('"')[0].replace("\\/", "/")
    with urllib.request.urlopen(urllib.request.Request(url, data=data, method=method)):
        pass


def comes(store: WebHdfs, path: str, at: int, expected: bytes) -> None:
    """Until the DataNodes have reported their blocks, a read fails, or gives less: never anything else."""
    deadline = time.monotonic() + 60
    found = b""
    while found != expected:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
        with suppress(OSError):
            found = store.read(path, at, len(expected))
            assert expected.startswith(found)


class OpenFile:
    """A file that a process writes, and keeps open."""

    def __init__(self, hdfs: HdfsCluster, path: str) -> None:
        jars = os.pathsep.join(map(str, hdfs_jars()))
        command = [str(find_java().executable), "-Xmx128m", "-cp", jars, str(_WRITER), hdfs.uri, path]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answered()

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def do(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        self._answered()

    def _answered(self) -> None:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        assert answer == "ok\n", answer


def test_folders_and_files(hdfs: HdfsCluster, store: WebHdfs) -> None:
    data = bytes(range(256)) * 40_000  # more than one piece
    change(hdfs, f"/hbase/WALs/one,16020,1/{NAME}", "op=CREATE&blocksize=1048576", data)
    change(hdfs, "/hbase/oldWALs", "op=MKDIRS")
    assert store.entries("/hbase") == [FolderEntry("WALs", True), FolderEntry("oldWALs", True)]
    assert store.entries("/hbase/WALs/one,16020,1") == [FolderEntry(NAME, False)]
    path = f"/hbase/WALs/one,16020,1/{NAME}"
    assert store.read(path, 0, len(data) + 1) == data
    assert store.read(path, 70_000, 10) == data[70_000:70_010]
    assert store.read(path, len(data) - 3, 10) == data[-3:]
    assert store.read(path, len(data), 10) == b""
    assert store.read(path, len(data) + 1, 10) == b""
    assert store.is_all(path, len(data))
    assert not store.is_all(path, len(data) - 1)
    store.check("/hbase/WALs")
    for folder in ("/hbase/WAL", path):
        with pytest.raises(Unfit, match="is no folder"):
            store.check(folder)
    change(hdfs, path, f"op=RENAME&destination=/hbase/oldWALs/{quote(NAME)}")
    for question in (lambda: store.read(path, 5, 10), lambda: store.is_all(path, 10), lambda: store.entries("/x")):
        with pytest.raises(FileNotFoundError):
            question()
    assert store.read(f"/hbase/oldWALs/{NAME}", 256, 3) == b"\x00\x01\x02"


def test_a_file_that_is_written_shows_what_is_flushed(hdfs: HdfsCluster, store: WebHdfs) -> None:
    path = f"/hbase/{NAME}"
    with OpenFile(hdfs, path) as file:
        assert store.read(path, 0, 10) == b""
        file.do("write 1000 1")
        assert store.read(path, 0, 2000) == b"\x01" * 1000
        file.do("write 500 2")
        assert store.read(path, 990, 2000) == b"\x01" * 10 + b"\x02" * 500
        assert store.read(path, 1500, 10) == b""
        assert not store.is_all(path, 1500), "it is open"
        # Behind the first block, the NameNode knows a length that is too short.
        file.do(f"write {BLOCK} 3")
        assert store.read(path, BLOCK + 1400, 200) == b"\x03" * 100
        assert store.read(path, BLOCK + 1500, 10) == b""
        file.do("close")
    assert store.is_all(path, BLOCK + 1500)
    assert store.read(path, BLOCK + 1499, 10) == b"\x03"


def test_what_a_dead_writer_flushed_is_not_taken_for_the_whole_file(hdfs: HdfsCluster, store: WebHdfs) -> None:
    path = f"/hbase/dead-{NAME}"
    with OpenFile(hdfs, path) as file:
        file.do("write 1000 1")
    assert store.read(path, 0, 2000) == b"\x01" * 1000
    assert not store.is_all(path, 1000), "HDFS has not recovered the writer's lease"


def test_a_data_node_that_is_gone_is_left_for_another_one(hdfs: HdfsCluster, store: WebHdfs) -> None:
    path = f"/hbase/copies-{NAME}"
    change(hdfs, path, "op=CREATE", b"0123456789")
    hdfs.kill(DATA_NODE)
    try:
        for at in range(10):  # the NameNode does not know it for minutes
            for _ in range(3):
                assert store.read(path, at, 1) == b"%d" % at
        hdfs.kill(f"{DATA_NODE}2")
        with pytest.raises(OSError, match=r"no DataNode sends it|No active nodes"):
            store.read(path, 0, 1)
    finally:
        hdfs.restart()
    comes(store, path, 3, b"3456")


def test_a_name_node_that_restarts_is_waited_for(hdfs: HdfsCluster, store: WebHdfs) -> None:
    path = f"/hbase/kept-{NAME}"
    change(hdfs, path, "op=CREATE", b"0123456789")
    assert store.read(path, 0, 99) == b"0123456789"
    hdfs.kill(NAME_NODE)
    try:
        with pytest.raises(OSError, match="no NameNode of webhdfs://") as problem:
            store.read(path, 0, 99)
        assert not isinstance(problem.value, FileNotFoundError)
        store.check("/hbase/WALs")  # a service that starts meanwhile waits, too
    finally:
        hdfs.restart()
    comes(store, path, 0, b"0123456789")
