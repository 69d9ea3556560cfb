"""For the loader's tests: chunks into Kafka as a gateway writes them, tables read without Spark.

`rows_of` is the reference for what must come out: plain Python over the chunks that were committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.structs import RecordMetadata, TopicPartition
from logferry.gateway.contract.chunk import Chunk, Headers, record_headers
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.storage.files import open_table
from logferry.loaders.storage.ledger import last_batch

from tests.support.checker import History, Stored, digest, violations
from tests.support.delta_log import rows_by_log
from tests.support.kafka import until_grown

# When the chunks of these tests were made: 2023-11-14 22:13:20 UTC.
CREATED_MS = 1_700_000_000_000
WAIT_S = 300


class Line(NamedTuple):
    """What of a row must be exact. ``data`` is the text's bytes, or those in the quarantine."""

    source_id: str | None
    seqno: int | None
    line: int | None
    data: bytes
    newline: bool | None


class Sent(NamedTuple):
    source_id: str
    chunk: Chunk


# ---- Kafka -----------------------------------------------------------------------------------------------


class Topic:
    """One topic of a test, written by transactions. ``committed`` is what readers of committed records must see."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.bootstrap = bootstrap
        self.name = name
        self.committed: list[Sent] = []
        self._transactions = 0
        self._is_held = False

    async def create(self, partitions: int = 1, **configs: str) -> None:
        """Without a retention: a broker looks for old records at any time, and tests write some of days ago."""
        kept = {"retention.ms": "-1", **configs}
        admin = await self._admin()
        try:
            await admin.create_topics([NewTopic(self.name, partitions, 1, topic_configs=kept)])
        finally:
            await admin.close()

    async def exists(self) -> bool:
        admin = await self._admin()
        try:
            return self.name in await admin.list_topics()
        finally:
            await admin.close()

    async def delete(self) -> None:
        admin = await self._admin()
        try:
            await admin.delete_topics([self.name])
            async with asyncio.timeout(60):
                while self.name in await admin.list_topics():  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.02)
        finally:
            await admin.close()

    async def grow(self, partitions: int) -> None:
        admin = await self._admin()
        try:
            await admin.create_partitions({self.name: NewPartitions(partitions)})
        finally:
            await admin.close()
        await until_grown(self.bootstrap, self.name, partitions)

    async def remove_before(self, partition: int, offset: int) -> None:
        admin = await self._admin()
        try:
            await admin.delete_records({TopicPartition(self.name, partition): RecordsToDelete(offset)})
        finally:
            await admin.close()

    async def write(
        self, chunks: Iterable[Sent], *, partitions: int = 1, commit: bool = True, recorded_ms: int | None = None
    ) -> None:
        """One transaction with these chunks, spread over the partitions by source. ``recorded_ms``: else now.

        Returns when readers of committed records can pass it, unless a test holds a transaction open.
        """
        producer = await self._begun(chunks, partitions, recorded_ms)
        try:
            await (producer.commit_transaction() if commit else producer.abort_transaction())
        finally:
            await producer.stop()
        if not self._is_held:
            await self._passed(partitions)
        if commit:
            self.committed.extend(chunks)

    async def open_transaction(
        self, chunks: Iterable[Sent], *, partitions: int = 1, recorded_ms: int | None = None
    ) -> AIOKafkaProducer:
        """The chunks are sent; the transaction is for the caller to end."""
        self._is_held = True
        return await self._begun(chunks, partitions, recorded_ms)

    async def _begun(self, chunks: Iterable[Sent], partitions: int, recorded_ms: int | None) -> AIOKafkaProducer:
        producer = await self._producer()
        await producer.begin_transaction()
        for source_id, chunk in chunks:
            partition = sum(source_id.encode()) % partitions
            headers = record_headers(chunk)
            await producer.send(
                self.name,
                chunk.data,
                key=source_id.encode(),
                partition=partition,
                timestamp_ms=recorded_ms,
                headers=headers,
            )
        await producer.flush()
        return producer

    async def _passed(self, partitions: int) -> None:
        """The coordinator answers a commit before its markers are written."""
        places = [TopicPartition(self.name, number) for number in range(partitions)]
        clients = [
            AIOKafkaConsumer(bootstrap_servers=self.bootstrap, isolation_level=level)
            for level in ("read_committed", "read_uncommitted")
        ]
        try:
            for client in clients:
                await client.start()
            async with asyncio.timeout(WAIT_S):
                while True:
                    stable, ends = [await client.end_offsets(places) for client in clients]
                    if stable == ends:
                        return
                    await asyncio.sleep(0.01)
        finally:
            for client in clients:
                await client.stop()

    async def write_raw(self, value: bytes | None, key: bytes | None, headers: Headers) -> RecordMetadata:
        """A record as some other program might write it."""
        producer = await self._producer()
        try:
            async with producer.transaction():
                return await producer.send_and_wait(self.name, value, key=key, partition=0, headers=headers)
        finally:
            await producer.stop()

    async def _producer(self) -> AIOKafkaProducer:
        self._transactions += 1
        producer = AIOKafkaProducer(
            bootstrap_servers=self.bootstrap,
            transactional_id=f"{self.name}-{self._transactions}",
            max_request_size=32 << 20,
            max_batch_size=1 << 20,
        )
        await producer.start()
        return producer

    async def _admin(self) -> AIOKafkaAdminClient:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        return admin


def chunks_of(source_id: str, *parts: bytes, start: int = 0, created_ms: int = CREATED_MS) -> list[Sent]:
    """Chunks one after the other, numbered by the position after their last byte."""
    found, position = [], start
    for data in parts:
        seqno = position + max(1, len(data))
        found.append(Sent(source_id, Chunk(seqno, position, created_ms, {"host": "web1"}, data)))
        position = seqno
    return found


# ---- what must be in the tables --------------------------------------------------------------------------


def rows_of(sent: Iterable[Sent]) -> tuple[set[Line], set[Line]]:
    """(rows of the table, lines of the quarantine) for these chunks."""
    rows: set[Line] = set()
    bad: set[Line] = set()
    for source_id, chunk in sent:
        *whole, rest = chunk.data.split(b"\n")
        lines = [(line, True) for line in whole] + ([(rest, False)] if rest else [])
        for number, (data, newline) in enumerate(lines):
            line = Line(source_id, chunk.seqno, number, data, newline)
            (rows if _is_utf8(data) else bad).add(line)
    return rows, bad


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def stored(place: Location | Path) -> list[dict[str, Any]]:
    """All rows of a table, by an independent reader."""
    return rows_by_log(Location.of(place))


def quarantine(path: Location | Path) -> list[dict[str, Any]]:
    """What stands in the quarantine of the table at ``path``: not the lines that a batch of the table has brought."""
    paths = TablePaths.of(path)
    last = last_batch(open_table(paths.main))
    rows = stored(paths.quarantine)
    return [
        row
        for row in rows
        if (row["resolved"] is None or row["resolved"] > last) and (row.get("since") is None or row["since"] <= last)
    ]


def check_exact(table: Location | Path, sent: Iterable[Sent]) -> None:
    """The tables hold these chunks' lines: all of them, none twice, none other, byte for byte."""
    want_rows, want_bad = rows_of(sent)
    paths = TablePaths.of(table)
    rows = [_line(row, row["text"].encode()) for row in stored(paths.main)]
    bad = [_line(row, row["bytes"]) for row in quarantine(table)]
    for what, have, want in (("table", rows, want_rows), ("quarantine", bad, want_bad)):
        assert len(have) == len(set(have)), f"{what}: {len(have) - len(set(have))} rows stand twice"
        assert not want - set(have), f"{what}: missing {sorted(want - set(have), key=str)[:3]}"
        assert not set(have) - want, f"{what}: not written {sorted(set(have) - want, key=str)[:3]}"


def check_kept(table: Location | Path, sent: Sequence[Sent]) -> None:
    """`check_exact`, and the judgement of the checker on the chunks as they can be put together from the tables."""
    check_exact(table, sent)
    history = History()
    for source_id, chunk in sent:
        if chunk.data:
            history.note(source_id, chunk.seqno, chunk.data, "ok")
    found = violations(history, _chunks_in(TablePaths.of(table)))
    assert not found, found[:3]


def _chunks_in(paths: TablePaths) -> list[Stored]:
    """Each chunk wherever it came from: one that was loaded from two offsets is there twice."""
    lines = [(row, row["text"].encode()) for row in stored(paths.main)]
    lines += [(row, row["bytes"]) for row in stored(paths.quarantine)]
    chunks: dict[tuple[str, int, int, int], dict[int, bytes]] = {}
    for row, data in lines:
        place = (row["source_id"], row["partition"], row["offset"], row["seqno"])
        chunks.setdefault(place, {})[row["line"]] = data + b"\n" * row["newline"]
    return [
        Stored(*place, prev=None, digest=digest(b"".join(parts[number] for number in sorted(parts))))
        for place, parts in chunks.items()
    ]


def _line(row: dict[str, Any], data: bytes) -> Line:
    return Line(row["source_id"], row["seqno"], row["line"], data, row["newline"])
