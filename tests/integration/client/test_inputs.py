"""Standard input, syslog and the journal through the push-client into Kafka, while the client is killed."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgpack
import pytest
from logferry.ops.stack.processes import free_ports
from logferry.ops.stack.stack import Stack

from tests.support import journal as journals
from tests.support.journal import Journal

BOUND_S = 240
PARTITIONS = 2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=1, lanes=2) as running:
        yield running


@pytest.fixture
def topic(stack: Stack, topic_name: str) -> str:
    body = json.dumps({"partitions": PARTITIONS}).encode()
    request = urllib.request.Request(f"{stack.urls()[0]}/v1/topics/{quote(topic_name)}", data=body, method="PUT")
    with urllib.request.urlopen(request, timeout=BOUND_S):
        pass
    return topic_name


@pytest.fixture
def journal() -> Iterator[Journal]:
    if journals.missing():
        pytest.skip(journals.missing())
    found = Journal(f"lf{os.getpid()}")
    yield found
    found.clean()


class Push:
    """The client with one input."""

    def __init__(self, stack: Stack, topic: str, root: Path, **table: Any) -> None:
        self.root = root
        self.log = root / "client.log"
        rows = [f"{name} = {json.dumps(value)}\n" for name, value in table.items()]
        settings = f"url = {json.dumps(stack.urls())}\ntopic = {json.dumps(topic)}\nhost = 'h'\nlinger_ms = 20\n"
        settings += f"state_dir = {json.dumps(str(root / 'state'))}\n[[inputs]]\n{''.join(rows)}"
        (root / "push.toml").write_text(settings)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "logferry.client", "--config", str(self.root / "push.toml")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=stdin, stderr=log)
        return self.process

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(BOUND_S)

    def status(self) -> dict[str, Any]:
        command = [
            sys.executable,
            "-m",
            "logferry.client",
            "--status",
            "--json",
            "--state-dir",
            str(self.root / "state"),
        ]
        done = subprocess.run(command, capture_output=True, check=False, timeout=BOUND_S)
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout.startswith(b"{") else {}
        return found


def stored(stack: Stack, topic: str) -> dict[str, bytes]:
    """What is readable of each source; the chunks have to meet end to end, each once."""
    sources: dict[str, list[list[Any]]] = {}
    for partition in range(PARTITIONS):
        offset: str | None = "earliest"
        while offset is not None:
            url = f"{stack.urls()[0]}/v1/topics/dc1.{quote(topic)}/partitions/{partition}/chunks?offset={offset}"
            with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
                rows = list(msgpack.Unpacker(io.BytesIO(answer.read())))
                offset = answer.headers["X-Next-Offset"] if rows else None
            for row in rows:
                sources.setdefault(row[4], []).append(row)
    for name, rows in sources.items():
        assert [row[6] for row in rows] == [0, *[row[5] for row in rows[:-1]]], name
    return {name: b"".join(row[10] for row in rows) for name, rows in sources.items()}


def until(condition: Callable[[], bool]) -> None:
    """Bounded: other processes are waited for."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {BOUND_S} s"
        time.sleep(0.05)


def only(stack: Stack, topic: str) -> list[dict[str, Any]]:
    """The records of the only source."""
    sources = stored(stack, topic)
    assert len(sources) <= 1
    return [json.loads(line) for content in sources.values() for line in content.splitlines()]


def test_standard_input_arrives_byte_for_byte(stack: Stack, topic: str, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4000 + b"x" * 2_500_000 + b"\nlast line without an end"
    push = Push(stack, topic, tmp_path, type="stdin", source="web1/program")
    process = push.start(subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(content)
    process.stdin.close()
    assert process.wait(BOUND_S) == 0, push.log.read_text()
    ((name, found),) = stored(stack, topic).items()
    assert name.startswith("web1/program#")
    assert found == content


@pytest.mark.long
def test_standard_input_of_a_client_that_is_killed(stack: Stack, topic: str, tmp_path: Path) -> None:
    """A beginning of each run is there, in order, and nothing twice."""
    push = Push(stack, topic, tmp_path, type="stdin")
    chance, runs = random.Random(), 4
    for run in range(runs):
        process = push.start(subprocess.PIPE)
        assert process.stdin is not None
        begun, killed_at = time.monotonic(), chance.uniform(0.5, 2.0)
        try:
            for number in range(1_000_000_000):
                process.stdin.write(b"%d %d\n" % (run, number))
                if number % 100 == 0:
                    process.stdin.flush()
                    if time.monotonic() - begun > killed_at:
                        break
        finally:
            push.kill()
        with suppress(BrokenPipeError):
            process.stdin.close()
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as nothing:
        assert nothing.stdout is not None
        assert push.start(nothing.stdout.fileno()).wait(BOUND_S) == 0, push.log.read_text()
    ((_, found),) = stored(stack, topic).items()
    got: dict[int, list[bytes]] = {}
    for line in found.splitlines():
        got.setdefault(int(line.split()[0] or b"-1"), []).append(line)
    for run, lines in got.items():
        whole = [b"%d %d" % (run, number) for number in range(len(lines))]
        assert lines[:-1] == whole[:-1]
        assert whole[-1].startswith(lines[-1])
    assert sorted(got) == [*got] != []


@pytest.mark.long
def test_syslog_of_a_client_that_is_killed(stack: Stack, topic: str, tmp_path: Path) -> None:
    """Each sender's messages are in order and none is twice; of a kill only what was under way may be missing."""
    port, udp = free_ports(2)
    listen = [f"tcp://127.0.0.1:{port}", f"udp://127.0.0.1:{udp}"]
    push = Push(stack, topic, tmp_path, type="syslog", listen=listen)
    ended, sent = threading.Event(), 0

    def send() -> None:
        nonlocal sent
        while not ended.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), 5) as sender:
                    while not ended.wait(0.001):
                        sender.sendall(b"<13>1 - h app - - - %d\n" % sent)
                        sent += 1
            except OSError:
                ended.wait(0.02)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(3):
            push.start()
            before = sent
            until(lambda before=before: sent > before + 400)  # type: ignore[misc]
            push.kill()
        push.start()
        before = sent
        until(lambda: sent > before + 400)
    finally:
        ended.set()
        sender.join()
    until(lambda: any(int(record["message"]) == sent - 1 for record in only(stack, topic)))
    numbers = [int(record["message"]) for record in only(stack, topic)]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 400
    until(lambda: push.status().get("inputs", [{}])[0].get("messages", 0) >= 400)
    row = push.status()["inputs"][0]
    assert (row["name"], row["type"], row["dropped"], row["refused"], row["error"]) == ("syslog", "syslog", 0, 0, "")
    push.kill(signal.SIGTERM)


def test_each_entry_of_the_journal_once(stack: Stack, topic: str, tmp_path: Path, journal: Journal) -> None:
    """The client is killed at random moments, the journal rotates, and journald is killed as well."""
    push = Push(stack, topic, tmp_path, type="journald", namespace=journal.name)
    chance, ended = random.Random(), threading.Event()
    lock = threading.Lock()

    def write() -> None:
        while not ended.wait(chance.uniform(0, 0.004)):
            with lock:
                size = chance.choice([10, 100, 5000])
                journal.send(chance.choice([b"text", b"\xff\0\n" * 3]) + b"x" * size, PRIORITY="6")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(8):
            push.start()
            time.sleep(chance.uniform(0.2, 1.6))  # a random moment: nothing to wait for
            push.kill()
            if number == 3:
                with lock:
                    journal.settle()
                    journal.stop(signal.SIGKILL)
                    journal.start()
            elif number % 3 == 0:
                journal.rotate()
        push.start()
    finally:
        ended.set()
        writer.join()
    expected = [str(number) for number in range(journal.sent)]

    def numbers() -> list[str]:
        return [record["N"] for record in only(stack, topic) if "N" in record]

    until(lambda: len(numbers()) >= len(expected))
    push.kill(signal.SIGTERM)
    assert numbers() == expected
    records = only(stack, topic)
    assert len({record["__CURSOR"] for record in records}) == len(records)
    assert "journal-cursor-gone" not in push.log.read_text()


def test_a_cursor_that_is_gone_is_said(stack: Stack, topic: str, tmp_path: Path, journal: Journal) -> None:
    push = Push(stack, topic, tmp_path, type="journald", namespace=journal.name, start="end")
    journal.send(b"before the first start")
    push.start()
    until(lambda: (tmp_path / "state" / "spool" / "journald.spool.last").exists())
    journal.send(b"one")
    until(lambda: len(only(stack, topic)) == 1)
    push.kill()
    journal.stop()
    for path in journal.folder.glob("*.journal"):
        path.unlink()
    journal.start()
    journal.send(b"two")
    push.start()
    until(lambda: any(record.get("N") == "2" for record in only(stack, topic)))
    assert "journal-cursor-gone" in push.log.read_text()
    assert [record["N"] for record in only(stack, topic) if "N" in record] == ["1", "2"]
    push.kill(signal.SIGTERM)
