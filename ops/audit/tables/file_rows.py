"""The rows of a table, file by file: what each file holds of which chunks, and rows that belong to none. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.lines import WHOLE_RECORD, sum_of
from logferry.ops.audit.digests.ranges import Ranges
from logferry.ops.audit.digests.sums import ANY_OFFSET, Cell, Tally, weighed, weight_of
from logferry.ops.audit.tables.ledger_check import Loaded, Place
from logferry.ops.audit.tables.table_reader import MAIN, ChunkRows, FileId, Stat, stands

AGAIN: Final = Stat(-1, -1)

# ``compared``: rows of chunks that were read from the log. ``removed``: of records that retention removed before any
# audit read them, or whose topic was created anew. ``elsewhere``: of a data centre's offsets that is not audited.
# ``underway``: rows of the quarantine whose batch is not in the main table yet. ``outside``: of no batch at all.
Kind = Literal["compared", "removed", "elsewhere", "underway", "outside"]


@dataclass(slots=True)
class FileFacts:
    """``rows``: that stand in it. ``compared``: those that were held against the log; ``left``: those that cannot be.

    ``windows``: the rows of each window of the segments, by its start in seconds.
    """

    stat: Stat
    rows: int = 0
    compared: Tally = field(default_factory=Tally)
    left: int = 0
    windows: dict[int, Tally] = field(default_factory=dict)


@dataclass
class Sorter:
    """Says of rows which chunks they are to be held against.

    ``home``: the data centre whose log they are compared with. ``seen``: the offsets of each partition there that were
    read, by this audit or by those that it goes on from. ``firsts``: of a table that moved, whose rows name offsets of
    several data centres: the first seqno that was read of each source; None: offsets are compared.
    """

    loaded: Mapping[str, Loaded]
    home: str
    seen: Mapping[Place, Ranges]
    last: int
    firsts: Mapping[Cell, int] | None = None
    strays: dict[tuple[str, Place], Finding] = field(default_factory=dict)

    def kind_of(self, row: ChunkRows) -> Kind:
        place = (row.topic, row.partition)
        here, loaded = self.loaded[self.home], self.loaded.get(row.dc)
        if loaded is None:
            return "outside"
        if row.dc != self.home and self.firsts is None:
            return "elsewhere"
        if row.topic in here.strange:
            return "removed"
        if row.topic not in here.topics:
            return "elsewhere" if row.topic in loaded.others | loaded.topics else "outside"
        if row.offset in loaded.covers(place):
            return "compared" if self._was_read(row, place) else "removed"
        return "underway" if row.offset in loaded.planned.get(place, ()) else "outside"

    def _was_read(self, row: ChunkRows, place: Place) -> bool:
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

    def take(self, file: FileId, stat: Stat, rows: Iterable[ChunkRows], cells: dict[Cell, Tally]) -> FileFacts:
        """``cells``: gets what is compared, by source."""
        facts = FileFacts(stat)
        for row in rows:
            if not row.is_for(self.last):
                facts.stat = AGAIN
            if not stands(row, self.last):
                continue
            number = len(row.lines)
            facts.rows += number
            tally = tally_of(row, by_offset=self.firsts is None)
            if row.window is not None and file.table == MAIN:
                _add(facts.windows, row.window, tally)
            kind = self.kind_of(row)
            if kind == "compared":
                facts.compared.add(tally.lines, tally.size_bytes, tally.digest)
                _add(cells, cell_of(row), tally)
            elif kind in ("removed", "elsewhere"):
                facts.left += number
            else:
                facts.stat = AGAIN
                if kind == "outside":
                    stray(self.strays, "rows-outside-ledger", "rows that no batch of the ledger accounts for", row)
        return facts

    def tell(self, findings: Findings) -> None:
        for finding in self.strays.values():
            findings.add(finding)


def is_whole_record(row: ChunkRows) -> bool:
    return row.source_id is None or row.seqno is None or row.lines[0].number == WHOLE_RECORD


def cell_of(row: ChunkRows) -> Cell:
    return Cell(row.topic, row.partition, None if is_whole_record(row) else row.source_id)


def tally_of(row: ChunkRows, *, by_offset: bool) -> Tally:
    total = sum_of(row.lines)
    whole = is_whole_record(row)
    weight = weight_of(None if whole else row.source_id, row.seqno, row.offset if by_offset else ANY_OFFSET)
    return Tally(total.lines, sum(len(line.text) for line in row.lines), weighed(total, weight))


def _add(tallies: dict[Cell, Tally] | dict[int, Tally], key: Cell | int, tally: Tally) -> None:
    found: Tally = tallies.setdefault(key, Tally())  # type: ignore[arg-type]
    found.add(tally.lines, tally.size_bytes, tally.digest)


def stray(strays: dict[tuple[str, Place], Finding], kind: str, detail: str, row: ChunkRows) -> None:
    """One finding for each kind and partition, with the range of offsets."""
    key = (kind, (row.topic, row.partition))
    found = strays.get(key)
    if found is None:
        where = f"{row.topic}-{row.partition}"
        strays[key] = Finding(kind, where, detail, row.source_id, row.offset, row.offset, len(row.lines))
        return
    assert found.first is not None
    assert found.last is not None
    found.first, found.last = min(found.first, row.offset), max(found.last, row.offset)
    found.count += len(row.lines)
    if found.source_id != row.source_id:
        found.source_id = None


def beyond_the_log(loaded: Loaded, ends: Mapping[Place, int], findings: Findings) -> None:
    """The ledger names offsets that the log does not reach: the log was cut back, or it is another one."""
    for (topic, partition), ranges in sorted(loaded.committed.items()):
        end = ends.get((topic, partition), 0)
        if ranges.end > end:
            detail = f"loaded up to {ranges.end}, but the log ends at {end}: it was cut back"
            findings.add(Finding("ledger-beyond-log", f"{topic}-{partition}", detail, first=end, last=ranges.end - 1))


def pooled(cells: Mapping[Cell, Tally], is_known: Callable[[Cell], bool]) -> dict[Cell, Tally]:
    """The rows of sources of which nothing is kept any more count together, as those of no source."""
    found: dict[Cell, Tally] = {}
    for cell, tally in cells.items():
        _add(found, cell if is_known(cell) else cell._replace(source_id=None), tally)
    return found
