"""For the audit's tests: stored data as gateway and loader leave it, so that it can be damaged on purpose.

A `World` is one topic with its states; `Plan` says what to write, and a test changes it before it is written. Tables
are written by delta-rs, in the same order and with the same transaction versions as a load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from aiokafka.structs import TopicPartition
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from logferry.gateway.config import KafkaSettings
from logferry.gateway.contract.chunk import Chunk, Headers, record_headers
from logferry.gateway.contract.names import full_topic, lane_of, partition_of, printed_topic_id
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.kafka.client import KafkaClient
from logferry.loaders.location import Location
from logferry.loaders.planning.ledger_entry import LedgerEntry, TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import APP, Ledger, new_entry
from logferry.ops.audit.audit import audit
from logferry.ops.audit.compare.report import Report
from logferry.ops.audit.config import AuditConfig
from logferry.ops.audit.digests.sums import lines_of
from logferry.ops.audit.tables.accepted_resets import ResetName

DC = "dc1"
PARTITIONS = LANES = 2
_NOW_MS = 1_790_000_000_000


class Planned(NamedTuple):
    """A record to be written."""

    partition: int
    source_id: str
    chunk: Chunk


class Stored(NamedTuple):
    """A record as it is in the log."""

    partition: int
    offset: int
    source_id: str | None
    chunk: Chunk
    at_ms: int
    headers: tuple[tuple[str, bytes], ...] = ()


@dataclass
class Plan:
    """What a gateway would write: ``records`` in order, ``states`` by source; a state None forgets it."""

    records: list[Planned]
    states: dict[SourceIdentity, SourceState | None]

    def of(self, source_id: str) -> list[int]:
        """The indexes of a source's records."""
        return [index for index, record in enumerate(self.records) if record.source_id == source_id]

    def state(self, source_id: str, **changes: Any) -> None:
        for source, state in self.states.items():
            if source.source_id == source_id and state is not None:
                self.states[source] = state._replace(**changes)


async def audited(
    bootstrap: str,
    dc: str | None = None,
    *,
    table: Path | None = None,
    files: Sequence[Path] = (),
    full: bool = False,
    accept: Sequence[str] = (),
    **settings: Any,
) -> Report:
    """An audit without progress. ``settings``: others of `AuditConfig`. ``accept``: resets, by table and batch."""
    tables = [Location.of(one) for one in (settings.pop("tables", []) if table is None else [table])]
    kafka = KafkaSettings(bootstrap_servers=bootstrap)
    config = AuditConfig(dc=dc, kafka=kafka, tables=tables, **settings)
    return await audit(config, files=files, full=full, accept_resets=[ResetName.parse(one) for one in accept])


@dataclass
class World:
    """``at_ms``: the time of its records; None: when they are written."""

    bootstrap: str
    name: str
    topic_id: bytes = b""
    at_ms: int | None = None
    stored: list[Stored] = field(default_factory=list)

    @property
    def topic(self) -> str:
        return full_topic(DC, self.name)

    @property
    def state_topic(self) -> str:
        return f"{self.prefix}.gateway.{DC}.state"

    @property
    def prefix(self) -> str:
        """A gateway of its own."""
        return self.name[-60:]

    async def create(self) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            compacted = {"cleanup.policy": "compact"}
            topics = [NewTopic(self.topic, PARTITIONS, 1)]
            topics.append(NewTopic(self.state_topic, LANES, 1, topic_configs=compacted))
            await admin.create_topics(topics)
        finally:
            await admin.close()
        kafka = KafkaClient({"bootstrap_servers": self.bootstrap}, "planting")
        await kafka.start()
        try:
            self.topic_id = await self._appeared(kafka)
        finally:
            await kafka.close()

    async def _appeared(self, kafka: KafkaClient) -> bytes:
        """Waits until the broker knows both topics and their leaders. Returns the id of the first."""
        names = [self.topic, self.state_topic]
        async with asyncio.timeout(60):
            while True:
                views = (await kafka.describe(names)).topics
                if len(views) == 2 and all(p.leader >= 0 for view in views.values() for p in view.partitions):
                    return views[self.topic].id
                await asyncio.sleep(0.02)

    def plan(
        self,
        sources: Iterable[str] = ("web1", "api1", "web3"),
        chunks: int = 5,
        lines: int = 4,
        content: Callable[[str, int], bytes] | None = None,
    ) -> Plan:
        """Chunks of these sources in turn, with positions as seqnos, and the states after them. ``content``: of a
        source's chunk by its number, if not some lines."""
        records: list[list[Planned]] = []
        states: dict[SourceIdentity, SourceState | None] = {}
        for source_id in sources:
            data = [
                content(source_id, number) if content is not None else _chunk(source_id, number, lines)
                for number in range(chunks)
            ]
            records.append([Planned(partition_of(source_id, PARTITIONS), source_id, one) for one in _chained(data)])
            last = records[-1][-1]
            state = SourceState(self.topic_id, last.partition, last.chunk.seqno, 0, 1, _NOW_MS)
            states[SourceIdentity(self.topic, None, source_id)] = state
        return Plan([record for turn in zip(*records, strict=True) for record in turn], states)

    async def write(self, plan: Plan, *, transactional_id: str | None = None, abort: bool = False) -> None:
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap, transactional_id=transactional_id)
        await producer.start()
        try:
            if transactional_id is not None:
                await producer.begin_transaction()
            at_ms = int(time.time() * 1000) if self.at_ms is None else self.at_ms
            sent = [await self._send(producer, record, at_ms) for record in plan.records]
            for source, state in plan.states.items():
                lane = lane_of(source.key, LANES)
                value = None if state is None else state.encode()
                await producer.send(self.state_topic, value, key=source.state_key(), partition=lane)
            await producer.flush()
            metadata = [await future for future in sent]
            if transactional_id is not None:
                await (producer.abort_transaction() if abort else producer.commit_transaction())
        finally:
            await producer.stop()
        if not abort:
            if transactional_id is not None:
                await self._passed({facts.partition: facts.offset for facts in metadata})
            self.stored += [
                Stored(one.partition, facts.offset, one.source_id, one.chunk, at_ms)
                for one, facts in zip(plan.records, metadata, strict=True)
            ]

    async def _passed(self, last: Mapping[int, int]) -> None:
        """The coordinator answers a commit before its markers are written: till then a loader finds less."""
        places = {TopicPartition(self.topic, number): offset for number, offset in last.items()}
        async with AIOKafkaConsumer(bootstrap_servers=self.bootstrap, isolation_level="read_committed") as consumer:
            async with asyncio.timeout(60):
                while any(end <= places[at] for at, end in (await consumer.end_offsets(list(places))).items()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    async def write_foreign(self, value: bytes, headers: Headers) -> None:
        """A record as some other program might write it."""
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap)
        await producer.start()
        try:
            facts = await producer.send_and_wait(self.topic, value, key=b"stranger", partition=0, headers=headers)
        finally:
            await producer.stop()
        chunk = Chunk(0, None, None, {}, value)
        self.stored.append(Stored(0, facts.offset, None, chunk, facts.timestamp, tuple(headers)))

    async def remove_before(self, partition: int, offset: int) -> None:
        """As retention does."""
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            await admin.delete_records({TopicPartition(self.topic, partition): RecordsToDelete(offset)})
        finally:
            await admin.close()

    async def audit(self, **options: Any) -> Report:
        return await audited(self.bootstrap, DC, topics=[self.name], prefix=self.prefix, **options)

    async def _send(self, producer: AIOKafkaProducer, record: Planned, at_ms: int) -> Any:
        headers = record_headers(record.chunk)
        key, value = record.source_id.encode(), record.chunk.data
        return await producer.send(
            self.topic, value, key=key, partition=record.partition, headers=headers, timestamp_ms=at_ms
        )

    # ---- tables ------------------------------------------------------------------------------------------

    def load(self, batches: int = 2) -> Load:
        """What a loader makes of all that is stored."""
        ends = [
            max((one.offset + 1 for one in self.stored if one.partition == p), default=0) for p in range(PARTITIONS)
        ]
        entries = []
        for batch in range(batches):
            cuts = [(end * batch // batches, end * (batch + 1) // batches) for end in ends]
            ranges = [Range(self.topic, p, printed_topic_id(self.topic_id), *cut) for p, cut in enumerate(cuts)]
            entries.append(new_entry(batch, DC, "lines/1", "run", ranges))
        rows: list[dict[str, Any]] = []
        quarantine: list[dict[str, Any]] = []
        for one in sorted(self.stored, key=lambda one: (one.partition, one.offset)):
            for row in rows_of(self.topic, one):
                (quarantine if "bytes" in row else rows).append(row)
        return Load(entries, rows, quarantine)


@dataclass
class Load:
    """``rows`` and ``quarantine`` are written with the batch whose ranges hold their offset, strays with the last."""

    entries: list[LedgerEntry]
    rows: list[dict[str, Any]]
    quarantine: list[dict[str, Any]]

    def move(self, batch: int, *, partition: int, start: int = 0, end: int = 0) -> None:
        """Shifts the ends of a range of the ledger."""
        entry = self.entries[batch]
        ranges = [
            r._replace(start=r.start + start, end=r.end + end) if r.partition == partition else r for r in entry.ranges
        ]
        self.entries[batch] = entry._replace(ranges=tuple(ranges))

    def write(self, path: Path, *, strays: bool = True, main: pa.Schema | None = None) -> Path:
        """``strays``: write the rows that no entry covers, too. ``main``: the main table's columns, if others."""
        paths = TablePaths.of(path)
        main = MAIN if main is None else main
        Ledger(paths.ledger).create()
        for place, schema in ((paths.main, main), (paths.quarantine, QUARANTINE)):
            DeltaTable.create(str(place), Schema.from_arrow(schema))
        for entry in self.entries:
            Ledger(paths.ledger).put(entry)
            batches = [entry.batch, None] if strays and entry is self.entries[-1] else [entry.batch]
            for place, schema, rows in (
                (paths.quarantine, QUARANTINE, self.quarantine),
                (paths.main, main, self.rows),
            ):
                chosen = [row for row in rows if _batch_of(row, self.entries) in batches]
                commit(Path(place), entry.batch, pa.Table.from_pylist(chosen, schema=schema))
        return path


def commit(place: Path, batch: int, rows: pa.Table) -> None:
    properties = CommitProperties(app_transactions=[Transaction(APP, batch)])
    write_deltalake(str(place), rows, mode="append", commit_properties=properties)


def _batch_of(row: dict[str, Any], entries: Iterable[LedgerEntry]) -> int | None:
    for entry in entries:
        for r in entry.ranges:
            if r.partition == row["partition"] and r.start <= row["offset"] < r.end:
                return entry.batch
    return None


def _chunk(source_id: str, number: int, lines: int) -> bytes:
    text = [f"{source_id} chunk {number} line {line} näher".encode() for line in range(lines)]
    return b"\n".join(text) + b"\n"


def _chained(data: Iterable[bytes]) -> Iterable[Chunk]:
    position = 0
    for part in data:
        yield Chunk(position + len(part), position, _NOW_MS, {"host": "here"}, part)
        position += len(part)


def rows_of(topic: str, one: Stored) -> Iterable[dict[str, Any]]:
    head = {"topic": topic, "dc": DC, "partition": one.partition, "offset": one.offset}
    head["recorded"] = _moment(one.at_ms)
    chunk = one.chunk
    if one.source_id is None:
        pairs = [{"key": name, "value": content} for name, content in one.headers]
        yield {**head, "bytes": chunk.data, "reason": "not written by a gateway", "key": b"stranger", "headers": pairs}
        return
    head |= {"source_id": one.source_id, "seqno": chunk.seqno, "prev": chunk.prev}
    head |= {"created": _moment(chunk.created_ms or 0), "attributes": list(chunk.attributes.items())}
    for line in lines_of(one.chunk.data):
        row = {**head, "line": line.number, "newline": line.newline}
        try:
            yield {**row, "text": line.text.decode()}
        except UnicodeDecodeError:
            yield {**row, "bytes": line.text, "reason": "the line is not UTF-8"}


def _moment(unix_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=unix_ms)


_IDENTITY = [
    ("topic", pa.string()),
    ("source_id", pa.string()),
    ("seqno", pa.int64()),
    ("line", pa.int32()),
    ("dc", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("recorded", pa.timestamp("us", "UTC")),
    ("created", pa.timestamp("us", "UTC")),
    ("prev", pa.int64()),
    ("attributes", pa.map_(pa.string(), pa.string())),
]
MAIN = pa.schema([*_IDENTITY, ("text", pa.string()), ("newline", pa.bool_())])
TIMED = pa.schema([*MAIN, ("event_time", pa.timestamp("us", "UTC"))])
CHUNKS = pa.schema([*(column for column in _IDENTITY if column[0] != "line"), ("data", pa.binary())])
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_WHOLE = [("key", pa.binary()), ("headers", _HEADERS)]
QUARANTINE = pa.schema([*_IDENTITY, ("bytes", pa.binary()), ("newline", pa.bool_()), ("reason", pa.string()), *_WHOLE])
