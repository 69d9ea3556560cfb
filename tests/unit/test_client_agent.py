"""Sources, files and checkpoint together, driven step by step without threads, clock or sockets."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from logferry.client import source as source_module
from logferry.client.agent import Agent
from logferry.client.checkpoint import FILE, Checkpoint
from logferry.client.config import Config
from logferry.client.push import Cluster, Pusher
from logferry.client.source import FIGHT_WINDOW_S, RETRY_S, pause_s
from model.fake_gateway import FakeGateway

MIB = 1 << 20


class Client:
    """An agent over a folder and a fake gateway; `restart` is what a SIGKILL and a new start do."""

    def __init__(self, root: Path, gateway: FakeGateway, **options: object) -> None:
        self.root = root
        self.gateway = gateway
        self.now = 0.0
        self.config = Config(
            urls=("http://g:1",), topic="t", state_dir=str(root / "state"), patterns=(str(root / "*.log*"),),
            host="h", attributes={"env": "test"}, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        self._begin()

    def _begin(self) -> None:
        self.checkpoint = Checkpoint.open(Path(self.config.state_dir))
        self.agent = Agent(self.config, self.checkpoint, self.now)
        self.pusher = Pusher(Cluster(self.config.urls, self.config.token), self.gateway, self.config.topic)

    def close(self) -> None:
        self.agent.watch.close()
        self.checkpoint.close()

    def restart(self) -> None:
        self.close()
        self._begin()

    def step(self, later_s: float = 5.0) -> int:
        """One round of the main loop; how many requests it sent."""
        self.now += later_s
        self.agent.tick(self.now)
        jobs = self.agent.jobs(self.now, self.config.threads)
        for source, job in jobs:
            self.agent.finish(source, job, self.pusher.perform(job), self.now)
        return len(jobs)

    def settle(self) -> None:
        for _ in range(100):
            if not self.step():
                return
        raise AssertionError("it does not come to rest")

    def write(self, name: str, content: bytes, mode: str = "ab") -> None:
        with (self.root / name).open(mode) as file:
            file.write(content)

    def stored(self) -> list[bytes]:
        return [stored.content() for stored in self.gateway.sources.values() if stored.chunks]


@pytest.fixture
def gateway():
    return FakeGateway()


@pytest.fixture
def client(tmp_path, gateway, request):
    client = Client(tmp_path, gateway, **getattr(request, "param", {}))
    yield client
    client.close()


def test_chunks_carry_who_and_where(client, gateway):
    client.write("a.log", b"one\ntwo\n")
    client.settle()
    ((name, stored),) = gateway.sources.items()
    path = str(client.root / "a.log")
    assert name.startswith(f"h:{path}#")
    (chunk,) = stored.chunks
    assert (chunk.prev, chunk.seqno, chunk.data) == (0, 8, b"one\ntwo\n")
    assert chunk.attributes == {"host": "h", "path": path, "env": "test"}


def test_a_rename_keeps_source_and_path_also_over_a_restart(client, gateway):
    client.write("a.log", b"one\n")
    client.settle()
    (client.root / "a.log").rename(client.root / "a.log.1")
    client.write("a.log.1", b"two\n")
    client.settle()
    client.restart()
    client.write("a.log.1", b"three\n")
    client.write("a.log", b"new\n")
    client.settle()
    assert sorted(client.stored()) == [b"new\n", b"one\ntwo\nthree\n"]
    paths = {chunk.attributes["path"] for stored in gateway.sources.values() for chunk in stored.chunks}
    assert paths == {str(client.root / "a.log")}


def test_the_gateways_word_goes_before_the_checkpoints(client, gateway):
    client.write("a.log", b"one\ntwo\n")
    client.settle()
    (stored,) = gateway.sources.values()
    stored.chunks.clear()
    stored.recorded = stored.base = None
    client.restart()
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]


def test_a_gateway_that_has_more_than_the_file_makes_it_a_new_source(client, gateway, caplog):
    client.write("a.log", b"one\n")
    client.step()
    next(iter(gateway.sources.values())).recorded = 999
    client.restart()
    client.settle()
    assert client.stored() == [b"one\n"]
    assert len(gateway.sources) == 2
    assert "the gateway has recorded 999 bytes of it, it holds 4" in caplog.text


def test_a_file_that_changes_between_start_and_session_is_a_new_source(client, gateway):
    """The same head, so that only the bytes before the position, as the checkpoint knows them, tell."""
    head = b"# a long header\n" * 100
    client.write("a.log", head + b"first\n" * 100)
    client.settle()
    assert client.agent.remember(client.now)
    client.restart()
    client.agent.tick(client.now)
    client.write("a.log", head + b"other\n" * 200, "wb")
    client.settle()
    assert client.stored() == [head + b"first\n" * 100, head + b"other\n" * 200]


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(b"{")])
def test_a_lost_checkpoint_costs_doubles_under_new_names_and_no_bytes(client, gateway, damage):
    client.write("a.log", b"one\n")
    client.settle()
    damage(client.root / "state" / FILE)
    client.restart()
    client.write("a.log", b"two\n")
    client.settle()
    assert client.stored() == [b"one\n", b"one\ntwo\n"]


def test_a_last_line_waits_until_the_file_is_idle_and_may_go_on(client, gateway):
    client.write("a.log", b"one\ntw")
    client.step(1)
    client.step(1)
    assert client.step(1) == 0
    assert client.stored() == [b"one\n"]
    assert client.step(client.config.idle_s) == 1
    client.write("a.log", b"o\nthree\n")
    client.settle()
    (stored,) = gateway.sources.values()
    assert [(c.data, c.attributes.get("split")) for c in stored.chunks] == [
        (b"one\n", None), (b"tw", "open"), (b"o\n", "last"), (b"three\n", None),
    ]  # fmt: skip


def test_a_rotated_file_is_dropped_when_it_is_sent_and_quiet(client):
    client.write("a.log", b"one\n")
    client.step()
    (client.root / "a.log").rename(client.root / "archived")
    client.write("archived", b"two")
    client.settle()
    assert list(client.agent.watch.sources)
    client.step(client.config.rotated_s)
    client.step(client.config.rotated_s)
    client.step(client.config.rotated_s)
    assert client.stored() == [b"one\ntwo"]
    assert not client.agent.watch.sources
    assert not client.checkpoint.entries


def test_a_rotated_file_is_read_to_its_end_over_many_restarts(client):
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    (client.root / "a.log").rename(client.root / "archived")
    for _ in range(3):
        client.write("archived", b"more\n")
        client.restart()
        client.step()
        assert client.agent.remember(client.now)
    client.settle()
    assert client.stored() == [b"one\n" + b"more\n" * 3]


def test_a_file_that_no_pattern_asks_for_any_more_is_left_alone(client):
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.config = dataclasses.replace(client.config, patterns=(str(client.root / "b.log"),))
    client.write("a.log", b"two\n")
    client.restart()
    client.settle()
    assert client.stored() == [b"one\n"]


def test_a_file_that_is_gone_after_a_restart_is_told_once(client, caplog):
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    (client.root / "a.log").unlink()
    for _ in range(2):
        client.restart()
        client.settle()
        assert client.agent.remember(client.now)
    assert caplog.text.count("file-gone") == 1


def test_nothing_leaves_before_the_checkpoint_is_written(client, gateway, monkeypatch, caplog):
    def full() -> None:
        raise OSError(28, "No space left on device")

    client.write("a.log", b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr(client.checkpoint, "save", full)
        assert client.step() == 0
        assert not gateway.requests
    assert "state-write-failed" in caplog.text
    client.settle()
    assert client.stored() == [b"one\n"]


def test_a_full_disk_holds_up_new_sources_only(client, gateway, monkeypatch, caplog):
    def full() -> None:
        raise OSError(28, "No space left on device")

    client.write("z.log", b"x" * 2000 + b"\n")
    client.write("short.log", b"its head is not known yet\n")
    client.settle()
    with monkeypatch.context() as patch:
        patch.setattr(client.checkpoint, "save", full)
        client.write("short.log", b"so this has to wait, too\n")
        for number in range(10):
            client.write(f"{number}.log", b"new\n")
        for _ in range(20):
            client.write("z.log", b"old\n")
            client.step(0.5)
        for _ in range(5):  # its turn comes
            client.step(0.5)
        assert client.stored() == [b"its head is not known yet\n", b"x" * 2000 + b"\n" + b"old\n" * 20]
        assert client.agent.held_bytes() == 0
    assert 1 <= caplog.text.count("state-write-failed") <= 5  # told, but not with every attempt
    for _ in range(20):
        client.step()
    assert sorted(client.stored()) == sorted(path.read_bytes() for path in client.root.glob("*.log"))


def test_the_checkpoint_knows_the_source_when_the_request_leaves(client, gateway):
    """Every request finds on the disk what a client killed right after it needs."""
    seen = []

    class Spy(FakeGateway):
        def __call__(self, url, headers, body):
            entries = json.loads((client.root / "state" / FILE).read_bytes().split(b"\n")[1])["entries"]
            seen.append({entry["source_id"]: entry["head"][0] for entry in entries})
            return super().__call__(url, headers, body)

    client.pusher.exchange = spy = Spy()
    for text in (b"a\n", b"b\n", b"c" * 2000 + b"\n", b"d\n"):
        client.write("a.log", text)
        client.settle()
    assert [list(heads.values()) for heads in seen] == [[2], [2], [4], [1024], [1024]]
    assert all(heads.keys() == spy.sources.keys() for heads in seen)


@pytest.mark.parametrize("fault", ["503", "500 before", "500 after", "cut before", "cut after", "429"])
@pytest.mark.parametrize("before", range(4))
def test_a_fault_of_any_request_costs_nothing(client, gateway, fault, before):
    gateway.faults.extend([""] * before + [fault] * 3)
    for number in range(4):
        client.write("a.log", b"%d\n" % number)
        client.settle()
    for _ in range(20):
        client.step(20.0)
    assert client.stored() == [b"0\n1\n2\n3\n"]


def test_retry_after_is_waited_for(client, gateway):
    client.write("a.log", b"one\n")
    client.step()
    gateway.faults.extend(["503"])
    client.step()
    requests = len(gateway.requests)
    assert client.step(0.9) == 0
    assert len(gateway.requests) == requests
    assert client.step(1.0) == 1


def test_after_an_unknown_outcome_the_very_same_bytes_are_sent(client, gateway):
    bodies = []

    class Spy(FakeGateway):
        def __call__(self, url, headers, body):
            bodies.append(body)
            return super().__call__(url, headers, body)

    client.pusher.exchange = spy = Spy()
    client.write("a.log", b"one\n")
    client.step()
    spy.faults.append("cut after")
    client.step()
    client.write("a.log", b"two\n")
    client.settle()
    assert bodies[1] == bodies[2]
    assert [stored.content() for stored in spy.sources.values()] == [b"one\ntwo\n"]


def test_a_newer_session_is_answered_by_one_of_our_own_but_not_fought(client, gateway, caplog):
    client.write("a.log", b"one\n")
    client.settle()
    (stored,) = gateway.sources.values()
    stored.session += 5
    client.write("a.log", b"two\n")
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]
    client.now += FIGHT_WINDOW_S
    for _ in range(2):
        stored.session += 5
        client.write("a.log", b"three\n")
        client.settle()
    assert client.stored() == [b"one\ntwo\nthree\n"]
    assert "another client writes this source" in caplog.text
    assert list(client.agent.failures().values()) == ["another client writes this source: superseded"]


def test_chunks_too_large_get_smaller_and_lines_are_split_if_need_be(client, gateway):
    gateway.largest_chunk_bytes = 2000
    client.write("a.log", b"".join(b"%d\n" % n for n in range(2000)) + b"x" * 5000 + b"\ny\n")
    client.settle()
    (stored,) = gateway.sources.values()
    assert stored.content() == (client.root / "a.log").read_bytes()
    assert max(len(chunk.data) for chunk in stored.chunks) <= 2000
    assert [c.attributes["split"] for c in stored.chunks if "split" in c.attributes][::4] == ["first", "last"]


def test_a_gateway_that_finds_everything_too_large_is_tried_slowly(client, gateway, caplog):
    gateway.largest_chunk_bytes = 0
    client.write("a.log", b"one\n")
    client.settle()
    assert "refused" in caplog.text
    assert len(gateway.requests) < 50


def test_an_unknown_topic_is_told_and_tried_again(client, gateway, caplog):
    gateway.topics = {"other"}
    client.write("a.log", b"one\n")
    client.settle()
    assert "404" in caplog.text
    assert not client.stored()
    gateway.topics = {"t"}
    client.step(400.0)
    client.settle()
    assert client.stored() == [b"one\n"]


def test_an_overlap_is_cut_anew_where_the_gateway_is(client, gateway):
    client.write("a.log", b"one\ntwo\n")
    client.step()
    stored = next(iter(gateway.sources.values()))
    gateway.faults.append("503")
    client.step(1.0)  # cut, and not recorded
    stored.recorded, stored.base = 4, 0  # another way recorded the first line
    client.settle()
    assert [(c.prev, c.data) for c in stored.chunks] == [(4, b"two\n")]


def test_an_owner_out_of_reach_is_reached_through_the_given_url(client, gateway):
    """The owner's address may mean nothing on this host: after a failure the gateway forwards."""
    gateway.other_url = "http://unreachable:9"
    asked = []

    class Spy(FakeGateway):
        def __call__(self, url, headers, body):
            asked.append(url.partition("/v1/")[0])
            if asked[-1] == "http://unreachable:9":
                gateway.faults.append("cut before")
            return gateway(url, headers, body)

    client.pusher.exchange = Spy()
    client.write("a.log", b"one\n")
    client.settle()
    assert asked == ["http://g:1", "http://unreachable:9", "http://g:1"]
    assert client.stored() == [b"one\n"]


@pytest.mark.parametrize("client", [{"threads": 2, "request_bytes": MIB}], indirect=True)
def test_memory_is_bounded_while_the_gateway_is_away(client, gateway):
    for number in range(20):
        client.write(f"{number}.log", b"%d\n" % number + (b"x" * 99 + b"\n") * 15_000)
    while len(gateway.sources) < 20:
        client.step()
    gateway.faults.extend(["cut after", "cut before"] * 200)
    most = 0
    while gateway.faults:
        client.step(20.0)
        most = max(most, client.agent.held_bytes())
    assert MIB < most <= 4 * MIB
    client.settle()
    for _ in range(20):
        client.step(20.0)
    assert sorted(client.stored()) == sorted(path.read_bytes() for path in client.root.glob("*.log"))


def test_the_gateways_absence_is_told_once_and_its_return(client, gateway, caplog):
    caplog.set_level("INFO", "logferry.client")
    client.write("a.log", b"one\n")
    gateway.faults.extend(["cut before"] * 10)
    while not client.stored():
        client.step(20.0)
    assert [word for word in caplog.text.split() if word.startswith("gateway-")] == ["gateway-away", "gateway-back"]


def test_a_file_that_may_not_be_read_is_told_once(client, monkeypatch, caplog):
    """Tests may run as root, whom no permission stops; so the system's answer is put in."""
    really = os.open

    def refuse(path, *arguments):
        if str(path).endswith("a.log"):
            raise PermissionError(13, "Permission denied")
        return really(path, *arguments)

    client.write("a.log", b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        client.step()
        client.step()
        assert client.agent.failures() == {str(client.root / "a.log"): "Permission denied"}
    assert caplog.text.count("file-unreadable") == 1
    client.settle()
    assert client.stored() == [b"one\n"]
    assert not client.agent.failures()


def test_a_file_on_a_broken_disk_does_not_stop_the_others(client, monkeypatch, caplog):
    client.write("a.log", b"one\n")
    client.write("b.log", b"two\n")
    client.settle()
    bad = next(s for name, s in client.agent.watch.sources.items() if "a.log" in name).tail
    for name in ("a.log", "b.log"):
        client.write(name, b"more\n")
    with monkeypatch.context() as patch:

        def broken(limit: int) -> bytes:
            raise OSError(5, "Input/output error")

        patch.setattr(bad, "read", broken)
        for _ in range(20):
            client.step()
        assert client.stored() == [b"one\n", b"two\nmore\n"]
    assert caplog.text.count("file-unreadable") == 1
    for _ in range(20):
        client.step(400.0)
    assert client.stored() == [b"one\nmore\n", b"two\nmore\n"]


def test_pauses_grow_up_to_a_limit_and_are_not_all_alike(monkeypatch):
    first, longest = RETRY_S
    for number in range(1, 50):
        pauses = {pause_s(number, RETRY_S) for _ in range(20)}
        step = min(first * 2 ** (number - 1), longest)
        assert all(step / 2 <= pause <= step for pause in pauses)
        assert len(pauses) > 1
    monkeypatch.setattr(source_module.random, "uniform", lambda low, high: high)
    assert pause_s(10_000, RETRY_S) == longest
