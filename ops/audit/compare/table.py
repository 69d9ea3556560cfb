"""One table against the log: sums of each source on both sides, of what is new since the last proof.

What the log says that the table must hold comes from the partitions as they are read (`partition.LogSide`); what the
table holds comes from its files. A file that was proven, and is there as it was, counts as what was found in it then.

* Nothing was taken away: each source's new chunks must be its new rows.
* Files are gone (a compaction, a repair): all sums together must be the same. If they are not, every file is read, and
  each source is compared over all that was ever proven of it.

Sources that differ are looked at chunk by chunk (`naming`). What differs is not kept, so the next audit finds it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from logferry.loaders.notes import Note
from logferry.loaders.storage.ledger import DROP, LedgerEntry
from logferry.ops.audit.compare.proven_file import KeptTable
from logferry.ops.audit.compare.report import SegmentReport, TableReport
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.lines import identity_of
from logferry.ops.audit.digests.ranges import Ranges
from logferry.ops.audit.digests.sums import Cell, Tally, shown, totals
from logferry.ops.audit.log.partition import LogSide, PartitionLog
from logferry.ops.audit.segments import compare_segments
from logferry.ops.audit.tables.file_rows import FileFacts, Sorter, pooled
from logferry.ops.audit.tables.ledger_check import Loaded, Place, last_drop
from logferry.ops.audit.tables.table_reader import FileId, Tables


@dataclass
class TableProof:
    """``loaded``: what the ledger says, by the data centre whose offsets it names; ``home``: the one whose log is
    compared. ``moved``: its rows were read in several, and their offsets are not compared; the log of ``home`` must
    have everything. ``kept``: of earlier audits.

    After `compare`: ``expected`` and ``rows``: of each source, all that was ever proven with it; ``bad``: where they
    differ. ``changed``: files that are gone or changed.
    """

    tables: Tables
    loaded: dict[str, Loaded]
    home: str
    moved: bool
    kept: KeptTable
    findings: Findings
    begins: dict[Place, int] = field(default_factory=dict)
    sides: dict[Place, LogSide] = field(default_factory=dict)
    seen: dict[Place, Ranges] = field(default_factory=dict)
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

    def side(self, dc: str, place: Place, chains_from: int) -> LogSide | None:
        """What is to be read of a partition; None: the table has nothing of its topic. ``chains_from``: up to there
        earlier audits read the log."""
        loaded = self.loaded[self.home]
        if dc != self.home or not any(topic == place[0] for topic, _ in loaded.upto):
            return None
        covers = loaded.covers(place)
        if self.moved:
            # All before the end, wherever it was read.
            covers = Ranges()
            covers.add(self.begins.get(place, 0), loaded.end(place))
        wanted = covers.minus(self.kept.seen.get(place, Ranges()))
        # Where nothing new is loaded, what is not was counted before.
        before = 0 if wanted else self.kept.not_loaded.get(place, 0)
        side = LogSide(
            wanted, loaded.end(place), 0 if wanted else chains_from, self.tables.whole_chunks, not_loaded=before
        )
        notes = [note for note in self.tables.left_out if (note.topic, note.partition) == place]
        if self.moved:
            side.by_offset, side.copies = False, frozenset(identity_of(note.source_id, note.seqno) for note in notes)
        else:
            side.left_out = {
                note.offset: identity_of(note.source_id, note.seqno)
                for note in notes
                if note.kept != note.topic and note.offset in wanted
            }
        self.sides[place] = side
        return side

    def read(self, logs: Mapping[Place, PartitionLog]) -> None:
        """Called when the partitions of the home were read."""
        for place, side in self.sides.items():
            log = logs[place]
            fresh = side.wanted.within(0, log.reached).minus(log.removed)
            self.seen[place] = self.kept.seen.get(place, Ranges()).copy()
            self.seen[place].update(fresh)
            for offset in sorted(offset for offset in side.left_out if offset in fresh):
                self._not_left_out(place, offset)
        for place, ranges in self.kept.seen.items():
            self.seen.setdefault(place, ranges)

    def _not_left_out(self, place: Place, offset: int) -> None:
        for note in self.tables.left_out:
            if (note.topic, note.partition, note.offset) == (*place, offset):
                said = f"the table says that it left out seqno {note.seqno}, for it came by {note.kept}"
                detail = f"{said}; the log has it not"
                where = f"{note.topic}-{note.partition}"
                self.findings.add(Finding("left-out-without-record", where, detail, note.source_id, offset))

    def _firsts(self) -> dict[Cell, int] | None:
        """The first seqno that was ever read of each source."""
        if not self.moved:
            return None
        found = {
            Cell(*place, source_id): seqno
            for place, side in self.sides.items()
            for source_id, seqno in side.firsts.items()
        }
        return {**found, **(self.kept.firsts or {})}

    # ---- the rows' side ------------------------------------------------------------------------------------------

    def compare(self, advance: Callable[[int, int], None]) -> None:
        """Reads what is new of the table and compares. Raises Unavailable."""
        new = {
            Cell(*place, source_id): tally
            for place, side in self.sides.items()
            for source_id, tally in side.tallies.items()
            if tally
        }
        there = self.tables.files()
        known = {file: facts for file, facts in self.kept.files.items() if there.get(file) == facts.stat}
        gone = {file: facts for file, facts in self.kept.files.items() if file not in known}
        self.changed = [f"{file.table}/{file.name}" for file in gone]
        fresh: dict[Cell, Tally] = {}
        self.files = {**known, **self._facts(there.keys() - known.keys(), there, fresh, advance)}
        expected = _plus(self.kept.cells, new)
        if not gone:
            self.rows = _plus(self.kept.cells, fresh)
            self.bad = _differing(expected, self.rows)
        else:
            compared = totals(facts.compared for facts in self.files.values())
            self.rows = expected
            if compared != totals(expected.values()):
                fresh = {}
                self.files = self._facts(there.keys(), there, fresh, advance)
                self.rows = pooled(fresh, expected.__contains__)
                self.bad = _differing(expected, self.rows)
        self.expected = expected

    def _facts(
        self,
        wanted: Iterable[FileId],
        there: Mapping[FileId, Any],
        cells: dict[Cell, Tally],
        advance: Callable[[int, int], None],
    ) -> dict[FileId, FileFacts]:
        sorter = Sorter(self.loaded, self.home, self.seen, self.tables.last, self._firsts())
        wanted = set(wanted)
        total, done = self.tables.count(wanted), 0
        found: dict[FileId, FileFacts] = {}
        for file, rows in self.tables.read(wanted):
            found[file] = sorter.take(file, there[file], rows, cells)
            self.files_read += 1
            done += found[file].rows
            advance(done, total)
        self.rows_read += done
        sorter.tell(self.findings)
        return found

    @property
    def drops(self) -> list[LedgerEntry]:
        """The batches that dropped old rows since the last audit, oldest first."""
        entries = (entry for entry in self.tables.entries if entry.kind == DROP)
        return [entry for entry in entries if self.kept.batch < entry.batch <= self.tables.last]

    def dropped(self, place: Place) -> Ranges:
        """The offsets of which rows may have been dropped at any time."""
        found = Ranges()
        if self.moved and last_drop(self.tables.entries, self.tables.last) >= 0:
            found.add(0, self.loaded[self.home].end(place))
            return found
        return self.loaded[self.home].dropped.get(place, found)

    def accept(self, cell: Cell) -> None:
        """The rows of a source are what they must be, though fewer than its lines."""
        self.expected[cell] = self.rows.get(cell, Tally())
        del self.bad[cell]

    def segments(self) -> list[SegmentReport]:
        """The windows, and whether the table of segments says of each what the rows say. Raises Unavailable."""
        if self.tables.window_s is None:
            return []
        windows: dict[int, Tally] = {}
        for facts in self.files.values():
            for start, tally in facts.windows.items():
                windows.setdefault(start, Tally()).add(tally.lines, tally.size_bytes, tally.digest)
        return compare_segments(self.path, windows, self.tables.segments(), self.findings)

    def report(self) -> TableReport:
        """Raises Unavailable."""
        facts = self.files.values()
        return TableReport(
            path=self.path,
            batches=self.tables.last + 1,
            rows=sum(one.rows for one in facts),
            compared=sum(one.compared.lines for one in facts),
            not_comparable=sum(one.left for one in facts),
            not_loaded=sum(side.not_loaded for side in self.sides.values()),
            hash=shown(totals(one.compared for one in facts).digest),
            segments=tuple(self.segments()),
        )

    def to_keep(self, retired: Callable[[Cell], bool]) -> KeptTable:
        """What the next audit goes on from. ``retired``: sources of which nothing is left in the log."""
        if self.bad:
            return self.kept
        cells = {cell: tally for cell, tally in self.expected.items() if tally}
        if not self.moved:
            cells = pooled(cells, lambda cell: not retired(cell))
        not_loaded = {place: side.not_loaded for place, side in self.sides.items()}
        head = (self.tables.id, self.tables.last, self.home, self._firsts())
        notes = notes_digest(self.tables.left_out, self.seen)
        return KeptTable(*head, self.seen, cells, self.files, not_loaded, notes)


def notes_digest(notes: Iterable[Note], seen: Mapping[Place, Ranges]) -> str:
    """Which of the chunks that were read the table has left out: a repair may leave out others."""
    digest = blake2b(digest_size=8)
    for note in notes:
        if note.offset in seen.get((note.topic, note.partition), ()):
            digest.update(repr((note.place, note.source_id, note.seqno)).encode())
    return digest.hexdigest()


def _plus(one: Mapping[Cell, Tally], other: Mapping[Cell, Tally]) -> dict[Cell, Tally]:
    return {cell: one.get(cell, Tally()).plus(other.get(cell, Tally())) for cell in one.keys() | other.keys()}


def _differing(expected: Mapping[Cell, Tally], rows: Mapping[Cell, Tally]) -> dict[Cell, tuple[Tally, Tally]]:
    nothing = Tally()
    found = {}
    for cell in expected.keys() | rows.keys():
        pair = expected.get(cell, nothing), rows.get(cell, nothing)
        if pair[0] != pair[1]:
            found[cell] = pair
    return found
