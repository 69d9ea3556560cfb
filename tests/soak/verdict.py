"""Decides whether the promise held, from what was sent and what is stored. Pure. This is its specification:

* HTTP: a chunk that was acknowledged is stored exactly once, with its bytes, in the data centre that acknowledged it. A
  chunk whose answers were all "not recorded" is not stored; any other one at most once; nothing else is stored.
* Order: the chunks of a source are in one partition, their seqnos rise, each ``prev`` is the seqno before it.
* Copy: partition by partition the same records in the same order, all headers and times included.
* Files: all data centres together hold each source as one stream of bytes without hole or overlap, equal where both
  have a chunk; its lines are those of the log, each once in each host. Lines that a truncation took before they were
  sent are counted, not refuted: a suffix of that incarnation of the file.
* Readers got exactly the stored chunks, in the order of the offsets.
* Table: every line of every chunk is one row, or one line of the quarantine.
* Segments: each state of a segment counts the rows that the table had of it. A READY one lacks no line that a reader
  had got before the closing. Lines that come later are of sources that nobody had read before, or that were silent for
  ``source_idle_s``, of which the segment says how many there were.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, NamedTuple
from zlib import crc32

from tests.soak.lines import decode_line
from tests.support.checker import History, digest, disorder, violations
from tests.support.checker import Stored as PlainStored

Found = list[str]
_SHOWN: Final = 5
_HEADERS = tuple[tuple[str, bytes], ...]


class Stored(NamedTuple):
    """One record of Kafka. ``host``: of the push-client that sent it; None: it came over HTTP otherwise."""

    partition: int
    offset: int
    source: str
    seqno: int
    prev: int | None
    data: bytes
    headers: _HEADERS = ()
    recorded_ms: int = 0
    host: str | None = None

    @property
    def place(self) -> str:
        return f"{self.source} {self.seqno} at {self.partition}@{self.offset}"


class Row(NamedTuple):
    """A line in the table, or in its quarantine (without event time)."""

    source: str
    seqno: int
    line: int
    text: bytes
    event_time: datetime | None
    batch: int


class SegmentChange(NamedTuple):
    """A segment as a batch left it. ``written_ms``: Unix time at which that was written. ``silent``: how many sources
    were silent, by the segment's own words."""

    start: datetime
    version: int
    state: str
    rows: int
    batch: int
    written_ms: int
    silent: int = 0


class Witness(NamedTuple):
    """What others than the loader saw of the sources, all by (source, seqno) or by source, in Unix time.

    ``read_ms``: when a reader of any data centre got the chunk, so that it was committed before. ``recorded_ms``: of
    its record. ``beats``: when heartbeats were sent, and when they were answered.
    """

    read_ms: Mapping[tuple[str, int], int]
    recorded_ms: Mapping[tuple[str, int], int]
    beats: Mapping[str, Sequence[tuple[int, int]]]


class FileTruth(NamedTuple):
    """What a log of a host holds: lines 1 to ``lines``. ``truncated``: first and last of each incarnation that was
    truncated and whose copy was compressed at once: lines that were not sent may be lost.

    ``since``: lines up to this one need not be there: the state folder was copied to the host when they existed.
    """

    log: str
    lines: int
    truncated: Sequence[tuple[int, int]] = ()
    since: int = 0


# ---- HTTP, readers ---------------------------------------------------------------------------------------------------


def check_http(history: History, stored: Sequence[Stored]) -> Found:
    """Of one data centre: the answers over HTTP, and the order of all its sources."""
    http = [_plain(record, record.prev) for record in stored if record.host is None]
    # A file's chunk may follow one that another data centre has.
    return violations(history, http) + disorder([_plain(record, None) for record in stored if record.host is not None])


def _plain(record: Stored, prev: int | None) -> PlainStored:
    return PlainStored(record.source, record.partition, record.offset, record.seqno, prev, digest(record.data))


def check_reader(got: Sequence[tuple[int, str, int, int]], stored: Sequence[Stored]) -> Found:
    """Of one partition: (offset, source, seqno, checksum) as they were read, and what is stored."""
    wanted = [(one.offset, one.source, one.seqno, crc32(one.data)) for one in stored]
    if list(got) == wanted:
        return []
    at = next((n for n, (one, other) in enumerate(zip(got, wanted, strict=False)) if one != other), len(wanted))
    return [f"reader: {len(got)} chunks read, {len(wanted)} stored; the first difference is number {at}"]


# ---- files -----------------------------------------------------------------------------------------------------------


def union(topics: Iterable[Iterable[Stored]]) -> tuple[dict[str, list[Stored]], Found]:
    """The chunks of each source in all data centres by seqno, a chunk that two of them have once."""
    found: Found = []
    chunks: dict[str, dict[int, Stored]] = defaultdict(dict)
    for topic in topics:
        for record in topic:
            known = chunks[record.source].setdefault(record.seqno, record)
            if known.data != record.data:
                found.append(f"unequal: {known.place} and {record.place}, in two data centres, differ")
    return {source: [by[seqno] for seqno in sorted(by)] for source, by in chunks.items()}, found


def check_files(
    sources: Mapping[str, Sequence[Stored]], truths: Mapping[str, Sequence[FileTruth]]
) -> tuple[Found, int]:
    """``truths``: by host. Returns also how many lines truncations took before they were sent."""
    found: Found = []
    lines: dict[str, Counter[tuple[str, int]]] = defaultdict(Counter)
    for source, records in sources.items():
        host = records[0].host
        if host is None:
            continue
        stream, at = [], records[0].seqno - len(records[0].data)
        pieces = 2 if at else 0
        if at:
            stream.append(b"\n")  # it resumes within its file: what comes before the next newline may be a piece
        for record in records:
            begins = record.seqno - len(record.data)
            if begins != at:
                found.append(f"{'hole' if begins > at else 'overlap'}: {record.place} begins at {begins}, not at {at}")
            stream.append(record.data)
            at = record.seqno
        for number, text in enumerate(b"".join(stream).split(b"\n")[:-1]):
            line = decode_line(text)
            if line is not None:
                lines[host][line.log, line.number] += 1
            elif text and number >= pieces:
                found.append(f"damaged: line {number} of {source}: {text[:80]!r}")
    lost = 0
    for host, files in truths.items():
        for truth in files:
            more, taken = _check_lines(host, truth, lines[host])
            found += more
            lost += taken
        known = {truth.log for truth in files}
        found += [f"never written: {host} sent line {chunk}" for chunk in lines[host] if chunk[0] not in known]
    return found, lost


def _check_lines(host: str, truth: FileTruth, seen: Counter[tuple[str, int]]) -> tuple[Found, int]:
    doubled = [number for number in range(1, truth.lines + 1) if seen[truth.log, number] > 1]
    missing = {number for number in range(truth.since + 1, truth.lines + 1) if not seen[truth.log, number]}
    lost = 0
    for first, last in truth.truncated:
        number = last
        while number >= first and number in missing:
            missing.discard(number)
            lost += 1
            number -= 1
    found = []
    if missing:
        found.append(f"lost: {host} {truth.log}: {len(missing)} lines: {sorted(missing)[:_SHOWN]} …")
    if doubled:
        found.append(f"doubled: {host} {truth.log}: {len(doubled)} lines: {doubled[:_SHOWN]} …")
    return found, lost


# ---- tables ----------------------------------------------------------------------------------------------------------


def lines_of(sources: Mapping[str, Sequence[Stored]]) -> dict[tuple[str, int, int], bytes]:
    """By source, seqno and number in the chunk, from 0: the lines that a table must have."""
    return {
        (source, record.seqno, number): text
        for source, records in sources.items()
        for record in records
        for number, text in enumerate(record.data.removesuffix(b"\n").split(b"\n"))
    }


def check_rows(wanted: Mapping[tuple[str, int, int], bytes], rows: Iterable[Row]) -> Found:
    """``wanted``: the lines of all chunks of all data centres, each once."""
    found: Found = []
    seen: Counter[tuple[str, int, int]] = Counter()
    for row in rows:
        key = (row.source, row.seqno, row.line)
        seen[key] += 1
        if key not in wanted:
            found.append(f"never stored: the table has {key}, and no chunk has this line")
        elif wanted[key] != row.text:
            found.append(f"altered: the row {key} has other bytes than the line")
    missing = wanted.keys() - seen.keys()
    doubled = [key for key, count in seen.items() if count > 1]
    if missing:
        found.append(f"lost: {len(missing)} lines are not in the table: {sorted(missing)[:_SHOWN]} …")
    if doubled:
        found.append(f"doubled: {len(doubled)} lines are in the table more than once: {sorted(doubled)[:_SHOWN]} …")
    return found


def check_segments(
    changes: Iterable[SegmentChange], rows: Iterable[Row], witness: Witness, window_s: int, idle_s: int
) -> tuple[Found, Counter[str]]:
    """Returns also how many rows came after READY by right, by reason.

    The check that made a segment READY began after its closing was written, and before READY was written.
    """
    found: Found = []
    late: Counter[str] = Counter()
    sources = _Sources(rows, witness, idle_s * 1000)
    by_window: dict[datetime, list[Row]] = defaultdict(list)
    for row in sources.rows:
        if row.event_time is not None:
            seconds = int(row.event_time.timestamp()) // window_s * window_s
            by_window[datetime.fromtimestamp(seconds, UTC)].append(row)
    changes = sorted(changes, key=lambda one: (one.batch, one.start))
    closed = {(one.start, one.version): one.written_ms for one in changes if one.state == "IMMUTABLE"}
    for start in sorted(by_window.keys() - {one.start for one in changes}):
        found.append(f"no segment: {len(by_window[start])} rows are of {start}, and nothing is known of it")
    for change in changes:
        inside, what = by_window[change.start], f"{change.start:%H:%M:%S} version {change.version} {change.state}"
        counted = sum(row.batch <= change.batch for row in inside)
        if counted != change.rows:
            found.append(f"count: {what} in batch {change.batch} has {change.rows} rows; there are {counted}")
        if change.state != "READY":
            continue
        if (change.start, change.version) not in closed:
            found.append(f"never closed: {what} in batch {change.batch}")
            continue
        from_ms, silent = closed[change.start, change.version], set()
        for row in (row for row in inside if row.batch > change.batch):
            why = sources.why_late(row, change.batch, from_ms, change.written_ms)
            if why not in _BY_RIGHT:
                found.append(f"{why}: {what} in batch {change.batch}, {row.source} {row.seqno} in batch {row.batch}")
                continue
            late[why] += 1
            silent |= {row.source} if why == _SILENT else set()
        if len(silent) > change.silent:
            found.append(f"silent: {what} says {change.silent} sources; later came rows of {sorted(silent)}")
    return found, late


_NEW: Final = "late rows of new sources"
_SILENT: Final = "late rows of silent sources"
_BY_RIGHT: Final = (_NEW, _SILENT)


class _Sources:
    def __init__(self, rows: Iterable[Row], witness: Witness, idle_ms: int) -> None:
        self.rows = list(rows)
        self._witness, self._idle_ms = witness, idle_ms
        self._first_ms: dict[str, int] = {}
        for (source, _), at in witness.read_ms.items():
            self._first_ms[source] = min(at, self._first_ms.get(source, at))
        self._loaded: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for row in self.rows:
            self._loaded[row.source].add((row.batch, witness.recorded_ms.get((row.source, row.seqno), 0)))

    def why_late(self, row: Row, batch: int, from_ms: int, to_ms: int) -> str:
        """Why the row came after a batch whose check began between these times."""
        read_ms = self._witness.read_ms.get((row.source, row.seqno))
        if read_ms is not None and read_ms < from_ms:
            return f"missing from READY, read {(from_ms - read_ms) / 1000:.1f} s before the closing was written"
        if self._first_ms.get(row.source, to_ms) >= from_ms:
            return _NEW
        return _SILENT if self._may_be_silent(row.source, batch, from_ms, to_ms) else "late from a live source"

    def _may_be_silent(self, source: str, batch: int, from_ms: int, to_ms: int) -> bool:
        """Whether at one of these times nothing was heard of it for so long: neither a chunk that is loaded, nor a
        heartbeat that was answered before."""
        seen = {recorded for loaded, recorded in self._loaded[source] if loaded <= batch}
        seen |= {at for at, answered in self._witness.beats.get(source, ()) if answered < from_ms}
        within = sorted(at for at in seen if from_ms - self._idle_ms < at < to_ms)
        return any(b - a > self._idle_ms for a, b in pairwise([from_ms - self._idle_ms, *within, to_ms]))
