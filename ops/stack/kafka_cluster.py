"""A real Kafka cluster on this machine: KRaft, one to a few nodes, each broker and controller at once.

Invariants:

* One process owns a data folder (a file lock, dropped by the kernel when its holder dies); another one is refused.
* ``cluster.json`` says what the folder holds and is written first; a node's log folder is formatted beside its
  place and moved in by one rename. So a crash at any instant leaves a folder that can be opened again, and a
  folder that is half of something came from elsewhere: it is refused with a word on what is wrong.
* A node counts as started when it answers a Kafka request and knows of all nodes that run.
* No node outlives this process (`children`). What was acknowledged by all replicas survives SIGKILL of nodes,
  since the operating system holds the pages; not a power cut.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from logferry.ops.cli.problems import WrongUse
from logferry.ops.kraft import FolderUnusable, check_node_folder, known_brokers, node_settings
from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.ports import free_ports, is_free
from logferry.ops.stack.processes import Child, processes_with, stop_together

# Compiling less makes a start faster and a long run slower: for tests. Benchmarks and long runs take the other.
QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
LONG_RUN = ("-XX:+UseSerialGC",)

_READY_S = 60
_STOP_S = 20
_FORMAT = 1

_LOGGING = """rootLogger.level = info
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %m (%c)%n%throwable
# One line for each setting at every start, and one for each snapshot.
logger.config.name = org.apache.kafka.common.config
logger.config.level = warn
logger.kafkaconfig.name = kafka.server.KafkaConfig
logger.kafkaconfig.level = warn
"""


class FolderInUse(WrongUse):
    """Another live process owns the data folder."""


class Cluster:
    """Kafka of one data centre. Not safe for use by several threads at once.

    ``settings`` are added to every node's server.properties and win over ours. ``data`` is made if need be and can
    be opened again later: the same cluster, and the same ports if they are free. The nodes' log files go to
    ``logs``, else beside each node's data.
    """

    def __init__(
        self,
        name: str,
        data: Path,
        brokers: int = 1,
        heap: str = "256m",
        settings: Mapping[str, str] | None = None,
        jvm: Sequence[str] = QUICK_START,
        logs: Path | None = None,
    ) -> None:
        if not 1 <= brokers <= 9:
            raise WrongUse(f"{brokers} brokers: from 1 to 9 can be started on one machine")
        self.name = name
        self.data = Path(data).absolute()
        self._logs = logs
        self._nodes = range(1, brokers + 1)
        self._jvm = [f"-Xmx{heap}", *jvm, "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData", "-Djava.awt.headless=true"]
        self._settings = dict(settings or {})
        self._lock: IO[str] | None = None
        self._ports: dict[int, tuple[int, int]] = {}  # node → (broker, controller)
        self._children: dict[int, Child] = {}

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when every node answers. WrongUse for the folder, Unavailable for the rest; then nothing runs."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """The first half of `start`: the nodes are started, and may not answer yet."""
        if self._children:
            raise RuntimeError(f"cluster {self.name} is started")
        self._take_folder()
        try:
            cluster_id = self._open_folder()
            self._await_leftovers()
            for node in self._nodes:
                self._write_configuration(node)
            self._format_new_nodes(cluster_id)
            self._children = {node: self._child(node) for node in self._nodes}
            for child in self._children.values():
                child.start()
        except BaseException:
            self.stop()
            raise

    def wait_ready(self) -> None:
        """The second half of `start`."""
        try:
            self._await_answers(self._nodes)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """SIGTERM to all nodes at once, SIGKILL for those that take too long. Calling again is safe."""
        stop_together(list(self._children.values()), _STOP_S)
        self._children = {}
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def ask_to_stop(self) -> None:
        """SIGTERM to all nodes, without waiting; `stop` has to follow."""
        for child in self._children.values():
            child.ask_to_stop()

    def kill(self, node: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a node. After SIGKILL it is gone when this returns."""
        self._children[node].send(number)

    def restart(self, node: int) -> None:
        """Starts a node again on its data and ports (ended by SIGKILL if it still runs); returns when it answers."""
        self._children[node].restart()
        self._await_answers([node])

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """``host:port,…`` of all nodes, for clients."""
        return ",".join(f"127.0.0.1:{broker}" for broker, _ in self._ports.values())

    @property
    def brokers(self) -> int:
        return len(self._nodes)

    @property
    def pids(self) -> dict[int, int]:
        """Node → process, of those that run."""
        return {node: child.pid for node, child in self._children.items() if child.pid is not None}

    def ended(self) -> dict[int, int]:
        """Node → exit status (negative: signal), of those that were started and do not run."""
        return {n: child.exit_status for n, child in self._children.items() if child.exit_status is not None}

    @property
    def children(self) -> dict[int, Child]:
        """The nodes' processes, for those who watch over them."""
        return dict(self._children)

    def log(self, node: int) -> Path:
        """What a node writes about itself."""
        return (self._logs / f"{self.name}-kafka-{node}.log") if self._logs else self._folder(node) / "kafka.log"

    # ---- the data folder -----------------------------------------------------------------------------------

    def _folder(self, node: int) -> Path:
        return self.data / f"kafka-{node}"

    def _take_folder(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        lock = (self.data / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "of unknown number"
            lock.close()
            raise FolderInUse(f"{self.data} is in use by process {owner}; stop it, or choose another folder") from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def _open_folder(self) -> str:
        """Reads or makes ``cluster.json``, chooses ports, checks every node's folder. Returns the cluster's id."""
        file = self.data / "cluster.json"
        others = [entry.name for entry in self.data.iterdir() if entry.name not in ("lock", "cluster.json.new")]
        if not file.exists():
            if others:
                raise FolderUnusable(
                    f"{self.data} is not empty and holds no cluster.json, so it is not a cluster's folder"
                    f" ({', '.join(sorted(others)[:5])}); choose another one, or empty it"
                )
            self._ports = self._new_ports()
            cluster_id = _new_cluster_id()
        else:
            cluster_id, ports = self._read_cluster_file(file)
            kept = all(is_free(port) for pair in ports.values() for port in pair)
            self._ports = ports if kept else self._new_ports()
        facts = {"format": _FORMAT, "cluster_id": cluster_id, "ports": self._ports}
        new = file.with_name("cluster.json.new")
        new.write_text(json.dumps(facts, indent=1), encoding="utf-8")
        new.replace(file)
        for node in self._nodes:
            check_node_folder(self._folder(node) / "log", node, cluster_id)
        return cluster_id

    def _read_cluster_file(self, file: Path) -> tuple[str, dict[int, tuple[int, int]]]:
        try:
            facts = json.loads(file.read_text(encoding="utf-8"))
            ports = {int(node): (int(broker), int(controller)) for node, (broker, controller) in facts["ports"].items()}
            cluster_id = str(facts["cluster_id"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FolderUnusable(f"{file} cannot be read ({error}); remove {self.data} to begin anew") from None
        if list(ports) != list(self._nodes):
            raise FolderUnusable(
                f"{self.data} holds a cluster of {len(ports)} brokers, asked for are {len(self._nodes)};"
                f" ask for {len(ports)}, or choose another folder"
            )
        return cluster_id, ports

    def _new_ports(self) -> dict[int, tuple[int, int]]:
        ports = iter(free_ports(2 * len(self._nodes)))
        return {node: (next(ports), next(ports)) for node in self._nodes}

    def _await_leftovers(self) -> None:
        """Nodes of an owner that was just killed need a moment to die. Raises FolderInUse if one lives on."""
        deadline = time.monotonic() + 5
        while left := processes_with("kafka.Kafka", f"{self.data}/kafka-"):
            if time.monotonic() > deadline:
                raise FolderInUse(f"{self.data} is in use by Kafka itself (process {left[0]}), left over; end it first")
            time.sleep(0.05)

    # ---- formatting and starting ---------------------------------------------------------------------------

    def _write_configuration(self, node: int) -> None:
        folder = self._folder(node)
        folder.mkdir(exist_ok=True)
        (folder / "log4j2.properties").write_text(_LOGGING, encoding="utf-8")
        ours = node_settings(node, self._ports, folder / "log") | self._settings
        text = "".join(f"{name}={value}\n" for name, value in ours.items())
        (folder / "server.properties").write_text(text, encoding="utf-8")

    def _format_new_nodes(self, cluster_id: str) -> None:
        new = [self._folder(node) for node in self._nodes if not (self._folder(node) / "log").exists()]
        running = []
        for folder in new:
            shutil.rmtree(folder / "log.new", ignore_errors=True)
            text = (folder / "server.properties").read_text(encoding="utf-8")
            properties = folder / "format.properties"
            properties.write_text(f"{text}log.dirs={folder / 'log.new'}\n", encoding="utf-8")
            command = self._java(folder, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties))
            child = Child(f"format {folder.name}", command, folder / "format.log")
            child.start()
            running.append(child)
        for child, folder in zip(running, new, strict=True):
            if not child.ends_by_itself(_READY_S) or child.exit_status != 0:
                raise child.failed("did not succeed")
            (folder / "log.new").rename(folder / "log")

    def _child(self, node: int) -> Child:
        folder = self._folder(node)
        command = self._java(folder, "kafka.Kafka", str(folder / "server.properties"))
        return Child(f"{self.name}/kafka-{node}", command, self.log(node))

    def _java(self, folder: Path, main: str, *arguments: str) -> list[str]:
        classpath = ":".join(map(str, kafka_jars()))
        logging = f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}"
        return [str(find_java().executable), *self._jvm, logging, "-cp", classpath, main, *arguments]

    def _await_answers(self, nodes: Sequence[int]) -> None:
        deadline = time.monotonic() + _READY_S
        for node in nodes:
            child = self._children[node]
            while not set(self.pids) <= known_brokers(self._ports[node][0]):
                if not child.running:
                    raise child.failed(f"ended by itself with status {child.exit_status}")
                if time.monotonic() > deadline:
                    raise child.failed(f"does not answer after {_READY_S} s")
                time.sleep(0.02)


def _new_cluster_id() -> str:
    """As Kafka writes its ids: 16 bytes in URL-safe base64, without a dash, which would look like an option."""
    return urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
