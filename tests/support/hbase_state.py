"""HBase's scan as a model: what a column shows after a set of changes, found the way a region server finds it.

Nothing here is shared with the loader. A region server sorts the cells of a row and reads them once. It has the
deletes of a family, then for each column its cells from the newest timestamp down; at one timestamp, deletes before
puts, and of several puts the one that was written last. It shows the first put that no delete hides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class CellChange(NamedTuple):
    """``place``: within the edit of this sequence id."""

    row: str
    family: str
    qualifier: str
    kind: str
    ts: int
    seq: int
    place: int
    value: str = ""


Column = tuple[str, str, str]


class _Column:
    """The cells of one column, in HBase's order."""

    def __init__(self, cells: Iterable[CellChange], of_family: Iterable[CellChange]) -> None:
        deletes = list(of_family)
        self._up_to = max((one.ts for one in deletes if one.kind == "delete_family"), default=None)
        self._exactly = {one.ts for one in deletes if one.kind == "delete_family_version"}
        self._cells = sorted(cells, key=lambda one: (-one.ts, one.kind == "put", -one.seq, -one.place))

    def shown(self) -> list[CellChange]:
        """The versions, newest first."""
        column_up_to, exactly = None, set(self._exactly)
        found: list[CellChange] = []
        for cell in self._cells:
            if cell.kind == "delete_column":
                column_up_to = cell.ts if column_up_to is None else column_up_to
            elif cell.kind == "delete":
                exactly.add(cell.ts)
            elif not self._hides(cell.ts, column_up_to, exactly) and (not found or found[-1].ts != cell.ts):
                found.append(cell)
        return found

    def _hides(self, ts: int, column_up_to: int | None, exactly: set[int]) -> bool:
        # The deletes of the column come first, as they have a timestamp that is at least as high.
        return column_up_to is not None or ts in exactly or (self._up_to is not None and ts <= self._up_to)


def scan(changes: Iterable[CellChange]) -> dict[Column, list[CellChange]]:
    """The versions that each column shows, newest first; columns without any are not there."""
    families: dict[tuple[str, str], list[CellChange]] = {}
    columns: dict[Column, list[CellChange]] = {}
    for one in changes:
        if one.kind in ("delete_family", "delete_family_version"):
            families.setdefault((one.row, one.family), []).append(one)
        else:
            columns.setdefault((one.row, one.family, one.qualifier), []).append(one)
    found = {key: _Column(cells, families.get(key[:2], ())).shown() for key, cells in columns.items()}
    return {key: shown for key, shown in found.items() if shown}
