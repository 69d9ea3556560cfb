"""SIGHUP: it reads everything again, the configuration too, and ends no client, however early it comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_gateway import FakeGateway, Served

BOUND_S = 120.0


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def served() -> Iterator[Any]:
    with Served(FakeGateway(("t", "other"))) as served:
        yield served


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Started with ``push.toml``; its log is in ``log``."""
    processes = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("wb") as log:
            command = [sys.executable, "-m", "logferry.client", "--config", str(tmp_path / "push.toml")]
            processes.append(subprocess.Popen(command, stderr=log))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def settings(root: Path, url: str, topic: str, pattern: str = "*.log") -> str:
    return (
        f'url = "{url}"\nstate_dir = "{root}/state"\nhost = "h"\nlinger_ms = 10\n'
        f'[[files]]\npaths = "{root}/{pattern}"\ntopic = "{topic}"\n'
    )


def has(log: Path, words: str) -> bool:
    return any("config-unusable" in line and words in line for line in log.read_text().splitlines())


def content(gateway: FakeGateway, topic: str) -> list[bytes]:
    return sorted(each.content() for each in gateway.sources.values() if each.chunks and each.topic == topic)


def test_one_that_comes_before_the_client_runs_is_kept_for_later(
    tmp_path: Path, served: Any, client: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """The client waits for its configuration, a pipe, and reads it a second time when it runs."""
    (tmp_path / "a.log").write_bytes(b"one\n")
    os.mkfifo(tmp_path / "push.toml")
    process = client()
    with (tmp_path / "push.toml").open("w") as pipe:  # returns when the client has opened it, too
        process.send_signal(signal.SIGHUP)
        pipe.write(settings(tmp_path, served.url, "t"))
    until(lambda: process.poll() is not None or " started " in (tmp_path / "log").read_text())
    assert process.poll() is None
    (tmp_path / "push.toml").write_text(settings(tmp_path, served.url, "other"))
    until(lambda: content(served.gateway, "other") == [b"one\n"])
    process.terminate()
    assert process.wait(BOUND_S) == 0


def test_a_changed_configuration_is_taken_up_and_nothing_is_doubled(
    tmp_path: Path, served: Any, client: Callable[[], subprocess.Popen[bytes]]
) -> None:
    push, gateway = tmp_path / "push.toml", served.gateway
    (tmp_path / "a.log").write_bytes(b"one\n")
    push.write_text(settings(tmp_path, served.url, "t"))
    process = client()
    until(lambda: content(gateway, "t") == [b"one\n"])
    (tmp_path / "new.txt").write_bytes(b"new\n")
    push.write_text(settings(tmp_path, served.url, "t", "*.[lt][ox][gt]"))
    process.send_signal(signal.SIGHUP)
    until(lambda: content(gateway, "t") == [b"new\n", b"one\n"])
    with (tmp_path / "a.log").open("ab") as file:
        file.write(b"two\n")
    until(lambda: content(gateway, "t") == [b"new\n", b"one\ntwo\n"])
    process.terminate()
    assert process.wait(BOUND_S) == 0
    assert (tmp_path / "log").read_text().count(" config-read") == 1


def test_a_configuration_with_an_error_changes_nothing(
    tmp_path: Path, served: Any, client: Callable[[], subprocess.Popen[bytes]]
) -> None:
    push, gateway, log = tmp_path / "push.toml", served.gateway, tmp_path / "log"
    (tmp_path / "a.log").write_bytes(b"one\n")
    push.write_text(settings(tmp_path, served.url, "t"))
    process = client()
    until(lambda: content(gateway, "t") == [b"one\n"])
    for text, words in (
        ("url = ", "push.toml: "),
        (settings(tmp_path, served.url, "t") + 'format = "x"\n', "files[0].format: 'x'"),
        (settings(tmp_path, served.url, "t") + "unknown = 1\n", "files[0].unknown: unknown setting"),
    ):
        push.write_text(text)
        process.send_signal(signal.SIGHUP)
        until(partial(has, log, words))
    with (tmp_path / "a.log").open("ab") as file:
        file.write(b"two\n")
    until(lambda: content(gateway, "t") == [b"one\ntwo\n"])
    process.terminate()
    assert process.wait(BOUND_S) == 0
    assert log.read_text().count(" started ") == 1


def test_topics_of_a_file_come_and_go_and_nothing_is_doubled(
    tmp_path: Path, served: Any, client: Callable[[], subprocess.Popen[bytes]]
) -> None:
    push, gateway, log = tmp_path / "push.toml", served.gateway, tmp_path / "log"
    one = settings(tmp_path, served.url, "t")

    def has_all(topic: str, wanted: bytes) -> bool:
        return content(gateway, topic) == [wanted]

    def reread(topics: str, count: int) -> None:
        push.write_text(one.replace('topic = "t"', f"topics = {topics}"))
        process.send_signal(signal.SIGHUP)
        until(lambda: log.read_text().count(" config-read") == count)

    (tmp_path / "a.log").write_bytes(b"one\n")
    push.write_text(one)
    process = client()
    until(lambda: content(gateway, "t") == [b"one\n"])
    wanted = b"one\n"
    for number, topics in enumerate(('["t", "other"]', '["other"]', '["other", "t"]'), 1):
        reread(topics, number)
        with (tmp_path / "a.log").open("ab") as file:
            file.write(b"%d\n" % number)
        wanted += b"%d\n" % number
        for topic in re.findall(r"\w+", topics):
            until(partial(has_all, topic, wanted))
        assert content(gateway, "t") == [wanted if "t" in re.findall(r"\w+", topics) else b"one\n1\n"]
    assert len(gateway.sources) == 2
    process.terminate()
    assert process.wait(BOUND_S) == 0
