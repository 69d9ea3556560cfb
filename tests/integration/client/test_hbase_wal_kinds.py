"""Files that a real HBase wrote with each kind of log that its settings have: read, or refused by name; and cut."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from logferry.ops.runtime.jars import HBASE_VERSIONS
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.hbase_cluster import HBaseCluster

from tests.support.gateway import Gateway
from tests.support.hbase import chunks_of, make_topic, needs_jdk
from tests.support.hbase_log import HBaseTail, entries_of, log_paths

pytestmark = [needs_jdk, pytest.mark.long, pytest.mark.timeout(600)]

SERVER = "region-server-1"
ROWS = 20
WAL = "hbase.regionserver.wal"
_SECURE = "org.apache.hadoop.hbase.regionserver.wal.SecureProtobufLog"


class Kind(NamedTuple):
    """``refusal``: what the tail says of it; empty: it is read."""

    settings: dict[str, str]
    refusal: str


def kinds(key_store: Path) -> dict[str, Kind]:
    compressed = {f"{WAL}.enablecompression": "true"}
    with_values = {f"{WAL}.value.enablecompression": "true", f"{WAL}.value.compression.type": "gz"}
    provider = f"jceks://{key_store}?password=secret"
    encrypted = {
        f"{WAL}.encryption": "true",
        "hbase.crypto.keyprovider": "org.apache.hadoop.hbase.io.crypto.KeyStoreKeyProvider",
        "hbase.crypto.keyprovider.parameters": provider,
        "hbase.crypto.master.key.name": "hbase",
        "hbase.regionserver.hlog.reader.impl": f"{_SECURE}Reader",
        "hbase.regionserver.hlog.writer.impl": f"{_SECURE}Writer",
        "hbase.regionserver.hlog.async.writer.impl": _SECURE.replace("Secure", "SecureAsync") + "Writer",
    }
    off = dict.fromkeys((*compressed, f"{WAL}.value.enablecompression"), "false")
    return {
        "plain": Kind({}, ""),
        "filesystem": Kind({"hbase.wal.provider": "filesystem"}, ""),
        "groups": Kind({"hbase.wal.provider": "multiwal"}, ""),
        "compressed": Kind({"hbase.wal.provider": "asyncfs", **compressed}, f"compressed ({WAL}.enablecompression"),
        "values": Kind(with_values, f"compressed ({WAL}.value.enablecompression"),
        "encrypted": Kind({**off, **encrypted}, f"encrypted ({WAL}.encryption"),
    }


@pytest.mark.parametrize("version", HBASE_VERSIONS)
def test_each_kind_of_log_is_read_or_refused_by_name(workers: Gateway, tmp_path: Path, version: str) -> None:
    key_store = tmp_path / "keys"
    keytool = find_java().home / "bin" / "keytool"
    command = f"{keytool} -genseckey -alias hbase -keyalg AES -keysize 128 -storetype jceks -storepass secret"
    subprocess.run([*command.split(), "-keypass", "secret", "-keystore", str(key_store)], check=True)
    files: dict[str, list[Path]] = {}
    old = tmp_path / "oldWALs"
    for folder in (old, tmp_path / "WALs"):
        folder.mkdir()
    every = kinds(key_store)
    with HBaseCluster(tmp_path / "hbase", servers=1, version=version) as hbase:
        for kind, (settings, _) in every.items():
            if settings:
                hbase.kill(SERVER)
                hbase.configure(SERVER, settings)
                hbase.restart(SERVER)
                hbase.wait_ready()
            hbase.shell(f"create {kind} d 0 1")
            for number in range(ROWS):
                hbase.shell(f"put {kind} {kind}-{number} d q {'v' * 100}")
            server = hbase.shell("servers")
            files[kind] = [path for path in log_paths(hbase.data) if path.parent.name == server]
            assert files[kind], server
            for path in files[kind]:
                shutil.copy(path, old / path.name)
    (old / "empty.example%2C16020%2C1700000000000.1700000000100").write_bytes(b"")
    refused = {kind: one.refusal for kind, one in every.items() if one.refusal}
    rows = {f"{kind}-{number}" for kind in every.keys() - refused.keys() for number in range(ROWS)}

    topic = "kinds_" + version.replace(".", "_")
    make_topic(workers.urls[0], topic)
    tail = HBaseTail(tmp_path, workers.urls, topic, tmp_path / "tail.log", sorted(every)).start()
    for kind, text in refused.items():
        for path in files[kind]:
            tail.wait_logged(f'{path.name} reason="it is {text}'.encode())
    wait_rows(workers, topic, rows)
    assert tail.stop() == 0, tail.child.log_tail()

    names = [path.name for kind in refused for path in files[kind]]
    tail = HBaseTail(tmp_path, workers.urls, topic, tmp_path / "2.log", sorted(every), "--leave-out", *names).start()
    tail.wait_logged(b" hbase-tailing ")
    assert tail.stop() == 0, tail.child.log_tail()
    wait_rows(workers, topic, rows)

    dice = Random(version)
    for path in (path for kind in every.keys() - refused.keys() for path in files[kind]):
        data = (old / path.name).read_bytes()
        whole = list(entries_of(data))
        for size in {dice.randrange(len(data)) for _ in range(50)}:
            found = list(entries_of(data[:size]))
            assert found == [one for one in whole if one.end <= size], (path, size)


def wait_rows(workers: Gateway, topic: str, rows: set[str]) -> None:
    """Until the topic has these rows, each once, and no other."""
    deadline = time.monotonic() + 120
    while True:
        found = [one.change.row.decode() for one in chunks_of(workers.kafka.bootstrap, f"dc1.{topic}")]
        assert len(found) == len(set(found))
        assert set(found) <= rows
        if set(found) == rows:
            return
        assert time.monotonic() < deadline, rows - set(found)
        time.sleep(0.5)
