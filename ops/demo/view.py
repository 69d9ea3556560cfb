"""The demo's output: one line per event, and on a terminal a live picture below.

`DemoState` collects the state; a picture is drawn from a `DemoSnapshot` alone. Without a terminal, a line every few
seconds replaces it.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logferry.client.files.identity import printable
from logferry.ops.demo import gateways
from logferry.ops.demo.plan import DC, LANES, OTHER_DC, DemoPlan
from logferry.ops.demo.readers import FileGrowth, IndependentReader, SeenSource, percentile
from logferry.ops.stack.stack import Stack
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_PULSE_S: Final = 5.0
_SHOWN_SOURCES: Final = 10
# Columns for the ^C that a terminal prints at the cursor: a wrapped line would leave parts of the picture behind.
_MARGIN: Final = 3
_REFRESH_S: Final = 0.25
_RATE_OVER_S: Final = 4.0
_GENERATION: Final = re.compile(r"#(\d+)$")


@dataclass(frozen=True)
class SourceLine:
    name: str
    chunks: int
    bytes: int
    behind: int


@dataclass(frozen=True)
class ProcessLine:
    """``pid``: None if it does not run."""

    name: str
    pid: int | None
    note: str


@dataclass(frozen=True)
class DemoSnapshot:
    """The state at one moment: bytes, MB/s, and ages in ms (None before the first chunk)."""

    step: str = ""
    written: int = 0
    readable: int = 0
    written_mb_s: float = 0.0
    readable_mb_s: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    sources: Sequence[SourceLine] = ()
    processes: Sequence[ProcessLine] = ()
    lanes: Sequence[int | None] = ()


class View:
    """Any thread may print events."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()
        self._pulse_at = self._started + _PULSE_S
        self._last_pulse = ""
        self._saying = threading.Lock()

    def say(self, text: str, style: str = "") -> None:
        """Prints an event."""
        at = f"{time.monotonic() - self._started:6.1f} s"
        with self._saying:
            if self.console.is_terminal:
                line = Table.grid(padding=(0, 2))
                line.add_column(style="dim", no_wrap=True)
                line.add_row(at, Text(text, style=style))
                self.console.print(line)
            else:
                self.console.print(f"{at}  {text}", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def live(self, look: Callable[[], DemoSnapshot]) -> Iterator[None]:
        """Shows the picture while the body runs, and removes it afterwards; the events stay."""
        if not self.console.is_terminal:
            yield
            return
        live = Live(
            get_renderable=lambda: picture(look(), time.monotonic() - self._started, self.console.width - _MARGIN),
            console=self.console,
            refresh_per_second=4,
            transient=True,
        )
        with live:
            yield

    def pulse(self, snapshot: DemoSnapshot) -> None:
        """Without a terminal: prints the line that replaces the picture, every few seconds, if it has changed."""
        now = time.monotonic()
        if self.console.is_terminal or now < self._pulse_at:
            return
        self._pulse_at = now + _PULSE_S
        text = f"{_flow(snapshot)}; {_ages(snapshot)}"
        if text != self._last_pulse:
            self._last_pulse = text
            self.say(text)


def picture(now: DemoSnapshot, elapsed_s: float, width: int) -> RenderableType:
    """At most 18 lines of about 100 columns."""
    head = Text.assemble((f" {elapsed_s:5.1f} s ", "bold reverse"), "  ", (now.step, "bold"))
    flow = Text(f" {_flow(now)}\n {_ages(now)}\n", style="cyan")
    body = Table.grid(expand=True, padding=(0, 1))
    body.add_column(ratio=11)
    body.add_column(ratio=10)
    body.add_row(_sources(now.sources), Group(_processes(now.processes), Text(), _lanes(now.lanes)))
    return Panel(Group(head, flow, body), box=box.ROUNDED, border_style="dim", width=width)


def _flow(now: DemoSnapshot) -> str:
    return (
        f"written {mb(now.written)} at {now.written_mb_s:.1f} MB/s, readable {mb(now.readable)}"
        f" at {now.readable_mb_s:.1f} MB/s, behind {mb(max(0, now.written - now.readable))}"
    )


def _ages(now: DemoSnapshot) -> str:
    if now.p50_ms is None or now.p99_ms is None:
        return "nothing is readable yet"
    return f"created → readable: p50 {seconds(now.p50_ms)}, p99 {seconds(now.p99_ms)}"


def _sources(sources: Sequence[SourceLine]) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column("source", no_wrap=True, overflow="ellipsis", ratio=1)
    for name in ("chunks", "readable", "behind"):
        table.add_column(name, justify="right", no_wrap=True)
    for source in sources[:_SHOWN_SOURCES]:
        behind = Text(mb(source.behind), style="yellow" if source.behind >= 1e6 else "")
        table.add_row(escape(source.name), f"{source.chunks:,}", mb(source.bytes), behind)
    if len(sources) > _SHOWN_SOURCES:
        table.add_row(f"and {len(sources) - _SHOWN_SOURCES:,} more", "", "", "")
    return table


def _processes(processes: Sequence[ProcessLine]) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True)
    table.add_column("process", no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for process in processes:
        pid = Text("—", style="red") if process.pid is None else Text(str(process.pid), style="green")
        table.add_row(escape(process.name), pid, escape(process.note))
    return table


def _lanes(owners: Sequence[int | None]) -> Text:
    """One mark per lane: the number of the worker that serves it, or a red dash."""
    text = Text(" lanes  ")
    for owner in owners:
        mark, style = (" – ", "white on red") if owner is None else (f" {owner} ", "black on green")
        text.append(mark, style=style).append(" ")
    return text


def mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def seconds(ms: float) -> str:
    return f"{ms / 1000:.2f} s"


class DemoState:
    """``step``: the present step of the story. One thread calls `look`; others may read `snapshot`."""

    def __init__(
        self, plan: DemoPlan, stack: Stack, reader: IndependentReader, processes: Callable[[], Sequence[ProcessLine]]
    ) -> None:
        self.step = ""
        self.snapshot = DemoSnapshot()
        self._plan, self._stack, self._reader, self._processes = plan, stack, reader, processes
        self.growth = FileGrowth()
        self._rates: deque[tuple[float, int, int]] = deque()
        self._looked_at = 0.0

    def look(self) -> DemoSnapshot:
        """Records the sizes of the files; refreshes the other values a few times a second."""
        self.growth.note(self._plan.originals(), time.time() * 1000)
        now = time.monotonic()
        if now - self._looked_at >= _REFRESH_S:
            self._looked_at = now
            self.snapshot = self._now(now)
        return self.snapshot

    def lanes(self) -> list[int | None]:
        """The worker that serves each lane, by the workers' readiness answers."""
        owners: list[int | None] = [None] * LANES
        for worker, url in enumerate(self._stack.urls()):
            for lane in gateways.lanes_served(url):
                owners[lane] = worker
        return owners

    def written(self) -> int:
        return sum(self._sizes().values())

    def behind(self) -> int:
        """Bytes of the files that the reader has not received yet."""
        return max(0, self.written() - self._reader.account.bytes)

    def _now(self, now: float) -> DemoSnapshot:
        sizes, ages, owners = self._sizes(), sorted(self._reader.account.ages_ms), self.lanes()
        written, readable = sum(sizes.values()), self._reader.account.bytes
        written_mb_s, readable_mb_s = self._rate(now, written, readable)
        return DemoSnapshot(
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
        """Sizes by path, spelled as in source ids."""
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


def source_lines(sources: Mapping[str, SeenSource], sizes: Mapping[str, int]) -> list[SourceLine]:
    """Each source with its file: of several sources of one path the newest has the path, the one before ``path.1``."""
    by_path: dict[str, list[tuple[str, SeenSource]]] = {}
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
