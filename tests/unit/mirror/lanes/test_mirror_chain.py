"""Copies of copies: each record is known by its position in the original, and replication cycles stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from logferry.gateway.contract.mirror_state import (
    BlockPointer,
    HistoryBlock,
    MirrorCheckpoint,
    OffsetRange,
    OriginalPosition,
    checkpoint_key,
)
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.mirror.copy.batch_rewrite import CopiedBatch, committed_batches
from logferry.mirror.copy.partition import MirroredPartition
from logferry.mirror.lanes import chain as lanes_chain
from logferry.mirror.lanes.chain import ChainHistories, ChainStopped

from tests.support.mirror_lane import in_memory, topic
from tests.unit.mirror.copy.test_batch_rewrite import encoded, record

FIRST, MIDDLE, LOCAL = b"1" * 16, b"2" * 16, b"3" * 16
THERE = MirrorCheckpoint(FIRST, MIDDLE, 100, 50, 40, 0, 0, 0, 1, ())


class Books:
    """Of the middle of a chain; ``answers`` to one question after the other, the last one permanently."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    async def originals(self, tp: Any, first: int, last: int) -> Any:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def partition(checkpoint: MirrorCheckpoint | None = None, *, is_chained: bool = True) -> MirroredPartition:
    return MirroredPartition(
        topic="dc1.t",
        number=0,
        dc="dc2",
        source_id=MIDDLE,
        local_id=LOCAL,
        partition_bytes=1 << 20,
        checkpoint=checkpoint,
        clock_ms=lambda: 0,
        is_chained=is_chained,
    )


async def origin(moved: MirroredPartition, *answers: Any) -> lanes_chain.ChainOrigin | None:
    batches = committed_batches(memoryview(encoded(7, [record(7), record(8)])), [], 7).batches
    return await ChainHistories({"dc2": cast(OffsetTranslation, Books(*answers))}).origin(moved, batches)


async def test_what_is_no_copy_there_is_its_own_original() -> None:
    assert await origin(partition(is_chained=False)) is None


async def test_the_history_there_is_waited_for() -> None:
    ranges = [OffsetRange(70, 7, 2)]
    assert await origin(partition(), None, None, (THERE, ranges)) == lanes_chain.ChainOrigin(FIRST, ranges)


async def test_without_the_history_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_chain, "_HISTORY_WAIT_S", 0.05)
    for answer in (None, Problem("not-mirrored", "no mirror writes it"), OSError("away")):
        with pytest.raises(ChainStopped) as stopped:
            await origin(partition(), answer)
        assert stopped.value.kind == "origin-unknown"


async def test_what_comes_from_here_is_a_replication_cycle() -> None:
    with pytest.raises(ChainStopped) as stopped:
        await origin(partition(), (replace(THERE, source_id=LOCAL), [OffsetRange(70, 7, 2)]))
    assert stopped.value.kind == "replication-cycle"


async def test_what_is_here_already_is_not_written_again() -> None:
    here = replace(THERE, source_id=MIDDLE, local_id=LOCAL, chained=OriginalPosition(FIRST, 71))
    with pytest.raises(ChainStopped) as stopped:
        await origin(partition(here), (THERE, [OffsetRange(70, 7, 2)]))
    assert stopped.value.kind == "duplicate-records"
    after = replace(here, chained=OriginalPosition(FIRST, 70))
    assert await origin(partition(after), (THERE, [OffsetRange(70, 7, 2)])) is not None
    # Of another original, offsets start again.
    other = replace(here, chained=OriginalPosition(b"4" * 16, 71))
    assert await origin(partition(other), (THERE, [OffsetRange(70, 7, 2)])) is not None


def test_a_copy_of_a_copy_continues_from_the_original_itself() -> None:
    moved = partition(replace(THERE, source_id=MIDDLE, local_id=LOCAL, chained=OriginalPosition(FIRST, 71)))
    moved.source_id, moved.dc, moved.is_chained = FIRST, "dc1", False
    moved.rewind()
    assert (moved.stop, moved.position, moved.checks) == (None, 71, False)


NUMBERED = HistoryBlock(FIRST, 0, (), (OffsetRange(0, 0, 10),)).encode()
NOT_NUMBERED = HistoryBlock(FIRST, 0, (), ()).encode()


@pytest.mark.parametrize("damage", [b"\x02" + NUMBERED[1:], b"", NUMBERED[:-1], NOT_NUMBERED], ids=repr)
async def test_a_history_block_that_cannot_be_decoded_stops_only_what_needs_it(damage: bytes) -> None:
    state, history = "logferry.mirror.dc2.state", "logferry.mirror.dc2.pairs"
    there = in_memory("there", topic(state, 1), topic(history, 1))
    key, pointers = checkpoint_key("dc1.t", 0), (BlockPointer(0, 0, 0),)
    second = HistoryBlock(FIRST, 1, pointers, (OffsetRange(11, 10, 10),)).encode()
    end = replace(THERE, local_next=20, blocks=2, pointers=(BlockPointer(1, 11, 10),))
    there.records[state, 0] = [KafkaRecord(0, 0, key, end.encode(), [])]
    blocks = there.records[history, 0] = [KafkaRecord(at, 0, key, raw, []) for at, raw in enumerate((damage, second))]
    translation = OffsetTranslation(there, "logferry", "dc2")
    chains = ChainHistories({"dc2": translation})

    def batches(offset: int) -> list[CopiedBatch]:
        return committed_batches(memoryview(encoded(offset, [record(offset)])), [], offset).batches

    with pytest.raises(Problem, match=rf"kafka-unavailable: {history}-0 .* dc1.t-0 near offset 0; at offset 0: "):
        await translation.to_here(("dc1.t", 0), 5)
    with pytest.raises(ChainStopped, match="offset 0") as stopped:
        await chains.origin(partition(), batches(5))
    assert stopped.value.kind == "origin-unknown"
    # The block behind it is read, and after its repair it is, too.
    assert await translation.to_here(("dc1.t", 0), 15) == 14
    assert await chains.origin(partition(), batches(14)) == lanes_chain.ChainOrigin(FIRST, [OffsetRange(15, 14, 1)])
    blocks[0] = blocks[0]._replace(value=NUMBERED)
    assert await translation.to_here(("dc1.t", 0), 5) == 5
    assert await chains.origin(partition(), batches(5)) == lanes_chain.ChainOrigin(FIRST, [OffsetRange(5, 5, 1)])


@pytest.mark.parametrize("circle", ["to itself", "to a later one"])
async def test_a_history_whose_pointers_lead_in_a_circle_stops_only_what_follows_them(
    circle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, history = "logferry.mirror.dc2.state", "logferry.mirror.dc2.pairs"
    there = in_memory("there", topic(state, 1), topic(history, 1))
    key, first, second = checkpoint_key("dc1.t", 0), BlockPointer(0, 3, 0), BlockPointer(1, 11, 10)
    of_first, of_second = ((), second) if circle == "to itself" else ((second,), first)
    raw = [
        HistoryBlock(FIRST, 0, of_first, (OffsetRange(3, 0, 8),)).encode(),
        HistoryBlock(FIRST, 1, (of_second,), (OffsetRange(11, 10, 10),)).encode(),
    ]
    end = replace(THERE, local_next=20, blocks=2, pointers=(second,))
    there.records[state, 0] = [KafkaRecord(0, 0, key, end.encode(), [])]
    there.records[history, 0] = [KafkaRecord(at, 0, key, block, []) for at, block in enumerate(raw)]
    translation, read = OffsetTranslation(there, "logferry", "dc2"), list[int]()
    block = OffsetTranslation._block

    async def counted(self: OffsetTranslation, tp: TopicPartition, pointer: BlockPointer) -> HistoryBlock:
        read.append(pointer.offset)
        assert len(read) < 100
        return await block(self, tp, pointer)

    monkeypatch.setattr(OffsetTranslation, "_block", counted)
    with pytest.raises(Problem, match=rf"kafka-unavailable: {history}-0: .* of dc1.t-0 .* in a circle"):
        await translation.to_here(("dc1.t", 0), 1)
    with pytest.raises(Problem, match="in a circle"):
        await translation.originals(("dc1.t", 0), -1, 15)
    assert await translation.to_here(("dc1.t", 0), 15) == 14
