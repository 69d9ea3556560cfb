"""What the demo shows: events, one line each with its time, and on a terminal below them a picture of the present.

A picture is drawn from a `Snapshot` alone. Where there is no terminal, a line every few seconds stands for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_PULSE_S: Final = 5.0
_SHOWN_SOURCES: Final = 10
# Room for the ^C that a terminal shows where the cursor is: in the next line, it would leave a part of the picture.
_MARGIN: Final = 3


@dataclass(frozen=True)
class SourceLine:
    name: str
    chunks: int
    bytes: int
    behind: int


@dataclass(frozen=True)
class ProcessLine:
    """``pid`` None: it does not run."""

    name: str
    pid: int | None
    note: str


@dataclass(frozen=True)
class Snapshot:
    """The present. Bytes and MB/s, ages in ms; the ages are None before the first chunk."""

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
    """One for a demo; any thread may say something."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started = time.monotonic()
        self._pulse_at = self._started + _PULSE_S
        self._last_pulse = ""
        self._saying = threading.Lock()

    def begin(self) -> None:
        """Times count from here."""
        self._started = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """An event."""
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
    def live(self, look: Callable[[], Snapshot]) -> Iterator[None]:
        """Shows the picture while the body runs; it is gone afterwards, the events stay."""
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

    def pulse(self, snapshot: Snapshot) -> None:
        """The line that stands for the picture, now and then, if something has changed."""
        now = time.monotonic()
        if self.console.is_terminal or now < self._pulse_at:
            return
        self._pulse_at = now + _PULSE_S
        text = f"{_flow(snapshot)}; {_ages(snapshot)}"
        if text != self._last_pulse:
            self._last_pulse = text
            self.say(text)


def picture(now: Snapshot, elapsed_s: float, width: int) -> RenderableType:
    """At most 18 lines high, for about 100 columns."""
    head = Text.assemble((f" {elapsed_s:5.1f} s ", "bold reverse"), "  ", (now.step, "bold"))
    flow = Text(f" {_flow(now)}\n {_ages(now)}\n", style="cyan")
    body = Table.grid(expand=True, padding=(0, 1))
    body.add_column(ratio=11)
    body.add_column(ratio=10)
    body.add_row(_sources(now.sources), Group(_processes(now.processes), Text(), _lanes(now.lanes)))
    return Panel(Group(head, flow, body), box=box.ROUNDED, border_style="dim", width=width)


def _flow(now: Snapshot) -> str:
    return (
        f"written {mb(now.written)} at {now.written_mb_s:.1f} MB/s, readable {mb(now.readable)}"
        f" at {now.readable_mb_s:.1f} MB/s, behind {mb(max(0, now.written - now.readable))}"
    )


def _ages(now: Snapshot) -> str:
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
    """One mark a lane: the number of the worker that serves it, or a red dash."""
    text = Text(" lanes  ")
    for owner in owners:
        text.append(
            " – " if owner is None else f" {owner} ", style="white on red" if owner is None else "black on green"
        )
        text.append(" ")
    return text


def mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"


def seconds(ms: float) -> str:
    return f"{ms / 1000:.2f} s"
