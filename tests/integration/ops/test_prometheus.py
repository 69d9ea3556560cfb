"""A real Prometheus with the rules and dashboards of `ops/deploy`, on two data centres that run.

Every panel has data. The alerts about what is away are raised by their fault and cleared after it; `promtool` shows the
same of all others (``tests/unit/ops/test_monitoring.py``). For the test, waits and windows are seconds.
"""

from __future__ import annotations

import http.server
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from logferry.ops.stack.processes import Child, free_ports, get, stop_all
from logferry.ops.stack.stack import Stack

from tests.support.delivery import Deliver
from tests.support.loader_process import java_env

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian's package) is not installed"),
]

ROOT: Final = Path(__file__).parents[3]
DEPLOY: Final = ROOT / "ops" / "deploy"
BOUND_S: Final = 120.0


class Prometheus:
    def __init__(self, folder: Path, jobs: list[dict[str, Any]]) -> None:
        folder.mkdir()
        (folder / "rules.yaml").write_text(quick((DEPLOY / "prometheus-alerts.yaml").read_text(encoding="utf-8")))
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config = {"global": every, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        self.child = Child("prometheus", [*command, f"--web.listen-address=127.0.0.1:{port}"], folder / "log")

    def samples(self, expression: str) -> list[float]:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        ) as answer:
            return [float(row["value"][1]) for row in json.load(answer)["data"]["result"]]

    def firing(self) -> set[str]:
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts") as answer:
            alerts = json.load(answer)["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def is_up(self) -> bool:
        try:
            return bool(self.samples("up"))
        except OSError:
            return False


def quick(rules: str) -> str:
    """Seconds for minutes, and the numbers of lanes and hosts of this stack."""
    rules = re.sub(r"for: \w+", "for: 1s", rules)
    rules = re.sub(r"\[(5m|10m|15m|1h)\]", "[15s]", rules)
    for before, after in (
        *(("< 12\n", "< 8\n"), ("< 6\n", "< 4\n"), ("_lane_open) < 8", "_lane_open) < 4")),
        *(("_away_seconds > 300", "_away_seconds > 3"), ("_stalled_seconds) > 600", "_stalled_seconds) > 3")),
    ):
        assert before in rules
        rules = rules.replace(before, after)
    return rules


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {BOUND_S:.0f} s: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder / "data", ("dc1", "dc2"), workers=2, lanes=8, mirrors=1, restart=False) as running:
        yield running


@pytest.fixture(scope="module")
def push(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Child, int]]:
    """A push-client that follows a file which grows all the time."""
    folder = tmp_path_factory.mktemp("push")
    urllib.request.urlopen(
        urllib.request.Request(f"{stack.urls()[0]}/v1/topics/nginx", b'{"partitions": 2}', method="PUT")
    ).close()
    [port] = free_ports(1)
    options = ["--url", *stack.urls()[:1], "--topic", "nginx", "--state-dir", str(folder / "state")]
    command = [sys.executable, "-m", "logferry.ops.cli.main", "push", *options, "--metrics-port", str(port)]
    over = threading.Event()

    def write() -> None:
        with (folder / "access.log").open("a") as file:
            while not over.wait(0.1):
                file.write("a line\n" * 20)
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    child = Child("push", [*command, str(folder / "*.log")], folder / "log")
    child.start()
    yield child, port
    over.set()
    writer.join()
    stop_all([child], 10)


@pytest.fixture(scope="module")
def loader(stack: Stack, push: tuple[Child, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("loader")
    [port] = free_ports(1)
    job = ["--table", str(folder / "t"), "--topics", "dc1.nginx", "--bootstrap", stack.cluster("dc1").bootstrap]
    command = [sys.executable, "-m", "logferry.ops.cli.main", "load", *job, "--master", "local[1]", "--follow"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in java_env().items():
            patch.setenv(name, value)
        child = Child("loader", [*command, "--metrics-listen", f"127.0.0.1:{port}"], folder / "log")
        child.start()
    yield port
    stop_all([child], 30)


@pytest.fixture(scope="module")
def keeping(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A keeper that only shows its plan, and looks twice a second."""
    folder = tmp_path_factory.mktemp("keeper")
    [port] = free_ports(1)
    (folder / "keeper.toml").write_text(
        f'dc = "dc1"\nlisten = "127.0.0.1:{port}"\nwatch.every_s = 0.5\n'
        f'kafka.bootstrap_servers = "{stack.cluster("dc1").bootstrap}"\n'
    )
    command = [sys.executable, "-m", "logferry.ops.keeper", "--config", str(folder / "keeper.toml"), "--worker", "0"]
    child = Child("keeper", command, folder / "log")
    child.start()
    yield port
    stop_all([child], 10)


class Taking:
    """Push delivery of the topic `nginx` in dc1 to a receiver that answers ``status``."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.status, taking = 200, self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(taking.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self._url = f"{stack.urls('dc1')[0]}/v1/subscriptions/shop"
        self.deliver = Deliver(stack.cluster("dc1"), folder, "logferry")
        self.worker = self.deliver.start(0)

    def ask(self, method: str, path: str = "", body: object = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        urllib.request.urlopen(urllib.request.Request(self._url + path, data, method=method)).close()

    def subscribe(self) -> None:
        [host, port] = self.server.server_address[:2]
        self.ask("PUT", body={"topics": ["dc1.nginx"], "url": f"http://{host!s}:{port}/in", "max_wait_ms": 100})


@pytest.fixture(scope="module")
def taking(stack: Stack, push: tuple[Child, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taking]:
    found = Taking(stack, tmp_path_factory.mktemp("deliver"))
    try:
        wait_until(lambda: get(found.worker.url, "/readyz")[0] == 200, "deliver serves")
        found.subscribe()
        yield found
    finally:
        stop_all([found.worker.child], 15)
        found.server.shutdown()
        found.server.server_close()


class Jobs:
    """The statuses of jobs as the documented script leaves them, served as node_exporter serves its text files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        page = (ROOT / "ops/docs/operations/production.md").read_text(encoding="utf-8")
        [script] = [block for block in page.split("```") if "usage: ExecStopPost=/usr/local/sbin/logferry-job" in block]
        (folder / "logferry-job").write_text(script.removeprefix("sh\n"))

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = "".join(file.read_text() for file in folder.glob("*.prom")).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def ended(self, name: str, status: int) -> None:
        env = {**os.environ, "TEXTFILE_FOLDER": str(self.folder), "EXIT_CODE": "exited", "EXIT_STATUS": str(status)}
        subprocess.run(["sh", str(self.folder / "logferry-job"), name], env=env, check=True, timeout=30)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    found = Jobs(tmp_path_factory.mktemp("jobs"))
    for name in ("load", "audit-dc1", "audit-dc2"):
        found.ended(name, 0)
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(scope="module")
def prometheus(
    stack: Stack,
    push: tuple[Child, int],
    loader: int,
    keeping: int,
    taking: Taking,
    jobs: Jobs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    def targets(urls: list[str], **labels: str) -> dict[str, Any]:
        return {"targets": [url.removeprefix("http://") for url in urls], "labels": labels}

    dcs = ("dc1", "dc2")
    scraped = {
        "logferry-gateway": [targets(stack.urls(dc), dc=dc) for dc in dcs],
        "logferry-mirror": [targets(stack.urls(dc, "mirror"), target_dc=dc) for dc in dcs],
        "logferry-deliver": [targets([taking.worker.url], dc="dc1")],
        "logferry-push": [targets([f"127.0.0.1:{push[1]}"], dc="dc1", host="web1")],
        "logferry-load": [targets([f"127.0.0.1:{loader}"], dc="dc1")],
        "logferry-keeper": [targets([f"127.0.0.1:{keeping}"], dc="dc1")],
        "node": [targets([f"127.0.0.1:{jobs.port}"], dc="dc1")],
    }
    # `dc` of the mirror's own metrics is the remote data centre: it stays.
    found = [{"job_name": job, "honor_labels": True, "static_configs": configs} for job, configs in scraped.items()]
    server = Prometheus(tmp_path_factory.mktemp("prometheus") / "files", found)
    server.child.start()
    try:
        wait_until(server.is_up, "Prometheus answers")
        yield server
    finally:
        stop_all([server.child], 20)


def test_alerts_are_raised_by_their_fault_and_cleared_after_it(
    stack: Stack, push: tuple[Child, int], jobs: Jobs, prometheus: Prometheus
) -> None:
    away = {"WorkerDown", "LanesNotServed", "MirrorWorkerDown", "MirrorLanesWithoutOwner", "PushClientDown",
            "PushNoDelivery", "JobNeedsOperator", "JobsMissing"}  # fmt: skip

    def raised(names: set[str]) -> None:
        wait_until(lambda: names <= prometheus.firing(), f"{names} are raised")

    def cleared(names: set[str]) -> None:
        wait_until(lambda: not names & prometheus.firing(), f"{names} are cleared")

    wait_until(lambda: bool(prometheus.samples("logferry_push_sent_bytes_total > 0")), "bytes are sent")
    cleared(away)

    stack.kill("dc2/gateway-1")
    raised({"WorkerDown"})
    stack.restart("dc2/gateway-1")
    cleared({"WorkerDown", "LanesNotServed"})

    for name in ("dc1/gateway-0", "dc1/gateway-1"):
        stack.kill(name)
    raised({"WorkerDown", "LanesNotServed", "PushNoDelivery"})
    for name in ("dc1/gateway-0", "dc1/gateway-1"):
        stack.restart(name)
    cleared({"WorkerDown", "LanesNotServed", "PushNoDelivery"})

    stack.kill("dc2/mirror-0")
    raised({"MirrorWorkerDown", "MirrorLanesWithoutOwner"})
    stack.restart("dc2/mirror-0")
    cleared({"MirrorWorkerDown", "MirrorLanesWithoutOwner"})

    push[0].send(signal.SIGKILL)
    raised({"PushClientDown"})
    push[0].restart()
    cleared({"PushClientDown"})

    jobs.ended("load", 1)
    raised({"JobNeedsOperator"})
    jobs.ended("load", 0)
    cleared({"JobNeedsOperator"})


def test_alerts_of_push_delivery_name_the_subscription(taking: Taking, prometheus: Prometheus) -> None:
    names = {"DeliverWorkerDown", "DeliveryLanesNotServed", "DeliveryStopped", "DeliveryStalled", "DeliveryRetries"}

    def firing() -> set[str]:
        return prometheus.firing() & names

    wait_until(lambda: bool(prometheus.samples("logferry_delivery_bytes_total > 0")), "batches are taken")
    wait_until(lambda: not firing(), "no alert of push delivery")
    taking.status = 503
    wait_until(lambda: firing() == {"DeliveryStalled", "DeliveryRetries"}, "it is stalled")
    assert prometheus.samples('ALERTS{alertname="DeliveryStalled", subscription="shop", alertstate="firing"}') == [1]
    taking.status = 200
    wait_until(lambda: not firing(), "it advances")
    taking.status = 400
    wait_until(lambda: firing() == {"DeliveryStopped"}, "it is stopped")
    taking.status = 200
    taking.ask("POST", "/resume")
    wait_until(lambda: not firing(), "it is resumed")
    taking.worker.child.send(signal.SIGKILL)
    wait_until(lambda: {"DeliverWorkerDown", "DeliveryLanesNotServed"} <= firing(), "the worker is down")
    taking.worker.child.restart()
    wait_until(lambda: not firing(), "the worker is back")


PANELS: Final = {
    f"{file.stem}: {panel['title']}": panel["targets"][0]["expr"]
    for file in sorted((DEPLOY / "grafana").glob("*.json"))
    for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]
}


def test_every_panel_has_data(prometheus: Prometheus) -> None:
    """After the faults, so that lanes were opened while Prometheus saw it."""

    def without_data() -> list[str]:
        return [name for name, expression in PANELS.items() if not has_data(prometheus, expression)]

    deadline = time.monotonic() + BOUND_S
    while (missing := without_data()) and time.monotonic() < deadline:
        time.sleep(1)
    assert missing == []


def has_data(prometheus: Prometheus, expression: str) -> bool:
    found = prometheus.samples(expression.replace("$__rate_interval", "5m"))
    return any(not math.isnan(value) for value in found)
