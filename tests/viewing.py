"""For the tests of what shows the newest rows: what Kafka itself holds, read without Spark, as rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.structs import TopicPartition
from logferry.gateway.contract.chunk import chunk_of_record


class Row(NamedTuple):
    """What of a row must be exact."""

    topic: str
    source_id: str
    seqno: int
    line: int
    text: str


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    rows: tuple[Row, ...]


async def committed_records(bootstrap: str, topics: Iterable[str]) -> list[Record]:
    """All that readers of committed records see now."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed", enable_auto_commit=False)
    await consumer.start()
    try:
        await consumer._client.force_metadata_update()
        places = [TopicPartition(topic, n) for topic in topics for n in consumer.partitions_for_topic(topic) or ()]
        consumer.assign(places)
        ends = await consumer.end_offsets(places)
        await consumer.seek_to_beginning(*places)
        found = []
        while any([await consumer.position(place) < ends[place] for place in places]):
            for place, records in (await consumer.getmany(timeout_ms=200)).items():
                found += [Record(*place, r.offset, _rows(place.topic, r.key, r.value, r.headers)) for r in records]
        return found
    finally:
        await consumer.stop()


def _rows(topic: str, key: bytes, value: bytes, headers: Iterable[tuple[str, bytes]]) -> tuple[Row, ...]:
    seqno = chunk_of_record(value, headers).seqno
    *whole, rest = value.decode().split("\n")
    lines = [*whole, rest] if rest else whole
    return tuple(Row(topic, key.decode(), seqno, number, text) for number, text in enumerate(lines))


def truth(records: Iterable[Record], ends: Mapping[tuple[str, int], int]) -> list[Row]:
    """The rows of the records before the ends, sorted."""
    return sorted(row for r in records if r.offset < ends.get((r.topic, r.partition), 0) for row in r.rows)
