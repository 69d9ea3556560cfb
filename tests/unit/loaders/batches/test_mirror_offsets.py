"""A position in a copy is translated only when the offset history covers every record before it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from logferry.gateway.config import KafkaSettings
from logferry.gateway.contract.mirror_state import MirrorCheckpoint
from logferry.gateway.contract.names import TopicPartition, printed_topic_id
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.record_batch import FetchedRecords, KafkaRecord
from logferry.loaders.batches.mirror_offsets import MirrorOffsets
from logferry.loaders.planning.ledger_entry import OriginOffset
from logferry.loaders.planning.plan import Range

ORIGINAL, COPY = b"o" * 16, b"c" * 16
# Records at 3, 4 and 7 of the copy; markers at 5 and 8.
RECORDS, END = (3, 4, 7), 9

NOWHERE = KafkaSettings(bootstrap_servers="127.0.0.1:1")


class Kafka:
    """The copy. ``asked``: where fetches began."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def fetch(self, topic: str, partition: int, offset: int, *, max_bytes: int) -> FetchedRecords:
        self.asked.append(offset)
        records = [KafkaRecord(at, 0, b"", b"", []) for at in RECORDS if at >= offset]
        return FetchedRecords(records, END, END)


class Translation:
    """Books that are further each time they are asked for how far they are: 10 + offset is the original's."""

    def __init__(self, *ends: int) -> None:
        self.ends = list(ends)
        self.said = MirrorCheckpoint(ORIGINAL, COPY, 0, 0, -1, -1, 0, 0, 0, ())

    async def checkpoint(self, tp: TopicPartition) -> MirrorCheckpoint:
        if not self.ends:
            raise Problem("not-mirrored", "no mirror")
        local = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        self.said = replace(self.said, source_next=10 + local, local_next=local)
        return self.said

    async def to_original(self, tp: TopicPartition, here: int) -> int:
        return min(10 + here, self.said.original.next_offset)


async def asked(translation: Translation, end: int, topic_id: bytes = COPY) -> tuple[OriginOffset | None, list[int]]:
    books, kafka = MirrorOffsets(NOWHERE, "logferry", "dc1"), Kafka()
    books._kafka = kafka  # type: ignore[assignment]
    found = await books._original(translation, Range("dc2.a", 0, printed_topic_id(topic_id), end, end))  # type: ignore[arg-type]
    return found, kafka.asked


@pytest.mark.parametrize(
    ("ends", "end", "original"),
    [
        ((8,), 4, 14),  # in the midst of what they speak of
        ((8,), 8, 18),
        ((8,), 9, 18),  # behind the last record is a marker only
        ((5,), 6, 15),
        ((5, 5, 8), 9, 18),  # the record at 7 was not spoken of at first
        ((5, 8), 8, 18),
        ((3, 5), 5, 15),
    ],
)
async def test_a_position_beyond_the_history_is_waited_for(ends: tuple[int, ...], end: int, original: int):
    found, _ = await asked(Translation(*ends), end)
    assert found == OriginOffset("dc2.a", 0, printed_topic_id(ORIGINAL), original)


async def test_nothing_is_read_of_the_copy_where_the_history_is_ahead():
    assert (await asked(Translation(8), 7))[1] == []
    assert (await asked(Translation(8), 9))[1] == [8]


async def test_another_topic_of_that_name_and_no_mirror():
    assert await asked(Translation(8), 4, b"x" * 16) == (None, [])
    assert await asked(Translation(), 4) == (None, [])


def test_without_kafka_no_position_is_noted_and_no_time_is_lost():
    books = MirrorOffsets(NOWHERE, "logferry", "dc1")
    try:
        assert books.originals([Range("dc2.a", 0, "id", 0, 4)], 0.5) == []
    finally:
        books.close()
