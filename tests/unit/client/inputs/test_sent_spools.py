"""Spools, sources and checkpoint together: what the gateway has is what was put, once, whatever happens between."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent.agent import Agent
from logferry.client.agent.config import Config, DataCentre, FileGroup
from logferry.client.agent.status import render_metrics
from logferry.client.agent.workers import Pusher
from logferry.client.files import checkpoint as checkpoints
from logferry.client.files.checkpoint import Checkpoint
from logferry.client.inputs import spool as spools
from logferry.client.inputs.inputs import Inputs, spool_path
from logferry.client.inputs.spool import KEPT_BYTES, STEP_BYTES, Spool
from logferry.client.transport.cluster import GatewayCluster

from tests.support.fake_gateway import FakeGateway

LIMIT = 16 << 20


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Client:
    """An agent with one spool, without threads for requests; ``begin`` is a start."""

    def __init__(self, root: Path, gateway: FakeGateway) -> None:
        self.state = root / "state"
        self.path = spool_path(str(self.state), "x")
        self.gateway = gateway
        self.now = 0.0
        self.numbers = 0
        files = FileGroup((self.path,), "t", attributes={"path": "x"}, source="web1/x")
        self.config = Config((DataCentre("g:1", ("http://g:1",)),), str(self.state), "h", (files,))
        self.begin()

    def begin(self) -> None:
        self.checkpoint = Checkpoint.open(self.state)
        self.spool = Spool(Path(self.path), LIMIT, of_lines=True)
        self.spool.open()
        inputs = Inputs()
        inputs.spools[self.path] = self.spool
        self.agent = Agent(self.config, self.checkpoint, self.now, inputs)
        self.pusher = Pusher([GatewayCluster(("http://g:1",), None)], self.gateway)

    def end(self) -> None:
        """Without a last checkpoint, as a SIGKILL does."""
        self.spool.close(60)
        self.agent.close()
        self.checkpoint.close()

    def put(self, count: int, size: int = 100) -> bytes:
        """So many records, on the disk."""
        lines = [json.dumps({"n": self.numbers + n, "fill": "x" * size}).encode() + b"\n" for n in range(count)]
        self.numbers += count
        for line in lines:
            while not self.spool.put(line):
                self.step()
        until(lambda: self.spool.is_empty)
        return b"".join(lines)

    def step(self, later_s: float = 6.0) -> int:
        self.now += later_s
        self.agent.tick(self.now)
        jobs = self.agent.jobs(self.now, 5)
        for source, job in jobs:
            self.agent.finish(source, job, self.pusher.perform(job), self.now)
        return len(jobs)

    def settle(self) -> None:
        for _ in range(200):
            if not self.step() and not self.step():
                return
        raise AssertionError("it does not come to rest")

    def stored(self) -> dict[str, bytes]:
        return {name: stored.content() for name, stored in self.gateway.sources.items() if stored.chunks}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    client = Client(tmp_path, FakeGateway())
    yield client
    client.end()


def test_one_source_over_every_restart_in_bounded_space(client: Client) -> None:
    chance = random.Random(3)
    expected = b""
    for _ in range(70):
        expected += client.put(chance.randrange(1, 40), chance.choice([10, 1000, 60_000]))
        client.gateway.faults.extend(chance.choices(["cut before", "cut after", "503", "500 after"], k=2))
        for _ in range(chance.randrange(6)):
            client.step()
        if chance.random() < 0.3:
            client.end()
            client.begin()
    client.settle()
    client.settle()
    ((name, content),) = client.stored().items()
    assert name.startswith("web1/x#")
    assert content == expected
    assert len(expected) > LIMIT + KEPT_BYTES  # so it was freed meanwhile
    assert client.spool.used_bytes <= KEPT_BYTES + 2 * STEP_BYTES
    chunk = client.gateway.sources[name].chunks[-1]
    assert (chunk.attributes["path"], chunk.seqno) == ("x", len(expected))


def freed(client: Client) -> bytes:
    """So much was sent that space was freed."""
    content = client.put(16, 900_000)
    client.settle()
    client.put(1)
    client.settle()
    assert client.spool.freed == 2 * STEP_BYTES
    return content


def test_a_lost_checkpoint_begins_a_source_behind_what_was_freed(client: Client) -> None:
    freed(client)
    client.end()
    (client.state / "checkpoint.json").unlink()
    client.begin()
    last = client.put(1)
    client.settle()
    first, second = client.stored().values()
    assert second.startswith(b'{"n": ')
    assert second == (first + last)[-len(second) :]
    assert len(second) > KEPT_BYTES


def test_a_gateway_that_forgot_gets_what_is_left(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    freed(client)
    (before,) = client.stored().values()
    client.gateway.sources.clear()
    client.end()
    client.begin()
    last = client.put(1)
    client.settle()
    (after,) = client.stored().values()
    assert after == (before + last)[2 * STEP_BYTES :]
    assert "gateway-forgot" in caplog.text


def test_after_a_power_failure_the_source_continues(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is older than what was sent, and what proves the rest for a file of another program is gone."""
    monkeypatch.setattr(checkpoints, "boot", lambda: "first")
    client.end()
    client.begin()
    expected = client.put(10)
    client.settle()
    client.agent.remember(client.now + 100)
    kept = (client.state / "checkpoint.json").read_bytes()
    expected += client.put(10)
    client.settle()
    client.end()
    (client.state / "checkpoint.json").write_bytes(kept)
    (client.state / "cuts.jsonl").unlink()
    monkeypatch.setattr(checkpoints, "boot", lambda: "second")
    client.begin()
    expected += client.put(10)
    client.settle()
    assert [*client.stored().values()] == [expected]


def test_a_spool_that_grew_too_long_becomes_a_new_source(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "RENEW_BYTES", 5000)
    expected = b""
    for _ in range(7):
        expected += client.put(20)
        client.settle()
        client.settle()
    contents = [*client.stored().values()]
    assert len(contents) == 3
    assert b"".join(contents) == expected


def test_an_input_that_is_configured_again_continues(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    expected = client.put(5)
    client.settle()
    expected += client.put(5)
    client.end()
    config, other = client.config, FileGroup((str(client.state.parent / "*.log"),), "t")
    client.config = config._replace(files=(other,))
    client.checkpoint = Checkpoint.open(client.state)
    client.agent = Agent(client.config, client.checkpoint, client.now, Inputs.open((), str(client.state)))
    client.settle()
    assert f"spool-left path={client.path} size={len(expected)}" in caplog.text
    client.agent.remember(client.now + 100)
    client.end()
    client.config = config
    client.begin()
    client.settle()
    assert [*client.stored().values()] == [expected]


def test_a_pattern_of_files_leaves_spools_out(client: Client) -> None:
    every = FileGroup((str(client.state / "**"),), "t")
    client.config = client.config._replace(files=(*client.config.files, every))
    client.end()
    client.begin()
    expected = client.put(5)
    client.settle()
    assert client.stored().keys() == {*client.gateway.sources}
    assert [*client.stored().values()] == [expected]


def test_status_and_metrics_of_what_is_not_started(client: Client) -> None:
    found: Any = client.agent.metrics(0.0)
    assert "logferry_push_input" not in found


@pytest.mark.parametrize("has_inotify", [True, False])
def test_what_an_input_wrote_is_sent_in_the_next_round(
    client: Client, has_inotify: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it was quiet. No event of its file is asked for: that comes before the bytes are on the disk."""
    caplog.set_level("INFO")
    if not has_inotify:
        client.agent.watch.looks.hints.close()
    expected = client.put(1)
    client.settle()
    for quiet_s in (0.2, 3.0, 50.0, 12.0, 1.1) * 4:
        client.step(quiet_s)
        expected += client.put(1)
        client.step(0.2)
        assert [*client.stored().values()] == [expected]
    assert "folder-polled" not in caplog.text
    assert client.agent.watch.looks.hints.armed == 0


def test_the_first_part_of_a_line_waits_also_after_a_quiet_time(client: Client) -> None:
    client.spool.of_lines = False
    client.put(1)
    client.settle()
    for _ in range(20):
        client.step()
    for part in (b"begin of a li", b"ne\n"):
        assert client.spool.put(part)
        until(lambda: client.spool.is_empty)
        client.step(0.2)
        client.step(0.2)
    (stored,) = client.gateway.sources.values()
    assert stored.chunks[-1].data == b"begin of a line\n"


def test_metrics_of_inputs(client: Client) -> None:
    counts: dict[str, Any] = {"messages": 3, "bytes": 40, "dropped": 1, "refused": 2}
    row = {"name": "a", "type": "syslog", **counts, "spool_bytes": 5, "spool_limit_bytes": 6, "error": ""}
    lines = render_metrics(client.agent.watches, 0, {}, "g", [row]).splitlines()
    assert 'logferry_push_input_dropped_total{input="a"} 1' in lines
    assert "# TYPE logferry_push_input_messages_total counter" in lines
    assert 'logferry_push_input_spool_limit_bytes{input="a"} 6' in lines


def test_space_is_freed_when_every_topic_has_what_was_in_it(client: Client) -> None:
    """A topic that takes nothing holds the spool, over a restart, too; one that was removed does not."""
    client.end()
    (files,) = client.config.files
    client.config = client.config._replace(files=(files._replace(more=(files._replace(topic="u"),)),))
    client.begin()
    content = client.put(16, 900_000)
    for _ in range(20):
        client.step()
    assert client.stored() == {next(iter(client.stored())): content}
    client.end()
    client.begin()
    content += client.put(1)
    client.step()
    client.step()
    assert client.spool.freed == 0
    client.gateway.topics.add("u")
    client.step(400.0)
    client.settle()
    content += client.put(1)
    client.settle()
    assert {stored.topic: stored.content() for stored in client.gateway.sources.values()} == {
        "t": content,
        "u": content,
    }
    assert client.spool.freed == 2 * STEP_BYTES
    client.gateway.topics.remove("u")
    client.end()
    client.config = client.config._replace(files=(files,))
    client.begin()
    client.put(10, 900_000)
    client.settle()
    client.put(1)
    client.settle()
    assert client.spool.freed > 2 * STEP_BYTES
