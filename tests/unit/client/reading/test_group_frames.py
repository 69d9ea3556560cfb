"""What a consumer's frames mean to its reader. No I/O."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.client import Chunk, Rejected
from logferry.client.reading.prefetch import (
    GroupMembership,
    PartitionsRevoked,
    has_news,
)
from logferry.client.reading.subscription import ReadOffset

A, B = ("dc1.t", 0), ("dc1.t", 1)


def chunk(offset: int, partition: int = 0, data: bytes = b"x\n") -> Chunk:
    return Chunk("dc1", "dc1.t", partition, offset, "s", offset + 1, None, 1, 2, {}, data)


def frame(one: Chunk) -> dict[str, Any]:
    return {"frame": "chunk", **one._asdict()}


def assigned(generation: int, **starts: int) -> dict[str, Any]:
    partitions = [{"topic": "dc1.t", "partition": int(name[1:]), "offset": at} for name, at in starts.items()]
    return {"frame": "assigned", "generation": generation, "partitions": partitions}


def session(name: str) -> dict[str, Any]:
    return {"frame": "session", "session": name, "consumer": "c"}


def caught_up(partition: int, offset: int) -> dict[str, Any]:
    return {"frame": "caught_up", "partitions": [{"topic": "dc1.t", "partition": partition, "offset": offset}]}


def offsets(member: GroupMembership, *frames: dict[str, Any]) -> list[int]:
    """Feeds the frames, and hands out what is to be."""
    member.feed(frames)
    out = []
    while (one := member.next_chunk()) is not None:
        member.reach(one, ReadOffset(one.offset + 1))
        out.append(one.offset)
    return out


def test_what_was_handed_out_does_not_come_twice_after_a_break() -> None:
    member = GroupMembership({}, True)
    assert offsets(member, session("1"), assigned(1, p0=0), *(frame(chunk(n)) for n in range(5))) == [0, 1, 2, 3, 4]
    assert offsets(member, session("2"), assigned(2, p0=0), *(frame(chunk(n)) for n in range(8))) == [5, 6, 7]


def test_a_consumer_that_was_set_back_is_read_again() -> None:
    member = GroupMembership({}, True)
    offsets(member, session("1"), assigned(1, p0=0), *(frame(chunk(n)) for n in range(5)))
    body = member.to_commit()
    assert body is not None
    member.committed(body)
    assert offsets(member, session("2"), assigned(2, p0=1), frame(chunk(1)), frame(chunk(2))) == [1, 2]


def test_it_continues_at_the_position_that_others_reached() -> None:
    member = GroupMembership({}, True)
    offsets(member, session("1"), assigned(1, p0=0), frame(chunk(0)))
    assert offsets(member, assigned(3, p0=10), frame(chunk(10))) == [10]
    assert member.position[A] == ReadOffset(11)


def test_what_lies_below_a_stored_position_is_dropped() -> None:
    member = GroupMembership({A: ReadOffset(3)}, True)
    assert offsets(member, session("1"), assigned(1, p0=0), *(frame(chunk(n)) for n in range(5))) == [3, 4]


def test_a_commit_names_what_was_handed_out_of_what_is_held() -> None:
    member = GroupMembership({}, True)
    assert member.to_commit() is None
    offsets(member, session("1"), assigned(7, p0=0, p1=5), frame(chunk(0)), frame(chunk(1)), caught_up(1, 9))
    body = member.to_commit()
    assert body == {
        "generation": 7,
        "positions": [
            {"topic": "dc1.t", "partition": 0, "offset": 2},
            {"topic": "dc1.t", "partition": 1, "offset": 9},
        ],
    }
    member.committed(body)
    assert member.to_commit() is None
    assert member.lost() == []


def damaged(partition: int) -> dict[str, Any]:
    found = {"detail": f"dc1.t-{partition}: the batch at offset 5 has a wrong checksum"}
    return {"frame": "damaged", "topic": "dc1.t", "partition": partition, "offset": 5, "problem": found}


def test_a_damaged_partition_ends_a_reader_to_the_end_after_the_others() -> None:
    member = GroupMembership({}, False)
    opening = session("1"), assigned(1, p0=0, p1=0), damaged(0)
    assert offsets(member, *opening, frame(chunk(0, 1)), frame(chunk(1, 1))) == [0, 1]
    with pytest.raises(Rejected, match=r"dc1\.t-0: the batch at offset 5"):
        offsets(member, caught_up(1, 2))


def test_a_damaged_partition_that_is_mended_is_read_to_the_end() -> None:
    member = GroupMembership({}, False)
    opening = session("1"), assigned(1, p0=0, p1=0), damaged(0)
    assert offsets(member, *opening, frame(chunk(0)), caught_up(1, 2), frame(chunk(1))) == [0, 1]
    assert not member.is_over
    offsets(member, caught_up(0, 2))
    assert member.is_over


def test_a_reader_that_follows_waits_for_a_damaged_partition() -> None:
    member = GroupMembership({}, True)
    opening = session("1"), assigned(1, p0=0, p1=0), damaged(0)
    assert offsets(member, *opening, caught_up(1, 2), frame(chunk(0))) == [0]


def test_a_lost_partition_is_reported_once() -> None:
    member = GroupMembership({}, True)
    offsets(member, session("1"), assigned(1, p0=0, p1=0), frame(chunk(0)), frame(chunk(0, 1)))
    offsets(member, assigned(2, p1=0))
    assert member.lost() == [A]
    assert member.lost() == []
    body = member.to_commit()
    assert body is not None
    assert [p["partition"] for p in body["positions"]] == [1]


def test_a_revocation_is_reported_after_all_chunks_before_it() -> None:
    member = GroupMembership({}, True)
    member.feed([session("1"), assigned(1, p0=0), frame(chunk(0)), {"frame": "revoked", "generation": 1}])
    assert member.next_chunk() is not None
    with pytest.raises(PartitionsRevoked):
        member.next_chunk()
    assert member.to_commit() is None, "the chunk was not reached"
    member.reach(chunk(0), ReadOffset(1))
    assert member.to_commit() is not None, "the gateway waits a moment for it"


@pytest.mark.parametrize("follow", [True, False])
def test_the_end_is_where_all_that_is_held_is_caught_up(follow: bool) -> None:
    member = GroupMembership({}, follow)
    offsets(member, session("1"), assigned(1, p0=0, p1=0), caught_up(0, 0), frame(chunk(0, 1)))
    assert not member.is_over
    offsets(member, caught_up(1, 1))
    assert member.is_over is not follow


def test_a_session_that_only_begins_and_fails_is_no_news() -> None:
    error = {"frame": "error", "problem": {}}
    assert not has_news([session("1"), error])
    assert has_news([session("1"), assigned(1, p0=0), error])


def test_what_is_no_frame() -> None:
    with pytest.raises(ValueError, match="not a session"):
        GroupMembership({}, True).feed([60, 104])


def test_an_error_frame_is_raised_after_what_came_before() -> None:
    member = GroupMembership({}, True)
    gone = {"type": "https://h/unknown-topic", "status": 404, "detail": "it was deleted"}
    member.feed([session("1"), assigned(1, p0=0), frame(chunk(0)), {"frame": "error", "problem": gone}])
    assert member.next_chunk() is not None
    with pytest.raises(Rejected, match="deleted"):
        member.next_chunk()
