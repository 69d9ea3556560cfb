"""The rows of a table against the log: taken off the accounts of the partitions one by one. Pure but for its input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from logferry.loaders.notes import Note
from logferry.ops.audit.account import Account
from logferry.ops.audit.findings import Finding, Findings
from logferry.ops.audit.lines import NO_IDENTITY, WHOLE_RECORD, identity_of, sum_of
from logferry.ops.audit.loaded import Loaded, Place
from logferry.ops.audit.ranges import Ranges
from logferry.ops.audit.tables import ChunkRows


@dataclass(slots=True)
class RowCounts:
    """``compared``: rows of chunks that Kafka still holds. ``removed``: rows whose records retention removed, or
    whose topic was created anew. ``elsewhere``: rows of another data centre's offsets. ``underway``: quarantined
    rows of a batch that is not in the main table yet. ``by_source``: rows of each (topic, source)."""

    compared: int = 0
    removed: int = 0
    elsewhere: int = 0
    underway: int = 0
    outside: int = 0
    of_no_source: int = 0
    by_source: Counter[tuple[str, str]] = field(default_factory=Counter)


def take_off(
    rows: Iterable[ChunkRows],
    accounts: Mapping[Place, Account],
    removed: Mapping[Place, Ranges],
    loaded: Loaded,
    dc: str,
    findings: Findings,
    left_out: Iterable[Note] = (),
) -> RowCounts:
    """``removed``: the offsets that retention had removed before they could be read. ``left_out``: chunks that the
    table does not hold, for it has their copies.

    What is left in the accounts afterwards is damage of single chunks; rows that belong to no chunk are found here.
    """
    counts = RowCounts()
    for note in left_out:
        _leave_out(note, accounts, removed, findings)
    strays: dict[tuple[str, Place], Finding] = {}
    for row in rows:
        place = (row.topic, row.partition)
        number = len(row.lines)
        if row.source_id is None:
            counts.of_no_source += number
        else:
            counts.by_source[row.topic, row.source_id] += number
        if row.dc != dc and row.dc in loaded.dcs:
            counts.elsewhere += number
        elif row.topic in loaded.strange:
            counts.removed += number
        elif row.dc != dc or row.offset not in loaded.covers(place):
            if row.dc == dc and row.offset in loaded.planned.get(place, ()):
                counts.underway += number
            else:
                counts.outside += number
                _stray(strays, "rows-outside-ledger", "rows that no batch of the ledger accounts for", row)
        elif row.offset in removed.get(place, ()):
            counts.removed += number
        elif _found(accounts, place, row):
            counts.compared += number
        else:
            _stray(strays, "rows-without-record", "rows of which the log has no record", row)
    for stray in strays.values():
        findings.add(stray)
    return counts


def _leave_out(
    note: Note, accounts: Mapping[Place, Account], removed: Mapping[Place, Ranges], findings: Findings
) -> None:
    """That the copy is there shows in the account of its own topic."""
    place = (note.topic, note.partition)
    account = accounts.get(place)
    if account is None or note.offset in removed.get(place, ()):
        return
    if note.kept == note.topic or not account.leave_out(note.offset, identity_of(note.source_id, note.seqno)):
        detail = f"the table says that it left out seqno {note.seqno}, for it came by {note.kept}; the log has it not"
        where = f"{note.topic}-{note.partition}"
        findings.add(Finding("left-out-without-record", where, detail, note.source_id, note.offset))


def _found(accounts: Mapping[Place, Account], place: Place, row: ChunkRows) -> bool:
    account = accounts.get(place)
    if account is None:
        return False
    if row.source_id is None or row.seqno is None or row.lines[0].number == WHOLE_RECORD:
        identity = NO_IDENTITY
    else:
        identity = identity_of(row.source_id, row.seqno)
    return account.found(row.offset, identity, sum_of(row.lines))


def _stray(strays: dict[tuple[str, Place], Finding], kind: str, detail: str, row: ChunkRows) -> None:
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
