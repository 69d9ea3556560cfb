"""What a connector has done and what it waits for: for Prometheus, and for `logferry hbase status`.

`status` is another process: the connector notes its figures in its own node of ZooKeeper, which ends with it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

_MOST_WAITS = 20
_MOST_REASON = 300
_GAUGE, _COUNTER = "gauge", "counter"


class RefusedCall(NamedTuple):
    """The last call of a region server that was not carried out, and how many times it happened. ``who``: its host."""

    who: str
    at_ms: int
    times: int
    reason: str


class Figures:
    """Of one connector since its start. Thread-safe. ``change_age_ms``: how old the newest change of the last call was
    when it was recorded; None before the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._in_hand: dict[int, float] = {}
        self._waits: dict[str, RefusedCall] = {}
        self.calls = self.failed_calls = self.chunks = self.bytes = 0
        self.change_age_ms: int | None = None

    def call_came(self, came: float) -> int:
        """``came``: monotonic. A number for `call_ended`."""
        with self._lock:
            number = self._next = self._next + 1
            self._in_hand[number] = came
            return number

    def call_ended(self, number: int, who: str, reason: str) -> None:
        """``who``: HOST:PORT. ``reason``: why HBase has to ship it again; empty: it is done."""
        host = who.rpartition(":")[0]
        with self._lock:
            self._in_hand.pop(number, None)
            if not reason:
                self.calls += 1
                return
            self.failed_calls += 1
            before = self._waits.pop(host, None)
            times = 1 if before is None else before.times + 1
            self._waits[host] = RefusedCall(host, int(time.time() * 1000), times, reason[:_MOST_REASON])
            if len(self._waits) > _MOST_WAITS:
                self._waits.pop(next(iter(self._waits)))

    def recorded(self, chunks: int, size: int, newest_ms: int) -> None:
        """``newest_ms``: when HBase wrote the newest change, 0: there was none."""
        with self._lock:
            self.chunks += chunks
            self.bytes += size
            if newest_ms:
                self.change_age_ms = max(int(time.time() * 1000) - newest_ms, 0)

    def oldest_call_s(self) -> float:
        """For how long the oldest call in hand waits; 0: there is none."""
        with self._lock:
            return max(time.monotonic() - min(self._in_hand.values()), 0.0) if self._in_hand else 0.0

    def note(self) -> bytes:
        """For ZooKeeper. Without the time, so that it is the same while nothing happens."""
        oldest_s = round(self.oldest_call_s())
        with self._lock:
            names = ("calls", "failed_calls", "chunks", "bytes", "change_age_ms")
            found = {name: getattr(self, name) for name in names}
            waits = [one._asdict() for one in self._waits.values()]
        return json.dumps({**found, "oldest_call_s": oldest_s, "waits": waits}).encode()


def figures_of(note: bytes | None) -> dict[str, Any]:
    """What a connector has noted; empty for one that has not, or that is of another version."""
    try:
        found = json.loads(note or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def render(name: str, figures: Figures, held_bytes: int, connections: int, is_announced: bool) -> str:
    """The page. ``name``: of the subscription."""
    age_ms = figures.change_age_ms
    facts: Mapping[str, tuple[str, str, float | None]] = {
        "calls_total": (_COUNTER, "Calls of HBase that were carried out.", figures.calls),
        "failed_calls_total": (_COUNTER, "Calls that HBase has to ship again.", figures.failed_calls),
        "recorded_chunks_total": (_COUNTER, "Chunks that were acknowledged, duplicates among them.", figures.chunks),
        "recorded_bytes_total": (_COUNTER, "Bytes of those chunks.", figures.bytes),
        "change_age_seconds": (
            *(_GAUGE, "How old the newest change of the last call was when it was recorded."),
            None if age_ms is None else age_ms / 1000,
        ),
        "oldest_call_seconds": (_GAUGE, "For how long the oldest call in hand waits.", figures.oldest_call_s()),
        "held_bytes": (_GAUGE, "Bytes of calls in memory.", held_bytes),
        "connections": (_GAUGE, "Connections of region servers.", connections),
        "announced": (_GAUGE, "1 while the connection to ZooKeeper lives.", is_announced),
    }
    lines = []
    for fact, (kind, help_, value) in facts.items():
        if value is not None:
            lines += [f"# HELP logferry_hbase_{fact} {help_}", f"# TYPE logferry_hbase_{fact} {kind}"]
            lines.append(f'logferry_hbase_{fact}{{subscription="{name}"}} {float(value):.15g}')
    return "\n".join(lines) + "\n"
