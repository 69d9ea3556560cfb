"""The push-client against real gateway workers and Kafka: files, and what is stored of them, byte for byte."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgpack
import pytest
from logferry.ops.stack.stack import Stack

PARTITIONS = 4
BOUND_S = 120


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), workers=2, lanes=4) as running:
        yield running


def created(stack: Stack, topic_name: str) -> str:
    body = json.dumps({"partitions": PARTITIONS}).encode()
    request = urllib.request.Request(f"{stack.urls()[0]}/v1/topics/{quote(topic_name)}", data=body, method="PUT")
    with urllib.request.urlopen(request, timeout=BOUND_S):
        pass
    return topic_name


@pytest.fixture
def topic(stack: Stack, topic_name: str) -> str:
    return created(stack, topic_name)


class Push:
    """The client on a folder of its own; `start` after a kill continues from its state."""

    def __init__(self, stack: Stack, topic: str, root: Path) -> None:
        self.logs = root / "logs"
        self.logs.mkdir()
        urls = [part for url in stack.urls() for part in ("--url", url)]
        self._command = [sys.executable, "-m", "logferry.client", *urls, "--topic", topic, "--host", "h"]
        self._command += ["--state-dir", str(root / "state"), "--linger-ms", "20", "--chunk-bytes", "16384"]
        self._log = root / "client.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, pattern: str = "**") -> subprocess.Popen[bytes]:
        files = [str(self.logs / pattern)] if "--config" not in self._command else []
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([*self._command, *options, *files], stderr=log)
        return self.process

    def configure(self, path: Path, topics: str) -> None:
        """``topics``: of all files, as TOML."""
        path.write_text(f'[[files]]\npaths = "{self.logs}/**"\ntopics = {topics}\n')
        self._command += [] if "--config" in self._command else ["--config", str(path)]

    def once(self, pattern: str = "**") -> None:
        status = self.start("--once", pattern=pattern).wait(BOUND_S)
        assert status == 0, self._log.read_text()[-2000:]

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def push(stack: Stack, topic: str, tmp_path: Path) -> Iterator[Push]:
    client = Push(stack, topic, tmp_path)
    yield client
    client.stop()


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


def held(folder: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_files_arrive_byte_for_byte(stack: Stack, topic: str, push: Push) -> None:
    contents = {
        "crlf.log": b"one\r\ntwo\r\n" * 5000,
        "no-newline.log": b"one\ntwo",
        "binary.log": bytes(range(256)) * 4000,
        "long.log": b"x" * 2_500_000 + b"\nshort\n",
        "deep/er/\N{SNOWMAN} name%2F.log": "ä\n".encode() * 1000,
    }
    for name, content in contents.items():
        (push.logs / name).parent.mkdir(parents=True, exist_ok=True)
        (push.logs / name).write_bytes(content)
    (push.logs / "empty.log").write_bytes(b"")
    push.once()
    assert sorted(stored(stack, topic).values()) == sorted(contents.values())
    push.once()
    assert sorted(stored(stack, topic).values()) == sorted(contents.values())


@pytest.mark.skipif("LOGFERRY_SAMPLE_LOGS" not in os.environ, reason="LOGFERRY_SAMPLE_LOGS names a folder of logs")
def test_logs_of_real_life_arrive_byte_for_byte(stack: Stack, topic: str, push: Push) -> None:
    for path in Path(os.environ["LOGFERRY_SAMPLE_LOGS"]).glob("*.log"):
        (push.logs / path.name).write_bytes(path.read_bytes())
    push.once()
    assert sorted(stored(stack, topic).values()) == held(push.logs) != []


def test_it_continues_through_kills_of_itself_of_gateways_and_broker(stack: Stack, topic: str, push: Push) -> None:
    """Eight files are written and rotated while client, workers and broker are killed. More: test_push_killed.py."""
    chance = random.Random(5)
    names = [f"{letter}.log" for letter in "abcdefgh"]
    for number in range(60):
        if number % 10 == 0:
            push.stop()
            push.start()
        if number % 20 == 5:
            stack.kill("gateway-0")
        if number % 20 == 15:
            stack.kill("gateway-1")
        if number == 35:
            stack.kill("kafka-1")
        for name in names:
            path = push.logs / name
            if path.exists() and chance.random() < 0.1:
                path.rename(path.with_name(f"{name}.{number}"))
            with path.open("ab") as file:
                file.writelines(b"%s %d %d\n" % (name.encode(), number, chance.randrange(1 << 60)) for _ in range(200))
        time.sleep(0.1)  # the pace of the writers
    push.stop()
    stack.wait_ready()
    push.once()
    assert sorted(stored(stack, topic).values()) == held(push.logs)


def test_lines_are_readable_soon_after_they_are_written(stack: Stack, topic: str, push: Push) -> None:
    (push.logs / "a.log").write_bytes(b"one\n")
    push.start()
    until(lambda: list(stored(stack, topic).values()) == [b"one\n"])
    with (push.logs / "a.log").open("ab") as file:
        file.write(b"two\nhal")
    until(lambda: list(stored(stack, topic).values()) != [b"one\n"])
    assert list(stored(stack, topic).values()) == [b"one\ntwo\n"]


def test_a_topic_that_is_not_there_is_named(stack: Stack, tmp_path: Path) -> None:
    nowhere = Push(stack, "nosuch", tmp_path)
    (nowhere.logs / "a.log").write_bytes(b"one\n")
    assert nowhere.start("--once").wait(BOUND_S) == 1
    said = (tmp_path / "client.log").read_text()
    assert "status=404 type=unknown-topic" in said
    assert "logferry topics create" in said


def test_the_gateway_knows_how_far_a_file_is_and_that_it_is_gone(stack: Stack, topic: str, push: Push) -> None:
    def sources() -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{stack.urls()[0]}/v1/topics/{quote(topic)}/sources", timeout=BOUND_S) as answer:
            rows: list[dict[str, Any]] = json.load(answer)["sources"]
        return rows

    (push.logs / "a.log").write_bytes(b"one\n")
    push.start("--heartbeat-s", "0.2", "--rotated-timeout-s", "0.2")
    until(lambda: [(row["position"], row["size"], row["finished"]) for row in sources()] == [(4, 4, False)])
    (push.logs / "a.log").unlink()
    until(lambda: sources()[0]["finished"] is True)
    assert [(row["position"], row["size"], row["finished"]) for row in sources()] == [(4, 4, True)]


def test_a_line_that_is_cut_leaves_chunks_without_bytes(stack: Stack, topic: str, push: Push) -> None:
    (push.logs / "a.log").write_bytes(b"one\n" + b"x" * 100_000 + b"\ntwo\n")
    assert push.start("--once", "--cut-lines", "--line-bytes", "16384").wait(BOUND_S) == 0
    assert list(stored(stack, topic).values()) == [b"one\n" + b"x" * 16384 + b"\ntwo\n"]


def has_open(process: subprocess.Popen[bytes], path: Path) -> bool:
    return path.resolve() in (link.resolve() for link in Path(f"/proc/{process.pid}/fd").iterdir())


def test_files_that_are_gone_once_they_were_opened_and_lines_that_are_left_out(
    stack: Stack, topic: str, push: Push
) -> None:
    """Also a chunk of which nothing is left, which the gateway has to record."""
    (push.logs / "first.log").write_bytes(b"one\n")
    client = push.start("--exclude-lines", "^debug")
    until(lambda: b"one\n" in stored(stack, topic).values())
    contents = {f"{number}.log": b"debug\n" * (number % 3) + b"%d\n" % number for number in range(30)}
    for name, content in contents.items():
        (push.logs / name).write_bytes(content)
        until(partial(has_open, client, push.logs / name))
        (push.logs / name).unlink()
    (push.logs / "debug.log").write_bytes(b"debug\n" * 3)
    wanted = sorted([b"", b"one\n", *(b"%d\n" % number for number in range(30))])
    until(lambda: sorted(stored(stack, topic).values()) == wanted)


def test_two_topics_have_every_byte_of_files_while_the_client_is_killed(
    stack: Stack, topic: str, push: Push, tmp_path: Path
) -> None:
    """The second topic does not exist at first, and their order changes; a third one has a filter of its own."""
    chance = random.Random(7)
    other = f"{topic}-audit"
    push.configure(tmp_path / "push.toml", f'["{topic}", "{other}"]')
    process = push.start()
    for number in range(24):
        for name in ("a.log", "b.log"):
            path = push.logs / name
            if path.exists() and chance.random() < 0.2:
                path.rename(path.with_name(f"{name}.{number}"))
            with path.open("ab") as file:
                file.writelines(b"%s %d %d\n" % (name.encode(), number, chance.randrange(1 << 60)) for _ in range(500))
        if number == 8:
            until(lambda: bool(stored(stack, topic)))  # though the other topic is refused
            created(stack, other)
        if number % 4 == 3:
            time.sleep(chance.uniform(0.0, 0.4))  # a random moment
            process.kill()
            assert process.wait() < 0
            push.configure(
                tmp_path / "push.toml", chance.choice([f'["{topic}", "{other}"]', f'["{other}", "{topic}"]'])
            )
            process = push.start()
    push.stop()
    push.once()
    files = held(push.logs)
    assert sorted(stored(stack, topic).values()) == files
    assert sorted(stored(stack, other).values()) == files
    third = created(stack, f"{topic}-filtered")
    only = f'{{ topic = "{third}", include_lines = "^a.log 3 " }}'
    push.configure(tmp_path / "push.toml", f'["{other}", {only}, "{topic}"]')
    push.once()
    wanted = b"".join(line for content in files for line in content.splitlines(True) if line.startswith(b"a.log 3 "))
    assert b"".join(stored(stack, third).values()) == wanted
    assert sorted(stored(stack, topic).values()) == sorted(stored(stack, other).values()) == files
