"""Offset pairs and their history: what is stored byte for byte, and that every offset is found in few steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from logferry.gateway.contract.mirror_state import (
    BlockPointer,
    DamagedMirrorState,
    HistoryBlock,
    MirrorCheckpoint,
    OffsetRange,
    OriginalPosition,
    checkpoint_key,
    composed,
    merged,
    mirror_lane_of,
    partition_of_key,
    partitions_of_lane,
    pointers_after,
    step_towards,
    within,
)

ID, LOCAL = b"i" * 16, b"l" * 16
POSTS = (BlockPointer(9, 700, 800), BlockPointer(5, 300, 400))


def test_a_state_byte_for_byte() -> None:
    state = MirrorCheckpoint(ID, LOCAL, 1000, 1200, 990, 7, 0xFFEEDDCC, 1_700_000_000_000, 3, POSTS)
    raw = (
        b"\x01" + ID + LOCAL + b"\0\0\0\0\0\0\x03\xe8\0\0\0\0\0\0\x04\xb0\0\0\0\0\0\0\x03\xde\0\0\0\x07\xff\xee\xdd\xcc"
        b"\0\0\x01\x8b\xcf\xe5\x68\0\x03\x09\xbc\x05\xa0\x06\x05\xac\x02\x90\x03"
    )
    assert state.encode() == raw
    assert MirrorCheckpoint.decode(raw) == state


def test_the_state_of_a_copy_of_a_copy_names_the_original() -> None:
    state = MirrorCheckpoint(ID, LOCAL, 1000, 1200, 990, 7, 0xFFEEDDCC, 1_700_000_000_000, 3, POSTS)
    assert state.original == OriginalPosition(ID, 1000)
    for pointers in (POSTS, ()):
        for original in (OriginalPosition(b"o" * 16, 650), OriginalPosition(b"\0" * 15 + b"o", 0)):
            chained = replace(state, pointers=pointers, chained=original)
            assert MirrorCheckpoint.decode(chained.encode()) == chained
            assert chained.original == original
            assert chained.encode().startswith(replace(state, pointers=pointers).encode())


def test_two_steps_are_composed_to_one() -> None:
    """Against the same by single records, with holes in either step."""
    for seed in range(300):
        rng = random.Random(seed)
        first, second = _random_runs(rng), _random_runs(rng)
        by_record = {run.local + i: run.source + i for run in first for i in range(run.size)}
        wanted = {
            by_record[run.source + i]: run.local + i
            for run in second
            for i in range(run.size)
            if run.source + i in by_record
        }
        found = composed(first, second)
        assert {run.source + i: run.local + i for run in found for i in range(run.size)} == wanted, f"seed {seed}"
        assert merged(found) == found
        assert all(run.size > 0 for run in found)


def test_what_runs_say_of_a_range_begins_and_ends_with_it() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        ranges, first = _random_runs(rng), rng.randrange(30)
        last = first + rng.randrange(30)
        wanted = [
            (run.source + i, run.local + i) for run in ranges for i in range(run.size) if first <= run.local + i <= last
        ]
        found = within(ranges, first, last)
        assert [(run.source + i, run.local + i) for run in found for i in range(run.size)] == wanted, f"seed {seed}"
        assert all(run.size > 0 for run in found)


def _random_runs(rng: random.Random) -> list[OffsetRange]:
    ranges, source, local = [], 0, 0
    for _ in range(rng.randrange(12)):
        source, local, size = source + rng.randrange(4), local + rng.randrange(4), rng.randrange(1, 6)
        ranges.append(OffsetRange(source, local, size))
        source, local = source + size, local + size
    return ranges


def test_a_block_byte_for_byte() -> None:
    block = HistoryBlock(ID, 3, POSTS, (OffsetRange(1000, 1200, 10), OffsetRange(1012, 1211, 5)))
    raw = (
        b"\x01" + ID + b"\0\0\0\0\0\0\0\x03\x02\x09\xbc\x05\xa0\x06\x05\xac\x02\x90\x03\xe8\x07\xb0\x09\x0a\x02\x01\x05"
    )
    assert block.encode() == raw
    assert HistoryBlock.decode(raw) == block


@pytest.mark.parametrize("raw", [b"", b"\x01", b"\x02" + bytes(60), b"\x01" + bytes(61) + b"\x80"])
def test_undecodable_state_is_reported_as_damaged(raw: bytes) -> None:
    with pytest.raises(DamagedMirrorState):
        MirrorCheckpoint.decode(raw)
    with pytest.raises(DamagedMirrorState):
        HistoryBlock.decode(raw)


def test_keys_name_a_topic_and_a_partition() -> None:
    assert checkpoint_key("dc1.nginx", 300) == b"dc1.nginx\0\0\0\x01\x2c"
    for number in (0, 300, 1 << 24):
        assert partition_of_key(checkpoint_key("dc1.nginx", number)) == ("dc1.nginx", number)
    for raw in (b"", b"dc1", b"dc1.nginx-0001"):
        with pytest.raises(DamagedMirrorState):
            partition_of_key(raw)


def test_runs_that_follow_each_other_on_both_sides_are_one() -> None:
    ranges = [
        OffsetRange(0, 0, 5),
        OffsetRange(5, 5, 5),
        OffsetRange(11, 10, 2),
        OffsetRange(13, 13, 1),
        OffsetRange(14, 14, 1),
    ]
    assert merged(ranges) == (OffsetRange(0, 0, 10), OffsetRange(11, 10, 2), OffsetRange(13, 13, 2))


class History:
    """Chapters as they would be stored, and the truth beside them: original offset → local offset."""

    def __init__(self, blocks: int, rng: random.Random) -> None:
        self.stored: dict[int, HistoryBlock] = {}
        self.truth: dict[int, int] = {}
        self.pointers: tuple[BlockPointer, ...] = ()
        source, local, offset = rng.randrange(3), 0, 0
        for number in range(blocks):
            ranges = []
            for _ in range(rng.choice((1, 1, 1, 3))):
                size = rng.choice((1, 2, 40))
                ranges.append(OffsetRange(source, local, size))
                self.truth.update((source + i, local + i) for i in range(size))
                source, local = source + size + rng.randrange(3), local + size + rng.randrange(2)
            offset += rng.randrange(1, 9)
            self.stored[offset] = HistoryBlock(ID, number, self.pointers, tuple(ranges))
            self.pointers = pointers_after(
                number, self.pointers, BlockPointer(offset, ranges[0].source, ranges[0].local)
            )
        self.end = source

    def find(self, offset: int, *, of_source: bool) -> tuple[HistoryBlock | None, int]:
        pointers, steps = self.pointers, 0
        while True:
            pointer, is_it = step_towards(pointers, offset, of_source=of_source)
            if pointer is None:
                return None, steps
            steps += 1
            block = self.stored[pointer.offset]
            if is_it:
                return block, steps
            pointers = block.pointers


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 16, 17, 64, 65, 500])
def test_every_offset_is_found_in_its_block_in_few_steps(blocks: int) -> None:
    history = History(blocks, random.Random(blocks))
    for source, local in history.truth.items():
        for offset, of_source in ((source, True), (local, False)):
            block, steps = history.find(offset, of_source=of_source)
            assert block is not None
            run = [r for r in block.ranges if 0 <= offset - (r.source if of_source else r.local) < r.size]
            assert len(run) == 1
            assert source - run[0].source == local - run[0].local
            assert steps <= 3 * (blocks.bit_length() // 2 + 1) + 1


def test_what_lies_before_the_first_block_is_in_none() -> None:
    history = History(50, random.Random(2))
    first = min(history.truth)
    assert history.find(first - 1, of_source=True)[0] is None


@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_each_partition_is_of_one_lane(lanes: int) -> None:
    for topic in ("dc1.nginx", "dc1.app", "x"):
        found = {number: lane for lane in range(lanes) for number in partitions_of_lane(topic, 10, lane, lanes)}
        assert found == {number: mirror_lane_of(topic, number, lanes) for number in range(10)}


def test_a_lane_that_is_none_any_more_has_no_partitions() -> None:
    """There were seven, and now there are three: lane 5 is not lane 2."""
    found = [len(partitions_of_lane("dc1.nginx", 10, lane, 3)) for lane in range(7)]
    assert (sum(found[:3]), found[3:]) == (10, [0, 0, 0, 0])
