"""The decisions of a reader: positions, rows, turns of the partitions. No I/O."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import msgpack
import pytest
from logferry.client import Chunk, OutOfRange, Position, Rejected, Superseded
from logferry.client.reading.decode import MsgpackDecoder, NdjsonDecoder, decode_chunk
from logferry.client.reading.prefetch import (
    PageRequest,
    PartitionScheduler,
)
from logferry.client.reading.requests import RetryLater, content_of, error_of_problem, page_of
from logferry.client.reading.subscription import LONG_POLL_MS, ReadOffset
from logferry.client.transport.connections import Reply

A, B = ("dc1.t", 0), ("dc1.t", 1)


def chunk(offset: int, partition: int = 0, data: bytes = b"x\n") -> Chunk:
    return Chunk("dc1", "dc1.t", partition, offset, "s", offset + 1, None, 1, 2, {}, data)


# ---- positions and rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "dc1.nginx:0:17", "dc1.nginx:0:17,dc1.nginx:3:81234+5,dc2.a-b:1:0"])
def test_a_position_is_its_text(text: str) -> None:
    position = Position.parse(text)
    assert str(position) == text
    assert Position.parse(str(position)) == position


def test_a_position_says_how_many_lines_of_a_chunk_are_done() -> None:
    assert Position.parse("dc1.t:0:7+2")[A] == ReadOffset(7, 2)


@pytest.mark.parametrize("text", ["dc1.t", "dc1.t:0", "dc1.t:0:x", "dc1.t:0:1+", "dc1.t:0:1+x", "dc1.t:0:-1", ","])
def test_what_is_no_position(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        Position.parse(text)


@pytest.mark.parametrize(
    ("data", "lines"),
    [(b"", []), (b"a", [b"a"]), (b"a\n", [b"a"]), (b"\n", [b""]), (b"a\n\nb", [b"a", b"", b"b"]), (b"a\r\n", [b"a\r"])],
)
def test_lines_of_a_chunk(data: bytes, lines: list[bytes]) -> None:
    assert chunk(0, data=data).lines() == lines


def rows() -> list[Chunk]:
    texts = (b"a\nb\n", "ü\n".encode(), b"\xff\x00\n", b"", b"\n" * 5)
    return [chunk(number, data=data)._replace(prev=3, attributes={"a": "ö\n"}) for number, data in enumerate(texts)]


def object_of(row: Chunk) -> dict[str, Any]:
    from logferry.gateway.reading.formats import row_object

    return row_object(tuple(row))


ENCODED: dict[str, tuple[type[MsgpackDecoder | NdjsonDecoder], bytes]] = {
    "msgpack rows": (MsgpackDecoder, b"".join(msgpack.packb(list(row)) for row in rows())),
    "msgpack frames": (MsgpackDecoder, b"".join(msgpack.packb({"frame": "chunk", **row._asdict()}) for row in rows())),
}
if sys.version_info >= (3, 11):  # what the gateway needs
    for name, ascii_only in (("ndjson", True), ("ndjson, unescaped", False)):
        encoded = (json.dumps(object_of(row), ensure_ascii=ascii_only).encode() + b"\n" for row in rows())
        ENCODED[name] = (NdjsonDecoder, b"".join(encoded))


@pytest.mark.parametrize("name", ENCODED)
def test_rows_come_in_pieces_of_any_size(name: str) -> None:
    decoder, encoded = ENCODED[name]
    rng = random.Random(1)
    for most in (1, 3, 50, 10_000):
        format_, found, at = decoder(), [], 0
        while at < len(encoded):
            size = rng.randint(1, most)
            found += [decode_chunk(row) for row in format_.feed(encoded[at : at + size])]
            at += size
        assert found == rows()


# ---- answers ----------------------------------------------------------------------------------------------------


def reply(status: int, kind: str = "", **more: Any) -> Reply:
    document = {"type": f"https://h/problems/{kind}", "title": kind, "status": status, "detail": "why", **more}
    return Reply(status, {"retry-after": "7"}, json.dumps(document).encode())


@pytest.mark.parametrize("status", [429, 500, 502, 503, 408])
def test_what_is_to_be_asked_again(status: int) -> None:
    with pytest.raises(RetryLater) as again:
        content_of(reply(status, "any"))
    assert again.value.pause_s(1) >= 7


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (reply(404, "unknown-topic"), Rejected),
        (reply(403, "forbidden"), Rejected),
        (reply(409, "superseded"), Superseded),
        (reply(416, "out-of-range", first=5, next=9), OutOfRange),
        (Reply(404, {}, b"<html>"), Rejected),
    ],
)
def test_what_the_caller_must_hear_of(answer: Reply, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        content_of(answer)
    assert type(raised.value) is error


@pytest.mark.parametrize("body", [b"<html>", b"[1]\n", b'{"a": 1}\n'])
def test_what_is_not_a_gateway_s_page_is_asked_again(body: bytes) -> None:
    with pytest.raises(RetryLater):
        page_of(Reply(200, {"x-next-offset": "1"}, body))
    with pytest.raises(RetryLater):
        page_of(Reply(200, {}, b""))


def test_an_error_frame_that_may_pass() -> None:
    passing = error_of_problem({"type": "https://h/kafka-unavailable", "status": 503, "detail": "it is away"})
    assert isinstance(passing, RetryLater)


# ---- turns of the partitions ------------------------------------------------------------------------------------


class Served:
    """Partitions of ``sizes`` chunks, as the gateway answers; control records between them."""

    def __init__(self, *sizes: int) -> None:
        self.chunks = [[chunk(2 * n, number) for n in range(size)] for number, size in enumerate(sizes)]

    def page(self, ask: PageRequest, most: int = 3) -> tuple[list[Chunk], int]:
        there = [one for one in self.chunks[ask.partition[1]] if one.offset >= ask.offset][:most]
        return there, there[-1].offset + 2 if there else ask.offset


def rotation(slots: int, *ends: int | None) -> PartitionScheduler:
    found = PartitionScheduler(slots)
    for number, end in enumerate(ends):
        found.add(("dc1.t", number), ReadOffset(0), end)
    return found


def handed_out(found: PartitionScheduler) -> list[tuple[int, int]]:
    out = []
    while (one := found.next_chunk()) is not None:
        found.reach(one, ReadOffset(one.offset + 1))
        out.append((one.partition, one.offset))
    return out


@pytest.mark.parametrize("seed", range(100))
def test_every_chunk_once_in_the_order_of_its_partition_whatever_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(0, 20) for _ in range(rng.randint(1, 6))]
    served = Served(*sizes)
    turns = rotation(rng.randint(1, 4), *(2 * size for size in sizes))
    now, flying, out = 0.0, [], []
    while not turns.is_over:
        ask = turns.next_request(now)
        if ask is not None:
            flying.append(ask)
        if flying and rng.random() < 0.6:
            ask = flying.pop(rng.randrange(len(flying)))
            if rng.random() < 0.3:
                turns.fail(ask, RetryLater("away"), now)
            else:
                turns.take(ask, *served.page(ask))
        if rng.random() < 0.3:
            out += handed_out(turns)
        now += 0.5
    for number, size in enumerate(sizes):
        assert [offset for partition, offset in out if partition == number] == [2 * n for n in range(size)]
        assert turns.position["dc1.t", number].offset == 2 * size


def test_the_position_follows_what_is_handed_out_and_not_what_was_fetched() -> None:
    turns, served = rotation(2, None), Served(3)
    ask = turns.next_request(0)
    assert ask is not None
    turns.take(ask, *served.page(ask))
    assert turns.position[A] == ReadOffset(0)
    one = turns.next_chunk()
    assert one is not None
    turns.reach(one, ReadOffset(one.offset + 1))
    assert turns.position[A] == ReadOffset(1)
    handed_out(turns)
    assert turns.position[A] == ReadOffset(6), "past the control record behind the last one"


def test_no_more_pages_than_slots_are_held() -> None:
    turns, served = rotation(2, None, None, None), Served(5, 5, 5)
    for _ in range(2):
        ask = turns.next_request(0)
        assert ask is not None
        turns.take(ask, *served.page(ask))
    assert turns.next_request(0) is None
    handed_out(turns)
    assert turns.next_request(0) is not None


def test_a_partition_is_asked_for_one_page_at_a_time() -> None:
    turns = rotation(8, None, None)
    asks = [turns.next_request(0), turns.next_request(0)]
    assert {ask.partition for ask in asks if ask} == {A, B}
    assert turns.next_request(0) is None


def waits(turns: PartitionScheduler, count: int) -> list[int]:
    """The waits of the next requests, each of which finds nothing."""
    found = []
    for _ in range(count):
        ask = turns.next_request(0)
        assert ask is not None
        found.append(ask.wait_ms)
        turns.take(ask, [], ask.offset)
    return found


def test_long_polls_where_there_are_enough_slots() -> None:
    turns = rotation(2, None, None)
    assert waits(turns, 2) == [0, 0]
    assert waits(turns, 2) == [LONG_POLL_MS, LONG_POLL_MS]


def test_short_waits_where_there_are_not_and_none_while_others_have_news() -> None:
    turns = rotation(1, *[None] * 10)
    assert waits(turns, 10) == [0] * 10
    assert waits(turns, 3) == [100] * 3
    ask = turns.next_request(0)
    assert ask is not None
    turns.take(ask, [chunk(0, ask.partition[1])], 1)
    handed_out(turns)
    assert waits(turns, 5) == [0] * 5
