"""``make demo-hbase``: from a put in HBase to a row of a table, on this machine, with kills and a comparison.

Puts and every kind of delete are written to a real HBase while a connector, and later a region server, are killed by
SIGKILL. A loader follows the topic. At the end the tables are compared with HBase's own scans: each change is in the
log of changes once, and the latest state shows what HBase shows. Exit status: 0 so it is, 1 it is not, 2 wrong use,
3 a process did not start or failed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.client.hbase.cells import TYPES
from logferry.loaders.errors import LoadError
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import dataset, open_table
from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.cli.problems import CommandError, Unavailable
from logferry.ops.cli.terminal import StopRequested, console_for_output, stop_on_signals
from logferry.ops.demo.view import View
from logferry.ops.runtime.jars import hbase_jars, kafka_jars, spark_environment, spark_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.hbase_cluster import HBaseCluster
from logferry.ops.stack.processes import Child, Setting, configuration
from logferry.ops.stack.stack import Stack
from rich.table import Table

NAME: Final = "orders"
_RATE: Final = 400
# Changes that are written before each step, and at least in all.
_STEP: Final = 4000
_SERVING: Final = b" hbase-serving "
_START_S: Final = 60.0
_LOADED_S: Final = 150.0
_LOOK_S: Final = 1.0
_STOP_S: Final = 40.0


class HBaseChange(NamedTuple):
    """A change as HBase's scan and the tables have it."""

    row: bytes
    family: bytes
    qualifier: bytes
    value: bytes
    timestamp: int
    type: str


class Compared(NamedTuple):
    """Numbers of changes. ``twice``: rows of the log beyond the first of the same change of the same edit."""

    what: str
    hbase: int
    table: int
    missing: int
    foreign: int
    twice: int = 0

    @property
    def is_equal(self) -> bool:
        return not (self.missing or self.foreign or self.twice)


class HBaseDemo:
    """Runs once. All processes that it starts have ended when `__exit__` returns."""

    def __init__(self, folder: Path, view: View) -> None:
        self._folder, self._view = folder, view
        self._stack = Stack(folder / "stack", workers=2, lanes=4, say=view.say)
        self._hbase = HBaseCluster(folder / "hbase")
        self._paths = TablePaths.of(folder / "warehouse" / NAME)
        self._ending = ExitStack()

    def __enter__(self) -> HBaseDemo:
        try:
            self._ending.enter_context(self._stack)
            self._view.say("starting HBase: ZooKeeper, a master and two region servers")
            self._ending.enter_context(self._hbase)
        except BaseException:
            self._ending.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def run(self) -> list[Compared]:
        """Raises CommandError, LoadError."""
        GatewayClient(self._stack.urls()[0]).request("PUT", f"/v1/topics/{NAME}", {"partitions": 2})
        self._hbase.shell(f"create {NAME} d 1 4")
        connectors = [self._connector(number) for number in (1, 2)]
        self._view.say("HBase ships to two connectors", "green")
        loader = self._started(self._loader())
        self._hbase.shell(f"write 1 2 {_RATE} {NAME} d")
        self._view.say(f"writing {_RATE} puts and deletes a second to HBase; a loader follows")
        self._written(1)
        connectors[0].send(signal.SIGKILL)
        self._view.say_killed("a connector", "a connector; HBase ships what it did not acknowledge to the other one")
        self._written(2)
        connectors[0].start()
        victim = self._hbase.names[0]
        self._hbase.kill(victim)
        self._view.say_killed("a region server", f"{victim}; the other one takes its regions")
        self._hbase.wait_ready(servers=1)
        self._hbase.restart(victim)
        self._hbase.wait_ready()
        self._view.say(f"{victim} is back", "green")
        self._written(4)
        count = self._hbase.shell("stop")
        self._view.say(f"{int(count):,} changes are written; waiting until the last one is loaded")
        compared = self._compared_when_loaded(loader)
        for child in (*connectors, loader):
            child.stop(_STOP_S)
        return compared

    def _connector(self, number: int) -> Child:
        command = [sys.executable, "-m", "logferry.ops.cli.main", "hbase", "subscribe", NAME, "--format", "msgpack"]
        command += ["--zookeeper", self._hbase.zookeeper, "--tables", NAME, "--topic", NAME]
        command += [f"--url={url}" for url in self._stack.urls()]
        child = self._started(Child(f"connector {number}", command, self._folder / f"connector-{number}.log"))
        deadline = time.monotonic() + _START_S
        while _SERVING not in child.log.read_bytes():
            if not child.running or time.monotonic() > deadline:
                raise child.failed("does not serve HBase")
            time.sleep(0.05)
        return child

    def _loader(self) -> Child:
        settings: dict[str, Setting] = {
            "kafka": {"bootstrap_servers": self._stack.cluster().bootstrap},
            "spark": {"scratch": str(self._folder / "scratch")},
            "follow_s": 0.5,
        }
        table: dict[str, Setting] = {"path": str(self._paths.main), "topics": [f"dc1.{NAME}"]}
        table |= {"parser.format": "hbase", "parser.latest": True}
        file = self._folder / "load.toml"
        file.write_text(f"{configuration(settings)}\n[[tables]]\n{configuration(table)}", encoding="utf-8")
        command = [sys.executable, "-m", "logferry.loaders", "--config", str(file), "--json", "--follow"]
        return Child("loader", command, self._folder / "loader.log", {**os.environ, **spark_environment(s3=False)})

    def _started(self, child: Child) -> Child:
        self._ending.callback(child.kill_group)
        child.start()
        return child

    def _written(self, steps: int) -> None:
        """Returns when so many steps of changes were written."""
        self._hbase.shell(f"until {steps * _STEP}")
        self._view.say(f"{steps * _STEP:,} changes written, {self._rows():,} rows loaded")

    def _rows(self) -> int:
        table = open_table(self._paths.main)
        return 0 if table is None else dataset(self._paths.main, table).count_rows()

    # ---- the verdict ------------------------------------------------------------------------------------------------

    def _compared_when_loaded(self, loader: Child) -> list[Compared]:
        """Once nothing is missing, or after `_LOADED_S`."""
        changes, shown = set(self._scan("scan")), list(self._scan("shown"))
        deadline, pulse = time.monotonic() + _LOADED_S, time.monotonic()
        while True:
            rows = self._stored(self._paths.main, "source_id", "seqno", "line")
            found = [(one, cell_of(one)) for one in rows]
            log = compare("log of changes", changes, {cell for _, cell in found})
            if not log.missing or time.monotonic() > deadline or not loader.running:
                break
            if time.monotonic() > pulse + 5:
                pulse = time.monotonic()
                self._view.say(f"{log.missing:,} of {len(changes):,} changes are not loaded yet")
            time.sleep(_LOOK_S)
        if not loader.running:
            raise loader.ended()
        places = {(one["source_id"], one["seqno"], one["line"]) for one, _ in found}
        log = log._replace(table=len(found), twice=len(found) - len(places))
        latest = [cell_of(one) for one in self._stored(self._paths.latest, "latest") if one["latest"]]
        state = compare("latest state", set(shown), set(latest))
        return [log, state._replace(table=len(latest), twice=len(latest) - len(set(latest)))]

    def _scan(self, command: str) -> Iterator[HBaseChange]:
        file = self._folder / command
        self._hbase.shell(f"{command} {NAME} {file}")
        for line in file.read_text(encoding="utf-8").splitlines():
            *names, timestamp, kind = line.split(" ")
            row, family, qualifier, value = (bytes.fromhex(text[1:]) for text in names)
            yield HBaseChange(row, family, qualifier, value, int(timestamp), TYPES[int(kind)])

    def _stored(self, path: Any, *more: str) -> list[dict[str, Any]]:
        table = open_table(path)
        if table is None:
            return []
        names = ("row", "family", "qualifier", "value")
        columns = [*names, *(f"{name}_bytes" for name in names), "timestamp", "type", *more]
        rows: list[dict[str, Any]] = dataset(path, table).to_table(columns=columns).to_pylist()
        return rows


def cell_of(row: dict[str, Any]) -> HBaseChange:
    """A delete has no value, which a scan shows as an empty one."""
    names = ("row", "family", "qualifier", "value")
    texts = [row[f"{name}_bytes"] if row[name] is None else row[name].encode() for name in names]
    return HBaseChange._make((*(text or b"" for text in texts), row["timestamp"], row["type"]))


def compare(what: str, hbase: set[HBaseChange], table: set[HBaseChange]) -> Compared:
    return Compared(what, len(hbase), len(table), len(hbase - table), len(table - hbase))


def show(compared: list[Compared], view: View) -> None:
    table = Table(title="HBase's own scan and the tables")
    table.add_column("table")
    for name in ("HBase", "rows", "missing", "not HBase's", "twice"):
        table.add_column(name, justify="right")
    for one in compared:
        table.add_row(one.what, *(f"{number:,}" for number in one[1:]))
    view.console.print(table)


def demonstrated(run: Callable[[Path, View], list[Compared]], view: View) -> int:
    """The exit status. The folder of the data is kept unless the tables are equal to HBase."""
    folder = Path(tempfile.mkdtemp(prefix="logferry-demo-hbase-"))
    view.say(f"data in {folder}")
    try:
        compared = run(folder, view)
    except (CommandError, LoadError) as error:
        view.say(str(error), "bold red")
        return 3
    show(compared, view)
    if all(one.is_equal for one in compared):
        view.say("each change is in the log once, and the latest state is HBase's", "bold green")
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    view.say(f"the tables are not what HBase has; the data is kept in {folder}", "bold red")
    return 1


def _run(folder: Path, view: View) -> list[Compared]:
    java = find_java()
    if not (java.home / "bin" / "javac").exists():
        raise Unavailable("the shell of HBase needs a JDK: apt-get install openjdk-17-jdk-headless")
    for jars in (kafka_jars, spark_jars, hbase_jars):
        jars()
    with HBaseDemo(folder, view) as demo:
        return demo.run()


def main() -> int:
    try:
        with stop_on_signals(announce=b""):
            return demonstrated(_run, View(console_for_output()))
    except StopRequested:
        return 130


if __name__ == "__main__":
    sys.exit(main())
