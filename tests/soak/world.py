"""The processes and links of a campaign: Kafka of two data centres, gateways, mirrors, push-clients and the loader.

A process that ends is restarted after a second, as systemd does, unless a fault holds it down; the rest of its process
group is killed first. Clients reach the gateways at 127.0.0.2, where relays accept; gateways and mirrors reach the
brokers through relays, too, at listeners of their own. The loader and the checker reach the brokers directly.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
from logferry.ops.cli.problems import Unavailable
from logferry.ops.runtime.jars import spark_environment
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, configuration, free_ports, stop_all

from tests.soak.files import HostFile
from tests.soak.lines import COLUMNS
from tests.soak.links import Relay
from tests.soak.plan import BROKERS, CLOCKS, DCS, HOSTS, TOPIC, WORKERS
from tests.soak.security import Security

WINDOW_S: Final = 60
IDLE_S: Final = 30
_LATE_WAIT_S: Final = 5
_FAR: Final = "127.0.0.2"
_RESTART_S: Final = 1.0
_READY_S: Final = 120.0
_STOP_S: Final = 20.0
_LISTENERS: Final = ("gateway", "mirror")
# Python imports it at its start. libfaketime 0.9.10 is of no use: time.sleep of Python 3.11 fails under it (EINVAL).
CLOCK_CODE: Final = """
import os, time
true_s, true_ns, file = time.time, time.time_ns, os.environ["SOAK_CLOCK"]
def shift():
    try:
        with open(file) as text:
            return int(text.read() or 0)
    except (OSError, ValueError):
        return 0
time.time = lambda: true_s() + shift()
time.time_ns = lambda: true_ns() + shift() * 10**9
"""


@dataclass
class Span:
    """What was wrong in the world between these seconds of the campaign."""

    what: str
    from_s: float
    to_s: float = float("inf")


class World:
    """Every process by its name, as ``dc1/gateway``; `held` counts the faults that keep one down."""

    def __init__(self, data: Path) -> None:
        self.data, self.logs = data, data / "logs"
        self.table = data / "table"
        self.security = Security(data / "security")
        self._clock_code = data / "clock"
        self._clock_code.mkdir()
        (self._clock_code / "sitecustomize").with_suffix(".py").write_text(CLOCK_CODE, encoding="ascii")
        self.links: dict[str, Relay] = {}
        self.clusters: dict[str, KafkaCluster] = {}
        self.children: dict[str, Child] = {}
        self.held: Counter[str] = Counter()
        self.clients: dict[str, Path] = {}  # client → its state folder
        self.timeline: list[Span] = []
        self.urls: dict[str, list[str]] = {}
        self._ports: dict[str, int] = {}
        self._far_ports: dict[str, dict[int, dict[str, tuple[int, int]]]] = {}
        self._tls: dict[str, dict[str, str]] = {}
        self._began = time.monotonic()
        self._watching: asyncio.Task[None] | None = None
        self.session: aiohttp.ClientSession

    # ---- start and stop ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when Kafka, gateways and mirrors answer. Raises CommandError."""
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=self.security.context))
        for dc in DCS:
            self._make_cluster(dc)
        for step in ("launch", "wait_ready"):
            await asyncio.gather(*(asyncio.to_thread(getattr(self.clusters[dc], step)) for dc in DCS))
        for dc in DCS:
            for node, child in self.clusters[dc].children.items():
                self.children[f"{dc}/kafka-{node}"] = child
            self._make_gateway(dc)
        for relay in self.links.values():
            await relay.start()
        for name, child in self.children.items():
            if name.endswith("/gateway"):
                child.start()
        self._watching = asyncio.create_task(self._watch())
        await self.wait_ready()
        for dc in DCS:
            url = f"{self.direct(dc)[0]}/v1/topics/{TOPIC}"
            async with self.session.put(url, json={"partitions": 3}, headers=self.authorization) as answer:
                if answer.status >= 300:
                    raise Unavailable(f"the topic of {dc} could not be made: {await answer.text()}")
        for dc in DCS:
            self._make_mirror(dc)
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def active(self) -> list[Span]:
        """The faults that last at present."""
        return [span for span in self.timeline if span.to_s == float("inf")]

    async def stop(self) -> None:
        """Ends every process. Calling it again is safe."""
        if self._watching is not None:
            self._watching.cancel()
        for relay in self.links.values():
            relay.close()
        kafka = [name for name in self.children if "/kafka-" in name]
        await asyncio.to_thread(stop_all, [self.children[n] for n in self.children if n not in kafka], _STOP_S)
        for name, child in self.children.items():
            if name not in kafka:
                child.kill_group()
        await asyncio.gather(*(asyncio.to_thread(cluster.stop) for cluster in self.clusters.values()))
        if hasattr(self, "session"):
            await self.session.close()

    async def wait_ready(self) -> None:
        """Returns when each gateway worker serves its lanes. Raises Unavailable."""
        waiting = [url for dc in DCS for url in self.direct(dc)]
        deadline = asyncio.get_running_loop().time() + _READY_S
        while waiting:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                timeout = aiohttp.ClientTimeout(5)
                async with self.session.get(f"{waiting[0]}/readyz", timeout=timeout) as answer:
                    if answer.status == 200:
                        waiting.pop(0)
                        continue
            if asyncio.get_running_loop().time() > deadline:
                raise Unavailable(f"{waiting[0]} is not ready after {_READY_S:.0f} s; see the logs in {self.logs}")
            await asyncio.sleep(0.2)

    async def _watch(self) -> None:
        """Restarts what ended."""
        down: dict[str, Span] = {}
        while True:
            for name, child in list(self.children.items()):
                if child.running or self.held[name]:
                    down.pop(name, None)
                    continue
                span = down.setdefault(name, Span(f"down: {name}", self.elapsed_s))
                if self.elapsed_s - span.from_s >= _RESTART_S:
                    child.kill_group()
                    child.start()
                    span.to_s = self.elapsed_s
                    self.timeline.append(down.pop(name))
            await asyncio.sleep(0.1)

    # ---- facts -------------------------------------------------------------------------------------------------------

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.security.token}"}

    def direct(self, dc: str) -> list[str]:
        """URLs of the gateway's workers that no relay is in front of."""
        return [f"https://127.0.0.1:{self._ports[dc] + number}" for number in range(WORKERS)]

    def bootstrap(self, dc: str) -> str:
        return self.clusters[dc].bootstrap

    def pid(self, name: str) -> int | None:
        """Of a child, or of a worker of one: ``dc1/gateway-0`` is a child of ``dc1/gateway``."""
        if name in self.children:
            return self.children[name].pid
        parent, _, number = name.rpartition("-")
        found = self.children[parent].pid if parent in self.children else None
        if found is None:
            return None
        for worker in _children_of(found):
            with suppress(OSError):
                command = Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")
                if command[-3:-1] == [b"--worker", number.encode()]:
                    return worker
        return None

    def pids(self, name: str) -> list[int]:
        """Of a process and its children: the loader's JVM is one."""
        pid = self.pid(name)
        return [] if pid is None else [pid, *_children_of(pid)]

    def send(self, name: str, number: int) -> bool:
        """A signal to a process; to the loader and its JVM together. False: it does not run now."""
        pid = self.pid(name)
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            if name == "loader":
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
            return True
        return False

    def controller(self, dc: str) -> str:
        """The node that leads the metadata quorum, as one of the nodes knows it; the first one if none does."""
        for node in BROKERS:
            file = self.clusters[dc].data / f"kafka-{node}" / "log" / "__cluster_metadata-0" / "quorum-state"
            with suppress(OSError, ValueError, KeyError):
                leader = int(json.loads(file.read_text(encoding="utf-8"))["leaderId"])
                if leader in BROKERS:
                    return f"{dc}/kafka-{leader}"
        return f"{dc}/kafka-{BROKERS[0]}"

    # ---- configurations ----------------------------------------------------------------------------------------------

    def _make_cluster(self, dc: str) -> None:
        ports = iter(free_ports(4 * len(BROKERS)))
        far = {node: {who: (next(ports), next(ports)) for who in _LISTENERS} for node in BROKERS}
        self._far_ports[dc] = far
        for node, listeners in far.items():
            for who, (listens, relayed) in listeners.items():
                self.links[f"{dc}/{who}-kafka-{node}"] = Relay("127.0.0.1", relayed, listens)
        self.clusters[dc] = KafkaCluster(
            dc, self.data / dc / "kafka", len(BROKERS), logs=self.logs, settings_of=partial(_listeners, far)
        )

    def _kafka(self, dc: str, who: str) -> dict[str, str]:
        return {"bootstrap_servers": ",".join(f"127.0.0.1:{ports[who][1]}" for ports in self._far_ports[dc].values())}

    def _make_gateway(self, dc: str) -> None:
        self._ports[dc] = port = free_ports(WORKERS)[0]
        self.urls[dc] = [f"https://{_FAR}:{port + number}" for number in range(WORKERS)]
        for number in range(WORKERS):
            self.links[f"{dc}/client-gateway-{number}"] = Relay(_FAR, port + number, port + number)
        self._tls[dc] = self.security.new_certificate(dc)
        self.write_gateway(dc)
        self._child(f"{dc}/gateway", "logferry.gateway", "--config", str(self.data / dc / "gateway.toml"))

    def write_gateway(self, dc: str) -> None:
        """The configuration with the present tokens; a reload reads it."""
        settings = {
            "dc": dc,
            "data_centres": list(DCS),
            "listen": f"127.0.0.1:{self._ports[dc]}",
            "advertised_host": _FAR,
            "worker_hosts": [_FAR],
            "workers": WORKERS,
            "lanes": 4,
            "kafka": self._kafka(dc, "gateway"),
            "tls": self._tls[dc],
            "tokens": self.security.tokens(),
        }
        self._write(self.data / dc / "gateway.toml", settings)

    def _make_mirror(self, dc: str) -> None:
        settings = {
            "dc": dc,
            "listen": f"127.0.0.1:{free_ports(WORKERS)[0]}",
            "workers": WORKERS,
            "remote": [{"dc": other, "kafka": self._kafka(other, "mirror")} for other in DCS if other != dc],
            "kafka": self._kafka(dc, "mirror"),
        }
        self._write(self.data / dc / "mirror.toml", settings)
        self._child(f"{dc}/mirror", "logferry.mirror", "--config", str(self.data / dc / "mirror.toml")).start()

    def start_client(self, name: str, host: str, files: list[HostFile], copied_from: str | None = None) -> None:
        """A push-client that sends the files, from its nearest data centre; with a copy of another one's state."""
        state = self.data / "state" / name
        if copied_from is not None:
            shutil.copytree(self.clients[copied_from], state, ignore=shutil.ignore_patterns("*.new"))
        nearest = DCS if HOSTS.index(host) % len(DCS) == 0 else tuple(reversed(DCS))
        settings = {
            "topic": TOPIC,
            "state_dir": str(state),
            "host": name,
            "token_file": str(self.security.token_file),
            "ca_file": str(self.security.authority_file),
            "failover_s": 8,
            "failback_s": 8,
            "heartbeat_s": 5,
            "idle_s": 5,
            "files": [{"paths": [file.pattern for file in files]}],
            "datacenters": [{"name": dc, "urls": self.urls[dc]} for dc in nearest],
        }
        config = self.data / f"push-{name}.toml"
        self._write(config, settings)
        self.clients[name] = state
        self._child(name, "logferry.client", "--config", str(config), "--verbose", clock=host).start()

    def start_loader(self) -> None:
        gateways: dict[str, Any] = {}
        for dc in DCS:
            gateways[f"{dc}.urls"] = self.direct(dc)
            gateways[f"{dc}.ca_file"] = str(self.security.authority_file)
            gateways[f"{dc}.token_file"] = str(self.security.loader_token_file)
        event_time = {"column": "t", "formats": ["epoch_ms"]}
        table = {
            "path": str(self.table),
            "topics": [f"*.{TOPIC}"],
            "parser": {"format": "json", "columns": COLUMNS, "event_time": event_time},
            "segments": {"window_s": WINDOW_S, "late_wait_s": _LATE_WAIT_S, "source_idle_s": IDLE_S, "max_wait_s": 120},
        }
        settings = {
            "dc": DCS[0],
            "kafka": {"bootstrap_servers": self.bootstrap(DCS[0])},
            "spark": {"master": "local[1]", "driver_memory": "1g", "scratch": str(self.data / "scratch")},
            "follow_s": 3,
            "gateways": gateways,
            "tables": [table],
        }
        self._write(self.data / "load.toml", settings)
        command = ("logferry.loaders", "--config", str(self.data / "load.toml"), "--json", "--follow")
        self._child("loader", *command, env=spark_environment()).start()

    def write_audit(self) -> dict[str, Path]:
        """The configuration of the audit of each data centre, with its copies; the table is loaded from the first."""
        found = {}
        for dc in DCS:
            kafka = {one: {"bootstrap_servers": self.bootstrap(one)} for one in DCS}
            settings = {
                "dc": dc,
                "topics": [TOPIC],
                "tables": [str(self.table)] if dc == DCS[0] else [],
                "copies": [{"dc": other, "kafka": kafka[other], "topics": [TOPIC]} for other in DCS if other != dc],
                "kafka": kafka[dc],
            }
            found[dc] = self.data / f"audit-{dc}.toml"
            self._write(found[dc], settings)
        return found

    def set_clock(self, name: str, shift_s: int) -> None:
        """How far the clock of this process is off, and of its children."""
        self._clock_file(name).write_text(str(shift_s), encoding="ascii")

    def _clock_file(self, name: str) -> Path:
        return self.data / f"clock-{name.replace('/', '-')}"

    def _child(self, name: str, *command: str, clock: str = "", env: Mapping[str, str] | None = None) -> Child:
        own: dict[str, str] = {**os.environ, **(env or {})}
        if (clock or name) in CLOCKS:
            self.set_clock(clock or name, 0)
            own |= {"PYTHONPATH": str(self._clock_code), "SOAK_CLOCK": str(self._clock_file(clock or name))}
        log = self.logs / f"{name.replace('/', '-')}.log"
        self.children[name] = child = Child(name, [sys.executable, "-m", *command], log, own)
        return child

    def _write(self, file: Path, settings: Mapping[str, Any]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(configuration(settings), encoding="utf-8")
        new.replace(file)


def _listeners(
    far: Mapping[int, Mapping[str, tuple[int, int]]], node: int, broker: int, controller: int
) -> dict[str, str]:
    """A listener for each kind of client, whose advertised address is a relay's."""
    names = {"PLAINTEXT": (broker, broker)} | {who.upper(): ports for who, ports in far[node].items()}
    listens = [f"{name}://127.0.0.1:{port}" for name, (port, _) in names.items()]
    return {
        "listeners": ",".join([*listens, f"CONTROLLER://127.0.0.1:{controller}"]),
        "advertised.listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, (_, port) in names.items()),
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in [*names, "CONTROLLER"]),
        "inter.broker.listener.name": "PLAINTEXT",
    }


def _children_of(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except OSError:
        return []
