"""The rows of a table, file by file: the sums of each file by source, and rows that belong to no chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from logferry.gateway.contract.names import TopicPartition
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.lines import WHOLE_RECORD, sum_of
from logferry.ops.audit.digests.ranges import Ranges
from logferry.ops.audit.digests.sums import ANY_OFFSET, Cell, Tally, weighed, weight_of
from logferry.ops.audit.tables.ledger_check import LoadedRanges
from logferry.ops.audit.tables.table_reader import MAIN, ChunkRows, FileId, FileStat, is_active

K = TypeVar("K")
AGAIN: Final = FileStat(-1, -1)

# ``compared``: rows of chunks that were read from the log. ``left``: rows of records that retention removed before any
# audit read them, whose topic was recreated, or with offsets of a data centre that is not audited. ``underway``: rows
# of the quarantine whose batch is not in the main table yet. ``outside``: rows of no batch.
Kind = Literal["compared", "left", "underway", "outside"]


@dataclass(slots=True)
class FileFacts:
    """``rows``: the active ones. ``compared``: those that were compared with the log; ``left``: those that cannot be.

    ``segments``: the rows of each segment, by its start in Unix seconds.
    """

    stat: FileStat
    rows: int = 0
    compared: Tally = field(default_factory=Tally)
    left: int = 0
    segments: dict[int, Tally] = field(default_factory=dict)


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
    strays: dict[tuple[str, TopicPartition], Finding] = field(default_factory=dict)

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
        first = self.firsts.get(cell_of(row))
        return first is not None and row.seqno is not None and row.seqno >= first

    def take(self, file: FileId, stat: FileStat, rows: Iterable[ChunkRows], cells: dict[Cell, Tally]) -> FileFacts:
        """Adds the compared rows to ``cells``, by source."""
        facts = FileFacts(stat)
        for row in rows:
            if not row.is_for(self.last):
                facts.stat = AGAIN
            if not is_active(row, self.last):
                continue
            number = len(row.lines)
            facts.rows += number
            tally = tally_of(row, by_offset=self.firsts is None)
            if row.segment is not None and file.table == MAIN:
                _add(facts.segments, row.segment, tally)
            kind = self.kind_of(row)
            if kind == "compared":
                facts.compared = facts.compared.plus(tally)
                _add(cells, cell_of(row), tally)
            elif kind == "left":
                facts.left += number
            else:
                facts.stat = AGAIN
                if kind == "outside":
                    add_stray(self.strays, "rows-outside-ledger", "no batch of the ledger accounts for these rows", row)
        return facts


def is_whole_record(row: ChunkRows) -> bool:
    return row.source_id is None or row.seqno is None or row.lines[0].number == WHOLE_RECORD


def cell_of(row: ChunkRows) -> Cell:
    return Cell(row.topic, row.partition, None if is_whole_record(row) else row.source_id)


def tally_of(row: ChunkRows, *, by_offset: bool) -> Tally:
    total = sum_of(row.lines)
    whole = is_whole_record(row)
    weight = weight_of(None if whole else row.source_id, row.seqno, row.offset if by_offset else ANY_OFFSET)
    return Tally(total.lines, sum(len(line.text) for line in row.lines), weighed(total, weight))


def _add(tallies: dict[K, Tally], key: K, tally: Tally) -> None:
    tallies[key] = tallies.get(key, Tally()).plus(tally)


def add_stray(strays: dict[tuple[str, TopicPartition], Finding], kind: str, detail: str, row: ChunkRows) -> None:
    """One finding for each kind and partition, with the range of offsets."""
    key = (kind, (row.topic, row.partition))
    where, offset = f"{row.topic}-{row.partition}", row.offset
    found = strays.setdefault(key, Finding(kind, where, detail, row.source_id, offset, offset, 0))
    found.first, found.last = min(found.first or 0, offset), max(found.last or 0, offset)
    found.count += len(row.lines)
    if found.source_id != row.source_id:
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
        _add(found, cell if is_known(cell) else cell._replace(source_id=None), tally)
    return found
