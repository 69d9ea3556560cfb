"""The rows of a table, file by file: the sums of each file by source, and rows that no batch accounts for. Pure.

What is loaded is said by the ledger. It is consistent if the entries of the batches 0 to the last one are all there,
and the ranges of each topic-partition lie end to end: a gap is a part of the log that no batch ever read, an overlap
one that two batches did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from logferry.gateway.contract.names import TopicPartition
from logferry.loaders.planning.ledger_entry import DROP, MOVE, LedgerEntry
from logferry.loaders.planning.plan import Range
from logferry.ops.audit.digests import sums
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Cell, ChunkLine, Head, LineRun, Ranges, Tally, add_to
from logferry.ops.audit.tables.accepted_resets import AcceptedResets

MAIN: Final = "main"
QUARANTINE: Final = "quarantine"


class ChunkRows(NamedTuple):
    """Adjacent rows of one chunk: all its rows, or some.

    ``segment``: its start in Unix seconds; None where the table has no segments, or the row no time.
    ``resolved``: the batch that moves a row of the quarantine into the table, or removes it; ``since``: the batch that
    adds it to the quarantine in place of others. ``is_whole``: the row is a record that no gateway wrote. ``head``: the
    columns that the rows take from their record.
    """

    dc: str
    topic: str
    partition: int
    offset: int
    source_id: str | None
    seqno: int | None
    lines: LineRun | Sequence[ChunkLine]
    segment: int | None = None
    resolved: int | None = None
    since: int | None = None
    is_whole: bool = False
    head: Head = None

    def is_active(self, last: int) -> bool:
        """Whether it is active at the last batch of the main table: a line that a batch moves into the table leaves the
        quarantine at the instant in which the table holds that batch."""
        return (self.resolved is None or self.resolved > last) and (self.since is None or self.since <= last)

    @property
    def is_whole_record(self) -> bool:
        return self.is_whole or self.source_id is None or self.seqno is None

    @property
    def identity(self) -> int:
        return sums.identity_of(self.source_id or "", self.seqno or 0)

    @property
    def account(self) -> int:
        """Identifies the chunk, and the columns that are equal in all its rows."""
        return sums.account_of(None if self.is_whole_record else self.source_id, self.seqno, self.head)

    @property
    def cell(self) -> Cell:
        return Cell(self.topic, self.partition, None if self.is_whole_record else self.source_id)

    def tally(self, *, by_offset: bool) -> Tally:
        offset = self.offset if by_offset else sums.ANY_OFFSET
        return sums.sum_of(self.lines).weighed(sums.weight_of(self.cell.source_id, self.seqno, offset, self.head))


class FileId(NamedTuple):
    """A file of a table: ``table`` is `MAIN` or `QUARANTINE`, ``name`` its path within."""

    table: str
    name: str


class FileStat(NamedTuple):
    """Size and time of a file; -1: the file is always read again."""

    size_bytes: int
    changed_ns: int


# ---- the ledger --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class LoadedRanges:
    """``committed``: offsets that the table must hold. ``planned``: offsets that a loader may have begun to write.

    ``strange``: topics whose entries name another incarnation than Kafka's, so that offsets cannot be compared.
    ``topics``: the audited ones; ``others``: further topics of the ledger. ``first``: the start of each partition's
    first batch; ``upto``: the end of its last one. ``dropped``: the offsets whose rows retention may have dropped.
    """

    committed: dict[TopicPartition, Ranges] = field(default_factory=dict)
    planned: dict[TopicPartition, Ranges] = field(default_factory=dict)
    strange: set[str] = field(default_factory=set)
    topics: frozenset[str] = frozenset()
    others: set[str] = field(default_factory=set)
    first: dict[TopicPartition, int] = field(default_factory=dict)
    upto: dict[TopicPartition, int] = field(default_factory=dict)
    dropped: dict[TopicPartition, Ranges] = field(default_factory=dict)

    def covers(self, place: TopicPartition) -> Ranges:
        """The comparable offsets of the batches."""
        return Ranges() if place[0] in self.strange else self.committed.get(place, Ranges())

    def end(self, place: TopicPartition) -> int:
        """Up to where the partition is loaded; a batch that read nothing of it says so, too."""
        return 0 if place[0] in self.strange else self.upto.get(place, 0)


def check_ledger(
    ledger: str,
    entries: Sequence[LedgerEntry],
    last: int,
    last_now: int,
    dc: str,
    ids: Mapping[str, str],
    findings: Findings,
    accepted: AcceptedResets | None = None,
) -> LoadedRanges:
    """``last``: the last batch of the table as it is audited; ``last_now``: as it was after the ledger was read.

    ``ids``: the printed ids of the audited topics. Only offsets of this ``dc`` are judged. Where a table moved, a batch
    that was planned in the old place may have been read in the new one: then the entry of the move has its ranges.
    """
    found = LoadedRanges(topics=frozenset(ids))
    for batch in sorted(set(range(last + 1)).difference(*(entry.batches for entry in entries))):
        detail = f"batch {batch} has no entry, but the table holds batch {last}: the offsets of that batch are unknown"
        findings.add(Finding("ledger-missing", ledger, detail))
    if entries and entries[-1].batch > last_now + 1:
        detail = f"the ledger ends with batch {entries[-1].batch}, the table with {last_now}: the table was restored"
        findings.add(Finding("ledger-ahead", ledger, detail))
    before: dict[TopicPartition, tuple[int, Range]] = {}
    read_elsewhere = {entry.batch - 1 for entry in entries if entry.kind == MOVE and any(r.size for r in entry.ranges)}
    dropped = last_drop(entries, last)
    for entry in entries:
        if entry.dc != dc:
            continue
        if entry.kind == MOVE:
            # Batches in between have other offsets; the comparison of the rows shows that none is missing or doubled.
            before.clear()
        for r in entry.ranges:
            if r.topic_id != ids.get(r.topic):
                (found.strange if r.topic in ids else found.others).add(r.topic)
                continue
            _follow(ledger, entry, r, before, findings, accepted or AcceptedResets())
            found.first.setdefault(r.key, r.start)
            if entry.batch <= last:
                found.upto[r.key] = r.end
            if entry.batch in read_elsewhere:
                continue
            target = found.committed if entry.batch <= last else found.planned
            target.setdefault(r.key, Ranges()).add(r.start, r.end)
            if entry.batch < dropped:
                found.dropped.setdefault(r.key, Ranges()).add(r.start, r.end)
        for r in entry.reload if entry.batch <= last else ():
            if r.topic_id == ids.get(r.topic):
                found.committed.setdefault(r.key, Ranges()).add(r.start, r.end)
    for topic in sorted(found.strange):
        detail = "entries name an older topic of this name, or another cluster: its rows cannot be compared"
        findings.add(Finding("loaded-from-older-topic", topic, detail, refutes=False))
    return found


def _follow(
    ledger: str,
    entry: LedgerEntry,
    r: Range,
    before: dict[TopicPartition, tuple[int, Range]],
    findings: Findings,
    accepted: AcceptedResets,
) -> None:
    previous, batch = before.get(r.key), entry.batch
    before[r.key] = (batch, r)
    where = f"{r.topic}-{r.partition}"
    if r.end < r.start:
        detail = f"batch {batch} of {ledger} holds a range that ends before it starts"
        findings.add(Finding("ledger-overlap", where, detail, first=r.end, last=r.start))
    if previous is None:
        return
    number, earlier = previous
    first, last = sorted((earlier.end, r.start))
    if first < last and accepted.accepts(entry, r, first, last - 1):
        what = "skipped" if r.start > earlier.end else "to be loaded again"
        detail = f"{ledger}: batch {batch} is an accepted reset: {last - first} offsets {what}"
        findings.add(Finding("reset-accepted", where, detail, None, first, last - 1, last - first, refutes=False))
    elif r.start > earlier.end:
        detail = f"{ledger}: batch {number} ends at {earlier.end}, batch {batch} starts at {r.start}: never loaded"
        findings.add(Finding("ledger-gap", where, detail, first=earlier.end, last=r.start - 1))
    elif r.start < earlier.end:
        detail = f"{ledger}: batch {number} ends at {earlier.end}, batch {batch} starts at {r.start}: loaded twice"
        findings.add(Finding("ledger-overlap", where, detail, first=r.start, last=earlier.end - 1))


def last_drop(entries: Sequence[LedgerEntry], last: int) -> int:
    """The last batch that dropped old rows; -1: none did."""
    return max((entry.batch for entry in entries if entry.kind == DROP and entry.batch <= last), default=-1)


# ---- the rows of a file ------------------------------------------------------------------------------------------

# ``compared``: rows of chunks that were read from the log. ``left``: rows of records that retention removed before any
# audit read them, whose topic was recreated, or with offsets of a data centre that is not audited. ``underway``: rows
# of the quarantine whose batch is not in the main table yet. ``outside``: rows of no batch.
Kind = Literal["compared", "left", "underway", "outside"]
AGAIN: Final = FileStat(-1, -1)


@dataclass(slots=True)
class FileFacts:
    """``rows``: the active ones. ``compared``: those that were compared with the log; ``left``: those that cannot be.

    ``segments``: the rows of each segment, by its start in Unix seconds. ``parsed``: rows whose columns were compared
    with their text; ``unparsed``: those that only the JVM can parse.
    """

    stat: FileStat
    rows: int = 0
    compared: Tally = field(default_factory=Tally)
    left: int = 0
    segments: dict[int, Tally] = field(default_factory=dict)
    parsed: int = 0
    unparsed: int = 0


@dataclass
class RowClassifier:
    """Decides for each row whether it is compared with the log.

    ``home``: the data centre of that log. ``seen``: the offsets of each partition there that this audit or an earlier
    one read. ``firsts``: of a relocated table, whose rows have offsets of several data centres: the first seqno of each
    source that was read; None: offsets are compared.
    """

    loaded: Mapping[str, LoadedRanges]
    home: str
    seen: Mapping[TopicPartition, Ranges]
    last: int
    firsts: Mapping[Cell, int] | None = None

    def kind_of(self, row: ChunkRows) -> Kind:
        place = (row.topic, row.partition)
        here, loaded = self.loaded[self.home], self.loaded.get(row.dc)
        if loaded is None:
            return "outside"
        if row.topic in here.strange or (row.dc != self.home and self.firsts is None):
            return "left"
        if row.topic not in here.topics:
            return "left" if row.topic in loaded.others | loaded.topics else "outside"
        if row.offset in loaded.covers(place):
            return "compared" if self._was_read(row, place) else "left"
        return "underway" if row.offset in loaded.planned.get(place, ()) else "outside"

    def _was_read(self, row: ChunkRows, place: TopicPartition) -> bool:
        seen = self.seen.get(place)
        if not seen:
            return False
        if self.firsts is None:
            return row.offset in seen
        # Offsets differ between data centres, the order of a source does not.
        if seen.start == 0:
            return True
        first = self.firsts.get(row.cell)
        return first is not None and row.seqno is not None and row.seqno >= first

    def take(
        self,
        facts: FileFacts,
        file: FileId,
        rows: Iterable[ChunkRows],
        cells: dict[Cell, Tally],
        strays: dict[tuple[str, TopicPartition], Finding],
    ) -> None:
        """Adds the rows of a file to ``facts``, the compared ones to ``cells``, by source, and others to ``strays``."""
        for row in rows:
            # It may be in another state for a later batch.
            if max(row.resolved or 0, row.since or 0) > self.last:
                facts.stat = AGAIN
            if not row.is_active(self.last):
                continue
            number = len(row.lines)
            facts.rows += number
            tally = row.tally(by_offset=self.firsts is None)
            if row.segment is not None and file.table == MAIN:
                add_to(facts.segments, row.segment, tally)
            kind = self.kind_of(row)
            if kind == "compared":
                facts.compared += tally
                add_to(cells, row.cell, tally)
            elif kind == "left":
                facts.left += number
            else:
                facts.stat = AGAIN
                if kind == "outside":
                    add_stray(strays, "rows-outside-ledger", "no batch of the ledger accounts for these rows", row)


def add_stray(strays: dict[tuple[str, TopicPartition], Finding], kind: str, detail: str, row: ChunkRows) -> None:
    """One finding for each kind and partition, with the range of offsets."""
    where, offset = f"{row.topic}-{row.partition}", row.offset
    one = Finding(kind, where, detail, row.source_id, offset, offset, len(row.lines))
    merge_strays(strays, {(kind, (row.topic, row.partition)): one})


def merge_strays(
    strays: dict[tuple[str, TopicPartition], Finding], more: Mapping[tuple[str, TopicPartition], Finding]
) -> None:
    for key, one in more.items():
        found = strays.setdefault(key, one)
        if found is one:
            continue
        found.first, found.last = min(found.first or 0, one.first or 0), max(found.last or 0, one.last or 0)
        found.count += one.count
        if found.source_id != one.source_id:
            found.source_id = None


def beyond_the_log(loaded: LoadedRanges, ends: Mapping[TopicPartition, int], findings: Findings) -> None:
    """Reports offsets of the ledger that the log does not reach: the log was truncated, or it is another one."""
    for (topic, partition), ranges in sorted(loaded.committed.items()):
        end = ends.get((topic, partition), 0)
        if ranges.end > end:
            detail = f"loaded up to {ranges.end}, but the log ends at {end}: it was truncated"
            findings.add(Finding("ledger-beyond-log", f"{topic}-{partition}", detail, first=end, last=ranges.end - 1))


def pooled(cells: Mapping[Cell, Tally], is_known: Callable[[Cell], bool]) -> dict[Cell, Tally]:
    """Sums the rows of all sources that are not known any more as rows of no source."""
    found: dict[Cell, Tally] = {}
    for cell, tally in cells.items():
        add_to(found, cell if is_known(cell) else cell._replace(source_id=None), tally)
    return found
