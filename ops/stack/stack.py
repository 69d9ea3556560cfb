"""A local stack: per data centre a Kafka cluster, gateway workers and mirror workers, as real processes.

* `Stack.start` returns when every process answers, or raises and leaves none running.
* A process that dies is restarted after `RESTART_S` under its name and port, unless restarts are switched off.
* `Stack.stop` ends the gateways first, so that they finish accepted requests, then Kafka; bounded in time.
* No process outlives the one that created the stack.

Under the data folder: ``<dc>/kafka`` (the cluster's own folder), ``<dc>/gateway.toml`` (of the first node; the others
have a number), ``<dc>/mirror.toml``, ``logs/<dc>-<name>.log``.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from logferry.gateway.contract.names import Malformed, check_dc
from logferry.ops.cli.problems import UsageError
from logferry.ops.stack.kafka_cluster import QUICK_START, KafkaCluster
from logferry.ops.stack.processes import Child, ServiceWorker, Setting, configuration, free_ports, is_free, stop_all

RESTART_S = 1.0
_READY_S = 120
_GATEWAY_STOP_S = 15
_ENOUGH_BROKERS = 3


class Stack:
    """Starts, watches and stops the processes.

    A process is named ``dc1/gateway-0``; with one data centre, ``gateway-0`` is enough.
    ``port``: of the first worker; the others follow, data centre by data centre. 0: any free ports.
    ``mirrors``: mirror workers per data centre; each mirror copies the topics of all other data centres.
    ``nodes``: gateways per data centre as on several hosts, each with ``workers`` workers and a configuration.
    ``gateway_settings`` are added to the gateways' configurations and override ours.
    ``say`` receives progress messages for people.
    """

    def __init__(
        self,
        data: Path,
        dcs: Sequence[str] = ("dc1",),
        brokers: int = 1,
        workers: int = 1,
        lanes: int = 8,
        port: int = 0,
        gateway_settings: Mapping[str, Setting] | None = None,
        *,
        restart: bool = True,
        heap: str = "256m",
        jvm: Sequence[str] = QUICK_START,
        nodes: int = 1,
        mirrors: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        try:
            for dc in dcs:
                check_dc(dc)
        except Malformed as error:
            raise UsageError(str(error)) from None
        if not dcs or len(set(dcs)) != len(dcs):
            raise UsageError("data centres: name at least one, and each only once")
        if workers < 1:
            raise UsageError(f"{workers} workers: at least one is required")
        self.data = Path(data).absolute()
        self._nodes, self._workers, self._lanes, self._port = nodes, workers, lanes, port
        self._gateway_settings = dict(gateway_settings or {})
        self._mirrors = mirrors if len(dcs) > 1 else 0
        self._restart, self._say = restart, say
        self._logs = self.data / "logs"
        self._first = dcs[0]
        self._clusters = {
            dc: KafkaCluster(dc, self.data / dc / "kafka", brokers, heap, jvm=jvm, logs=self._logs) for dc in dcs
        }
        self._services: dict[str, ServiceWorker] = {}
        self._stopping = threading.Event()
        self._life = threading.Lock()  # no process is restarted once the stop has begun
        self._supervisors: list[threading.Thread] = []

    def __enter__(self) -> Stack:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when all answer. On UsageError and Unavailable no process runs."""
        self._stopping.clear()
        try:
            first = self._first_port()
            self.data.mkdir(parents=True, exist_ok=True)
            self._say(f"starting Kafka for {', '.join(self._clusters)}")
            for cluster in self._clusters.values():
                cluster.launch()
            for cluster in self._clusters.values():
                cluster.wait_ready()
            self._say("starting the gateways")
            for place, dc in enumerate(self._clusters):
                self._launch_gateway(dc, first + place * self._nodes * self._workers)
            for dc in self._clusters if self._mirrors else ():
                self._launch_mirror(dc)
            self.wait_ready()
            self._watch()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Gateways and mirrors, then Kafka: SIGTERM, SIGKILL after a time-out. Calling it again is safe."""
        with self._life:
            self._stopping.set()
        for name in stop_all([worker.child for worker in self._services.values()], _GATEWAY_STOP_S):
            self._say(f"{name} did not stop within {_GATEWAY_STOP_S} s and was killed")
        self._services = {}
        for child in self._children().values():
            child.request_stop()
        for cluster in self._clusters.values():
            cluster.stop()
        for supervisor in self._supervisors:
            supervisor.join()
        self._supervisors = []

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process. After SIGKILL it has ended when this returns (and is restarted soon)."""
        self.child(name).send(number)

    def restart(self, name: str) -> None:
        """Kills a process if it runs, starts it at once, and returns when it answers."""
        child = self.child(name)
        if child.name in self._services:
            child.restart()
            self._await_workers([self._services[child.name]])
        else:
            dc, _, node = child.name.partition("/kafka-")
            self._clusters[dc].restart(int(node))

    def wait_ready(self) -> None:
        """Returns when every worker serves its lanes. Raises Unavailable after two minutes."""
        self._await_workers(list(self._services.values()))

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def pids(self) -> dict[str, int]:
        """Full name (``dc1/gateway-0``) → process id, of the running processes."""
        return {name: child.pid for name, child in self._children().items() if child.pid is not None}

    def urls(self, dc: str | None = None, service: str = "gateway") -> list[str]:
        """URLs of the workers of a data centre (default: the first). ``service``: ``gateway`` or ``mirror``."""
        place = f"{dc or self._first}/{service}-"
        return [worker.url for name, worker in self._services.items() if name.startswith(place)]

    def cluster(self, dc: str | None = None) -> KafkaCluster:
        return self._clusters[dc or self._first]

    def child(self, name: str) -> Child:
        children = self._children()
        full = f"{self._first}/{name}" if len(self._clusters) == 1 and "/" not in name else name
        if full not in children:
            raise KeyError(f"{name}: unknown process; there are {', '.join(children)}")
        return children[full]

    def describe(self) -> dict[str, dict[str, object]]:
        """The document of ``logferry up --json``."""
        return {
            dc: {
                "gateway": self.urls(dc),
                **({"mirror": self.urls(dc, "mirror")} if self._mirrors else {}),
                "kafka": cluster.bootstrap,
                "pids": {name.partition("/")[2]: pid for name, pid in self.pids.items() if name.startswith(f"{dc}/")},
            }
            for dc, cluster in self._clusters.items()
        }

    def _children(self) -> dict[str, Child]:
        """Every process by its full name."""
        found = [worker.child for worker in self._services.values()]
        for cluster in self._clusters.values():
            found += cluster.children.values()
        return {child.name: child for child in found}

    # ---- starting and watching -----------------------------------------------------------------------------

    def _first_port(self) -> int:
        count = len(self._clusters) * self._nodes * self._workers
        if self._port == 0:
            return free_ports(count)[0]
        if not 0 < self._port <= 65_536 - count:
            raise UsageError(f"port {self._port}: {count} gateway workers need ports from 1 to 65535")
        busy = [port for port in range(self._port, self._port + count) if not is_free(port)]
        if busy:
            raise UsageError(
                f"port {busy[0]} is in use; {count} gateway worker(s) need the ports {self._port}"
                f" to {self._port + count - 1}; choose others with --port"
            )
        return self._port

    def _launch_gateway(self, dc: str, port: int) -> None:
        for node in range(self._nodes):
            first = node * self._workers
            settings: dict[str, Setting] = {"workers": self._workers, "lanes": self._lanes, **self._gateway_settings}
            file = "gateway.toml" if node == 0 else f"gateway-{node}.toml"
            names = [f"gateway-{first + number}" for number in range(self._workers)]
            self._launch(dc, file, {"data_centres": list(self._clusters), **settings}, names, port + first)

    def _launch_mirror(self, dc: str) -> None:
        addresses = {other: cluster.bootstrap for other, cluster in self._clusters.items() if other != dc}
        remotes: list[Setting] = [{"dc": of, "kafka": {"bootstrap_servers": at}} for of, at in addresses.items()]
        names = [f"mirror-{number}" for number in range(self._mirrors)]
        settings: dict[str, Setting] = {"workers": self._mirrors, "remote": remotes}
        self._launch(dc, "mirror.toml", settings, names, free_ports(self._mirrors)[0])

    def _launch(self, dc: str, file: str, more: Mapping[str, Setting], names: Sequence[str], port: int) -> None:
        """Writes the configuration of these workers and starts them."""
        cluster, path = self._clusters[dc], self.data / dc / file
        settings: dict[str, Setting] = {"dc": dc, "listen": f"127.0.0.1:{port}"}
        settings["kafka"] = {"bootstrap_servers": cluster.bootstrap}
        if cluster.brokers < _ENOUGH_BROKERS:
            settings["accept_weak_kafka"] = ["replication", "min-isr"]
        path.write_text(configuration({**settings, **more}), encoding="utf-8")
        for number, name in enumerate(names):
            module, log = f"logferry.{name.partition('-')[0]}", self._logs / f"{dc}-{name}.log"
            worker = ServiceWorker(f"{dc}/{name}", path, number, port + number, log, module)
            self._services[f"{dc}/{name}"] = worker
            worker.child.start()

    def _await_workers(self, workers: Sequence[ServiceWorker]) -> None:
        """Waits until all are ready at once: a worker that joins takes lanes from the others for a moment."""
        deadline = time.monotonic() + _READY_S
        while not_ready := [worker for worker in workers if not worker.is_ready()]:
            for worker in not_ready:
                if not worker.child.running and not (self._supervisors and self._restart):
                    raise worker.startup_error()
            if time.monotonic() > deadline:
                raise not_ready[0].child.failed(f"is not ready after {_READY_S} s")
            time.sleep(0.05)

    def _watch(self) -> None:
        for name, child in self._children().items():
            supervisor = threading.Thread(target=self._supervise, args=(child,), name=f"supervises {name}", daemon=True)
            supervisor.start()
            self._supervisors.append(supervisor)

    def _supervise(self, child: Child) -> None:
        """Reports each end of the process and restarts it; one thread per process."""
        while True:
            child.wait_for_end()
            if self._stopping.is_set():
                return
            if child.running:  # restarted by `restart`
                continue
            again = f"; restarting it in {RESTART_S:.0f} s" if self._restart else ""
            self._say(f"{child.name} ended with status {child.exit_status}{again}")
            if not self._restart or self._stopping.wait(RESTART_S):
                return
            with self._life:
                if not self._stopping.is_set():
                    child.start()
