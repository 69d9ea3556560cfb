"""A real Kafka cluster on this machine: KRaft, one to nine nodes, each of them broker and controller.

Invariants:

* One process owns a data folder, by a file lock that the kernel drops when the holder dies. Others are refused.
* ``cluster.json`` describes the folder and is written first. A node's log folder is formatted under another name
  and renamed in one step. So a crash at any point leaves a folder that can be opened again. A half-made folder
  was not made by this module: it is refused with the reason.
* A node counts as started when it answers a Kafka request and knows all running nodes.
* No node outlives this process (`processes`). Records acknowledged by all replicas survive SIGKILL of nodes, because
  the operating system holds the pages; they do not survive a power cut.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import IO

from logferry.gateway.kafka.aiokafka_internals import MetadataResponse_v1
from logferry.ops.cli.problems import UsageError
from logferry.ops.runtime.jars import kafka_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.processes import Child, free_ports, is_free, processes_with, stop_all

# Less JIT compilation: a faster start and a slower long run, for tests. Benchmarks and `logferry up` use LONG_RUN.
QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
LONG_RUN = ("-XX:+UseSerialGC",)

_PROPERTIES, _LOGGING = (Path(__file__).with_name(name) for name in ("server.properties", "log4j2.properties"))

_READY_S = 120
_STOP_S = 20
_FORMAT = 1
_ASK_TIMEOUT_S = 2.0
# Of version 1, for no topics: [size] [key] [version] [correlation] [client: none] [topics: 0]
_METADATA_REQUEST = struct.pack(">ihhihi", 14, MetadataResponse_v1.API_KEY, MetadataResponse_v1.API_VERSION, 1, -1, 0)


class FolderInUse(UsageError):
    """Another live process owns the data folder."""


class FolderUnusable(UsageError):
    """The data folder does not hold a complete cluster of ours; the text says what is wrong and what to do."""


class KafkaCluster:
    """Kafka of one data centre. Not safe for use by several threads at once.

    ``settings`` are added to every node's server.properties and override ours, and so are those that ``settings_of``
    returns for a node, its broker port and its controller port. ``data`` is created if necessary and
    can be opened again later: the same cluster, and the same ports if they are free. The nodes write their log files
    to ``logs``, or beside their data. ``children``: their processes, by number. ``version``: of Kafka, as for
    `kafka_jars`.
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
        settings_of: Callable[[int, int, int], Mapping[str, str]] = lambda node, broker, controller: {},
        version: str | None = None,
    ) -> None:
        if not 1 <= brokers <= 9:
            raise UsageError(f"{brokers} brokers: start 1 to 9 on one machine")
        self.name, self.brokers = name, brokers
        self.data = Path(data).absolute()
        self._logs = logs
        self._nodes = range(1, brokers + 1)
        self._jvm = [f"-Xmx{heap}", *jvm, "-XX:+ExitOnOutOfMemoryError", "-XX:-UsePerfData", "-Djava.awt.headless=true"]
        self._jvm.append(f"-Dlog4j2.configurationFile={_LOGGING}")
        self._settings = dict(settings or {})
        self._settings_of, self._version = settings_of, version
        self._lock: IO[str] | None = None
        self._ports: dict[int, tuple[int, int]] = {}  # node → (broker, controller)
        self.children: dict[int, Child] = {}

    def __enter__(self) -> KafkaCluster:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when every node answers. On UsageError (the folder) and Unavailable (the rest) no node runs."""
        if self.children:
            raise RuntimeError(f"cluster {self.name} is started")
        try:
            self.launch()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """The first half of `start`: starts the nodes without waiting for their answers. `stop` ends a failed one."""
        self._take_folder()
        cluster_id = self._open_folder()
        # The nodes of a killed owner may still be ending.
        deadline = time.monotonic() + 5
        while left := processes_with("kafka.Kafka", f"{self.data}/kafka-"):
            if time.monotonic() > deadline:
                raise FolderInUse(f"{self.data} is in use by a left-over Kafka process ({left[0]}); end it first")
            time.sleep(0.05)
        for node in self._nodes:
            self._write_configuration(node)
        self._format_new_nodes(cluster_id)
        for node in self._nodes:
            self.children[node] = Child(f"{self.name}/kafka-{node}", self._broker(node), self.log(node))
            self.children[node].start()

    def _broker(self, node: int) -> list[str]:
        return self._java("kafka.Kafka", str(self._folder(node) / "server.properties"))

    def wait_ready(self, node: int | None = None) -> None:
        """The second half of `start`: returns when all nodes answer, or this one."""
        deadline = time.monotonic() + _READY_S
        for number in self._nodes if node is None else (node,):
            child = self.children[number]
            while not (child.running and set(self.pids) <= live_brokers(self._ports[number][0])):
                if not child.running:
                    raise child.ended()
                if time.monotonic() > deadline:
                    raise child.failed(f"does not answer after {_READY_S} s")
                time.sleep(0.02)

    def stop(self) -> None:
        """SIGTERM to all nodes at once, SIGKILL after a time-out. Calling it again is safe."""
        stop_all(list(self.children.values()), _STOP_S)
        self.children = {}
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self, node: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a node. After SIGKILL the process has ended when this returns."""
        self.children[node].send(number)

    def restart(self, node: int) -> None:
        """Restarts a node on its data and ports, after SIGKILL if it still runs; returns when it answers."""
        self.children[node].restart()
        self.wait_ready(node)

    def upgrade(self, version: str) -> Iterator[int]:
        """Stops each node in order and starts it on its data in another version of Kafka; yields it when it answers."""
        self._version = version
        for node in self._nodes:
            self.children[node].replace(self._broker(node), _STOP_S)
            self.wait_ready(node)
            yield node

    def tool(self, main: str, *arguments: str) -> list[str]:
        """The command of one of Kafka's tools, with the address of the cluster."""
        return self._java(main, "--bootstrap-server", self.bootstrap, *arguments)

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """``host:port,…`` of all nodes, for clients."""
        return ",".join(f"127.0.0.1:{broker}" for broker, _ in self._ports.values())

    @property
    def pids(self) -> dict[int, int]:
        """Node → process id, of the running nodes."""
        return {node: child.pid for node, child in self.children.items() if child.pid is not None}

    def log(self, node: int) -> Path:
        """A node's log file."""
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
            owner = lock.read().strip() or "(unknown id)"
            lock.close()
            raise FolderInUse(f"{self.data} is in use by process {owner}; stop it, or choose another folder") from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def _open_folder(self) -> str:
        """Reads or creates ``cluster.json``, chooses ports, checks every node's folder. Returns the cluster's id."""
        file = self.data / "cluster.json"
        others = [entry.name for entry in self.data.iterdir() if entry.name not in ("lock", "cluster.json.new")]
        if not file.exists():
            if others:
                raise FolderUnusable(
                    f"{self.data} is not empty and has no cluster.json, so it is not a cluster's folder"
                    f" ({', '.join(sorted(others)[:5])}); choose another folder, or empty it"
                )
            self._ports = self._new_ports()
            # A Kafka id: 16 bytes in URL-safe base64; without a dash, which would look like an option.
            cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
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
            raise FolderUnusable(
                f"{file} cannot be read ({error}); remove {self.data} (its data is lost), or choose another folder"
            ) from None
        if list(ports) != list(self._nodes):
            raise FolderUnusable(
                f"{self.data} holds a cluster of {len(ports)} brokers, but {len(self._nodes)} were requested;"
                f" start {len(ports)}, or choose another folder"
            )
        return cluster_id, ports

    def _new_ports(self) -> dict[int, tuple[int, int]]:
        ports = iter(free_ports(2 * len(self._nodes)))
        return {node: (next(ports), next(ports)) for node in self._nodes}

    # ---- formatting and starting ---------------------------------------------------------------------------

    def _write_configuration(self, node: int) -> None:
        """Of several lines with the same name Kafka takes the last one."""
        folder, (broker, controller) = self._folder(node), self._ports[node]
        folder.mkdir(exist_ok=True)
        text = _PROPERTIES.read_text(encoding="utf-8").format(
            node=node,
            broker=broker,
            controller=controller,
            log=folder / "log",
            voters=",".join(f"{n}@127.0.0.1:{port}" for n, (_, port) in self._ports.items()),
            replicas=min(3, self.brokers),
            in_sync=2 if self.brokers >= 3 else 1,
        )
        more = {**self._settings, **self._settings_of(node, broker, controller)}
        text += "".join(f"{name}={value}\n" for name, value in more.items())
        (folder / "server.properties").write_text(text, encoding="utf-8")

    def _format_new_nodes(self, cluster_id: str) -> None:
        running: dict[Path, Child] = {}
        for node in self._nodes:
            folder = self._folder(node)
            if (folder / "log").exists():
                continue
            shutil.rmtree(folder / "log.new", ignore_errors=True)
            text = (folder / "server.properties").read_text(encoding="utf-8")
            properties = folder / "format.properties"
            properties.write_text(f"{text}log.dirs={folder / 'log.new'}\n", encoding="utf-8")
            command = self._java("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties))
            running[folder] = Child(f"format {folder.name}", command, folder / "format.log")
            running[folder].start()
        for folder, child in running.items():
            if not child.wait_for_end(_READY_S) or child.exit_status != 0:
                raise child.failed("did not succeed")
            (folder / "log.new").rename(folder / "log")

    def _java(self, main: str, *arguments: str) -> list[str]:
        classpath = ":".join(map(str, kafka_jars(self._version)))
        return [str(find_java().executable), *self._jvm, "-cp", classpath, main, *arguments]


def check_node_folder(log: Path, node: int, cluster_id: str) -> None:
    """Raises FolderUnusable unless the log folder is absent or completely formatted for this node."""
    if not log.exists():
        return
    remedy = "remove it (its data is lost), or choose another data folder"
    try:
        text = (log / "meta.properties").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FolderUnusable(f"{log} is half-formatted: it has no meta.properties; {remedy}") from None
    meta = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    for name in ("cluster.id", "node.id", "directory.id"):
        if not meta.get(name):
            raise FolderUnusable(f"{log / 'meta.properties'} is half-written: no {name} in it; {remedy}")
    for what, found, wanted in (("the cluster", meta["cluster.id"], cluster_id), ("node", meta["node.id"], str(node))):
        if found != wanted:
            raise FolderUnusable(f"{log} belongs to {what} {found}, but {wanted} was expected there; {remedy}")


def live_brokers(port: int) -> set[int]:
    """The brokers that the broker at ``port`` reports as alive; none if it does not answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), _ASK_TIMEOUT_S) as link, link.makefile("rb") as answer:
            link.sendall(_METADATA_REQUEST)
            size, _correlation = struct.unpack(">ii", answer.read(8))
            found = MetadataResponse_v1.decode(BytesIO(answer.read(size - 4)))
    except (OSError, struct.error, ValueError):
        return set()
    return {broker for broker, *_ in found.brokers}
