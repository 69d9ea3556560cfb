"""Decides from a history of answers and from what is stored whether the promise was kept. This is its specification:

* a chunk with an answer ``ok`` in any attempt is stored exactly once, with the bytes that were sent;
* a chunk whose attempts were all answered ``fail`` ("surely not recorded") is not stored;
* any other chunk (an answer is ``unknown``, none is ``ok``) is stored at most once;
* nothing is stored that was never sent;
* the chunks of a source stand in one partition, their seqnos rise with the offsets, and each ``prev`` that was
  given is the seqno of the chunk before it;
* where the topic was deleted and recreated, all of this holds for the new one: what was acknowledged to an attempt
  that began before the older one was gone may be gone with it.

What is stored is read by a plain Kafka consumer, not through the code that is under test.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from logferry.gateway.contract.chunk import chunk_of_record

Answer = Literal["ok", "fail", "unknown"]
Chunk = tuple[str, int]


class Stored(NamedTuple):
    """One record as Kafka has it."""

    source: str
    partition: int
    offset: int
    seqno: int
    prev: int | None
    digest: bytes


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=12).digest()


@dataclass
class History:
    """What was sent and what was answered. ``protests``: answers that no correct gateway gives to a correct client."""

    answers: dict[Chunk, set[Answer]] = field(default_factory=lambda: defaultdict(set))
    sent: dict[Chunk, bytes] = field(default_factory=dict)
    protests: list[str] = field(default_factory=list)
    attempts: Counter[Chunk] = field(default_factory=Counter)
    incarnation: int = 0

    def note(self, source: str, seqno: int, data: bytes, answer: Answer, began_in: int | None = None) -> None:
        """``began_in``: the incarnation of the topic when the attempt was made; None: the present one."""
        if answer == "ok" and began_in not in (None, self.incarnation):
            answer = "unknown"
        self.answers[source, seqno].add(answer)
        self.attempts[source, seqno] += 1
        self.sent[source, seqno] = digest(data)

    def topic_removed(self) -> None:
        """To be called when no broker knows of the topic any more, before a new one is there."""
        self.incarnation += 1
        for answers in self.answers.values():
            if "ok" in answers:
                answers.remove("ok")
                answers.add("unknown")

    def acknowledged(self) -> int:
        """Chunks, of the present incarnation of the topic."""
        return sum("ok" in answers for answers in self.answers.values())


def violations(history: History, stored: list[Stored]) -> list[str]:
    """Every way in which the promise was broken; empty when it was kept."""
    return history.protests + _counts(history, stored) + disorder(stored)


def _counts(history: History, stored: list[Stored]) -> list[str]:
    found = []
    times: dict[Chunk, list[Stored]] = defaultdict(list)
    for record in stored:
        times[record.source, record.seqno].append(record)
    for chunk, answers in history.answers.items():
        records = times.pop(chunk, [])
        places = [f"{r.partition}@{r.offset}" for r in records]
        if "ok" in answers and not records:
            found.append(f"{chunk} lost: acknowledged, but not stored")
        if len(records) > 1:
            found.append(f"{chunk} doubled: stored {len(records)} times, at {places}")
        if answers == {"fail"} and records:
            found.append(f"{chunk} stored at {places} although every answer said that it was not recorded")
        if any(record.digest != history.sent[chunk] for record in records):
            found.append(f"{chunk} stored at {places} with other bytes than were sent")
    found.extend(f"{chunk} stored, but never sent" for chunk in times)
    return found


def disorder(stored: list[Stored]) -> list[str]:
    """Sources in several partitions, seqnos that do not rise, and ``prev`` that is not the seqno before it."""
    found = []
    by_source: dict[str, list[Stored]] = defaultdict(list)
    for record in sorted(stored, key=lambda record: (record.partition, record.offset)):
        by_source[record.source].append(record)
    for source, records in by_source.items():
        partitions = {record.partition for record in records}
        if len(partitions) > 1:
            found.append(f"{source} stands in the partitions {sorted(partitions)}")
            continue
        for before, after in itertools.pairwise(records):
            if after.seqno <= before.seqno:
                found.append(f"{source}: seqno {after.seqno} at {after.offset} follows {before.seqno}")
            if after.prev is not None and after.prev != before.seqno:
                found.append(f"{source}: prev {after.prev} at {after.offset} does not meet {before.seqno}")
    return found


async def committed_records(bootstrap: str, topic: str) -> list[ConsumerRecord]:
    """All committed records of the topic, up to the end of every partition; open transactions are waited for."""
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        fetch_max_wait_ms=100,
    )
    await consumer.start()
    try:
        partitions = sorted(consumer.assignment())
        assert partitions, f"{topic} is not known to this broker yet"
        ends = await high_watermarks(bootstrap, partitions)
        found: list[ConsumerRecord] = []
        while any([await consumer.position(partition) < ends[partition] for partition in partitions]):
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += records
        return found
    finally:
        await consumer.stop()


async def read_back(bootstrap: str, topic: str) -> list[Stored]:
    """The chunks of the topic, as Kafka has them."""
    stored = []
    for record in await committed_records(bootstrap, topic):
        chunk = chunk_of_record(record.value or b"", record.headers)
        place = (record.partition, record.offset)
        stored.append(Stored((record.key or b"").decode(), *place, chunk.seqno, chunk.prev, digest(chunk.data)))
    return stored


async def high_watermarks(bootstrap: str, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
    """The real ends, past what an open transaction hides: reading up to them waits until it has ended."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_uncommitted")
    await consumer.start()
    try:
        ends: dict[TopicPartition, int] = await consumer.end_offsets(partitions)
        return ends
    finally:
        await consumer.stop()
