"""The processes of the two data centres, each in the network of its host.

Under the folder: a folder for each host, ``secrets``, ``warehouse``, ``logs``.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from logferry.ops.cli.gateway_client import GatewayClient
from logferry.ops.cli.problems import CommandError, Unavailable
from logferry.ops.runtime.jars import spark_environment
from logferry.ops.stack import kafka_cluster
from logferry.ops.stack.processes import Child, stop_all

from tests.datacenters.credentials import ADMIN, PASSWORD, Secrets, java
from tests.datacenters.network import Network
from tests.datacenters.plan import (
    BROKERS,
    DCS,
    GATEWAYS,
    MIRROR,
    TOPIC,
    WORKERS,
    Host,
    block,
    configuration,
    server_properties,
)

_TEMPLATE: Final = Path(kafka_cluster.__file__).with_name("server.properties")
_HEAP: Final = "256m"
_CLUSTER_IDS: Final = {dc: f"datacentersofonehost{dc[-1]}Q" for dc in DCS}
_READY_S: Final = 180.0
_STEP_S: Final = 120.0
_STOP_S: Final = 20.0
_LOOK_S: Final = 0.1


class Site:
    """Starts and ends the processes. Everything that it started has ended when `__exit__` returns.

    ``children``: by name, such as ``dc1/gateway-2``. ``say``: progress for people.
    """

    def __init__(self, folder: Path, network: Network, rate_mb_s: float, say: Callable[[str], None]) -> None:
        self.folder, self.network, self._rate, self._say = folder, network, rate_mb_s, say
        self.logs = folder / "logs"
        self.warehouse = folder / "warehouse"
        self.warehouse.mkdir()
        self.children: dict[str, Child] = {}
        self.resting: set[str] = set()  # those that have been ended on purpose
        self.secrets = Secrets(folder / "secrets", self._run, network.command)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        last = [name for name in self.children if "kafka-" in name]
        stop_all([child for name, child in self.children.items() if name not in last], _STOP_S)
        for name, child in self.children.items():
            if name not in last:
                child.kill_group()
        stop_all([self.children[name] for name in last], _STOP_S)

    # ---- the steps of the page Production ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Steps 1 to 7, in their order. Raises CommandError."""
        for host in self.network.hosts.values():
            self.secrets.install(host, self.home(host))
        self._say("step 1: Kafka, three brokers in each data centre, with their users and rights")
        self._format()
        for dc in DCS:
            for node in BROKERS:
                place = f"kafka{node}.{dc}.example"
                self._start(f"{dc}/kafka-{node}", place, *java(_HEAP, "kafka.Kafka", str(self._properties(place))))
        await asyncio.gather(*(self._grant(dc) for dc in DCS))
        self._say("step 3: certificates, tokens, passwords")
        self.secrets.make_tokens()
        for host in self.network.hosts.values():
            self.secrets.install_passwords(host, self.home(host))
        self._say("steps 4 to 7: gateways, topics, mirrors, loader")
        for dc in DCS:
            for node in GATEWAYS:
                self.start_gateway(dc, node)
        for dc in DCS:
            for node in GATEWAYS:
                self._until(lambda dc=dc, node=node: self.is_ready(dc, node), f"the gateway on gw{node}.{dc}")  # type: ignore[misc]
        self._follow("topics", "$ logferry topics create nginx ")
        for dc in DCS:
            host = self.network.hosts[f"kafka{MIRROR}.{dc}.example"]
            self._serve(f"{dc}/mirror", host, "mirror.toml", "logferry.mirror")
            self._until(lambda dc=dc: self._answers(f"https://gw{MIRROR}.{dc}.example:8180"), f"the mirror of {dc}")  # type: ignore[misc]
        self._start_loader()

        self._say("step 11: status, a chunk that is sent twice, and read back in the other data centre")
        for text in self.doctor():
            self._say(f"  doctor on {text}")
        self._follow("status", "$ logferry status --url https://gw1.dc1.example:8443 ")
        self._follow("send-twice", "(umask 077; printf 'Authorization: ")
        self._follow("read-back", "$ logferry read dc1.app-probe ")

    async def _grant(self, dc: str) -> None:
        await self.secrets.await_brokers(dc)
        await asyncio.to_thread(self.secrets.make_users, dc)
        count = await self.secrets.grant_rights(dc)
        self._say(f"  {dc}: 5 users, {count} rights by the script of the page Kafka")

    def doctor(self) -> list[str]:
        """What `logferry doctor` finds on the first service host of each data centre, by its last lines."""
        found = []
        for dc in DCS:
            host = self.network.hosts[f"kafka{MIRROR}.{dc}.example"]
            etc = self.home(host) / "etc/logferry"
            given = [part for name in ("gateway", "mirror") for part in (f"--{name}", str(etc / f"{name}.toml"))]
            command = self.network.command(host.name, *_python("logferry.ops"), "doctor", *given)
            child = Child(f"doctor-{dc}", command, self.logs / f"doctor-{dc}.log")
            child.start()
            child.wait_for_end(_STEP_S)
            found.append(f"{host.names[-1]}: {child.log_tail().splitlines()[-1]}, status {child.exit_status}")
        return found

    def _follow(self, name: str, begins: str) -> None:
        """Runs a block of commands of the page, where operators work."""
        self.secrets.shell(DCS[0], name, block("production", begins), self.secrets.folder)

    def start_gateway(self, dc: str, node: int) -> None:
        host = self.network.hosts[f"kafka{node}.{dc}.example"]
        self._serve(f"{dc}/gateway-{node}", host, "gateway.toml", "logferry.gateway")

    def start_broker(self, dc: str, node: int) -> None:
        self.children[f"{dc}/kafka-{node}"].start()

    def start_clients(self, seed: int) -> None:
        """Step 9: on a host of each data centre a program that writes logs, the push-client, a writer, two readers."""
        for dc in DCS:
            host, home = self.web(dc), self.home(self.web(dc))
            logs = home / "var/log/nginx"
            self._start(
                f"{dc}/generator", host.name, *_python("logferry.ops.generate"), "--dir", str(logs), "--rate",
                str(self._rate), "--seed", f"{seed + DCS.index(dc)}", "--rotate-at", "30",
            )  # fmt: skip
            self._start_push(dc)
            urls = ",".join(self.urls(dc))
            probe, ca = _python("tests.datacenters.probe"), str(home / "etc/logferry/ca.pem")
            token = str(home / "etc/logferry/push-token")
            self._start(f"{dc}/writer", host.name, *probe, "write", urls, token, ca, f"{host.name.split('.')[0]}/probe")
            token = str(home / "etc/logferry/readers-token")
            for of in DCS:
                self._start(f"{dc}/reader-of-{of}", host.name, *probe, "read", urls, token, ca, f"{of}.{TOPIC}")

    def _start_push(self, dc: str, *options: str) -> Child:
        host = self.web(dc)
        config = self._configure("push.toml", host)
        token = self.home(host) / "etc/logferry/push-token"
        name = f"{dc}/push{'-once' if options else ''}"
        command = [*_python("logferry.client"), "--config", str(config), "--token-file", str(token), *options]
        return self._start(name, host.name, *command)

    def _start_loader(self) -> None:
        """Step 7: `logferry load --follow` on the loader host of dc1."""
        host = self.network.hosts[f"load1.{DCS[0]}.example"]
        config = self._configure("load.toml", host)
        (self.home(host) / "var/lib/logferry/scratch").mkdir(parents=True)
        command = [*_python("logferry.ops"), "load", "--config", str(config), "--follow"]
        self._start("loader", host.name, *command, environment=spark_environment())

    def audit(self, dc: str, *, with_files: bool = True) -> Child:
        """Step 8: of what this data centre writes, with the files of its host. Returns when it has ended."""
        host = self.network.hosts[f"load1.{DCS[0]}.example"]
        config = self._configure(f"audit-{dc}.toml", host)
        (self.home(host) / "var/lib/logferry").mkdir(parents=True, exist_ok=True)
        files = sorted(map(str, (self.home(self.web(dc)) / "var/log/nginx").glob("*.log*")))
        given = ["--file", *files] if with_files else []
        command = [*_python("logferry.ops"), "audit", "--config", str(config), "--brief", *given]
        child = Child(f"audit-{dc}", self.network.command(host.name, *command), self.logs / f"audit-{dc}.log")
        child.start()
        child.wait_for_end(_STEP_S * 5)
        child.stop(_STOP_S)
        return child

    def send_the_rest(self) -> None:
        """Ends what writes; returns when all of the files is recorded. Raises Unavailable.

        Then the push-clients run again, as on hosts that live on. Segments wait for sources that all fall silent, as
        they must: such hosts may have more to send.
        """
        for kind in ("generator", "writer", "push"):
            for dc in DCS:
                self.end(f"{dc}/{kind}")
        children = {dc: self._start_push(dc, "--once") for dc in DCS}
        self.resting |= {f"{dc}/push-once" for dc in DCS}
        for dc, child in children.items():
            self._until(lambda child=child: not child.running, f"the files of {dc} are sent")  # type: ignore[misc]
            child.check_end()
            self._start_push(dc)

    # ---- facts and parts ---------------------------------------------------------------------------------------------

    def home(self, host: Host) -> Path:
        return self.folder / host.name.removesuffix(".example")

    def web(self, dc: str) -> Host:
        return next(host for host in self.network.hosts.values() if host.dc == dc and host.name.startswith("web"))

    def urls(self, dc: str) -> list[str]:
        """Of the gateways, the preferred one first."""
        return [f"https://gw{node}.{dc}.example:8443" for node in GATEWAYS]

    def is_ready(self, dc: str, node: int) -> bool:
        return all(self._answers(f"https://gw{node}.{dc}.example:{8443 + worker}") for worker in range(WORKERS))

    def _answers(self, url: str) -> bool:
        with suppress(CommandError):
            GatewayClient(url, None, str(self.secrets.folder / "ca.pem")).request("GET", "/readyz")
            return True
        return False

    def end(self, name: str) -> None:
        """SIGTERM. Raises Unavailable if it ended badly."""
        self.resting.add(name)
        if not self.children[name].stop(6 * _STOP_S):
            raise self.children[name].failed("did not stop")

    def check(self) -> None:
        """Raises Unavailable if a process has ended that should run."""
        for name, child in self.children.items():
            if name not in self.resting and not child.running:
                raise child.ended()

    def _until(self, done: Callable[[], bool], what: str, limit_s: float = _READY_S) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            self.check()
            if time.monotonic() > deadline:
                raise Unavailable(f"not reached within {limit_s:.0f} s: {what}; see {self.logs}")
            time.sleep(_LOOK_S)

    def _format(self) -> None:
        """The storage of all brokers, with the two users that have to exist before the first start."""
        running = []
        for dc in DCS:
            for node in BROKERS:
                host = self.network.hosts[f"kafka{node}.{dc}.example"]
                text = server_properties(_TEMPLATE.read_text(encoding="utf-8"), host, node, self.home(host), PASSWORD)
                self._properties(host.name).write_text(text, encoding="utf-8")
                users = [f"SCRAM-SHA-512=[name={name},password={PASSWORD}]" for name in ("broker", ADMIN)]
                options = ["-t", _CLUSTER_IDS[dc], "-c", str(self._properties(host.name))]
                options += [part for user in users for part in ("--add-scram", user)]
                command = java(_HEAP, "kafka.tools.StorageTool", "format", *options)
                running.append(Child(f"format {host.name}", command, self.logs / f"format-{dc}-{node}.log"))
                running[-1].start()
        for child in running:
            if not child.wait_for_end(_STEP_S) or child.exit_status:
                raise child.failed("did not succeed")

    def _properties(self, place: str) -> Path:
        return self.home(self.network.hosts[place]) / "server.properties"

    def _serve(self, name: str, host: Host, file: str, module: str) -> None:
        self._start(name, host.name, *_python(module), "--config", str(self._configure(file, host)))

    def _configure(self, name: str, host: Host) -> Path:
        file = self.home(host) / "etc/logferry" / name
        file.write_text(configuration(name, host, self.home(host), self.secrets.digests), encoding="utf-8")
        return file

    def _start(self, name: str, place: str, *command: str, environment: Mapping[str, str] | None = None) -> Child:
        own = None if environment is None else {**os.environ, **environment}
        self.resting.discard(name)
        self.children[name] = child = Child(
            name, self.network.command(place, *command), self.logs / f"{name.replace('/', '-')}.log", own
        )
        child.start()
        return child

    def _run(self, dc: str, child: Child) -> None:
        child.start()
        if not child.wait_for_end(_STEP_S):
            child.kill_group()
        child.check_end()


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]
