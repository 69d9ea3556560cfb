"""A real HBase on this machine: ZooKeeper, a master and region servers, a process each, with its data in a folder.

* `HBaseCluster.start` returns when HBase itself reports that its master and all region servers work.
* No process outlives this one. What HBase acknowledged survives SIGKILL of its processes, because the operating system
  holds the pages.
* `HBaseCluster.shell` runs a command of ``HBaseShell.java`` and waits for its answer. It needs a JDK: the program is
  compiled when it starts.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final
from xml.sax.saxutils import escape

from logferry.ops.cli.problems import Unavailable
from logferry.ops.runtime.jars import hbase_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import QUICK_START
from logferry.ops.stack.processes import Child, free_ports, stop_all

ZOOKEEPER: Final = "zookeeper"
MASTER: Final = "master"
_SHELL: Final = Path(__file__).with_name("HBaseShell.java")
_ANSWER_S: Final = 120.0
_STOP_S: Final = 15.0
_HEAPS: Final = {ZOOKEEPER: "64m", MASTER: "160m"}
_REGION_SERVER_HEAP: Final = "256m"
_MAIN: Final = {
    ZOOKEEPER: "org.apache.zookeeper.server.ZooKeeperServerMain",
    MASTER: "org.apache.hadoop.hbase.master.HMaster",
}
_REGION_SERVER: Final = "org.apache.hadoop.hbase.regionserver.HRegionServer"
# As HBase's own start script opens them for Java 17.
_OPENED: Final = (
    *("java.base/java.io", "java.base/java.lang", "java.base/java.lang.reflect", "java.base/java.math"),
    *("java.base/java.net", "java.base/java.nio", "java.base/java.util", "java.base/java.util.concurrent"),
    *("java.base/sun.nio.ch", "java.base/sun.nio.cs", "java.base/jdk.internal.ref", "java.base/jdk.internal.misc"),
)
_LOGGING: Final = """log4j.rootLogger=WARN, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.target=System.err
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
log4j.logger.org.apache.hadoop.hbase.replication=INFO
"""
# Where HBase's web server wants folders before it shows its figures.
_WEB_FOLDERS: Final = ("regionserver/WEB-INF", "master/WEB-INF", "static")


class ShellError(Exception):
    """HBase refused the command; the text is its own."""


class HBaseCluster:
    """Use it in one thread. ``settings`` are added to hbase-site.xml and override ours. The processes are named
    ``zookeeper``, ``master``, ``region-server-1`` and so on. ``version``: of `jars.HBASE_VERSIONS`. ``data``: HBase's
    folder, with its write-ahead logs.
    """

    def __init__(
        self,
        folder: Path,
        servers: int = 2,
        settings: Mapping[str, str] | None = None,
        version: str = "2.6",
        jvm: Sequence[str] = QUICK_START,
    ) -> None:
        self._folder, self._version, self._jvm = folder, version, jvm
        self.data = folder / "data"
        ports = iter(free_ports(3 + 2 * servers))
        self._zookeeper_port = next(ports)
        self.zookeeper = f"127.0.0.1:{self._zookeeper_port}"
        self.names = [f"region-server-{number + 1}" for number in range(servers)]
        self._info_ports: dict[str, int] = {}
        self._own: dict[str, Mapping[str, str]] = {}
        self.children: dict[str, Child] = {}
        self._settings = {**self._common(), **(settings or {})}
        folder.mkdir(parents=True, exist_ok=True)
        self._add(ZOOKEEPER, {}, str(self._zookeeper_port), str(folder / "zookeeper-data"))
        for name in (MASTER, *self.names):
            kind = "master" if name == MASTER else "regionserver"
            port, self._info_ports[name] = next(ports), next(ports)
            own = {f"hbase.{kind}.port": str(port), f"hbase.{kind}.info.port": str(self._info_ports[name])}
            self._add(name, own, "start")
        self._configure(folder / "shell", {})
        self._shell: _Shell | None = None

    def __enter__(self) -> HBaseCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Raises Unavailable."""
        try:
            for child in self.children.values():
                child.start()
            self._shell = _Shell(self._java("shell", "256m", str(_SHELL)), self._folder / "shell.log")
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        if self._shell is not None:
            self._shell.close()
            self._shell = None
        # Region servers wait for the master's word when they stop; nothing of this is needed again.
        for name in (*self.names, MASTER):
            self.kill(name)
        stop_all(list(self.children.values()), _STOP_S)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process. After SIGKILL it has ended when this returns."""
        self.children[name].send(number)

    def restart(self, name: str) -> None:
        """Restarts a process on its data and ports. `wait_ready` waits for it."""
        self.children[name].restart()

    def configure(self, name: str, settings: Mapping[str, str]) -> None:
        """Adds settings to those of a process, from its next start on."""
        self._own[name] = {**self._own[name], **settings}
        self._configure(self._folder / name, self._own[name])

    def wait_ready(self, servers: int | None = None) -> None:
        """Returns when the master works, with this number of region servers (None: all). Raises Unavailable."""
        try:
            self.shell(f"ready {len(self.names) if servers is None else servers}")
        except Unavailable as problem:
            dead = [child for child in self.children.values() if not child.running]
            raise dead[0].ended() if dead else problem from None

    def shell(self, command: str, timeout_s: float = _ANSWER_S) -> str:
        """The answer to a command of HBaseShell.java. Raises ShellError, Unavailable."""
        if self._shell is None:
            raise RuntimeError("the cluster is not started")
        return self._shell.ask(command, timeout_s)

    def jmx_url(self, name: str) -> str:
        """The figures of the master or of a region server."""
        return f"http://127.0.0.1:{self._info_ports[name]}/jmx"

    def _common(self) -> dict[str, str]:
        return {
            "hbase.cluster.distributed": "true",
            "hbase.rootdir": f"file://{self.data}",
            "hbase.tmp.dir": f"{self._folder}/tmp",
            "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
            "hbase.unsafe.stream.capability.enforce": "false",
            "hbase.zookeeper.quorum": "127.0.0.1",
            "hbase.zookeeper.property.clientPort": str(self._zookeeper_port),
            # A killed region server is noticed after so long.
            "zookeeper.session.timeout": "4000",
            "hbase.master.wait.on.regionservers.mintostart": str(len(self.names)),
            **{f"hbase.{kind}.hostname": "127.0.0.1" for kind in ("master", "regionserver")},
            **{f"hbase.{kind}.ipc.address": "127.0.0.1" for kind in ("master", "regionserver")},
            **{f"hbase.{kind}.info.bindAddress": "127.0.0.1" for kind in ("master", "regionserver")},
            "hbase.regionserver.handler.count": "8",
            "hbase.netty.worker.count": "2",
            # Nothing is compacted or cleaned away before it is compared.
            "hbase.master.logcleaner.ttl": "86400000",
            "hbase.hregion.majorcompaction": "0",
            "hbase.hstore.time.to.purge.deletes": str(10**15),
            # HBase retries after 10 s by default, and gives a call up after 60 s.
            "hbase.serial.replication.waiting.ms": "500",
            "replication.source.sleepforretries": "300",
            # The logs of a dead server are taken over so long after its end, or up to twice that: 30 s by default.
            "replication.sleep.before.failover": "1000",
            "replication.source.shipedits.timeout": "10000",
            # Every connector is used; by default, a region server picks half of them.
            "replication.source.ratio": "1",
            # A peer that nobody serves holds a batch in memory.
            "replication.source.size.capacity": str(4 << 20),
            "replication.source.nb.capacity": "2000",
            "hbase.client.pause": "50",
        }

    def _add(self, name: str, own: Mapping[str, str], *arguments: str) -> None:
        self._own[name] = own
        self._configure(self._folder / name, own)
        main, heap = _MAIN.get(name, _REGION_SERVER), _HEAPS.get(name, _REGION_SERVER_HEAP)
        self.children[name] = Child(name, self._java(name, heap, main, *arguments), self._folder / f"{name}.log")

    def _configure(self, folder: Path, own: Mapping[str, str]) -> None:
        lines = (
            f"<property><name>{name}</name><value>{escape(value)}</value></property>"
            for name, value in {**self._settings, **own}.items()
        )
        for inner in _WEB_FOLDERS:
            (folder / "hbase-webapps" / inner).mkdir(parents=True, exist_ok=True)
        (folder / "hbase-site.xml").write_text(f"<configuration>{''.join(lines)}</configuration>", encoding="utf-8")
        (folder / "log4j.properties").write_text(_LOGGING, encoding="utf-8")

    def _java(self, name: str, heap: str, *arguments: str) -> list[str]:
        is_hdfs = self._settings["hbase.rootdir"].startswith("hdfs:")
        jars = os.pathsep.join([str(self._folder / name), *map(str, hbase_jars(self._version, hdfs=is_hdfs))])
        opened = [option for package in _OPENED for option in ("--add-opens", f"{package}=ALL-UNNAMED")]
        jvm = [f"-Xmx{heap}", "-XX:+ExitOnOutOfMemoryError", *self._jvm]
        quiet = ["-XX:-UsePerfData", "-Djava.awt.headless=true", "-Dzookeeper.admin.enableServer=false"]
        # ZooKeeper's tick: a session may be as short as two of them.
        tick = ["-Dzookeeper.tickTime=1000"] if name == ZOOKEEPER else []
        return [str(find_java().executable), *jvm, *quiet, *tick, *opened, "-cp", jars, *arguments]


class _Shell:
    """The process of HBaseShell.java. It ends when its standard input does, so with this process."""

    def __init__(self, command: list[str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self._log = log
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def ask(self, command: str, timeout_s: float) -> str:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.close()  # a late answer would be taken for that of the next command
            raise Unavailable(
                f"HBase did not carry out {command!r} within {timeout_s:.0f} s; see {self._log}"
            ) from None
        except OSError:
            answer = ""
        if not answer:
            text = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise Unavailable(f"the shell of HBase ended; it needs a JDK (with javac), not only a JRE:\n{text}")
        word, _, rest = answer.partition(" ")
        if word != "ok":
            raise ShellError(rest)
        return rest

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # a command that was never read
                    stream.close()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._answers.put(line.strip())
        self._answers.put("")
