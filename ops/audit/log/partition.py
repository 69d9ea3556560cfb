"""The records of one partition: the chain of each source, sums for the tables, and the proof for the next audit. Pure.

A proof is valid as long as the log is the same: the topic has its id, the log reaches at least as far, and the last
record that was read is still that record (or retention has removed it). Otherwise the old proof is retained, and each
audit reports the change until a full one reads everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

from logferry.ops.audit.digests import sums
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import ChunkHead, Ranges, RecordHead, Tally, add_to
from logferry.ops.audit.log.chain import Break, Chain, ForgottenSource
from logferry.ops.audit.records.batches import StoredRecord
from logferry.ops.audit.records.formats import NotAChunk, StoredChunk, stored_chunk

if TYPE_CHECKING:
    from logferry.ops.audit.log.original_files import OriginalFiles

# Findings of a partition that its proof holds in full; one more counts the rest.
MAX_FINDINGS: Final = 50


class AuditSpan(NamedTuple):
    """Offsets of one partition. ``start``: the first retained one; ``fence``: the end before the states were read;
    ``end``: the end after that, as high watermark."""

    start: int
    fence: int
    end: int


class ExpectedSources(NamedTuple):
    """Of a topic's sources: the base of each state, and the bases with which deleted ones may begin again."""

    bases: dict[str, int | None]
    reborn: Mapping[str, list[int | None]]


class LastRecord(NamedTuple):
    """A record, identified by 64 bits of a hash of its bytes."""

    offset: int
    digest: int


@dataclass
class ProvenPartition:
    """The proof of one partition of a data centre's log. ``end``: of the part that was read and checked."""

    topic_id: str
    end: int
    tail: LastRecord | None = None
    findings: list[Finding] = field(default_factory=list)
    chains: dict[str, Chain] = field(default_factory=dict)


@dataclass(slots=True)
class LogSide:
    """The rows of one partition that one table must hold, according to the log.

    ``wanted``: the offsets of its batches that no audit has read yet; ``tallies``: sums of their lines by source.
    ``behind``: the end of its last batch; ``not_loaded``: the number of chunks after that, counted from
    ``counted_from``. ``by_offset`` False: a relocated table, whose rows have offsets of several data centres: a chunk
    is identified by source and seqno alone, with `ANY_OFFSET`; ``firsts``: the first seqno of each source that was
    read. ``left_out``: (offset, identity) of the chunks whose copy, which arrived by another data centre, is in the
    table; ``met``: those of them that the log has.
    """

    wanted: Ranges
    behind: int
    counted_from: int = 0
    whole_chunks: bool = False
    left_out: frozenset[tuple[int, int]] = frozenset()
    not_loaded: int = 0
    by_offset: bool = True
    tallies: dict[str | None, Tally] = field(default_factory=dict)
    firsts: dict[str, int] = field(default_factory=dict)
    met: set[tuple[int, int]] = field(default_factory=set)

    def take(self, offset: int, chunk: StoredChunk) -> None:
        if offset not in self.wanted:
            self.not_loaded += offset >= max(self.behind, self.counted_from)
            return
        source_id, seqno = chunk.source_id, chunk.seqno
        if not self.by_offset:
            self.firsts[source_id] = min(seqno, self.firsts.get(source_id, seqno))
        self._add(offset, source_id, seqno, head_of(chunk), self.rows_of(offset, chunk))

    def take_foreign(self, record: StoredRecord) -> None:
        if record.offset in self.wanted:
            rows = sums.sum_of([sums.whole_record(record.value or b"")])
            self._add(record.offset, None, None, record_head(record), rows)

    def rows_of(self, offset: int, chunk: StoredChunk) -> Tally:
        """The sum of a chunk's rows; none if it is left out."""
        if self.left_out:
            place = offset if self.by_offset else sums.ANY_OFFSET
            key = (place, sums.identity_of(chunk.source_id, chunk.seqno))
            if key in self.left_out:
                self.met.add(key)
                return Tally()
        return sums.sum_of_rows(chunk.data, self.whole_chunks)

    def _add(self, offset: int, source_id: str | None, seqno: int | None, head: sums.Head, rows: Tally) -> None:
        weight = sums.weight_of(source_id, seqno, offset if self.by_offset else sums.ANY_OFFSET, head)
        add_to(self.tallies, source_id, rows.weighed(weight))


def head_of(chunk: StoredChunk) -> ChunkHead:
    """The columns that every row of the chunk must have."""
    return ChunkHead(chunk.prev, chunk.created_us, chunk.recorded_us, chunk.attributes)


def record_head(record: StoredRecord) -> RecordHead:
    return RecordHead(record.timestamp_ms * 1000, record.key, tuple(record.headers))


@dataclass(slots=True)
class PartitionLog:
    """Records from ``chains_from`` on are checked against the chains of their sources; all records that are read are
    counted for the tables.

    ``removed``: offsets that retention removed before they could be read. ``expected``: the sources according to their
    states. ``is_own``: its gateway's states are known; the order of a copy is not checked. ``tail``: the last record
    that an earlier audit proved; it must be unchanged. ``known``: the sources that earlier audits read; ``again``:
    those of them that are read again, for new files. ``is_recreated``: the earlier proof is of an older topic.
    """

    topic: str
    partition: int
    span: AuditSpan
    findings: Findings
    sides: Sequence[LogSide] = ()
    originals: OriginalFiles | None = None
    expected: ExpectedSources = field(default_factory=lambda: ExpectedSources({}, {}))
    chains: dict[str, Chain] = field(default_factory=dict)
    chains_from: int = 0
    is_own: bool = True
    tail: LastRecord | None = None
    known: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()
    removed: Ranges = field(default_factory=Ranges)
    reached: int = 0
    read_from: int = 0
    is_rewritten: bool = False
    records: int = 0
    read_bytes: int = 0
    last: LastRecord | None = None
    found: list[Finding] = field(default_factory=list)
    topic_id: str = ""
    proven: ProvenPartition | None = None
    is_recreated: bool = False
    _runs: dict[str, Finding] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.topic}-{self.partition}"

    def __post_init__(self) -> None:
        self.removed.add(0, self.span.start)

    @property
    def is_cut(self) -> bool:
        """Retention removed records: a source may start in the middle, or have no record left."""
        return bool(self.removed)

    def resume(self, topic_id: str, proven: ProvenPartition | None) -> None:
        """Continues from an earlier audit's proof. Call it before the log is read."""
        self.topic_id = topic_id
        if proven is None or proven.topic_id != topic_id:
            self.is_recreated = proven is not None
            return
        self.proven, self.tail, self.chains = proven, proven.tail, proven.chains
        self.chains_from = self.reached = proven.end
        self.known = frozenset(proven.chains)
        for source_id, chain in proven.chains.items():
            chain.settle_for_next(self.expected.reborn.get(source_id) if self.is_own else None)
        for finding in proven.findings:
            if finding.last is None or finding.last >= self.span.start:
                self._report(finding)
        if self.span.end < proven.end:
            detail = f"an earlier audit read it up to {proven.end}, now it ends at {self.span.end}: it was truncated"
            self.findings.add(Finding("log-cut-back", self.where, detail, None, self.span.end, proven.end - 1))
            self.is_rewritten, self.tail = True, None

    def to_state(self, sources: Collection[tuple[str, str]]) -> ProvenPartition:
        """The proof that the next audit resumes from. ``sources``: (topic, source) of all states; the chain of any
        other source is dropped with its last record."""
        if self.is_rewritten and self.proven is not None:
            return self.proven
        chains = {
            source_id: chain
            for source_id, chain in self.chains.items()
            if chain.last_offset >= self.span.start or (self.topic, source_id) in sources
        }
        findings, rest = self.found[:MAX_FINDINGS], self.found[MAX_FINDINGS:]
        if rest:
            last = max(finding.last or 0 for finding in rest)
            refutes = any(finding.refutes for finding in rest)
            detail = f"earlier audits found {len(rest)} more; a full audit lists them"
            more = Finding("found-earlier", self.where, detail, None, rest[0].first, last, len(rest), refutes)
            findings.append(more)
        tail = self.last or (self.proven.tail if self.proven else None)
        return ProvenPartition(self.topic_id, self.reached, tail, findings, chains)

    def reading_from(self, concerns: Callable[[str], bool]) -> int:
        """The first offset of the span to read. ``concerns``: whether a source is read again from its beginning."""
        self.again = frozenset(source_id for source_id in self.known if concerns(source_id))
        begins = [self.chains_from, *(side.wanted.start for side in self.sides if side.wanted)]
        begins += [self.chains[source_id].first_offset for source_id in self.again]
        if self.tail is not None:
            begins.append(self.tail.offset)
        self.read_from = min(max(self.span.start, min(begins)), self.span.end)
        return self.read_from

    def take(self, records: Iterable[StoredRecord]) -> None:
        """Takes the next records in offset order."""
        newest: StoredRecord | None = None
        for record in records:
            if record.offset >= self.span.end:
                break
            if self.tail is not None and record.offset >= self.tail.offset:
                self._check_tail(LastRecord(record.offset, record_digest(record)))
            is_new = record.offset >= self.chains_from
            self.records += 1
            self.read_bytes += len(record.value or b"")
            newest = record if is_new else newest
            try:
                chunk = stored_chunk(record)
            except NotAChunk as error:
                for side in self.sides:
                    side.take_foreign(record)
                if is_new:
                    self._report(Finding("foreign-record", self.where, str(error), None, record.offset, record.offset))
                continue
            for side in self.sides:
                side.take(record.offset, chunk)
            source_id = chunk.source_id
            if is_new:
                self._take(record, chunk)
            elif source_id in self.again and self.originals is not None:
                self.originals.take(self.topic, chunk, record.timestamp_ms, is_known=True, is_new=False)
        if newest is not None:
            self.last = LastRecord(newest.offset, record_digest(newest))

    def overtaken(self, start: int, end: int) -> None:
        """Retention removed [start, end) before it was read: the next record of a source may follow one of these."""
        self.removed.add(start, end)
        for chain in self.chains.values():
            chain.cut = True

    def ended(self) -> None:
        """Everything up to the end was read."""
        self.reached = max(self.reached, self.span.end)
        self._check_tail(None)

    def _check_tail(self, found: LastRecord | None) -> None:
        """``found``: the first record at or behind the last proven one."""
        tail, self.tail = self.tail, None
        if tail is not None and tail != found and tail.offset not in self.removed:
            self.is_rewritten = True
            detail = "an earlier audit proved another record here: the log was truncated and rewritten"
            self.findings.add(Finding("log-rewritten", self.where, detail, None, tail.offset, tail.offset))

    def _report(self, finding: Finding) -> None:
        """Findings of the log are part of its proof: the next audit repeats them without reading the log again."""
        self.found.append(finding)
        self.findings.add(finding)

    def _take(self, record: StoredRecord, chunk: StoredChunk) -> None:
        source_id, size = chunk.source_id, len(chunk.data)
        chain = self.chains.get(source_id)
        if chain is None:
            reborn = self.expected.reborn.get(source_id)
            forgotten = None if reborn is None else ForgottenSource(list(reborn))
            chain = Chain.begin(record.offset, chunk.seqno, chunk.prev, size, forgotten)
            self.chains[source_id] = chain
        else:
            broken = chain.follow(record.offset, chunk.seqno, chunk.prev, size)
            if broken is None or not self.is_own:
                self._runs.pop(source_id, None)
            else:
                self._broken(record.offset, source_id, broken)
        if chunk.prev is not None and chunk.prev == self.expected.bases.get(source_id):
            chain.head_seen = True
        chain.note(chunk.seqno, is_settled=record.offset < self.span.fence)
        chain.last_ms = record.timestamp_ms
        chain.chunks += 1
        chain.size_bytes += size
        chain.lines += sums.count_lines(chunk.data)
        chain.digest = (chain.digest + sums.chunk_digest(chunk.seqno, chunk.data)) % sums.MODULUS
        if self.originals is not None:
            is_known = source_id in self.known
            self.originals.take(self.topic, chunk, record.timestamp_ms, is_known=is_known)

    def _broken(self, offset: int, source_id: str, broken: Break) -> None:
        """Combines breaks of one kind in consecutive records of a source into one finding with a range."""
        run = self._runs.get(source_id)
        if run is not None and run.kind == broken.kind:
            run.last = offset
            run.count += 1
            return
        run = Finding(broken.kind, self.where, broken.detail, source_id, offset, offset, refutes=broken.refutes)
        self._runs[source_id] = run
        self._report(run)


def record_digest(record: StoredRecord) -> int:
    """64 bits of a record's bytes."""
    digest = blake2b(repr((record.key, record.headers, record.timestamp_ms)).encode(), digest_size=8)
    digest.update(record.value or b"")
    return int.from_bytes(digest.digest(), "little")
