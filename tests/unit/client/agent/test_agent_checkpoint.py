"""What the client writes down, and when: before anything leaves, and no more than a hint."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from logferry.client.files import batches
from logferry.client.files.checkpoint import FILE, Checkpoint
from logferry.client.files.chunking import Piece

from tests.support.fake_gateway import FakeGateway


def test_the_gateways_word_goes_before_the_checkpoints(client: Any, gateway: FakeGateway) -> None:
    client.write("a.log", b"one\ntwo\n")
    client.settle()
    (stored,) = gateway.sources.values()
    stored.chunks.clear()
    stored.recorded = stored.base = None
    client.restart()
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(b"{")])
def test_a_lost_checkpoint_costs_doubles_under_new_names_and_no_bytes(
    client: Any, gateway: FakeGateway, damage: Any
) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    damage(client.root / "state" / FILE)
    client.restart()
    client.write("a.log", b"two\n")
    client.settle()
    assert client.stored() == [b"one\n", b"one\ntwo\n"]


def test_nothing_leaves_before_the_checkpoint_is_written(
    client: Any, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_a_full_disk_holds_up_new_sources_only(
    client: Any, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


@contextmanager
def no_file_grows_beyond(size: int) -> Iterator[None]:
    """A write behind that position fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("has_room", [False, True])
def test_a_reboot_while_the_disk_is_full_doubles_nothing(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_room: bool
) -> None:
    """Nothing is sent that a later start could not prove; with room for the layouts, lines are not held up."""
    monkeypatch.setattr("logferry.client.files.checkpoint.boot", lambda: "one")
    client.restart()
    client.write("z.log", b"x" * 2000 + b"\n")
    client.settle()

    def full() -> None:
        raise OSError(28, "No space left on device")

    for _ in range(20):
        client.write("z.log", b"old\n")
        with no_file_grows_beyond(batches.RESERVED_BYTES if has_room else 1), monkeypatch.context() as patch:
            patch.setattr(client.checkpoint, "save", full)
            client.step()
    assert "state-write-failed" in caplog.text
    assert client.stored() == [b"x" * 2000 + b"\n" + b"old\n" * (20 if has_room else 0)]
    client.close()
    monkeypatch.setattr("logferry.client.files.checkpoint.boot", lambda: "two")
    client.begin()
    client.settle()
    assert client.stored() == [b"x" * 2000 + b"\n" + b"old\n" * 20]


def test_the_layouts_have_room_and_follow_a_torn_one(tmp_path: Any) -> None:
    layout = batches.BatchLayout(0, (Piece(0, 4, None),), 7, "a", "b")
    log = batches.InFlightLog(tmp_path)
    log.begin([batches.SentBatch("one", layout, 0)])
    file = tmp_path / batches.FILE
    assert file.stat().st_blocks * 512 >= batches.RESERVED_BYTES
    log.add([batches.SentBatch("two", layout, 0)])
    log.close()
    file.write_bytes(file.read_bytes().rstrip(b"\0") + b'["torn", 0,')
    after = batches.InFlightLog(tmp_path)
    with no_file_grows_beyond(1), pytest.raises(OSError, match="large"):
        after.add([batches.SentBatch("three", layout, 0)])
    after.add([batches.SentBatch("three", layout, 0)])
    after.add([batches.SentBatch("four", layout, 0)])
    after.close()
    assert batches.load(tmp_path) == {name: [layout] for name in ("one", "two", "three", "four")}


def test_the_checkpoint_knows_the_source_when_the_request_leaves(client: Any, gateway: FakeGateway) -> None:
    """Every request finds on the disk what a client killed right after it needs."""
    seen = []

    class Spy(FakeGateway):
        def __call__(self, url: Any, headers: Any, body: Any, method: str = "POST") -> Any:
            stored = Checkpoint.peek(client.root / "state")
            seen.append({entry.source_id: entry.head.length for entry in stored.entries.values()})
            stored.close()
            return super().__call__(url, headers, body, method)

    client.pusher.exchange = spy = Spy()
    for text in (b"a\n", b"b\n", b"c" * 2000 + b"\n", b"d\n"):
        client.write("a.log", text)
        client.settle()
    assert [list(heads.values()) for heads in seen] == [[2], [2], [4], [1024], [1024]]
    assert all(heads.keys() == spy.sources.keys() for heads in seen)
