r"""The lines of a chunk, and the digest by which they are compared. Pure.

A line ends with ``\n``; its text is the bytes before it, a ``\r`` included. The last line may lack the ``\n``; an
empty chunk has no lines. The loader makes rows in the same way, numbered from `FIRST_LINE`.

The digest of a chunk is the sum of its lines' digests modulo 2^128, each over the line's number, text and ending.
So rows can be added up in whatever order a table gives them, a row twice does not cancel out, and two different
sets of rows have the same sum by an accident of one in 2^128 (BLAKE2b; the construction is Bellare and Micciancio,
"A New Paradigm for Collision-free Hashing", 1997; it is not meant to withstand an attacker).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

FIRST_LINE: Final = 0
# A record that no gateway wrote has no lines: the loader quarantines it whole, as this line of no source.
WHOLE_RECORD: Final = -1
# A table of whole chunks has one row for each.
WHOLE_CHUNK: Final = -2
NO_IDENTITY: Final = 0
MODULUS: Final = 1 << 128
_HEAD = struct.Struct("<q?")


class ChunkLine(NamedTuple):
    """``newline``: it ended with one."""

    number: int
    text: bytes
    newline: bool


class LineSum(NamedTuple):
    """The number of lines, and their digest."""

    lines: int
    digest: int


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


def sum_of(lines: Iterable[tuple[int, bytes, bool]]) -> LineSum:
    """The sum of any lines, in any order."""
    head, from_bytes = _HEAD.pack, int.from_bytes
    count = total = 0
    for number, text, newline in lines:
        total += from_bytes(blake2b(head(number, newline) + text, digest_size=16).digest(), "little")
        count += 1
    return LineSum(count, total % MODULUS)


def identity_of(source_id: str, seqno: int) -> int:
    """64 bits that identify (source, seqno) where a million of them are held in memory."""
    raw = seqno.to_bytes(8, "big") + source_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


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


def _spans(numbers: Iterable[int]) -> str:
    """``lines 3, 5 to 9``; at most five spans are listed."""
    ordered = sorted(set(numbers))
    if ordered in ([WHOLE_RECORD], [WHOLE_CHUNK]):
        return "the whole record" if ordered == [WHOLE_RECORD] else "the whole chunk"
    spans = [f"{low}" if low == high else f"{low} to {high}" for low, high in _runs(ordered)]
    shown = ", ".join(spans[:5]) + (f" and {len(spans) - 5} more spans" if len(spans) > 5 else "")
    return f"{'line' if len(ordered) == 1 else 'lines'} {shown}"


def _runs(ordered: list[int]) -> Iterator[tuple[int, int]]:
    first = last = ordered[0]
    for number in ordered[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
