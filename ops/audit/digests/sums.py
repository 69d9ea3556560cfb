r"""The digests, sums and ranges by which two sides are compared: in total, chunk by chunk, or line by line. Pure.

A line ends with ``\n``; its text is the bytes before it, a ``\r`` included. The last line may lack the ``\n``; an
empty chunk has no lines. The loader makes rows in the same way, numbered from `FIRST_LINE`.

The digest of rows is the sum of their lines' digests modulo 2^128, each over the line's number, text and ending. So
rows can be added up in whatever order a table gives them, and a row twice does not cancel out.

To add chunks, the digest of each is multiplied by an odd number of 128 bits, modulo 2^128. That number identifies the
chunk and the columns that its rows take from its headers and time. So a row under another chunk's identity does not
cancel out, nor one with another time or attribute. Two different sets of rows have the same sum with a probability of
about 1 in 2^128. The digests are XXH3 (128 bits), three times as fast on lines as BLAKE2b; neither they nor the sums
are designed to withstand an attacker.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any, Final, NamedTuple, TypeVar

from xxhash import xxh3_128_intdigest

K = TypeVar("K")

FIRST_LINE: Final = 0
# A record that no gateway wrote has no lines: the loader quarantines it whole, as this line of no source.
WHOLE_RECORD: Final = -1
# A table of whole chunks has one row for each.
WHOLE_CHUNK: Final = -2
MODULUS: Final = 1 << 128
_UINT64: Final = (1 << 64) - 1


class ChunkLine(NamedTuple):
    """``newline``: it ended with one."""

    number: int
    text: bytes
    newline: bool


@dataclass(slots=True)
class LineRun:
    """Lines of one chunk with consecutive numbers and the same ending."""

    first: int
    texts: list[bytes]
    newline: bool

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[ChunkLine]:
        return (ChunkLine(number, text, self.newline) for number, text in enumerate(self.texts, self.first))


class ChunkHead(NamedTuple):
    """The columns that every row of a chunk takes from its record. ``created_us``, ``recorded_us``: microseconds since
    1970. ``attributes``: sorted pairs."""

    prev: int | None
    created_us: int | None
    recorded_us: int | None
    attributes: tuple[tuple[str, str | None], ...]


class RecordHead(NamedTuple):
    """Those that the row of a record that no gateway wrote takes from it."""

    recorded_us: int | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]


Head = ChunkHead | RecordHead | None


@dataclass(slots=True)
class Tally:
    """``size_bytes``: of the lines' texts, without their endings. ``digest``: below `MODULUS`."""

    lines: int = 0
    size_bytes: int = 0
    digest: int = 0

    def __add__(self, other: Tally) -> Tally:
        digest = (self.digest + other.digest) % MODULUS
        return Tally(self.lines + other.lines, self.size_bytes + other.size_bytes, digest)

    def weighed(self, weight: int) -> Tally:
        return Tally(self.lines, self.size_bytes, self.digest * weight % MODULUS)

    def __bool__(self) -> bool:
        return bool(self.lines or self.size_bytes or self.digest)


def count_lines(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))


def lines_of(data: bytes) -> list[ChunkLine]:
    parts = data.split(b"\n")
    last = parts.pop()
    found = [ChunkLine(number, text, True) for number, text in enumerate(parts, FIRST_LINE)]
    if last:
        found.append(ChunkLine(FIRST_LINE + len(parts), last, False))
    return found


def whole_record(value: bytes) -> ChunkLine:
    return ChunkLine(WHOLE_RECORD, value, False)


def rows_of(data: bytes, whole_chunks: bool) -> list[ChunkLine]:
    """The rows that a table must hold of a chunk: its lines, or the chunk as one row."""
    return [ChunkLine(WHOLE_CHUNK, data, False)] if whole_chunks else lines_of(data)


def sum_of_rows(data: bytes, whole_chunks: bool) -> Tally:
    """The sum of `rows_of`, faster."""
    if whole_chunks:
        return Tally(1, len(data), _digest(WHOLE_CHUNK, data, False))
    texts = data.split(b"\n")
    last = texts.pop()
    found = sum_of(LineRun(FIRST_LINE, texts, True))
    return found + sum_of(LineRun(FIRST_LINE + len(texts), [last], False)) if last else found


def sum_of(lines: LineRun | Iterable[tuple[int, bytes, bool]]) -> Tally:
    """The sum of any lines, in any order."""
    if isinstance(lines, LineRun) and lines.first >= 0:
        begin, texts = 2 * lines.first + lines.newline, lines.texts
        total = sum(map(xxh3_128_intdigest, texts, range(begin, begin + 2 * len(texts), 2)))
        return Tally(len(texts), sum(map(len, texts)), total % MODULUS)
    count = size = total = 0
    for number, text, newline in lines:
        total += _digest(number, text, newline)
        size += len(text)
        count += 1
    return Tally(count, size, total % MODULUS)


def _digest(number: int, text: bytes, newline: bool) -> int:
    return xxh3_128_intdigest(text, (2 * number + newline) & _UINT64)


def identity_of(source_id: str, seqno: int) -> int:
    """64 bits that identify (source, seqno) where a million of them are held in memory."""
    return int.from_bytes(blake2b(_raw(source_id, seqno), digest_size=8).digest(), "little")


def account_of(source_id: str | None, seqno: int | None, head: Head) -> int:
    """64 bits that identify a chunk and its head; None: of a record that no gateway wrote."""
    return weight_of(source_id, seqno, ANY_OFFSET, head) >> 64


def _raw(*values: Any) -> bytes:
    return repr(values).encode("utf-8", "surrogatepass")


def first_difference(one: bytes, other: bytes) -> int:
    """The first position at which they differ; the shorter one's length where one begins with the other."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


# ---- differences -------------------------------------------------------------------------------------------------


class Damage(NamedTuple):
    """``rows``: the number of rows concerned."""

    kind: str
    detail: str
    rows: int


def name_damage(expected: Sequence[ChunkLine], rows: Sequence[ChunkLine]) -> list[Damage]:
    """Compares the lines of a record with the rows of the table, both of one chunk and under its identity."""
    by_number: dict[int, list[ChunkLine]] = {}
    for row in rows:
        by_number.setdefault(row.number, []).append(row)
    missing: list[int] = []
    doubled: list[int] = []
    changed: list[Damage] = []
    for line in expected:
        there = by_number.pop(line.number, [])
        if not there:
            missing.append(line.number)
        doubled += [line.number] * (len(there) - 1)
        changed += [_changed(line, row) for row in there if row != line]
    found = []
    if missing:
        which = "all" if len(missing) == len(expected) else f"{_spans(missing)} of"
        found.append(Damage("missing-row", f"{which} {len(expected)} rows are missing", len(missing)))
    if doubled:
        found.append(Damage("doubled-row", f"{_spans(doubled)}: more than once in the table", len(doubled)))
    found += changed
    if by_number:
        extra = sum(map(len, by_number.values()))
        detail = f"{_spans(by_number)}: in the table, but the chunk has only {len(expected)} lines"
        found.append(Damage("row-without-line", detail, extra))
    return found


def _changed(line: ChunkLine, row: ChunkLine) -> Damage:
    if line.text == row.text:
        detail = f"{_spans([line.number])}: newline is {str(row.newline).lower()} in the table, but not in the log"
    else:
        at = first_difference(line.text, row.text)
        detail = f"{_spans([line.number])}: differs from the log at byte {at} of {len(line.text)}"
    return Damage("changed-row", detail, 1)


def changed_column(lines: Iterable[ChunkLine], name: str, stored: str, expected: str) -> Damage:
    """Of rows whose column ``name`` is not as their record says."""
    numbers = [line.number for line in lines]
    detail = f"{_spans(numbers)}: {name} is {stored} in the table, but {expected} by the log"
    return Damage("changed-column", detail, len(numbers))


def _spans(numbers: Iterable[int]) -> str:
    """``lines 3, 5 to 9``; at most five spans are listed."""
    ordered = sorted(set(numbers))
    if ordered in ([WHOLE_RECORD], [WHOLE_CHUNK]):
        return "the whole record" if ordered == [WHOLE_RECORD] else "the whole chunk"
    runs = [[number for _, number in run] for _, run in groupby(enumerate(ordered), lambda one: one[1] - one[0])]
    spans = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    shown = ", ".join(spans[:5]) + (f" and {len(spans) - 5} more spans" if len(spans) > 5 else "")
    return f"{'line' if len(ordered) == 1 else 'lines'} {shown}"


# The offset of rows whose offsets are not compared.
ANY_OFFSET: Final = -1


class Cell(NamedTuple):
    """The unit of comparison: one source in one partition. ``source_id`` None: records that no gateway wrote."""

    topic: str
    partition: int
    source_id: str | None

    @property
    def place(self) -> tuple[str, int]:
        return self.topic, self.partition


def weight_of(source_id: str | None, seqno: int | None, offset: int, head: Head = None) -> int:
    """The odd number of 128 bits that identifies a chunk and its head; of a record that no gateway wrote, its offset
    and head alone."""
    if source_id is None or seqno is None:
        source_id = seqno = None
    return int.from_bytes(blake2b(_raw(source_id, seqno, offset, head), digest_size=16).digest(), "little") | 1


def chunk_digest(seqno: int, data: bytes) -> int:
    """The digest of a chunk in a file or log; the digests of a source are added modulo 2^128."""
    return xxh3_128_intdigest(data, seqno)


def shown(digest: int) -> str:
    """The external form of a digest: 32 hexadecimal digits."""
    return f"{digest:032x}"


def add_to(tallies: dict[K, Tally], key: K, tally: Tally) -> None:
    tallies[key] = tallies[key] + tally if key in tallies else tally


# ---- chunk by chunk ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Balance:
    identity: int
    lines: int
    digest: int
    has_foreign_rows: bool = False


@dataclass(slots=True)
class ChunkAccount:
    """The account of one partition's chunks between Kafka and the table.

    The chunks of the log are entered first; then each row of the table is subtracted. A chunk is settled if the balance
    is zero: as many rows as lines, a zero difference of the digests, and every row under the source, seqno and head of
    its record.
    """

    _balances: dict[int, _Balance] = field(default_factory=dict)

    def expect(self, offset: int, identity: int, total: Tally) -> None:
        """Enters a chunk of the log."""
        self._balances[offset] = _Balance(identity, total.lines, total.digest)

    def found(self, offset: int, identity: int, total: Tally) -> bool:
        """Subtracts all or some rows of a chunk. False: the log has no chunk at this offset."""
        balance = self._balances.get(offset)
        if balance is None:
            return False
        balance.lines -= total.lines
        balance.digest = (balance.digest - total.digest) % MODULUS
        balance.has_foreign_rows |= identity != balance.identity
        return True

    def unsettled(self) -> Iterator[tuple[int, int]]:
        """Yields (offset, missing rows) of the other chunks, in the order of the log; negative: too many rows; 0: as
        many, but different."""
        for offset, balance in self._balances.items():
            if balance.lines or balance.digest or balance.has_foreign_rows:
                yield offset, balance.lines


@dataclass(slots=True)
class Ranges:
    """Numbers as disjoint [start, end), ascending, with nothing between two that touch."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """Merges these [start, end), of which some may be empty."""
        found = cls()
        for low, high in sorted(pair for pair in pairs if pair[0] < pair[1]):
            if found.ends and low <= found.ends[-1]:
                found.ends[-1] = max(high, found.ends[-1])
            else:
                found.starts.append(low)
                found.ends.append(high)
        return found

    def __contains__(self, offset: int) -> bool:
        index = bisect_right(self.starts, offset) - 1
        return index >= 0 and offset < self.ends[index]

    def overlaps(self, start: int, end: int) -> bool:
        """Whether any offset of [start, end) is in the ranges."""
        index = bisect_right(self.starts, end - 1) - 1
        return start < end and index >= 0 and self.ends[index] > start

    def add(self, start: int, end: int) -> None:
        """Merges the range in."""
        merged = Ranges.of([*self, (start, end)])
        self.starts, self.ends = merged.starts, merged.ends

    def minus(self, other: Ranges) -> Ranges:
        """The numbers in these ranges that are not in the others."""
        found = []
        for at, end in self:
            for low, high in other:
                if at < high and low < end:
                    found.append((at, low))
                    at = max(at, high)
            found.append((at, end))
        return Ranges.of(found)

    def within(self, start: int, end: int) -> Ranges:
        """The part of them in [start, end)."""
        return Ranges.of((max(low, start), min(high, end)) for low, high in self)

    def plus(self, other: Ranges) -> Ranges:
        """The numbers in either."""
        return Ranges.of([*self, *other])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self.starts, self.ends, strict=True)))

    def __bool__(self) -> bool:
        return bool(self.starts)

    @property
    def start(self) -> int:
        return self.starts[0] if self.starts else 0

    @property
    def end(self) -> int:
        return self.ends[-1] if self.ends else 0
