"""What exactly is wrong with a chunk whose rows do not add up: named line by line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from logferry.ops.audit.digests.lines import WHOLE_CHUNK, WHOLE_RECORD, Line, first_difference


class Damage(NamedTuple):
    """``rows``: how many it concerns."""

    kind: str
    detail: str
    rows: int


def name_damage(expected: Sequence[Line], rows: Sequence[Line]) -> list[Damage]:
    """The lines of the record against the rows of the table, both of one chunk and under its identity."""
    by_number: dict[int, list[Line]] = {}
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


def _changed(line: Line, row: Line) -> Damage:
    if line.text == row.text:
        detail = f"{_spans([line.number])}: the table says that it {'ended' if row.newline else 'did not end'} a line"
    else:
        at = first_difference(line.text, row.text)
        detail = f"{_spans([line.number])}: differs from the log at byte {at} of {len(line.text)}"
    return Damage("changed-row", detail, 1)


def _spans(numbers: Iterable[int]) -> str:
    """``lines 3, 5 to 9``; at most a few spans are spelt out."""
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
