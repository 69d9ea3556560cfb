"""The decisions of read sessions, without a broker: the frames, the start positions, and which commits are valid."""

from __future__ import annotations

import asyncio
import json
from unittest.mock import Mock

import msgpack
import pytest
from logferry.gateway.contract.chunk import MSGPACK, NDJSON
from logferry.gateway.contract.names import Malformed, TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.http.router import parse_query
from logferry.gateway.kafka.types import GroupMember
from logferry.gateway.reading import formats
from logferry.gateway.reading.assignment import SessionAssignment, Subscription, next_count
from logferry.gateway.reading.formats import Row, encoding
from logferry.gateway.reading.registry import named, worker_of
from logferry.gateway.reading.stream import FrameStream, ReaderGone, is_silent

A, B = ("dc1.t", 0), ("dc1.t", 1)


def held(generation: int = 3, starts: dict[TopicPartition, int] | None = None) -> SessionAssignment:
    assignment = SessionAssignment()
    hold(assignment, generation, starts or {A: 5})
    return assignment


def hold(assignment: SessionAssignment, generation: int, starts: dict[TopicPartition, int]) -> None:
    assignment.grant(GroupMember(generation, "m"), starts)
    assert assignment.granted is not None
    assert assignment.hold(assignment.granted, starts)


# ---- the frames that the reader receives ---------------------------------------------------------------------


def test_assigned_is_sent_once_and_revoked_before_the_next() -> None:
    assignment = held()
    assert assignment.due() == [formats.assigned(3, {A: 5})]
    assert assignment.due() == []
    assignment.revoke()
    assert assignment.due() == [formats.revoked(3, [A])]
    assert assignment.due() == []
    hold(assignment, 4, {B: 7})
    assert assignment.due() == [formats.assigned(4, {B: 7})]


def test_two_changes_that_meet_are_sent_in_order() -> None:
    assignment = held()
    assignment.due()
    assignment.revoke()
    hold(assignment, 4, {A: 6})
    assignment.revoke()
    hold(assignment, 5, {B: 1})
    assert assignment.due() == [formats.revoked(3, [A]), formats.assigned(5, {B: 1})]


def test_a_grant_that_is_revoked_before_it_is_held_is_never_sent() -> None:
    assignment = SessionAssignment()
    assignment.grant(GroupMember(1, "m"), [A])
    granted = assignment.granted
    assert granted is not None
    assignment.revoke()
    assert not assignment.hold(granted, {A: 0})
    assignment.grant(GroupMember(2, "m"), [A])
    assert not assignment.hold(granted, {A: 0}), "of a generation that has passed"
    assert assignment.held is None
    assert assignment.due() == []


def test_a_new_grant_alone_takes_the_held_ones() -> None:
    assignment = held()
    assignment.due()
    assignment.grant(GroupMember(4, "m"), [A])
    assert assignment.held is None
    assert assignment.due() == [formats.revoked(3, [A])]


def test_caught_up_is_sent_once_until_it_moves() -> None:
    assignment = held().held
    assert assignment is not None
    assert not assignment.caught_up(A, 5, 6)
    assert assignment.caught_up(A, 6, 6)
    assert not assignment.caught_up(A, 6, 6)
    assert assignment.caught_up(A, 8, 7), "the end was looked at before the position"
    assert assignment.reached == {A: 8}


# ---- commits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generation", "partition"), [(2, A), (4, A), (3, B)])
def test_a_commit_of_another_generation_or_partition_is_superseded(generation: int, partition: TopicPartition) -> None:
    with pytest.raises(Problem) as caught:
        held().may_commit(generation, [A, partition])
    assert caught.value.kind == "superseded"


def test_a_commit_is_good_after_the_revocation_until_the_next_assignment() -> None:
    assignment = held()
    assignment.revoke()
    assert assignment.may_commit(3, [A]).member == GroupMember(3, "m")
    hold(assignment, 4, {A: 6})
    with pytest.raises(Problem):
        assignment.may_commit(3, [A])


def test_nothing_may_be_committed_before_anything_is_held() -> None:
    with pytest.raises(Problem):
        SessionAssignment().may_commit(0, [])


def test_settled_means_that_what_was_delivered_is_committed() -> None:
    standing = held(starts={A: 5, B: 0})
    assignment = standing.held
    assert assignment is not None
    assert standing.is_settled
    assignment.deliver(A, 6)
    assignment.deliver(B, 1)
    assignment.deliver(A, 9)
    assignment.commit({A: 8, B: 4})
    assert not standing.is_settled
    standing.revoke()
    assert not standing.is_settled
    assignment.commit({A: 9})
    assert standing.is_settled
    assert SessionAssignment().is_settled


# ---- how much it takes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "records", "size", "expected"),
    [
        (1, 0, 0, 1),  # nothing came
        (4, 4, 40, 8),  # small ones: grows by doubling
        (900, 900, 9, 1000),  # up to the most
        (512, 512, 512 * 1000, 10),  # large ones: shrinks at once
        (512, 2, 100_000, 1),  # never below one
        (7, 7, 0, 14),  # empty ones
    ],
)
def test_how_many_records_are_taken_next(count: int, records: int, size: int, expected: int) -> None:
    assert next_count(count, records, size, target_bytes=10_000, most=1000) == expected


# ---- formats -----------------------------------------------------------------------------------------------

ROW: Row = ("dc1", "dc1.t", 2, 11, "web/ä", 7, None, 5, 6, {"host": "ü"}, b"\xff\n")


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [("", MSGPACK), ("*/*", MSGPACK), (MSGPACK, MSGPACK), (f"text/html, {NDJSON};q=0.5", NDJSON)],
)
def test_the_format_is_chosen_by_accept(accept: str, media_type: str) -> None:
    assert encoding(accept).media_type == media_type


@pytest.mark.parametrize("accept", ["text/plain", "image/png", "x"])
def test_a_format_that_is_not_known_is_refused(accept: str) -> None:
    with pytest.raises(Problem):
        encoding(accept)


def test_frames_in_both_formats_say_the_same() -> None:
    problem = Problem("out-of-range", "why", first=3)
    every = [
        formats.session("id", "c"),
        formats.assigned(3, {B: 1, A: 5}),
        formats.revoked(3, [B, A]),
        formats.caught_up({A: 9}),
        formats.KEEP_ALIVE,
        formats.error(problem),
    ]
    packed, lines = encoding(MSGPACK), encoding(NDJSON)
    unpacker = msgpack.Unpacker()
    unpacker.feed(b"".join(map(packed.frame, every)))
    assert list(unpacker) == every
    assert [json.loads(line) for line in b"".join(map(lines.frame, every)).splitlines()] == every
    assert every[1]["partitions"] == [
        {"topic": "dc1.t", "partition": 0, "offset": 5},
        {"topic": "dc1.t", "partition": 1, "offset": 1},
    ]


def test_golden_chunk_frames() -> None:
    assert (
        encoding(NDJSON).chunk(ROW)
        == (
            '{"frame": "chunk", "dc": "dc1", "topic": "dc1.t", "partition": 2, "offset": 11, "source_id": "web/ä",'
            ' "seqno": 7, "prev": null, "created_ms": 5, "recorded_ms": 6, "attributes": {"host": "ü"},'
            ' "data_base64": "/wo="}\n'
        ).encode()
    )
    assert msgpack.unpackb(encoding(MSGPACK).chunk(ROW)) == {
        "frame": "chunk",
        "dc": "dc1",
        "topic": "dc1.t",
        "partition": 2,
        "offset": 11,
        "source_id": "web/ä",
        "seqno": 7,
        "prev": None,
        "created_ms": 5,
        "recorded_ms": 6,
        "attributes": {"host": "ü"},
        "data": b"\xff\n",
    }


# ---- what is wanted ----------------------------------------------------------------------------------------


def test_patterns_mean_what_may_be_read_and_names_what_was_named() -> None:
    names = ["dc1.nginx", "dc2.nginx", "dc2.squid", "dc1.own", "__consumer_offsets", "logferry.gateway.dc1.state"]
    wanted = Subscription(
        "c", frozenset({"dc1.own"}), ("*.nginx", "dc2.*", "*.state"), lambda name: name[:3] in ("dc1", "dc2")
    )
    assert wanted.among(names) == {"dc1.nginx", "dc2.nginx", "dc2.squid", "dc1.own"}


def test_filters_must_all_pass() -> None:
    wanted = Subscription("c", frozenset(), (), lambda _: True, "web1", {"a": "1", "b": "2"})
    assert wanted.passes("web11", {"a": "1", "b": "2", "c": "3"})
    assert not wanted.passes("web2", {"a": "1", "b": "2"})
    assert not wanted.passes("web1", {"a": "1"})
    assert not wanted.passes("web1", {"a": "1", "b": "3"})


def test_names_that_may_be_repeated_are_apart() -> None:
    lists: dict[str, list[str]] = {"topic": []}
    assert parse_query("topic=a&from=x&topic=b%2Fc&topic=", lists) == {"from": "x"}
    assert lists == {"topic": ["a", "b/c", ""]}
    with pytest.raises(Malformed):
        parse_query("from=x&from=y", {"topic": []})


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "https://gateway-1.example:443", "http://[::1]:1"])
def test_a_sessions_id_names_its_worker(url: str) -> None:
    assert worker_of(f"{named(url)}.0a1b") == url
    assert "/" not in named(url)


@pytest.mark.parametrize("text", [".x", "a", "ä.x", "%.x", "_w.x", "a b.c"])
def test_other_ids_name_no_worker_that_there_is(text: str) -> None:
    assert worker_of(text) in (None, "")


# ---- writing -----------------------------------------------------------------------------------------------


class FakeStream(FrameStream):
    """A connection that takes what it is sent while ``open`` is set."""

    def __init__(self, stall_s: float = 300) -> None:
        super().__init__(Mock(transport=None), Mock(), encoding(NDJSON), stall_s)
        self.sent: list[bytes] = []
        self.open, self.is_sent_to = asyncio.Event(), asyncio.Event()
        self.gone = self.was_cut = False
        self.error: Exception | None = None

    def is_gone(self) -> bool:
        return self.gone

    async def send(self, data: bytes) -> None:
        self.is_sent_to.set()
        await self.open.wait()
        if self.error is not None:
            raise self.error
        self.sent.append(data)

    def cut(self) -> None:
        self.was_cut = True


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    reader = FakeStream(stall_s=0.01)
    with pytest.raises(ReaderGone, match="took nothing"):
        await reader.write(b"x")
    assert reader.was_cut


async def test_a_reader_that_goes_while_it_is_waited_for_is_noticed() -> None:
    reader = FakeStream()
    writing = asyncio.create_task(reader.write(b"x"))
    await reader.is_sent_to.wait()
    reader.gone = True
    with pytest.raises(ReaderGone, match="broke off"):
        await writing
    assert reader.was_cut
    assert reader.sent == []


async def test_a_connection_error_means_gone() -> None:
    reader = FakeStream()
    reader.open.set()
    reader.error = ConnectionResetError("by peer")
    with pytest.raises(ReaderGone, match="by peer"):
        await reader.send_frames([formats.KEEP_ALIVE])


async def test_keep_alive_is_sent_in_silence_alone() -> None:
    reader = FakeStream()
    reader.open.set()
    await reader.send_frames([])
    assert reader.sent == []
    await reader.send_frames([formats.session("id", "c")])
    await reader.keep_alive()
    assert len(reader.sent) == 1


@pytest.mark.parametrize(
    ("retransmits", "probes", "silent"), [(0, 0, False), (4, 4, False), (5, 0, True), (0, 5, True), (9, 9, True)]
)
def test_silence_is_what_the_kernel_counts(retransmits: int, probes: int, silent: bool) -> None:
    assert is_silent(bytes([1, 0, retransmits, probes, 3, 0, 0, 0])) is silent
