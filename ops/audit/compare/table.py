"""Compares one table with the log: sums of each source on both sides, over the data that is new since the last proof.

The expected rows come from the partitions as they are read (`partition.LogSide`), the actual rows from the table's
files. A proven file that is unchanged counts with the sums that were found in it then.

* No file was removed: each source's new chunks must equal its new rows.
* Files were removed (by a compaction or a repair): the sum over all sources must be the same. If it is not, every file
  is read, and each source is compared over all data that was ever proven of it.

Sources that differ are compared chunk by chunk (`pinpoint`). They are not added to the proof, so the next audit finds
the difference again. The segment of a row follows from its own ``event_time``; that each row is a line of a chunk, and
each line a row, is proven before. So the digest of a segment is one of lines of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from typing import Final

from logferry.gateway.contract.names import TopicPartition, printed_topic_id
from logferry.loaders.planning.ledger_entry import DROP, LedgerEntry
from logferry.loaders.storage.side_tables import LeftOutChunk
from logferry.ops.audit.compare.proven_file import ProvenTable
from logferry.ops.audit.compare.report import SegmentReport, TableAuditReport
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import ANY_OFFSET, Cell, Ranges, Tally, add_to, identity_of, shown
from logferry.ops.audit.log.partition import LogSide, PartitionLog, ProvenPartition
from logferry.ops.audit.log.read import Centre, offset_at
from logferry.ops.audit.tables import rows as table_rows
from logferry.ops.audit.tables.accepted_resets import AcceptedResets
from logferry.ops.audit.tables.file_scan import TableWork
from logferry.ops.audit.tables.rows import (
    FileFacts,
    FileId,
    FileStat,
    LoadedRanges,
    RowClassifier,
    merge_strays,
    pooled,
)
from logferry.ops.audit.tables.table_reader import TableReader
from logferry.ops.audit.workers.worker_pool import WorkerPool

# Files of less are read before another process has started.
_SMALL_BYTES: Final = 16 << 20


async def begin_comparison(
    tables: TableReader,
    here: Centre,
    centres: Mapping[str, Centre],
    proven: ProvenTable | None,
    accepted: AcceptedResets,
    findings: Findings,
    *,
    prefix: str,
    is_whole: bool,
) -> TableComparison | None:
    """Reads the ledger of a table; None if it is broken. Adds the topics that it was loaded from to its home's.

    ``here``: the audited data centre. ``is_whole``: all its topics are audited. Raises KafkaError;
    UsageError for an accepted reset that there is not.
    """
    ledger = str(tables.paths.ledger)
    if tables.broken:
        findings.add(Finding("ledger-broken", ledger, tables.broken))
        return None
    last, entries = tables.last, tables.entries
    # The last one is the data centre in which the table is loaded.
    dcs = [entry.dc for entry in entries if entry.batch <= last]
    centre = centres.get(dcs[-1], here) if dcs else here
    home = centre.dc
    moved = len(set(dcs)) > 1 and dcs[-1] == home
    named = {r.topic for entry in entries if entry.dc == home for r in entry.ranges}
    if is_whole or centre is not here:
        # Also topics of other data centres whose copies were loaded there.
        for name in sorted(named & centre.views.keys()):
            if not (centre is here and name.startswith(f"{home}.")):
                centre.topics[name] = centre.views[name]
    ids = {topic: printed_topic_id(view.id) for topic, view in centre.topics.items()}
    if is_whole:
        for topic in sorted(name for name in named - ids.keys() if name.startswith(f"{home}.")):
            detail = "the topic does not exist any more: its rows cannot be compared"
            findings.add(Finding("loaded-topic-gone", topic, detail, refutes=False))
    loaded = {}
    for dc in dict.fromkeys(entry.dc for entry in entries):
        # Of a data centre whose Kafka is not read, the ledger's own ids count.
        said = {r.topic: r.topic_id for entry in entries if entry.dc == dc for r in entry.ranges}
        loaded[dc] = table_rows.check_ledger("", entries, last, last, dc, said, Findings())
    loaded[home] = table_rows.check_ledger(ledger, entries, last, tables.last_now, home, ids, findings, accepted)
    accepted.check(str(tables.paths.main), entries)
    found = TableComparison(tables, loaded, home, moved, _valid_proof(tables, home, moved, proven, findings), findings)
    firsts: dict[TopicPartition, tuple[str, int]] = {}
    for dc, there in loaded.items() if moved else ():
        for place, start in there.first.items():
            firsts.setdefault(place, (dc, start))
    for place, (dc, start) in firsts.items():
        begin = await offset_at(home, centres, place, start, dc, prefix)
        if begin is not None:
            found.begins[place] = begin
            continue
        detail = f"the table was relocated to {home}, and the offset of its first rows in the log there is unknown"
        findings.add(Finding("moved-not-comparable", f"{place[0]}-{place[1]}", detail, refutes=False))
        loaded[home].strange.add(place[0])
    return found


def _valid_proof(
    tables: TableReader, home: str, moved: bool, proven: ProvenTable | None, findings: Findings
) -> ProvenTable:
    """The earlier proof as far as it holds for this table, else an empty one."""
    path, nothing = str(tables.paths.main), ProvenTable(tables.id, -1, home, {} if moved else None)
    if proven is None:
        return nothing
    if proven.table_id != tables.id:
        detail = f"an earlier audit proved another table here, up to batch {proven.batch}; the table was recreated"
        findings.add(Finding("table-recreated", path, detail))
        return nothing
    if proven.batch > tables.last:
        detail = f"an earlier audit proved it up to batch {proven.batch}, now it ends with {tables.last}: restored"
        findings.add(Finding("table-put-back", path, detail))
    # A relocated table is compared with another log, and after some repairs other chunks are left out: both are
    # compared from the beginning.
    is_other = (proven.home, proven.firsts is not None) != (home, moved)
    return nothing if is_other or proven.notes != left_out_digest(tables.left_out, proven.seen) else proven


@dataclass
class TableComparison:
    """``loaded``: the ledger's ranges, by the data centre of their offsets; ``home``: the one whose log is compared.

    ``moved``: the rows were read in several data centres, and their offsets are not compared; the log of ``home`` must
    hold everything. ``proven``: the proof of earlier audits.

    After `compare`: ``expected`` and ``rows`` are the sums of each source over all audits; ``bad`` holds those that
    differ; ``changed`` names files that were removed or changed.
    """

    tables: TableReader
    loaded: dict[str, LoadedRanges]
    home: str
    moved: bool
    proven: ProvenTable
    findings: Findings
    begins: dict[TopicPartition, int] = field(default_factory=dict)
    sides: dict[TopicPartition, LogSide] = field(default_factory=dict)
    seen: dict[TopicPartition, Ranges] = field(default_factory=dict)
    files: dict[FileId, FileFacts] = field(default_factory=dict)
    expected: dict[Cell, Tally] = field(default_factory=dict)
    rows: dict[Cell, Tally] = field(default_factory=dict)
    bad: dict[Cell, tuple[Tally, Tally]] = field(default_factory=dict)
    files_read: int = 0
    rows_read: int = 0
    changed: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return str(self.tables.paths.main)

    # ---- the log's side ------------------------------------------------------------------------------------------

    def side(self, dc: str, place: TopicPartition, chains_from: int) -> LogSide | None:
        """The part of a partition that the table needs; None: the table holds no rows of the topic. ``chains_from``:
        the end of the log that earlier audits read."""
        loaded = self.loaded[self.home]
        if dc != self.home or not any(topic == place[0] for topic, _ in loaded.upto):
            return None
        covers = loaded.covers(place)
        if self.moved:
            # Everything before the end, from whichever data centre it was read.
            covers = Ranges.of([(self.begins.get(place, 0), loaded.end(place))])
        wanted = covers.minus(self.proven.seen.get(place, Ranges()))
        # Without newly loaded chunks, those not loaded yet were counted by earlier audits.
        before = 0 if wanted else self.proven.not_loaded.get(place, 0)
        notes = self._notes(place)
        left_out = {(ANY_OFFSET if self.moved else n.offset, identity_of(n.source_id, n.seqno)) for n in notes}
        self.sides[place] = side = LogSide(
            *(wanted, loaded.end(place), 0 if wanted else chains_from, self.tables.whole_chunks, frozenset(left_out)),
            not_loaded=before,
            by_offset=not self.moved,
        )
        return side

    def read(self, logs: Mapping[TopicPartition, PartitionLog]) -> None:
        """Called after the partitions of the home were read."""
        ends = {place: log.span.end for place, log in logs.items()}
        table_rows.beyond_the_log(self.loaded[self.home], ends, self.findings)
        for place, side in self.sides.items():
            log = logs[place]
            fresh = side.wanted.within(0, log.reached).minus(log.removed)
            self.seen[place] = self.proven.seen.get(place, Ranges()).plus(fresh)
            for note in self._notes(place) if side.by_offset else ():
                if note.offset in fresh and (note.offset, identity_of(note.source_id, note.seqno)) not in side.met:
                    said = f"the table lists seqno {note.seqno} as left out, because it arrived by {note.kept}"
                    detail = f"{said}; the log does not have it"
                    where = f"{note.topic}-{note.partition}"
                    self.findings.add(Finding("left-out-without-record", where, detail, note.source_id, note.offset))
        self.seen = {**self.proven.seen, **self.seen}

    def _notes(self, place: TopicPartition) -> list[LeftOutChunk]:
        """The chunks that the table left out."""
        notes = self.tables.left_out
        return [note for note in notes if (note.topic, note.partition) == place and note.kept != note.topic]

    def _firsts(self) -> dict[Cell, int] | None:
        """The first seqno of each source that any audit read."""
        if not self.moved:
            return None
        sides = self.sides.items()
        found = {Cell(*place, name): seqno for place, side in sides for name, seqno in side.firsts.items()}
        return found | (self.proven.firsts or {})

    # ---- the rows' side ------------------------------------------------------------------------------------------

    async def compare(self, pool: WorkerPool, advance: Callable[[int, int], None]) -> None:
        """Reads the table's new files and compares. Raises Unavailable."""
        sides = self.sides.items()
        new = {Cell(*place, name): tally for place, side in sides for name, tally in side.tallies.items() if tally}
        there = self.tables.files()
        known = {file: facts for file, facts in self.proven.files.items() if there.get(file) == facts.stat}
        gone = {file: facts for file, facts in self.proven.files.items() if file not in known}
        self.changed = [f"{file.table}/{file.name}" for file in gone]
        scan = partial(self._scan, pool, advance, there)
        fresh: dict[Cell, Tally] = {}
        self.files = {**known, **await scan(there.keys() - known.keys(), fresh)}
        expected = _plus(self.proven.cells, new)
        if not gone:
            self.rows = _plus(self.proven.cells, fresh)
            self.bad = _differing(expected, self.rows)
        else:
            compared = sum((facts.compared for facts in self.files.values()), Tally())
            self.rows = expected
            if compared != sum(expected.values(), Tally()):
                self.files.update(await scan(known.keys(), fresh))
                self.rows = pooled(fresh, expected.__contains__)
                self.bad = _differing(expected, self.rows)
        self.expected = expected

    async def _scan(
        self,
        pool: WorkerPool,
        advance: Callable[[int, int], None],
        there: Mapping[FileId, FileStat],
        wanted: Collection[FileId],
        cells: dict[Cell, Tally],
    ) -> dict[FileId, FileFacts]:
        """Adds the rows of these files to ``cells``."""
        if not wanted:
            return {}
        classifier = RowClassifier(self.loaded, self.home, self.seen, self.tables.last, self._firsts())
        work = TableWork(self.tables.scanner(), classifier)
        found: dict[FileId, FileFacts] = {}
        strays: dict[tuple[str, TopicPartition], Finding] = {}
        jobs = self.tables.to_read(wanted, there)
        jobs.sort(key=lambda job: -job.stat.size_bytes)
        is_small = sum(job.stat.size_bytes for job in jobs) < _SMALL_BYTES
        async with aclosing(pool.run(work, jobs, lambda _: None, is_small=is_small)) as reading:
            async for one in reading:
                found[one.id] = one.facts
                self.rows_read += one.facts.rows
                self.findings.merge(one.findings)
                merge_strays(strays, one.strays)
                for cell, tally in one.cells.items():
                    add_to(cells, cell, tally)
                advance(len(found), len(jobs))
        self.files_read += len(found)
        for finding in strays.values():
            self.findings.add(finding)
        return found

    @property
    def drops(self) -> list[LedgerEntry]:
        """The batches that dropped old rows since the last audit, oldest first."""
        entries = (entry for entry in self.tables.entries if entry.kind == DROP)
        return [entry for entry in entries if self.proven.batch < entry.batch <= self.tables.last]

    def dropped(self, place: TopicPartition) -> Ranges:
        """The offsets whose rows may have been dropped."""
        loaded = self.loaded[self.home]
        if self.moved and table_rows.last_drop(self.tables.entries, self.tables.last) >= 0:
            return Ranges.of([(0, loaded.end(place))])
        return loaded.dropped.get(place, Ranges())

    def accept(self, cell: Cell) -> None:
        """Accepts the rows of a source although they are fewer than its lines."""
        self.expected[cell] = self.rows.get(cell, Tally())
        del self.bad[cell]

    def segments(self) -> list[SegmentReport]:
        """Compares the rows of each segment with the segment table, in order of time. Raises Unavailable."""
        actual: dict[int, Tally] = {}
        for facts in self.files.values() if self.tables.segment_s is not None else ():
            for start, tally in facts.segments.items():
                add_to(actual, start, tally)
        segments, reports = self.tables.segments(), list[SegmentReport]()
        for start in sorted(actual.keys() | segments.keys()):
            tally, segment = actual.get(start, Tally()), segments.get(start)
            name = _name(start)
            stated = (0, 0) if segment is None else (segment.rows, segment.bytes)
            if segment is None:
                detail = f"segment {name}: {tally.lines} rows, but the segment table does not list the segment"
                self.findings.add(Finding("segment-missing", self.path, detail, count=tally.lines))
            elif (tally.lines, tally.size_bytes) != stated:
                detail = (
                    f"segment {name}: the table has {tally.lines} rows of {tally.size_bytes} bytes, the segment table "
                    f"states {segment.rows} of {segment.bytes}"
                )
                self.findings.add(
                    Finding("segment-differs", self.path, detail, count=abs(tally.lines - stated[0]) or 1)
                )
            head = (name, "", 0) if segment is None else (name, segment.state, segment.version)
            reports.append(SegmentReport(*head, tally.lines, tally.size_bytes, shown(tally.digest), *stated))
        return reports

    def report(self) -> TableAuditReport:
        """Raises Unavailable."""
        facts = self.files.values()
        unparsed = sum(one.unparsed for one in facts)
        if unparsed:
            why = self.tables.scanner().parsed.why_unknown()
            detail = f"the columns of {unparsed} rows were not compared, which only the JVM can parse: {why}"
            self.findings.add(Finding("columns-not-compared", self.path, detail, count=unparsed, refutes=False))
        return TableAuditReport(
            path=self.path,
            batches=self.tables.last + 1,
            rows=sum(one.rows for one in facts),
            compared=sum(one.compared.lines for one in facts),
            not_comparable=sum(one.left for one in facts),
            not_loaded=sum(side.not_loaded for side in self.sides.values()),
            hash=shown(sum((one.compared for one in facts), Tally()).digest),
            segments=tuple(self.segments()),
            parsed=sum(one.parsed for one in facts),
            unparsed=unparsed,
        )

    def to_state(self, logs: Mapping[tuple[str, TopicPartition], ProvenPartition]) -> ProvenTable:
        """The proof that the next audit resumes from. ``logs``: the proof of the partitions that were read; their other
        sources have no record left."""
        if self.bad:
            return self.proven
        cells = {cell: tally for cell, tally in self.expected.items() if tally}
        if not self.moved:
            read = {place: log.chains for (dc, place), log in logs.items() if dc == self.home}
            cells = pooled(cells, lambda cell: cell.place not in read or cell.source_id in read[cell.place])
        not_loaded = {place: side.not_loaded for place, side in self.sides.items()}
        head = (self.tables.id, self.tables.last, self.home, self._firsts())
        notes = left_out_digest(self.tables.left_out, self.seen)
        return ProvenTable(*head, self.seen, cells, self.files, not_loaded, notes)


def left_out_digest(notes: Iterable[LeftOutChunk], seen: Mapping[TopicPartition, Ranges]) -> str:
    """Identifies the chunks that the table left out, of those that were read: a repair may leave out others."""
    digest = blake2b(digest_size=8)
    for note in notes:
        if note.offset in seen.get((note.topic, note.partition), ()):
            digest.update(repr((note.place, note.source_id, note.seqno)).encode())
    return digest.hexdigest()


def _plus(one: Mapping[Cell, Tally], other: Mapping[Cell, Tally]) -> dict[Cell, Tally]:
    return {cell: one.get(cell, Tally()) + other.get(cell, Tally()) for cell in one.keys() | other.keys()}


def _differing(expected: Mapping[Cell, Tally], rows: Mapping[Cell, Tally]) -> dict[Cell, tuple[Tally, Tally]]:
    nothing = Tally()
    pairs = {cell: (expected.get(cell, nothing), rows.get(cell, nothing)) for cell in expected.keys() | rows.keys()}
    return {cell: pair for cell, pair in pairs.items() if pair[0] != pair[1]}


def _name(start: int) -> str:
    try:
        return datetime.fromtimestamp(start, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{start} s since 1970"
