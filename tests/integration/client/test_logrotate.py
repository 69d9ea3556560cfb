"""The push-client beside Debian's logrotate, in each of its modes: every line is in the topic once.

The checker reads Kafka, not the client. logrotate runs with `--force`, a state file and a configuration of its own.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.ops.stack.stack import Stack

LOGROTATE = shutil.which("logrotate") or shutil.which("logrotate", path="/usr/sbin:/sbin")
BOUND_S = 60.0
ROTATIONS = 3
LINES = 60

pytestmark = pytest.mark.skipif(
    LOGROTATE is None, reason="logrotate is not installed; on Debian: apt-get install logrotate"
)

MODES = {
    "create": "create",
    "create, compress": "create\ncompress",
    "create, delaycompress": "create\ncompress\ndelaycompress",
    "create, dateext": "create\ndateext\ndateformat -%Y%m%d-%s",
    "copy": "copy",
    "copytruncate": "copytruncate",
    "copytruncate, compress": "copytruncate\ncompress",
    "copytruncate, delaycompress": "copytruncate\ncompress\ndelaycompress",
    "copytruncate, dateext": "copytruncate\ndateext\ndateformat -%Y%m%d-%s",
    "copytruncate, dateext, extension": "copytruncate\ndateext\ndateformat -%Y%m%d%s\nextension .log",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=1) as running:
        yield running


class Host:
    """A folder of logs, the program that writes `app.log`, logrotate, and the client."""

    def __init__(self, root: Path, url: str, topic: str, mode: str, pattern: str) -> None:
        self.root = root
        self.written: list[bytes] = []
        self.logs = root / "logs"
        self.logs.mkdir()
        self.logs.chmod(0o755)
        self.configuration = root / "logrotate.conf"
        self.configuration.write_text(f"{self.logs}/app.log {{\nrotate 50\nmissingok\n{mode}\n}}\n")
        self.command = [sys.executable, "-m", "logferry.client", "--url", url, "--topic", topic, "--host", "h"]
        self.command += ["--state-dir", str(root / "state"), "--linger-ms", "20", "--timeout", str(BOUND_S)]
        self.pattern = str(self.logs / pattern)
        self.url, self.topic = url, topic
        self.client: subprocess.Popen[bytes] | None = None

    def write(self, turn: int) -> None:
        lines = [b"turn %d line %d %s\n" % (turn, number, b"." * 50) for number in range(LINES)]
        with (self.logs / "app.log").open("ab") as file:
            file.writelines(lines)
        self.written += lines

    def rotate(self) -> None:
        command = [str(LOGROTATE), "--force", "--state", str(self.root / "rotated"), str(self.configuration)]
        deadline = time.monotonic() + BOUND_S
        while True:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BOUND_S)
            if "already exists" not in done.stderr or time.monotonic() > deadline:
                break  # else there is a file of this second
        assert done.returncode == 0, done.stderr

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        with (self.root / "client.log").open("ab") as log:
            self.client = subprocess.Popen([*self.command, *options, self.pattern], stderr=log)
        return self.client

    def end(self, number: int) -> None:
        assert self.client is not None
        self.client.send_signal(number)
        self.client.wait(BOUND_S)

    def until_recorded(self) -> None:
        """Everything that was written so far, whatever the names of the sources."""
        wanted, deadline = sum(map(len, self.written)), time.monotonic() + BOUND_S
        while True:
            recorded = 0
            with (
                suppress(OSError),
                urllib.request.urlopen(f"{self.url}/v1/topics/{self.topic}/sources", timeout=BOUND_S) as answer,
            ):
                recorded = sum(each["recorded_seqno"] or 0 for each in json.load(answer)["sources"])
            if recorded >= wanted:
                return
            assert time.monotonic() < deadline, f"{recorded} of {wanted} bytes\n{self.log()}"
            time.sleep(0.02)

    def log(self) -> str:
        return (self.root / "client.log").read_text()[-4000:]


async def stored(bootstrap: str, topic: str) -> list[bytes]:
    lines: list[bytes] = []
    options = {"isolation_level": "read_committed", "auto_offset_reset": "earliest"}
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, **options)
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, 0)])
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for record in records:
                    lines += chunk_of_record(record.value or b"", record.headers).data.splitlines(keepends=True)
    finally:
        await consumer.stop()
    return lines


@pytest.mark.parametrize("state", ["runs", pytest.param("stopped", marks=pytest.mark.long), "killed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", ["app.log", "app*log*"])
@pytest.mark.timeout(180)
def test_every_line_is_in_the_topic_once(
    stack: Stack, topic_name: str, tmp_path: Path, mode: str, state: str, pattern: str
) -> None:
    """``state``: of the client at each rotation. While it is down, lines are written before and after the rotation."""
    url = stack.urls()[0]
    body = json.dumps({"partitions": 1}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/topics/{topic_name}", data=body, method="PUT")):
        pass
    host = Host(tmp_path, url, topic_name, MODES[mode], pattern)
    host.start()
    try:
        for turn in range(ROTATIONS):
            host.write(2 * turn)
            host.until_recorded()
            if state != "runs":
                host.end(signal.SIGKILL if state == "killed" else signal.SIGTERM)
                host.write(2 * turn + 1)
            host.rotate()
            if state != "runs":
                host.write(100 + turn)
                host.start()
        host.write(1000)
        host.until_recorded()
    finally:
        host.end(signal.SIGTERM)
    assert host.start("--once").wait(BOUND_S) == 0, host.log()
    found = asyncio.run(stored(stack.cluster().bootstrap, f"dc1.{topic_name}"))
    assert sorted(found) == sorted(host.written), host.log()
