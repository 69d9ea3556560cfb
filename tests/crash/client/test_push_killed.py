"""Twenty files are written and rotated at 5 MB/s together, while client, gateway worker and broker are killed in turn.

Each is killed when lines have been acknowledged since the kill before, so always under load. What is stored is read
by a plain Kafka consumer and held against the writers' own record: what each wrote into each incarnation of its files,
noted as it wrote, not read from the files. And the audit has to find it exact.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from logferry.gateway.contract.chunk import chunk_of_record
from logferry.ops.stack.stack import Stack

FILES = 20
BYTES_PER_S = 5_000_000
PARTITIONS = 4
BOUND_S = 120
Record = tuple[int, str]  # bytes, and the digest of them


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), brokers=3, workers=2, lanes=4) as running:
        yield running


class Writers(threading.Thread):
    """Writes all files in turn, at the pace, and rotates each now and then; ``records``: what each incarnation got."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self.folder = folder
        self.written = 0
        self.records: list[Record] = []
        self._chance = random.Random(seed)
        self._ended = threading.Event()
        self._open: dict[Path, tuple[int, hashlib.blake2b]] = {}

    def run(self) -> None:
        began = time.monotonic()
        for number in range(1_000_000_000):
            path = self.folder / f"{number % FILES:02d}.log"
            if path in self._open and self._chance.random() < 0.002:
                self._close(path)
                path.rename(path.with_name(f"{path.name}.{number}"))
            self._write(path, number)
            if self._ended.wait(max(self.written / BYTES_PER_S - (time.monotonic() - began), 0)):
                return

    def _write(self, path: Path, number: int) -> None:
        lines = [b"%d %d %s\n" % (number, n, self._chance.randbytes(50).hex().encode()) for n in range(40)]
        text = b"".join(lines)
        with path.open("ab") as file:
            file.write(text)
        size, digest = self._open.get(path, (0, hashlib.blake2b()))
        digest.update(text)
        self._open[path] = size + len(text), digest
        self.written += len(text)

    def _close(self, path: Path) -> None:
        size, digest = self._open.pop(path)
        self.records.append((size, digest.hexdigest()))

    def finish(self) -> list[Record]:
        self._ended.set()
        self.join()
        for path in list(self._open):
            self._close(path)
        return sorted(self.records)


def recorded(stack: Stack, topic: str) -> int:
    """Bytes of all sources together. Bounded: while lanes move no worker has a complete list."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        for url in stack.urls():
            with suppress(OSError, ValueError):
                with urllib.request.urlopen(f"{url}/v1/topics/{topic}/sources", timeout=5) as answer:
                    return sum(source["recorded_seqno"] or 0 for source in json.load(answer)["sources"])
        time.sleep(0.2)
    raise AssertionError(f"no worker has a complete list within {BOUND_S} s")


def until_recorded(stack: Stack, topic: str, more: int) -> None:
    """Until so many bytes more are; bounded, for a broker takes its time to come back."""
    target = recorded(stack, topic) + more
    deadline = time.monotonic() + BOUND_S
    while recorded(stack, topic) < target:
        assert time.monotonic() < deadline, f"no progress within {BOUND_S} s"
        time.sleep(0.1)


async def stored(bootstrap: str, topic: str) -> list[Record]:
    """Of each source; its chunks have to meet end to end, in the order of the log."""
    found: dict[bytes, tuple[int, hashlib.blake2b]] = {}
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        consumer.assign([TopicPartition(topic, number) for number in range(PARTITIONS)])
        ends = await consumer.end_offsets(consumer.assignment())
        while any([await consumer.position(partition) < end for partition, end in ends.items()]):
            for records in (await consumer.getmany(timeout_ms=500)).values():
                for record in records:
                    chunk = chunk_of_record(record.value or b"", record.headers)
                    size, digest = found.get(record.key, (0, hashlib.blake2b()))
                    assert (chunk.prev, chunk.seqno) == (size, size + len(chunk.data)), (record.key, record.offset)
                    digest.update(chunk.data)
                    found[record.key] = chunk.seqno, digest
    finally:
        await consumer.stop()
    return sorted((size, digest.hexdigest()) for size, digest in found.values())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_client_worker_and_broker_are_killed_in_turn(stack: Stack, topic_name: str, tmp_path: Path) -> None:
    body = json.dumps({"partitions": PARTITIONS}).encode()
    request = urllib.request.Request(f"{stack.urls()[0]}/v1/topics/{topic_name}", data=body, method="PUT")
    with urllib.request.urlopen(request, timeout=BOUND_S):
        pass
    logs = tmp_path / "logs"
    logs.mkdir()
    command = [sys.executable, "-m", "logferry.client", "--topic", topic_name, "--host", "h", "--linger-ms", "50"]
    command += [part for url in stack.urls() for part in ("--url", url)]
    command += ["--state-dir", str(tmp_path / "state"), "--timeout", str(BOUND_S), str(logs / "*")]

    def start(*more: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "client.log").open("ab") as log:
            return subprocess.Popen([*command, *more], stderr=log)

    writers = Writers(logs, seed=3)
    writers.start()
    client = start()
    killed = 0
    try:
        for round_ in range(3):
            for victim in ("client", f"gateway-{round_ % 2}", f"kafka-{round_ + 1}"):
                until_recorded(stack, topic_name, more=5_000_000)
                killed += 1
                if victim != "client":
                    stack.kill(victim)
                    continue
                client.kill()
                client.wait()
                client = start()
        until_recorded(stack, topic_name, more=5_000_000)
    finally:
        written = writers.finish()
        client.kill()
        client.wait()
    stack.wait_ready()
    assert start("--once").wait(3 * BOUND_S) == 0, (tmp_path / "client.log").read_text()[-2000:]
    bootstrap = stack.cluster().bootstrap
    assert asyncio.run(stored(bootstrap, f"dc1.{topic_name}")) == written
    assert (killed, len(written) >= FILES + 5, sum(size for size, _ in written) > 45_000_000) == (9, True, True)

    audit = [
        sys.executable,
        "-m",
        "logferry.ops.cli.main",
        "audit",
        "--config",
        str(stack.data / "dc1" / "gateway.toml"),
    ]
    files = [str(path) for path in sorted(logs.iterdir())]
    done = subprocess.run(
        [*audit, "--topic", topic_name, "--file", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.splitlines()[-1].startswith("exact: ")
