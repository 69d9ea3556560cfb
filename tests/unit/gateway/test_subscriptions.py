"""Subscriptions as operators change them: replays that cover others, dead letters that would come back, names."""

from __future__ import annotations

import asyncio

import pytest
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.delivery import progress
from logferry.gateway.delivery.batch import BatchShape, DeliveryBatch
from logferry.gateway.delivery.sender import BatchSender
from logferry.gateway.subscriptions import NAME, AllowedAddresses, PushSubscription, Replay, StoredSubscription


def stored(**changes: object) -> StoredSubscription:
    definition = PushSubscription.model_validate({"topics": ["dc1.a"], "url": "https://example.org", **changes})
    return StoredSubscription(id="x", created_ms=1000, definition=definition)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "ä", "a b", "a" * 101, "a\n", "a\0"])
def test_names_that_no_path_brings_back_are_none(name: str) -> None:
    assert not NAME.match(name)


def test_a_replay_replaces_those_that_it_covers_and_no_other_is_left_out() -> None:
    """A worker that is away sees all of them when it comes back."""
    one = stored()
    for partition in range(3):
        one = one.replayed(Replay(topic="dc1.a", partition=partition, offset=0))
    one = one.replayed(Replay(cursor="dc1.a:1:7"))
    assert [replay.position.place for replay in one.replays] == [("dc1.a", 0), ("dc1.a", 2), ("dc1.a", 1)]
    assert [replay.number for replay in one.replays] == [1001, 1003, 1004]
    assert len(one.replayed(Replay(topic="dc1.b", time_ms=1)).replays) == 4
    assert len(one.replayed(Replay(topic="dc1.a", time_ms=1)).replays) == 1
    assert len(one.replayed(Replay(offset="earliest")).replays) == 1
    for partition in range(10, 1007):
        one = one.replayed(Replay(topic="dc1.a", partition=partition, offset=0))
    with pytest.raises(ValueError, match="replay the whole topic"):
        one.replayed(Replay(topic="dc1.a", partition=5000, offset=0))
    assert one.replayed(Replay(topic="dc1.a", offset="earliest")).last_replay == 2002


@pytest.mark.parametrize(
    "position",
    [
        {"cursor": "dc1.a:1:7"},
        {"time_ms": 5},
        {"offset": "latest"},
        {"offset": 7, "topic": "dc1.a", "partition": 0},
        {"time_ms": 5, "topic": "dc1.a"},
    ],
)
def test_every_replay_can_be_read_back(position: dict[str, object]) -> None:
    """What cannot be read back is a subscription that delivers nothing any more."""
    one = stored().replayed(Replay.model_validate(position))
    assert StoredSubscription.decode(one.encode()) == one


def test_a_subscription_made_again_is_a_replay_to_a_receiver_and_its_epochs_are_higher() -> None:
    """The receiver forgets the offset, and does not take the worker for one that was replaced."""
    first = progress.begun("x", b"t" * 16, 0, now_ms=2000, created_ms=1000, resumed=0)
    replayed = progress.replayed(first, stored().replayed(Replay(offset="earliest")).last_replay, b"t" * 16, 0)
    assert replayed.replay == 1001
    again = progress.begun("y", b"t" * 16, 0, now_ms=3000, created_ms=2500, resumed=0)
    assert (again.replay, again.epoch) > (replayed.replay, replayed.epoch)
    forgotten = progress.begun("x", b"t" * 16, 0, now_ms=3000, created_ms=1000, resumed=0)
    assert (forgotten.replay, forgotten.epoch) > (first.replay, first.epoch)


@pytest.mark.parametrize(
    ("topics", "letters", "is_good"),
    [
        (["dc1.a"], "b", True),
        (["dc1.a"], "a", False),
        (["*.a"], "a", False),
        (["dc2.*"], "a", True),
        (["*"], "b", False),
    ],
)
def test_dead_letters_that_would_come_back_are_refused(topics: list[str], letters: str, is_good: bool) -> None:
    definition = stored(topics=topics, on_rejection="split", dead_letter_topic=letters).definition
    if is_good:
        definition.check_dead_letters("dc1")
    else:
        with pytest.raises(ValueError, match="would come back"):
            definition.check_dead_letters("dc1")


# ---- receivers ----------------------------------------------------------------------------------------------------


async def _attempt(answer: bytes, *, closed: bool = False) -> str:
    """The detail of an attempt at a receiver that answers with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    definition = stored(url=f"http://127.0.0.1:{port}/", timeout_s=5).definition
    sender = BatchSender(definition, None, AllowedAddresses(["127.0.0.0/8"]))
    if closed:
        await sender.close()
    try:
        batch = DeliveryBatch(0, 1, [("dc1", "dc1.a", 0, 0, "s", 1, None, 1, 1, {}, b"body")], [b"body"])
        outcome = await sender.attempt(UnitKey("s", "dc1.a", 0), batch, BatchShape(definition.shape, 0), 1, 0)
    finally:
        await sender.close()
        server.close()
    assert outcome.kind in ("again", "rejected")
    return outcome.detail


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xfe\xfd",
        b"HTTP/1.1 500 \xff\xfe\r\n\r\n",
        b"HTTP/1.1 999999 x\r\n\r\n",
        b"HTTP/1.1 422 x\r\nContent-Length: 4\r\n\r\n\xff\x1b[1",
        b"HTTP/1.1 200 x\r\n\xff\xfe: y\r\n\xff\r\n\r\n",
        b"HTTP/1.1 503 x\r\nRetry-After: \xff\xfe\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 422 x\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx",
        b"x" * 100_000,
    ],
)
async def test_what_a_receiver_says_fits_into_a_state(answer: bytes) -> None:
    """The state of a unit is in a transaction with others: bytes that cannot be written would harm all of them."""
    state = DeliveryState("id", b"t" * 16, 1, 0)
    detail = await _attempt(answer)
    assert detail.isprintable()
    for changed in (progress.failed(state, detail, 1), progress.stopped(state, "rejected", detail, 1)):
        assert DeliveryState.decode(changed.encode()) == changed


async def test_an_attempt_after_the_subscription_was_changed_fails_and_nothing_else() -> None:
    assert "changed or removed" in await _attempt(b"HTTP/1.1 500 x\r\n\r\n", closed=True)
