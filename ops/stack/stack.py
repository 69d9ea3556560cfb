"""A local stack: for each data centre a Kafka cluster, its gateway workers and its mirrors, as real processes.

* `Stack.start` returns when everything answers, or raises and leaves nothing behind.
* A process that dies is started again after `RESTART_S` under its name and port, unless that is switched off.
* `Stack.stop` ends the gateways first, so that they finish what they have accepted, then Kafka; bounded in time.
* Nothing outlives the process that made the stack.

Under the data folder: ``<dc>/kafka`` (the cluster's own folder), ``<dc>/gateway.toml`` (of the first node, the others
have a number), ``<dc>/mirror.toml``, ``logs/<dc>-<name>.log``.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from logferry.gateway.contract.chunk import Malformed, check_dc
from logferry.ops.cli.problems import WrongUse
from logferry.ops.stack.kafka_cluster import QUICK_START, Cluster
from logferry.ops.stack.ports import free_block, is_free
from logferry.ops.stack.processes import Child, stop_together
from logferry.ops.stack.service_workers import Setting, Worker, configuration

RESTART_S = 1.0
_READY_S = 60
_GATEWAY_STOP_S = 15
_ENOUGH_BROKERS = 3


@dataclass
class _DataCentre:
    name: str
    cluster: Cluster
    configuration: Path
    workers: dict[str, Worker] = field(default_factory=dict)
    mirrors: dict[str, Worker] = field(default_factory=dict)

    @property
    def services(self) -> dict[str, Worker]:
        return self.workers | self.mirrors

    def children(self) -> dict[str, Child]:
        """Every process under its name within the data centre."""
        services = {name: worker.child for name, worker in self.services.items()}
        return services | {f"kafka-{node}": child for node, child in self.cluster.children.items()}


class Stack:
    """Starts, watches and stops the processes.

    A process is named ``dc1/gateway-0``; where there is one data centre, ``gateway-0`` will do.
    ``port``: the first worker's; the others follow, one data centre after the other. 0 takes free ones.
    ``mirrors`` workers in each data centre bring it the topics of all others.
    ``nodes`` of one data centre have ``workers`` each and a configuration of their own, as gateways on several hosts.
    ``gateway_settings`` are added to every gateway's configuration and win over ours, ``mirror_settings`` to
    every mirror's. ``say`` is told what a
    person who watches would want to know.
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
        mirror_settings: Mapping[str, Setting] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        _check_names(dcs)
        if workers < 1:
            raise WrongUse(f"{workers} workers: at least one is needed")
        self.data = Path(data).absolute()
        self._nodes, self._workers, self._lanes, self._port = nodes, workers, lanes, port
        self._gateway_settings = dict(gateway_settings or {})
        self._mirrors = mirrors if len(dcs) > 1 else 0
        self._mirror_settings = dict(mirror_settings or {})
        self._restart, self._say = restart, say
        self._logs = self.data / "logs"
        self._dcs = {
            dc: _DataCentre(
                dc,
                Cluster(dc, self.data / dc / "kafka", brokers, heap, jvm=jvm, logs=self._logs),
                self.data / dc / "gateway.toml",
            )
            for dc in dcs
        }
        self._stopping = threading.Event()
        self._life = threading.Lock()  # nothing is started again once stopping has begun
        self._keepers: list[threading.Thread] = []

    def __enter__(self) -> Stack:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ---- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when all answer. Raises WrongUse or Unavailable, and then nothing runs."""
        self._stopping.clear()
        try:
            first = self._first_port()
            self.data.mkdir(parents=True, exist_ok=True)
            self._say(f"starting Kafka for {', '.join(self._dcs)}")
            for dc in self._dcs.values():
                dc.cluster.launch()
            for dc in self._dcs.values():
                dc.cluster.wait_ready()
            self._say("starting the gateways")
            for place, dc in enumerate(self._dcs.values()):
                self._launch_gateway(dc, first + place * self._nodes * self._workers)
            for dc in self._dcs.values():
                self._launch_mirror(dc)
            self._await_workers(self._all_workers())
            self._watch()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Gateways, then Kafka; SIGTERM, and SIGKILL for what takes too long. Calling again is safe."""
        with self._life:
            self._stopping.set()
        for name in stop_together([worker.child for worker in self._all_workers()], _GATEWAY_STOP_S):
            self._say(f"{name} did not stop within {_GATEWAY_STOP_S} s and was killed")
        for dc in self._dcs.values():
            dc.workers, dc.mirrors = {}, {}
            dc.cluster.ask_to_stop()
        for dc in self._dcs.values():
            dc.cluster.stop()
        for keeper in self._keepers:
            keeper.join()
        self._keepers = []

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process; after SIGKILL it is gone when this returns (and soon started again)."""
        self.child(name).send(number)

    def restart(self, name: str) -> None:
        """Ends a process by SIGKILL if it runs, starts it at once, and returns when it answers."""
        dc, short = self._find(name)
        if short in dc.services:
            dc.services[short].child.restart()
            self._await_workers([dc.services[short]])
        else:
            dc.cluster.restart(int(short.removeprefix("kafka-")))

    def wait_ready(self) -> None:
        """Returns when every worker says that it serves its lanes. Raises Unavailable after a minute."""
        self._await_workers(self._all_workers())

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def pids(self) -> dict[str, int]:
        """Full name (``dc1/gateway-0``) → process, of those that run."""
        every = {f"{dc.name}/{name}": child for dc in self._dcs.values() for name, child in dc.children().items()}
        return {name: child.pid for name, child in every.items() if child.pid is not None}

    def urls(self, dc: str | None = None) -> list[str]:
        """The workers of a data centre; of the first one unless it is named."""
        return [worker.url for worker in self._data_centre(dc).workers.values()]

    def mirror_urls(self, dc: str | None = None) -> list[str]:
        """The mirror's workers of a data centre; of the first one unless it is named."""
        return [worker.url for worker in self._data_centre(dc).mirrors.values()]

    def cluster(self, dc: str | None = None) -> Cluster:
        return self._data_centre(dc).cluster

    def child(self, name: str) -> Child:
        dc, short = self._find(name)
        return dc.children()[short]

    def describe(self) -> dict[str, dict[str, object]]:
        """What ``logferry up --json`` prints."""
        return {
            dc.name: {
                "gateway": self.urls(dc.name),
                **({"mirror": self.mirror_urls(dc.name)} if dc.mirrors else {}),
                "kafka": dc.cluster.bootstrap,
                "pids": {name: child.pid for name, child in dc.children().items() if child.pid is not None},
            }
            for dc in self._dcs.values()
        }

    def _data_centre(self, dc: str | None) -> _DataCentre:
        return self._dcs[dc] if dc is not None else next(iter(self._dcs.values()))

    def _find(self, name: str) -> tuple[_DataCentre, str]:
        dc, slash, short = name.rpartition("/")
        if not slash and len(self._dcs) > 1:
            raise KeyError(f"{name}: say of which data centre, as in {next(iter(self._dcs))}/{name}")
        found = self._data_centre(dc or None)
        if short not in found.children():
            raise KeyError(f"{name}: there are {', '.join(found.children())}")
        return found, short

    # ---- starting and watching -----------------------------------------------------------------------------

    def _first_port(self) -> int:
        count = len(self._dcs) * self._nodes * self._workers
        if self._port == 0:
            return free_block(count)
        if not 0 < self._port <= 65_536 - count:
            raise WrongUse(f"port {self._port}: {count} gateway workers need ports from 1 to 65535")
        busy = [port for port in range(self._port, self._port + count) if not is_free(port)]
        if busy:
            raise WrongUse(
                f"port {busy[0]} is in use, and {count} gateway worker(s) want {self._port}"
                f" to {self._port + count - 1}; choose others with --port"
            )
        return self._port

    def _launch_gateway(self, dc: _DataCentre, port: int) -> None:
        dc.configuration.parent.mkdir(parents=True, exist_ok=True)
        for node in range(self._nodes):
            file = dc.configuration if node == 0 else dc.configuration.with_name(f"gateway-{node}.toml")
            first = node * self._workers
            file.write_text(configuration(self._settings_of(dc, port + first)), encoding="utf-8")
            for number in range(self._workers):
                name = f"gateway-{first + number}"
                log = self._logs / f"{dc.name}-{name}.log"
                worker = Worker(f"{dc.name}/{name}", file, number, port + first + number, log)
                dc.workers[name] = worker
                worker.child.start()

    def _settings_of(self, dc: _DataCentre, port: int) -> dict[str, Setting]:
        settings: dict[str, Setting] = {
            "dc": dc.name,
            "data_centres": list(self._dcs),
            "listen": f"127.0.0.1:{port}",
            "workers": self._workers,
            "lanes": self._lanes,
        }
        if dc.cluster.brokers < _ENOUGH_BROKERS:
            settings["accept_weak_kafka"] = ["replication", "min-isr"]
        return settings | {"kafka": {"bootstrap_servers": dc.cluster.bootstrap}} | self._gateway_settings

    def _launch_mirror(self, dc: _DataCentre) -> None:
        if not self._mirrors:
            return
        port = free_block(self._mirrors)
        remotes: list[Setting] = [
            {"dc": other.name, "kafka": {"bootstrap_servers": other.cluster.bootstrap}}
            for other in self._dcs.values()
            if other is not dc
        ]
        settings: dict[str, Setting] = {
            "dc": dc.name,
            "listen": f"127.0.0.1:{port}",
            "workers": self._mirrors,
            "remote": remotes,
        }
        if dc.cluster.brokers < _ENOUGH_BROKERS:
            settings["accept_weak_kafka"] = ["replication", "min-isr"]
        settings |= {"kafka": {"bootstrap_servers": dc.cluster.bootstrap}} | self._mirror_settings
        file = dc.configuration.with_name("mirror.toml")
        file.write_text(configuration(settings), encoding="utf-8")
        for number in range(self._mirrors):
            name = f"mirror-{number}"
            log = self._logs / f"{dc.name}-{name}.log"
            worker = Worker(f"{dc.name}/{name}", file, number, port + number, log, "logferry.mirror")
            dc.mirrors[name] = worker
            worker.child.start()

    def _all_workers(self) -> list[Worker]:
        return [worker for dc in self._dcs.values() for worker in dc.services.values()]

    def _await_workers(self, workers: Sequence[Worker]) -> None:
        """Until all are ready in one look: a worker that joins makes those before it busy for a moment."""
        deadline = time.monotonic() + _READY_S
        while not_ready := [worker for worker in workers if not worker.is_ready()]:
            for worker in not_ready:
                if not worker.child.running and not (self._keepers and self._restart):
                    raise worker.ended_early()
            if time.monotonic() > deadline:
                raise not_ready[0].child.failed(f"is not ready after {_READY_S} s")
            time.sleep(0.05)

    def _watch(self) -> None:
        for dc in self._dcs.values():
            for name, child in dc.children().items():
                keeper = threading.Thread(target=self._keep, args=(child,), name=f"keeps {dc.name}/{name}", daemon=True)
                keeper.start()
                self._keepers.append(keeper)

    def _keep(self, child: Child) -> None:
        """Tells of each death, and starts the process again; one thread a process."""
        while True:
            child.ends_by_itself()
            if self._stopping.is_set():
                return
            if child.running:  # started again by `restart`
                continue
            again = f"; starting it again in {RESTART_S:.0f} s" if self._restart else ""
            self._say(f"{child.name} ended with status {child.exit_status}{again}")
            if not self._restart or self._stopping.wait(RESTART_S):
                return
            with self._life:
                if not self._stopping.is_set():
                    child.start()


def _check_names(dcs: Sequence[str]) -> None:
    try:
        for dc in dcs:
            check_dc(dc)
    except Malformed as error:
        raise WrongUse(str(error)) from None
    if not dcs or len(set(dcs)) != len(dcs):
        raise WrongUse("data centres: name at least one, and each once")
