"""What writers, readers, console and loader saw, by phase. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

_LANES: Final = re.compile(r"^lanes? [\d, to]*\d(?: is| are)")
CURRENT_MS: Final = 1000.0  # a reader whose chunks are younger is up to date

Note = Mapping[str, float]


class Phase(NamedTuple):
    """A part of the run, in Unix milliseconds."""

    name: str
    from_ms: float
    to_ms: float

    def holds(self, at_ms: float) -> bool:
        return self.from_ms <= at_ms < self.to_ms


class Look(NamedTuple):
    """What the console's interface said. ``link``: lag of the mirror in seconds and records, and why it waits.

    ``wrong``: the problems that the first page shows. None where no gateway answered."""

    at_ms: float
    took_ms: float
    wrong: tuple[str, ...] | None
    lag_s: float | None = None
    lag_records: int | None = None
    wait: str | None = None


class TableLook(NamedTuple):
    """Rows of each data centre in the table, and its segments with rows: how many, and how many of them READY.

    ``waits``: the oldest segment that is not, and why."""

    at_ms: float
    rows: Mapping[str, int]
    segments: int
    ready: int
    waits: str = ""


def share(ordered: Sequence[float], part: float) -> float:
    """The smallest value that at least this part does not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * part) - 1)]


def writer_cells(notes: Iterable[Note], phase: Phase) -> list[str]:
    """Of the writes that began in the phase: number, p50, p99 and longest time until recorded."""
    times = sorted(note["took_ms"] for note in notes if phase.holds(note["at_ms"]))
    if not times:
        return ["0", "", "", ""]
    marks = (share(times, 0.5), share(times, 0.99), times[-1])
    return [f"{len(times):,}", *map(seconds, marks)]


def reader_cells(notes: Iterable[Note], phase: Phase) -> list[str]:
    """Of the chunks that came in the phase: number, longest time without one, p50 and longest delay, out of order."""
    found = [note for note in notes if phase.holds(note["at_ms"])]
    times = [phase.from_ms, *(note["at_ms"] for note in found), phase.to_ms]
    silence = max(later - earlier for earlier, later in pairwise(times))
    if not found:
        return ["0", seconds(silence), "", "", "0"]
    ages = sorted(note["age_ms"] for note in found)
    chunks, breaks = (sum(int(note[name]) for note in found) for name in ("chunks", "breaks"))
    return [f"{chunks:,}", seconds(silence), seconds(share(ages, 0.5)), seconds(ages[-1]), str(breaks)]


def console_cells(looks: Iterable[Look], phase: Phase) -> list[str]:
    """Of the looks in the phase: number, those without an answer, longest lag of the mirror and why it waited last."""
    found = [look for look in looks if phase.holds(look.at_ms)]
    silent = sum(look.wrong is None for look in found)
    lags = [look.lag_s for look in found if look.lag_s is not None]
    waits = [look.wait for look in found if look.wait]
    return [str(len(found)), str(silent), f"{max(lags):.1f} s" if lags else "", waits[-1] if waits else ""]


def caught_up_s(notes: Iterable[Note], from_ms: float) -> float | None:
    """Seconds from then until a reader that was behind gets chunks that are up to date. None: not at all."""
    later = [note for note in notes if note["at_ms"] >= from_ms]
    return next(((note["at_ms"] - from_ms) / 1000 for note in later if note["age_ms"] < CURRENT_MS), None)


def table_cells(looks: Sequence[TableLook], phase: Phase) -> list[str]:
    """Rows of each data centre that the phase added, and the segments READY at its end."""
    before = [look for look in looks if look.at_ms < phase.from_ms]
    found = [look for look in looks if phase.holds(look.at_ms)]
    if not found:
        return []
    start: Mapping[str, int] = before[-1].rows if before else dict.fromkeys(found[-1].rows, 0)
    added = [f"{found[-1].rows[dc] - start[dc]:,}" for dc in sorted(found[-1].rows)]
    return [*added, f"{found[-1].ready} of {found[-1].segments}"]


def loaded_text(looks: Sequence[TableLook]) -> str:
    """How far the loader is, and what it waits for."""
    if not looks:
        return "the loader has written no batch yet"
    last = looks[-1]
    rows = ", ".join(f"{count:,} rows of {dc}" for dc, count in sorted(last.rows.items()))
    text = f"{rows}; {last.ready} of {last.segments} segments READY"
    return f"{text}; {last.waits}" if last.waits else text


def seconds(ms: float) -> str:
    return f"{ms / 1000:.2f} s"


def problems(looks: Iterable[Look], phases: Sequence[Phase]) -> Iterator[tuple[str, str]]:
    """Phase and text of each problem, where it appeared first; which lanes it are does not matter."""
    seen: set[str] = set()
    for look in looks:
        for text in (_LANES.sub("some lanes are", one) for one in look.wrong or ()):
            if text not in seen:
                seen.add(text)
                yield next((phase.name for phase in phases if phase.holds(look.at_ms)), ""), text


def link_of(document: Mapping[str, Any]) -> tuple[float | None, int | None, str | None]:
    """Lag in seconds and records, and the reason of the present wait, of ``GET /v1/mirror``."""
    links = [link for worker in document["workers"].values() for link in worker.get("links", ())]
    lags = [link["lag_s"] for link in links if link["lag_s"] is not None]
    waits = [link["last_wait"] for link in links if link["last_wait"] and link["last_wait"]["ended_ms"] is None]
    records = sum(link["lag_records"] for link in links) if links else None
    return (max(lags) if lags else None), records, (str(waits[0]["reason"]) if waits else None)
