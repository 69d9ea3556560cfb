"""A copy against its original: what a killed run has proven is kept."""

from __future__ import annotations

from typing import cast

import pytest
from logferry.gateway.kafka.client import EARLIEST, KafkaClient
from logferry.gateway.kafka.requests import ClusterMetadata, PartitionMetadata, TopicMetadata
from logferry.ops.audit.compare.mirror_copy import Copies, CopyComparison
from logferry.ops.audit.records.batches import StoredRecord, StoredRecords

TOPIC = "dc1.nginx"
_PAGE = 10_000


class FakeKafka:
    """A topic of one partition with so many records, all of another program."""

    def __init__(self, records: int) -> None:
        self.records = records

    async def describe(self) -> ClusterMetadata:
        topic = TopicMetadata(TOPIC, bytes(16), False, (PartitionMetadata(0, 1, 0, (1,), (1,)),))
        return ClusterMetadata("c", {}, {TOPIC: topic}, {})

    async def offset(self, _topic: str, _partition: int, which: int) -> int:
        return 0 if which == EARLIEST else self.records

    async def answer(self, offset: int) -> StoredRecords:
        end = min(self.records, offset + _PAGE)
        return StoredRecords([StoredRecord(at, 1, None, b"v", []) for at in range(offset, end)], end, self.records)


async def test_the_proof_is_saved_meanwhile(monkeypatch: pytest.MonkeyPatch):
    answer = "logferry.ops.audit.compare.mirror_copy.fetch"
    monkeypatch.setattr(answer, lambda kafka, _place, offset, **_: kafka.answer(offset))
    proven: Copies = {}
    saved: list[tuple[int, int]] = []

    def save() -> None:
        saved.extend((copy.original, copy.copy) for copy in proven.values())

    there, here = (cast(KafkaClient, FakeKafka(50_000)) for _ in range(2))
    comparison = CopyComparison(there, here, "dc1", "dc1", "dc2", "logferry", lambda _: True, proven, save)
    report = await comparison.run([], lambda *_: None)
    assert (report.exact, report.partitions[0].compared) == (True, 50_000)
    assert saved == [(20_000, 20_000), (40_000, 40_000)]
