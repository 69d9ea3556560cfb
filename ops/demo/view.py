"""The demo's output: one line per event, and on a terminal a live picture below.

`DemoState` collects the state. Without a terminal, a line every few seconds replaces the picture.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Literal

from logferry.loaders.terminal import escape
from logferry.ops.demo.plan import DC, LANES, OTHER_DC, WORKERS, DemoPlan
from logferry.ops.demo.readers import FileGrowth, IndependentReader, SeenSource, percentile
from logferry.ops.stack.processes import json_of
from logferry.ops.stack.stack import Stack
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_PULSE_S: Final = 5.0
_SHOWN_SOURCES: Final = 10
# Columns for the ^C that a terminal prints at the cursor: a wrapped line would leave parts of the picture behind.
_MARGIN: Final = 3
_REFRESH_S: Final = 0.25
_RATE_OVER: Final = 16  # refreshes

Row = tuple[str | Text, ...]


class View:
    """Any thread may print events. ``killed``: what was killed until now."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.killed: list[str] = []
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

    def say_killed(self, what: str, text: str) -> None:
        self.killed.append(what)
        self.say(f"SIGKILL: {text}", "bold red")

    def live(self, state: DemoState) -> AbstractContextManager[object]:
        """Shows the picture while the ``with`` block runs, and removes it afterwards; the events stay."""
        if not self.console.is_terminal:
            return nullcontext()
        return Live(
            get_renderable=lambda: picture(
                state.step, state.body, time.monotonic() - self._started, self.console.width - _MARGIN
            ),
            console=self.console,
            refresh_per_second=4,
            transient=True,
        )

    def pulse(self, text: str) -> None:
        """Without a terminal: prints the line that replaces the picture, every few seconds, if it has changed."""
        now = time.monotonic()
        if self.console.is_terminal or now < self._pulse_at:
            return
        self._pulse_at = now + _PULSE_S
        if text != self._last_pulse:
            self._last_pulse = text
            self.say(text)


def picture(step: str, body: RenderableType, elapsed_s: float, width: int) -> RenderableType:
    """At most 18 lines of about 100 columns."""
    head = Text.assemble((f" {elapsed_s:5.1f} s ", "bold reverse"), "  ", (step, "bold"))
    return Panel(Group(head, body), box=box.ROUNDED, border_style="dim", width=width)


def body_of(
    flow: str, ages: str, sources: Sequence[Row], processes: Sequence[Row], lanes: Sequence[int | None]
) -> RenderableType:
    """The picture without its first line. ``lanes``: the worker that serves each, or None."""
    left = add_columns(Table(box=None), ["source"], ["chunks", "readable", "behind"], "source")
    for row in sources[:_SHOWN_SOURCES]:
        left.add_row(*row)
    if len(sources) > _SHOWN_SOURCES:
        left.add_row(f"and {len(sources) - _SHOWN_SOURCES:,} more")
    right = add_columns(add_columns(Table(box=None), ["process"], ["pid"]), [""], [], "")
    for row in processes:
        right.add_row(*row)
    marks = Text(" lanes  ")
    for owner in lanes:
        mark, style = (" – ", "white on red") if owner is None else (f" {owner} ", "black on green")
        marks.append(mark, style=style).append(" ")
    tables = Table.grid(expand=True, padding=(0, 1))
    tables.add_column(ratio=11)
    tables.add_column(ratio=10)
    tables.add_row(left, Group(right, Text(), marks))
    return Group(Text(f" {flow}\n {ages}\n", style="cyan"), tables)


def add_columns(table: Table, texts: Sequence[str], numbers: Sequence[str], wide: str | None = None) -> Table:
    """``wide``: the column that takes the remaining width."""
    for name in (*texts, *numbers):
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        ratio = 1 if name == wide else None
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", ratio=ratio)
    table.expand = table.expand or wide is not None
    return table


def process_row(name: str, pid: int | None, note: str) -> Row:
    """``pid``: None if it does not run."""
    return name, Text("—", style="red") if pid is None else Text(str(pid), style="green"), note


def source_rows(sources: Iterable[SeenSource], sizes: Mapping[str, int]) -> list[Row]:
    """One row per log: a rotated file (``path.1``) counts with the one that follows it."""
    by_path: dict[str, list[SeenSource]] = {}
    for seen in sources:
        by_path.setdefault(seen.path, []).append(seen)
    rows: list[Row] = []
    for path, found in sorted(by_path.items()):
        chunks, received = sum(len(seen.arrivals) for seen in found), sum(seen.bytes for seen in found)
        files = {path, f"{path}.1"} - (by_path.keys() - {path})
        behind = max(0, sum(sizes.get(file, 0) for file in files) - received)
        late = Text(mb(behind), style="yellow" if behind >= 1e6 else "")
        rows.append((escape(Path(path).name), f"{chunks:,}", mb(received), late))
    return rows


def flow_text(written: int, readable: int, written_mb_s: float, readable_mb_s: float) -> str:
    return (
        f"written {mb(written)} at {written_mb_s:.1f} MB/s, readable {mb(readable)}"
        f" at {readable_mb_s:.1f} MB/s, behind {mb(max(0, written - readable))}"
    )


def ages_text(ages_ms: Iterable[float]) -> str:
    if not (ordered := sorted(ages_ms)):
        return "nothing is readable yet"
    p50, p99 = (percentile(ordered, share) / 1000 for share in (0.5, 0.99))
    return f"created → readable: p50 {p50:.2f} s, p99 {p99:.2f} s"


def mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


class DemoState:
    """``step``: the present step of the story. ``body``: of the picture; ``text``: of the line that replaces it.

    ``processes``: returns the rows of those that the story itself has started. One thread calls the methods.
    """

    def __init__(
        self, plan: DemoPlan, stack: Stack, reader: IndependentReader, processes: Callable[[], list[Row]]
    ) -> None:
        self.step = self.text = ""
        self.body: RenderableType = ""
        self.growth = FileGrowth()
        self._plan, self._stack, self._reader, self._processes = plan, stack, reader, processes
        self._rates: deque[tuple[float, int, int]] = deque(maxlen=_RATE_OVER)

    def look(self) -> None:
        """Records the sizes of the files; refreshes the other values a few times a second."""
        written, now, account = self.written(), time.monotonic(), self._reader.account
        if self._rates and now - self._rates[-1][0] < _REFRESH_S:
            return
        self._rates.append((now, written, account.bytes))
        (then, written_then, readable_then), (_, _, readable) = self._rates[0], self._rates[-1]
        scale = max(now - then, _REFRESH_S) * 1e6
        flow = flow_text(written, readable, (written - written_then) / scale, (readable - readable_then) / scale)
        ages, owners = ages_text(account.ages_ms), self.lanes()
        sources = source_rows(list(account.sources.values()), self.growth.sizes)
        self.text = f"{flow}; {ages}"
        self.body = body_of(flow, ages, sources, self._stack_rows(owners) + self._processes(), owners)

    def lanes(self) -> list[int | None]:
        """The worker that serves each lane, by the workers' readiness answers."""
        owners: list[int | None] = [None] * LANES
        for worker, url in enumerate(self._stack.urls()):
            for lane, state in json_of(url, "/readyz").get("lanes", {}).items():
                if state == "serving":
                    owners[int(lane)] = worker
        return owners

    def written(self) -> int:
        self.growth.note(self._plan.originals(), time.time() * 1000)
        return sum(self.growth.sizes.values())

    def behind(self) -> int:
        """Bytes of the files that the reader has not received yet."""
        return max(0, self.written() - self._reader.account.bytes)

    def _stack_rows(self, owners: Sequence[int | None]) -> list[Row]:
        pids = self._stack.pids
        rows = [process_row("kafka-1", pids.get(f"{DC}/kafka-1"), "")]
        for worker in range(WORKERS):
            count, name = owners.count(worker), f"gateway-{worker}"
            rows.append(process_row(name, pids.get(f"{DC}/{name}"), "1 lane" if count == 1 else f"{count} lanes"))
        return [*rows, process_row("mirror", pids.get(f"{OTHER_DC}/mirror-0"), f"{DC} to {OTHER_DC}")]
