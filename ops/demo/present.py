"""The present of the demo, looked up now and then by the story, drawn by the view."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from logferry.client.files.source_names import printable
from logferry.ops.demo import gateways
from logferry.ops.demo.journey import Growth
from logferry.ops.demo.plan import DC, LANES, OTHER_DC, Plan
from logferry.ops.demo.readers import Reader, Seen, percentile
from logferry.ops.demo.view import ProcessLine, Snapshot, SourceLine
from logferry.ops.stack.stack import Stack

_REFRESH_S: Final = 0.25
_RATE_OVER_S: Final = 4.0
_GENERATION: Final = re.compile(r"#(\d+)$")

Processes = Callable[[], Sequence[ProcessLine]]


class Present:
    """``step``: what the story is at. One thread looks, others may draw `snapshot`."""

    def __init__(self, plan: Plan, stack: Stack, reader: Reader, processes: Processes) -> None:
        self.step = ""
        self.snapshot = Snapshot()
        self._plan, self._stack, self._reader, self._processes = plan, stack, reader, processes
        self.growth = Growth()
        self._rates: deque[tuple[float, int, int]] = deque()
        self._looked_at = 0.0

    def look(self) -> Snapshot:
        """Notes how the files have grown; looks at all else only if the last time is a moment ago."""
        self.growth.note(self._plan.originals(), time.time() * 1000)
        now = time.monotonic()
        if now - self._looked_at >= _REFRESH_S:
            self._looked_at = now
            self.snapshot = self._now(now)
        return self.snapshot

    def lanes(self) -> list[int | None]:
        """The worker that serves each lane, as the workers say right now."""
        owners: list[int | None] = [None] * LANES
        for worker, url in enumerate(self._stack.urls()):
            for lane in gateways.lanes_served(url):
                owners[lane] = worker
        return owners

    def written(self) -> int:
        return sum(self._sizes().values())

    def behind(self) -> int:
        """Bytes of the files that the reader does not have yet."""
        return max(0, self.written() - self._reader.account.bytes)

    def _now(self, now: float) -> Snapshot:
        sizes, ages, owners = self._sizes(), self._reader.ages_ms(), self.lanes()
        written, readable = sum(sizes.values()), self._reader.account.bytes
        written_mb_s, readable_mb_s = self._rate(now, written, readable)
        return Snapshot(
            step=self.step,
            written=written,
            readable=readable,
            written_mb_s=written_mb_s,
            readable_mb_s=readable_mb_s,
            p50_ms=percentile(ages, 0.5) if ages else None,
            p99_ms=percentile(ages, 0.99) if ages else None,
            sources=source_lines(dict(self._reader.account.sources), sizes),
            processes=[*self._stack_lines(owners), *self._processes()],
            lanes=owners,
        )

    def _rate(self, now: float, written: int, readable: int) -> tuple[float, float]:
        self._rates.append((now, written, readable))
        while len(self._rates) > 2 and self._rates[0][0] < now - _RATE_OVER_S:
            self._rates.popleft()
        then, written_then, readable_then = self._rates[0]
        if now - then < _REFRESH_S:
            return 0.0, 0.0
        return (written - written_then) / (now - then) / 1e6, (readable - readable_then) / (now - then) / 1e6

    def _sizes(self) -> dict[str, int]:
        """By the path as sources name it."""
        sizes = {}
        for path in self._plan.originals():
            try:
                sizes[printable(str(path))] = path.stat().st_size
            except FileNotFoundError:  # it is being rotated
                continue
        return sizes

    def _stack_lines(self, owners: Sequence[int | None]) -> list[ProcessLine]:
        pids = self._stack.pids
        lines = [ProcessLine("kafka-1", pids.get(f"{DC}/kafka-1"), "")]
        for worker in range(len(self._stack.urls())):
            count = owners.count(worker)
            lanes = "1 lane" if count == 1 else f"{count} lanes"
            lines.append(ProcessLine(f"gateway-{worker}", pids.get(f"{DC}/gateway-{worker}"), lanes))
        lines.append(ProcessLine("mirror", pids.get(f"{OTHER_DC}/mirror-0"), f"{DC} to {OTHER_DC}"))
        return lines


def source_lines(sources: Mapping[str, Seen], sizes: Mapping[str, int]) -> list[SourceLine]:
    """Each source with the file that it is now: of several of one path the newest has the path, the one before
    ``.1`` behind it, and so on."""
    by_path: dict[str, list[tuple[str, Seen]]] = {}
    for source_id, seen in sources.items():
        by_path.setdefault(seen.path, []).append((source_id, seen))
    lines = []
    for path, found in sorted(by_path.items()):
        found.sort(key=lambda one: _generation(one[0]), reverse=True)
        names = [name for name in (path, *(f"{path}.{n}" for n in range(1, len(found) + 1))) if name in sizes]
        for index, (_, seen) in enumerate(found):
            name = names[index] if index < len(names) else path
            behind = max(0, sizes.get(name, 0) - seen.bytes)
            lines.append(SourceLine(Path(name).name, seen.chunks, seen.bytes, behind))
    return lines


def _generation(source_id: str) -> int:
    found = _GENERATION.search(source_id)
    return int(found[1]) if found else 0
