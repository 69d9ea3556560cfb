"""Every process from an earlier version to this one, and back, under load: nothing lost, doubled or out of order.

The earlier version is a commit of this repository: the one before a feature, named by the file that the feature added.
Order and commands are those of the page *Upgrade*; the gateway's and the mirror's workers are changed one by one, so
that both versions serve at the same time. What is stored at the end is read without the code of either version.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import Ledger, last_batch, new_entry
from logferry.loaders.storage.ledger_summary import merge_entries
from logferry.loaders.storage.snapshots import newest_table
from logferry.ops.runtime.jars import spark_environment
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, Setting, configuration, free_ports, get, stop_all

from tests.soak.evidence import read_rows, read_segments, read_topic
from tests.soak.files import HostFile, Messages
from tests.soak.lines import COLUMNS
from tests.soak.verdict import FileTruth, Stored, check_files, check_http, check_rows, lines_of, union
from tests.support.clients import Load
from tests.support.delivery import PushReceiver, receiver
from tests.support.mirror import differences_in_the_end

ROOT: Final = Path(__file__).parents[3]
_WORKERS: Final = 2
_READY_S: Final = 600.0
_STOP_S: Final = 300.0  # a batch of the loader ends first
_END_S: Final = 300.0
_MORE: Final = 30  # chunks that are acknowledged after each change
_WEAK: Final = ["replication", "min-isr"]


class Release:
    """A version of the code. ``folder``: holds it as ``logferry``; None: the present one."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name, self._folder = name, folder

    def program(self, module: str, *arguments: str) -> list[str]:
        where = [] if self._folder is None else ["env", f"PYTHONPATH={self._folder}"]
        return [*where, sys.executable, "-m", module, *arguments]


NOW: Final = Release("now")


def before(added: str, folder: Path) -> Release:
    """The commit before the first one that had this file. Skips the test where the history does not reach so far."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout

    try:
        first = git("log", "--reverse", "--diff-filter=A", "--format=%H", "--", added).split()[0].decode()
        packed = git("archive", f"{first}^")
    except (OSError, subprocess.CalledProcessError, IndexError):
        pytest.skip(f"the history has no commit before {added} (a shallow clone, or no repository)")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder / "logferry", filter="data")
    return Release(f"before {added}", folder)


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, KafkaCluster]]:
    folder = tmp_path_factory.mktemp("kafka")
    with KafkaCluster("dc1", folder / "dc1") as one, KafkaCluster("dc2", folder / "dc2") as two:
        yield {"dc1": one, "dc2": two}


class Fleet:
    """One process of each kind, two of gateway and mirror, each in a version of its own."""

    def __init__(self, folder: Path, clusters: dict[str, KafkaCluster], topic: str) -> None:
        self.topic, self._prefix = topic, f"for-{topic}"
        self.folder, self._children = folder, dict[str, Child]()
        self._kafka = {dc: {"bootstrap_servers": cluster.bootstrap} for dc, cluster in clusters.items()}
        self._ports = {name: free_ports(_WORKERS)[0] for name in ("gateway", "mirror", "deliver")}
        self.table = Location.of(folder / "table")
        self.logs = folder / "var"
        self.logs.mkdir()
        (folder / "push-state").mkdir()
        self._configure()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        stop_all(list(self._children.values()), _STOP_S)
        for child in self._children.values():
            child.kill_group()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self._ports['gateway'] + number}" for number in range(_WORKERS)]

    def run(self, name: str, release: Release) -> None:
        """Stops the process, if it runs, as its service manager does, and starts it in this version."""
        service, _, number = name.partition("-")
        file = str(self.folder / f"{service}.toml")
        modules = {"gateway": "gateway", "mirror": "mirror", "deliver": "gateway.delivery", "loader": "loaders"}
        command = release.program(f"logferry.{modules.get(service, 'client')}", "--config", file)
        command += ["--worker", number] if number else {"loader": ["--json", "--follow"]}.get(service, [])
        self.stop(name)
        environment = None
        if service == "loader":
            environment = {**os.environ, **spark_environment()}
        self._children[name] = Child(name, command, self.folder / "logs" / f"{name}.log", environment)
        self._children[name].start()
        if service == "loader":
            before = last_batch(newest_table(self.table))
            self._until(lambda: last_batch(newest_table(self.table)) > before + 1, f"{release.name} loads")
        if number:
            url = f"http://127.0.0.1:{self._ports[service] + int(number)}"
            self._until(lambda: get(url, "/readyz")[0] == 200, f"{name} is ready")

    def stop(self, name: str) -> None:
        child = self._children.pop(name, None)
        if child is not None:
            self._check(child)
            assert child.stop(_STOP_S), f"{name} did not stop"

    def send_the_rest(self, release: Release) -> None:
        self.stop("push")
        once = Child("once", release.program("logferry.client", "--config", str(self.folder / "push.toml"), "--once"),
                     self.folder / "logs" / "once.log")  # fmt: skip
        once.start()
        assert once.wait_for_end(_END_S), "not all of the files was sent"
        once.check_end()

    def check(self) -> None:
        """Every process runs."""
        for child in self._children.values():
            self._check(child)

    def _check(self, child: Child) -> None:
        assert child.running, child.failed("has ended")

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _READY_S
        while not done():
            self.check()
            assert time.monotonic() < deadline, f"{what}: not within {_READY_S:.0f} s"
            time.sleep(0.1)

    def _configure(self) -> None:
        here, there = self._kafka["dc1"], self._kafka["dc2"]
        shared: dict[str, Setting] = {"prefix": self._prefix, "accept_weak_kafka": _WEAK, "workers": _WORKERS}
        remote: list[Setting] = [{"dc": "dc1", "topics": [self.topic], "kafka": here}]
        files: dict[str, dict[str, Setting]] = {
            "gateway": {"dc": "dc1", "lanes": 4, **shared, "kafka": here},
            "mirror": {"dc": "dc2", "lanes": 4, **shared, "kafka": there, "remote": remote},
            "deliver": {"dc": "dc1", "lanes": 4, **shared, "allowed_networks": ["127.0.0.0/8"], "kafka": here},
        }
        for service, settings in files.items():
            plain = {"listen": f"127.0.0.1:{self._ports[service]}", **settings}
            # Arrays of tables stand inline, so plain values come first.
            self._write(service, dict(sorted(plain.items(), key=lambda one: isinstance(one[1], dict))))
        push: dict[str, Setting] = {
            "topic": self.topic,
            "url": self.urls,
            "host": "web1",
            "heartbeat_s": 5,
            "idle_s": 5,
        }
        paths: list[Setting] = [{"paths": [f"{self.logs}/*.log"]}]
        self._write("push", {**push, "state_dir": str(self.folder / "push-state"), "files": paths})
        parser: dict[str, Setting] = {
            "format": "json",
            "columns": COLUMNS,
            "event_time": {"column": "t", "formats": ["epoch_ms"]},
        }
        segments: dict[str, Setting] = {"window_s": 10, "late_wait_s": 1, "source_idle_s": 5, "max_wait_s": 60}
        table: dict[str, Setting] = {"path": self.table.uri, "topics": [f"dc1.{self.topic}"], "parser": parser}
        loader: dict[str, Setting] = {"dc": "dc1", "prefix": self._prefix, "follow_s": 1}
        loader["tables"] = [{**table, "segments": segments}]
        spark: Setting = {"master": "local[1]", "driver_memory": "1g", "scratch": str(self.folder / "scratch")}
        gateways: Setting = {"dc1": {"urls": self.urls}}
        self._write("loader", {**loader, "kafka": here, "spark": spark, "gateways": gateways})

    def _write(self, service: str, settings: dict[str, Setting]) -> None:
        (self.folder / f"{service}.toml").write_text(configuration(settings), encoding="utf-8")


class GrowingFiles:
    """Logs of one host that grow until `stop`."""

    def __init__(self, folder: Path) -> None:
        messages = Messages(None, random.Random(5))
        self.files = [HostFile(f"log-{n}", folder / f"{n}.log", "create", messages) for n in range(3)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._grow, name="grows")
        self._thread.start()

    def _grow(self) -> None:
        while not self._stopping.wait(0.05):
            for file in self.files:
                file.write(3)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        for file in self.files:
            file.close()


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("topic", ["streams", "loader"])
async def test_every_process_there_and_back(topic: str, clusters: dict[str, KafkaCluster], tmp_path: Path) -> None:
    """The earlier version is the last one without push delivery."""
    loads = topic == "loader"
    old = await asyncio.to_thread(before, "gateway/delivery/config.py", tmp_path / "old")
    with Fleet(tmp_path, clusters, topic) as fleet:
        async with receiver() as got:
            growing = GrowingFiles(fleet.logs)
            try:
                load = await _there_and_back(old, fleet, got, loads=loads)
            finally:
                growing.stop()
            # The end is in the earlier version, as after a rollback.
            await asyncio.to_thread(fleet.send_the_rest, old)
            stored = await read_topic(clusters["dc1"].bootstrap, f"dc1.{topic}")
            assert check_http(load.history, stored) == []
            truths = {"web1": [FileTruth(file.log, file.number) for file in growing.files]}
            sources, found = union([stored])
            assert found == []
            assert check_files(sources, truths) == ([], 0)
            original, copy = ((cluster.bootstrap, f"dc1.{topic}") for cluster in clusters.values())
            assert await differences_in_the_end(original, copy, _END_S) == []
            if loads:
                await _check_table(fleet, sources)
            # Its state waited for a version that has it.
            await asyncio.to_thread(fleet.run, "deliver-0", NOW)
            await got.until(lambda: len(got.rows) >= len(stored), "all is delivered", _END_S)
            assert got.problems([(one.source, one.seqno) for one in stored]) == []


async def _there_and_back(old: Release, fleet: Fleet, got: PushReceiver, *, loads: bool) -> Load:
    """Returns the load, all of which is answered."""
    pairs = {service: [f"{service}-{number}" for number in range(_WORKERS)] for service in ("gateway", "mirror")}
    order = [*["loader"] * loads, *pairs["gateway"], *pairs["mirror"], "push"]
    for name in [*pairs["gateway"], *pairs["mirror"], "push"]:
        await asyncio.to_thread(fleet.run, name, old)
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{fleet.urls[0]}/v1/topics/{fleet.topic}", json={"partitions": 4}) as answer:
            assert answer.status < 300, await answer.text()
        async with Load(fleet.topic, fleet.urls, seed=11, sources=2) as load:
            await load.acknowledged(_MORE)
            if loads:
                await asyncio.to_thread(fleet.run, "loader", old)
            for release, names in ((NOW, order), (old, order[::-1])):
                for name in names:
                    await asyncio.to_thread(fleet.run, name, release)
                    await load.acknowledged(_MORE)
                    if name == "mirror-1" and release is NOW:
                        await _subscribe(session, fleet, got)
                        await asyncio.to_thread(fleet.run, "deliver-0", release)
                        await got.until(lambda: bool(got.seen), "it delivers")
                    elif name == "mirror-1":
                        await asyncio.to_thread(fleet.stop, "deliver-0")
                fleet.check()
    return load


async def _subscribe(session: aiohttp.ClientSession, fleet: Fleet, got: PushReceiver) -> None:
    body = {"topics": [f"dc1.{fleet.topic}"], "url": got.url, "start": "earliest", "max_wait_ms": 20}
    async with session.put(f"{fleet.urls[0]}/v1/subscriptions/upgrade", json=body) as answer:
        assert answer.status < 300, await answer.text()


async def _check_table(fleet: Fleet, sources: dict[str, list[Stored]]) -> None:
    place, wanted, deadline = Path(fleet.table.uri), lines_of(sources), time.monotonic() + _END_S
    while len(rows := await asyncio.to_thread(read_rows, place)) < len(wanted) and time.monotonic() < deadline:
        fleet.check()
        await asyncio.sleep(0.5)
    assert check_rows(wanted, rows) == []
    assert await asyncio.to_thread(read_segments, place)


_CONTINUED: Final = """
import sys
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import Ledger, new_entry
from pathlib import Path
try:
    from logferry.loaders.location import Location
except ImportError:
    place = Path(sys.argv[1])
else:
    place = Location.of(sys.argv[1])
ledger = Ledger(TablePaths.of(place).ledger)
ledger.create()
last = ledger.get(ledger.last())
ranges = [one._replace(start=one.end, end=one.end + 10) for one in last.ranges]
ledger.put(new_entry(last.batch + 1, "dc1", "lines/1", "older", ranges))
print(last.batch, len(ledger.entries()))
"""


def test_a_ledger_is_continued_by_an_earlier_loader_until_it_is_merged(tmp_path: Path) -> None:
    """Afterwards the earlier one reads it, and refuses to write by name: nothing is lost."""
    old = before("loaders/storage/ledger_summary.py", tmp_path / "old")
    ledger = Ledger(TablePaths.of(Location.of(tmp_path / "logs")).ledger)
    ledger.create()
    for n in range(12):
        ranges = [Range("dc1.a", 0, "id", 10 * n, 10 * n + 10)]
        ledger.put(new_entry(n, "dc1", "lines/1", f"run{n}", ranges))
    (tmp_path / "continued.py").write_text(_CONTINUED, encoding="utf-8")
    command = [*old.program("none")[:-2], str(tmp_path / "continued.py"), str(tmp_path / "logs")]

    def continued() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, check=False, capture_output=True, text=True)

    assert (done := continued()).stdout.split() == ["11", "13"], done.stderr
    found = ledger.entries()
    assert [entry.batch for entry in found] == [*range(13)]
    assert found[-1].ranges == (Range("dc1.a", 0, "id", 120, 130),)
    assert merge_entries(ledger.path, keep=4) == 9
    assert "cannot be written" in continued().stderr
    assert ledger.entries()[-1] == found[-1]
