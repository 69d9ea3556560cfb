"""What an audit makes of the records of one partition: a chain for each source, and sums for the table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from logferry.gateway.contract import Chunk, Malformed, chunk_of_record
from logferry.gateway.fetch import KafkaRecord
from logferry.ops.audit.account import Account
from logferry.ops.audit.chain import Break, Chain, Forgotten
from logferry.ops.audit.findings import Finding, Findings
from logferry.ops.audit.lines import NO_IDENTITY, count_lines, identity_of, lines_of, sum_of, whole_record
from logferry.ops.audit.ranges import Ranges


class Span(NamedTuple):
    """Offsets of one partition: ``start`` the first one retained, ``fence`` its end before the states were read,
    ``end`` its end after that (the high watermark then)."""

    start: int
    fence: int
    end: int


class Expected(NamedTuple):
    """Of a topic's sources: the base that the state names, and where forgotten ones may begin anew."""

    bases: Mapping[str, int | None]
    reborn: Mapping[str, list[int | None]]


class Originals(Protocol):
    """Who compares chunks with the files that they came from."""

    def take(self, topic: str, source_id: str, chunk: Chunk, recorded_ms: int) -> None: ...


@dataclass(slots=True)
class PartitionLog:
    """``account`` takes the chunks whose offsets are ``loaded``; None: there is no table. ``unloaded``: the others.

    ``removed``: offsets that retention had removed before they could be read. ``expected``: what the states say of
    the sources.
    """

    topic: str
    partition: int
    span: Span
    findings: Findings
    account: Account | None = None
    loaded: Ranges = field(default_factory=Ranges)
    originals: Originals | None = None
    expected: Expected = field(default_factory=lambda: Expected({}, {}))
    chains: dict[str, Chain] = field(default_factory=dict)
    unloaded: int = 0
    removed: Ranges = field(default_factory=Ranges)
    _runs: dict[str, Finding] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.topic}-{self.partition}"

    def __post_init__(self) -> None:
        self.removed.add(0, self.span.start)

    @property
    def is_cut(self) -> bool:
        """Retention removed something: a source may start in the middle, or have nothing left."""
        return bool(self.removed)

    def take(self, records: Iterable[KafkaRecord]) -> None:
        """The next records in offset order."""
        for record in records:
            if record.offset >= self.span.end:
                break
            try:
                source_id, chunk = decoded(record)
            except Malformed as error:
                self._foreign(record, str(error))
                continue
            self._take(record, source_id, chunk)

    def overtaken(self, start: int, end: int) -> None:
        """Retention removed [start, end) before it was read: the next record of a source may follow on one of it."""
        self.removed.add(start, end)
        for chain in self.chains.values():
            chain.cut = True

    def _take(self, record: KafkaRecord, source_id: str, chunk: Chunk) -> None:
        size = len(chunk.data)
        chain = self.chains.get(source_id)
        if chain is None:
            reborn = self.expected.reborn.get(source_id)
            forgotten = None if reborn is None else Forgotten(list(reborn))
            chain = Chain.begin(record.offset, chunk.seqno, chunk.prev, size, forgotten)
            self.chains[source_id] = chain
        else:
            broken = chain.follow(record.offset, chunk.seqno, chunk.prev, size)
            if broken is None:
                self._runs.pop(source_id, None)
            else:
                self._broken(record.offset, source_id, broken)
        if chunk.prev is not None and chunk.prev == self.expected.bases.get(source_id):
            chain.head_seen = True
        chain.note(chunk.seqno, is_settled=record.offset < self.span.fence)
        chain.last_ms = record.timestamp_ms
        chain.chunks += 1
        chain.size_bytes += size
        chain.lines += self._account(record.offset, source_id, chunk)
        if self.originals is not None:
            self.originals.take(self.topic, source_id, chunk, record.timestamp_ms)

    def _account(self, offset: int, source_id: str, chunk: Chunk) -> int:
        """Returns how many lines the chunk has."""
        if self.account is None or offset not in self.loaded:
            self.unloaded += 1
            return count_lines(chunk.data)
        total = sum_of(lines_of(chunk.data))
        self.account.expect(offset, identity_of(source_id, chunk.seqno), total)
        return total.lines

    def _broken(self, offset: int, source_id: str, broken: Break) -> None:
        """Breaks of one kind in consecutive records of a source are one finding with a range."""
        run = self._runs.get(source_id)
        if run is not None and run.kind == broken.kind:
            run.last = offset
            run.count += 1
            return
        run = Finding(broken.kind, self.where, broken.detail, source_id, offset, offset, refutes=broken.refutes)
        self._runs[source_id] = run
        self.findings.add(run)

    def _foreign(self, record: KafkaRecord, detail: str) -> None:
        self.findings.add(Finding("foreign-record", self.where, detail, first=record.offset, last=record.offset))
        if self.account is not None and record.offset in self.loaded:
            self.account.expect(record.offset, NO_IDENTITY, sum_of([whole_record(record.value or b"")]))


def decoded(record: KafkaRecord) -> tuple[str, Chunk]:
    """Raises Malformed for a record that no gateway wrote."""
    if record.key is None or record.value is None:
        raise Malformed("record: it has no key or no value; it was not written by a gateway")
    chunk = chunk_of_record(record.value, record.headers)
    if chunk.seqno < 0 or (chunk.prev is not None and chunk.prev < 0):
        raise Malformed(f"record: seqno {chunk.seqno} with prev {chunk.prev}")
    try:
        return record.key.decode(), chunk
    except UnicodeDecodeError:
        raise Malformed(f"record: the key {record.key!r} is not UTF-8") from None
