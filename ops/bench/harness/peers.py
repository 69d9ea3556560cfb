"""What ours is compared with, as processes: MirrorMaker 2 with exactly-once, rsyslog, syslog-ng, OpenTelemetry's
collector, a bare HTTP handler."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from logferry.ops.bench.harness.usage import Program
from logferry.ops.runtime.jars import mirror_maker_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.kafka_cluster import KafkaCluster
from logferry.ops.stack.processes import Child, ServiceWorker, Setting, configuration, free_ports, get

_MODULE_FOLDERS: Final = ("/usr/lib/x86_64-linux-gnu/rsyslog", "/usr/lib/aarch64-linux-gnu/rsyslog", "/usr/lib/rsyslog")
_START_S: Final = 30.0
_BARE_HANDLER: Final = """
import json, sys, uvloop
from aiohttp import web

PARSE

taken = 0

async def handler(request):
    global taken
    body = await request.read()
    parse(body)
    taken += len(body)
    said = json.dumps({"size": len(body), "taken": taken})
    return web.Response(body=said.encode(), content_type="application/json")

app = web.Application(client_max_size=1 << 26)
app.router.add_route("*", "/{path:.*}", handler)
loop = uvloop.new_event_loop()
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), backlog=4096, access_log=None, loop=loop)
"""


class PeerMissing(Exception):
    """A peer of a benchmark is not installed; the text says how to install it."""


# The clusters there and here, the topics, and a folder.
MakeMirror = Callable[[KafkaCluster, KafkaCluster, str, Path], Child]


def our_mirror(there: KafkaCluster, here: KafkaCluster, topics: str, folder: Path) -> Child:
    """``topics``: a name without its data centre, or ``*`` for all."""
    port, file = free_ports(1)[0], folder / "mirror.toml"
    settings: dict[str, Setting] = {
        "dc": "dc2",
        "listen": f"127.0.0.1:{port}",
        "accept_weak_kafka": ["replication", "min-isr"],
        "remote": [{"dc": "dc1", "topics": [topics], "kafka": {"bootstrap_servers": there.bootstrap}}],
        "kafka": {"bootstrap_servers": here.bootstrap},
    }
    file.write_text(configuration(settings))
    return ServiceWorker("mirror", file, 0, port, folder / "mirror.log", "logferry.mirror").child


def mirror_maker(there: KafkaCluster, here: KafkaCluster, topics: str, folder: Path, heap: str = "1g") -> Child:
    """MirrorMaker 2 with the same topics."""
    port, file = free_ports(1)[0], folder / "mm2.properties"
    pattern = "dc1\\\\..*" if topics == "*" else f"dc1.{topics}"
    file.write_text(
        _configured("mirror_maker.properties", there=there.bootstrap, here=here.bootstrap, topics=pattern, port=port)
    )
    classpath = ":".join(map(str, mirror_maker_jars()))
    command = [str(find_java().executable), f"-Xmx{heap}", "-cp", classpath]
    return Child("mm2", [*command, "org.apache.kafka.connect.mirror.MirrorMaker", str(file)], folder / "mm2.log")


def find_rsyslogd() -> str:
    """The path of ``rsyslogd``. Raises `PeerMissing` when it, or its module for Kafka, is not there."""
    found = shutil.which("rsyslogd") or shutil.which("rsyslogd", path="/usr/sbin:/sbin")
    if found is None or not any((Path(folder) / "omkafka.so").exists() for folder in _MODULE_FOLDERS):
        raise PeerMissing("rsyslog with omkafka is not installed; on Debian: apt-get install rsyslog rsyslog-kafka")
    return found


def start_rsyslog(folder: Path, logs: Path, topic: str, bootstrap: str) -> Program:
    """Follows the files of a folder; restarted on the same ``folder``, it resumes from its state."""
    folder.mkdir(parents=True, exist_ok=True)
    brokers = ",".join(f'"{broker}"' for broker in bootstrap.split(","))
    file, pid_file = folder / "rsyslog.conf", folder / "pid"
    file.write_text(_configured("rsyslog.conf", work=folder, pattern=logs / "*.log", topic=topic, brokers=brokers))
    pid_file.unlink(missing_ok=True)
    with (folder / "log").open("ab") as log:
        return Program([find_rsyslogd(), "-n", "-f", str(file), "-i", str(pid_file)], stdout=log, stderr=log)


def find_syslog_ng() -> str:
    """The path of ``syslog-ng``. Raises `PeerMissing` when it, or its module for Kafka, is not there."""
    found = shutil.which("syslog-ng") or shutil.which("syslog-ng", path="/usr/sbin:/sbin")
    if found is None or "kafka" not in subprocess.run([found, "--version"], capture_output=True, text=True).stdout:
        raise PeerMissing(
            "syslog-ng with its module for Kafka is not in PATH; on Debian, beside rsyslog: tests/support/syslog_ng.sh"
        )
    return found


def start_syslog_ng(folder: Path, logs: Path, topic: str, bootstrap: str) -> Program:
    """As `start_rsyslog`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "syslog-ng.conf"
    file.write_text(_configured("syslog-ng.conf", folder=logs, topic=topic, brokers=bootstrap))
    state = [f"--{name}={folder / name}" for name in ("persist-file", "pidfile", "control")]
    with (folder / "log").open("ab") as log:
        return Program([find_syslog_ng(), "--foreground", f"--cfgfile={file}", *state], stdout=log, stderr=log)


@contextmanager
def collector(bootstrap: str, topic: str, folder: Path) -> Iterator[tuple[str, int]]:
    """OpenTelemetry's collector that writes to the topic, which must exist: it creates none, and each request would end
    in its time-out. Yields its URL and pid. Raises `PeerMissing`."""
    program = shutil.which("otelcol")
    if program is None:
        raise PeerMissing("otelcol is not in PATH; tests/support/otelcol.yaml has the commands that build it")
    port, file = free_ports(1)[0], folder / "collector.yaml"
    file.write_text(_configured("collector.yaml", port=port, brokers=bootstrap, topic=topic))
    child = Child("otelcol", [program, "--config", str(file)], folder / "collector.log")
    child.start()
    try:
        deadline = time.monotonic() + _START_S
        while get(url := f"http://127.0.0.1:{port}", "/")[0] == 0:
            if not child.running or time.monotonic() > deadline:
                raise RuntimeError(f"the collector did not start: {child.log_tail()}")
            time.sleep(0.05)
        yield url, child.pid or 0
    finally:
        child.stop(10)


def _configured(name: str, **values: object) -> str:
    """The configuration of a peer, a file beside this one, with these values."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8").format_map(values)


@contextmanager
def bare_handler(parse: str = "parse = len") -> Iterator[tuple[str, int]]:
    """A bare aiohttp handler in one process: reads the body, parses it and answers. Yields its URL and pid.

    The answer has the bytes of this body, and those of all so far.

    ``parse``: a statement in Python that defines the function of that name.
    """
    port = free_ports(1)[0]
    command = [sys.executable, "-u", "-c", _BARE_HANDLER.replace("PARSE", parse), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError("the bare handler did not start")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
