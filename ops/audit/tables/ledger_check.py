"""The ranges that the ledger of a table names as loaded, and whether they are consistent. Pure.

The entries of the batches 0 to the last one are all there, and the ranges of each topic-partition lie end to end:
a gap is a part of the log that no batch ever read, an overlap one that two batches did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from logferry.gateway.contract.names import TopicPartition
from logferry.loaders.planning.ledger_entry import DROP, MOVE, LedgerEntry
from logferry.loaders.planning.plan import Range
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.ranges import Ranges


@dataclass(slots=True)
class LoadedRanges:
    """``committed``: offsets that the table must hold. ``planned``: offsets that a loader may have begun to write.

    ``strange``: topics whose entries name another incarnation than Kafka's, so that offsets cannot be compared.
    ``topics``: the audited ones; ``others``: further topics of the ledger. ``first``: the
    start of each partition's first batch; ``upto``: the end of its last one. ``dropped``: the offsets whose rows
    retention may have dropped since.
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
) -> LoadedRanges:
    """``last``: the last batch of the table as it is audited; ``last_now``: as it was after the ledger was read.

    ``ids``: the printed ids of the audited topics. Only offsets of this ``dc`` are judged. Where a table moved, a batch
    that was planned in the old place may have been read in the new one: then the entry of the move has its ranges.
    """
    found = LoadedRanges(topics=frozenset(ids))
    there = {entry.batch for entry in entries}
    for batch in range(last + 1):
        if batch not in there:
            detail = (
                f"batch {batch} has no entry, but the table holds batch {last}: the offsets of that batch are unknown"
            )
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
            if r.topic not in ids:
                found.others.add(r.topic)
                continue
            if r.topic_id != ids[r.topic]:
                found.strange.add(r.topic)
                continue
            _follow(ledger, entry.batch, r, before, findings)
            found.first.setdefault((r.topic, r.partition), r.start)
            if entry.batch <= last:
                found.upto[r.topic, r.partition] = r.end
            if entry.batch in read_elsewhere:
                continue
            target = found.committed if entry.batch <= last else found.planned
            target.setdefault((r.topic, r.partition), Ranges()).add(r.start, r.end)
            if entry.batch < dropped:
                found.dropped.setdefault((r.topic, r.partition), Ranges()).add(r.start, r.end)
        for r in entry.reload:
            if r.topic in ids and r.topic_id == ids[r.topic] and entry.batch <= last:
                found.committed.setdefault((r.topic, r.partition), Ranges()).add(r.start, r.end)
    for topic in sorted(found.strange):
        detail = "entries name an older topic of this name, or another cluster: its rows cannot be compared"
        findings.add(Finding("loaded-from-older-topic", topic, detail, refutes=False))
    return found


def _follow(
    ledger: str, batch: int, r: Range, before: dict[TopicPartition, tuple[int, Range]], findings: Findings
) -> None:
    previous = before.get((r.topic, r.partition))
    before[r.topic, r.partition] = (batch, r)
    where = f"{r.topic}-{r.partition}"
    if r.end < r.start:
        detail = f"batch {batch} of {ledger} holds a range that ends before it starts"
        findings.add(Finding("ledger-overlap", where, detail, first=r.end, last=r.start))
    if previous is None:
        return
    number, earlier = previous
    if r.start > earlier.end:
        detail = f"{ledger}: batch {number} ends at {earlier.end}, batch {batch} starts at {r.start}: never loaded"
        findings.add(Finding("ledger-gap", where, detail, first=earlier.end, last=r.start - 1))
    elif r.start < earlier.end:
        detail = f"{ledger}: batch {number} ends at {earlier.end}, batch {batch} starts at {r.start}: loaded twice"
        findings.add(Finding("ledger-overlap", where, detail, first=r.start, last=earlier.end - 1))


def ranges_elsewhere(entries: Sequence[LedgerEntry], last: int, dc: str) -> LoadedRanges:
    """The loaded ranges with offsets of a data centre whose Kafka is not read."""
    ids = {r.topic: r.topic_id for entry in entries if entry.dc == dc for r in entry.ranges}
    return check_ledger("", entries, last, last, dc, ids, Findings())


def home_of(entries: Sequence[LedgerEntry], last: int) -> str | None:
    """The data centre in which the table is loaded, as of its last batch."""
    return next((entry.dc for entry in reversed(entries) if entry.batch <= last), None)


def is_moved(entries: Sequence[LedgerEntry], last: int) -> bool:
    """Whether its rows were read in several data centres."""
    return len({entry.dc for entry in entries if entry.batch <= last}) > 1


def last_drop(entries: Sequence[LedgerEntry], last: int) -> int:
    """The last batch that dropped old rows; -1: none did."""
    return max((entry.batch for entry in entries if entry.kind == DROP and entry.batch <= last), default=-1)
