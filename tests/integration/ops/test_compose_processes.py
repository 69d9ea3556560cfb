"""The services of `ops/deploy/compose` as processes: their command lines, files and settings, where no container runs.

Names of services become 127.0.0.1, and their ports free ones. Kafka is that of `ops/stack`, with the settings of the
file; Grafana does not run here.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, free_ports, get, json_of, stop_all

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian's package) is not installed"),
]

DEPLOY: Final = Path(__file__).parents[3] / "ops" / "deploy"
COMPOSE: Final[dict[str, Any]] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: Final[dict[str, dict[str, Any]]] = COMPOSE["services"]
# What stands for the container itself: its place, its only node, its addresses.
OF_THE_CONTAINER: Final = ("listeners", "advertised.listeners", "log.dirs", "node.id", "controller.quorum.voters")
BOUND_S: Final = 120.0


def broker_settings(name: str) -> dict[str, str]:
    """As the image of Kafka makes them of its environment: KAFKA_LOG_DIRS is log.dirs."""
    environment: dict[str, str] = SERVICES[name]["environment"]
    found = {key[6:].lower().replace("_", "."): value for key, value in environment.items() if key.startswith("KAFKA_")}
    assert set(OF_THE_CONTAINER) <= set(found)
    return {key: value for key, value in found.items() if key not in OF_THE_CONTAINER}


class Composed:
    """``place``: of a service and its port, where it runs here."""

    def __init__(self, folder: Path, kafka: dict[str, KafkaCluster]) -> None:
        self.folder = folder
        ports = free_ports(7)
        # The workers of a gateway have ports one after the other.
        self.place = {
            **{f"{name}:9092": cluster.bootstrap for name, cluster in kafka.items()},
            **{f"gateway-dc{dc}:{8080 + n}": f"127.0.0.1:{ports[2 * dc - 2] + n}" for dc in (1, 2) for n in (0, 1)},
            **{f"mirror-dc{dc}:8180": f"127.0.0.1:{ports[3 + dc]}" for dc in (1, 2)},
            "prometheus:9090": f"127.0.0.1:{ports[6]}",
        }
        self.children = [self._child(name) for name in SERVICES if name not in (*kafka, "grafana")]

    def _child(self, name: str) -> Child:
        """Each file at the place that the service mounts it at, below a folder of its own."""
        service, root = SERVICES[name], self.folder / name
        for volume in service["volumes"]:
            source, _, target = volume.removesuffix(":ro").partition(":")
            there = root / target.lstrip("/")
            if not source.startswith("."):
                there.mkdir(parents=True)
                continue
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text(self._placed(name, (DEPLOY / "compose" / source).read_text(encoding="utf-8")))
        command = [re.sub(r"(^|=)/", rf"\1{root}/", part) for part in service["command"]]
        if command[0] == "logferry":
            command = [sys.executable, "-m", "logferry.ops.cli.main", *command[1:]]
        else:
            command = [name, *command, f"--web.listen-address={self.place['prometheus:9090']}"]
        return Child(name, command, self.folder / f"{name}.log")

    def _placed(self, name: str, text: str) -> str:
        def own(found: re.Match[str]) -> str:
            return f'listen = "{self.place[f"{name}:{found[1]}"]}"'

        text = re.sub(r'listen = "0\.0\.0\.0:(\d+)"', own, text).replace(f'advertised_host = "{name}"\n', "")
        for there, here in self.place.items():
            text = text.replace(there, here)
        return text

    def url(self, name: str) -> str:
        return f"http://{self.place[name]}"

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + BOUND_S
        while not condition():
            ended = [child.name for child in self.children if not child.running]
            assert not ended, f"ended: {[child.log_tail() for child in self.children if not child.running]}"
            assert time.monotonic() < deadline, f"not within {BOUND_S:.0f} s: {what}"
            time.sleep(0.1)


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    with ExitStack() as stack:
        kafka = {
            name: stack.enter_context(KafkaCluster(name, tmp_path / name / "kafka", settings=broker_settings(name)))
            for name in SERVICES
            if name.startswith("kafka-")
        }
        found = Composed(tmp_path / "services", kafka)
        try:
            for child in found.children:
                child.start()
            yield found
        finally:
            stop_all(found.children, 60)


def ask(url: str, method: str = "GET", body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, body, method=method)) as answer:
        return bytes(answer.read())


def test_the_services_run_as_they_are_described(composed: Composed) -> None:
    """What one data centre takes is read in the other, and Prometheus sees every worker."""
    for name in SERVICES:
        health = SERVICES[name].get("environment", {}).get("LOGFERRY_HEALTH_URL", "")
        if health:
            path = urllib.parse.urlsplit(health)
            url = composed.url(f"{name}:{path.port}")
            composed.wait(lambda url=url, path=path: get(url, path.path)[0] == 200, f"{name} is healthy")  # type: ignore[misc]
    for dc, other in (("dc1", "dc2"), ("dc2", "dc1")):
        gateway, there = composed.url(f"gateway-{dc}:8080"), composed.url(f"gateway-{other}:8080")
        ask(f"{gateway}/v1/topics/app", "PUT", b'{"partitions": 1}')
        ask(f"{gateway}/v1/topics/app/sources/web/chunks?seqno=1", "POST", f"of {dc}\n".encode())
        path = f"/v1/topics/{dc}.app/partitions/0/chunks"
        composed.wait(lambda url=there, path=path: f"of {dc}".encode() in get(url, path)[1], f"{dc} is mirrored")  # type: ignore[misc]  # noqa: B023

    prometheus = composed.url("prometheus:9090")

    def are_up() -> bool:
        samples = json_of(prometheus, f"/api/v1/query?{urllib.parse.urlencode({'query': 'up'})}")
        return [one["value"][1] for one in samples.get("data", {}).get("result", [])] == ["1"] * 6

    composed.wait(are_up, "every worker is scraped")
    rules = json.loads(ask(f"{prometheus}/api/v1/rules"))["data"]["groups"]
    assert {group["name"] for group in rules} >= {"logferry-gateway", "logferry-mirror"}
