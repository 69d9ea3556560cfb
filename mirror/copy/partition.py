"""One partition on its way here: what was fetched of it and waits, how far it is, and why it stands still. Pure.

Every reason to stand still has a name; the others go on. Nothing is ever skipped in silence: from a named stop it
goes on by itself when what was wrong is mended, or when somebody says from where (`resume`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.gateway.contract.offset_history import Place, Progress
from logferry.gateway.kafka.fetch_request import Found, TopicPartition, Wanted
from logferry.mirror.copy.batch_rewrite import MovedBatch, committed_batches

# The names of stops, and what an operator is told to do.
STOPS: Final = {
    "records-removed": "records were removed there before they were mirrored; go on behind the hole: --from earliest",
    "cut-back": "the log there is not the one that was mirrored: it was cut back, and may have gone on otherwise",
    "source-recreated": "the topic was deleted there and created anew; mirror the new one too: --from earliest",
    "source-deleted": "the topic is not there any more; what was mirrored stays",
    "unreadable-batch": "a batch there cannot be read; go on behind it: --from OFFSET",
    "no-original": "the mirror there does not tell which records these are of the original; it is tried again",
    "in-a-circle": "the data centre that it is taken from takes it from here: one of both must take it from its own",
    "comes-again": "its records are here: they go round in a circle, or the original was cut back; --from OFFSET",
    "refused": "Kafka here does not take a batch; mend what the detail says, it is tried again each minute",
    "target-not-empty": "there are records here that this mirror knows nothing of; what is mirrored goes behind them",
    "target-recreated": "the topic was deleted here and created anew; mirror it from the start: --from earliest",
}


@dataclass(frozen=True, slots=True)
class Stop:
    """``kind``: one of `STOPS`."""

    kind: str
    detail: str
    since_ms: int


class Reached(NamedTuple):
    """``offset``: the next one there. ``epoch``: of the last batch before it, be it a control batch."""

    offset: int
    epoch: int


_NOWHERE: Final = Reached(0, -1)


@dataclass(slots=True, eq=False)
class MirroredPartition:
    """Of one lane. ``position``: the next offset to fetch; ``progress``: what is committed, None: nothing yet.

    ``heard_at``: when records came last (monotonic); ``is_quiet``: that is a while ago.

    ``on_change`` is called when it may be fetched again, or not any more; ``on_waiting`` when there is more to write;
    ``on_passed`` when it went on without any; ``on_stop`` when it stands still. ``drawn_to``: the end of what is
    under way.
    """

    topic: str
    number: int
    dc: str
    source_id: bytes
    local_id: bytes
    partition_bytes: int
    progress: Progress | None
    verifies: bool = True
    is_chained: bool = False
    keeps_history: bool = True
    position: int = 0
    epoch: int = -1
    waiting: deque[MovedBatch] = field(default_factory=deque)
    waiting_bytes: int = 0
    stop: Stop | None = None
    end: int | None = None
    checks: bool = False
    is_known_empty: bool = False
    drawn_to: Reached = _NOWHERE
    under_way: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    is_quiet: bool = False
    moved_records: int = 0
    moved_bytes: int = 0
    on_change: Callable[[MirroredPartition], None] = lambda _: None
    on_waiting: Callable[[MirroredPartition], None] = lambda _: None
    on_passed: Callable[[MirroredPartition], None] = lambda _: None
    on_stop: Callable[[MirroredPartition], None] = lambda _: None

    @property
    def place(self) -> Place:
        return self.topic, self.number

    @property
    def key(self) -> TopicPartition:
        """What it is fetched by."""
        return self.source_id, self.number

    @property
    def state(self) -> str:
        """``stopped``, ``mirroring``, ``caught-up``, or ``unseen``: nothing was heard of it yet."""
        if self.stop is not None:
            return "stopped"
        if self.end is None:
            return "unseen"
        is_idle = not (self.waiting or self.under_way)
        return "caught-up" if is_idle and self.position >= self.end else "mirroring"

    @property
    def lag_records(self) -> int | None:
        """Offsets that are committed there and not here; control records count until they are passed."""
        if self.end is None:
            return None
        if not (self.waiting or self.under_way):
            return max(0, self.end - self.position)
        return max(0, self.end - (0 if self.progress is None else self.progress.source_next))

    @property
    def lag_bytes(self) -> int | None:
        """Of these, as they are stored: by the mean size of what was moved, so None until something was."""
        if not self.lag_records:
            return self.lag_records
        return round(self.lag_records * self.moved_bytes / self.moved_records) if self.moved_records else None

    @property
    def lag_s(self) -> float | None:
        """The age of the last record that is here, while there are others; 0 when it is caught up."""
        if self.state == "caught-up":
            return 0.0
        if self.end is None or self.progress is None or self.progress.last_base < 0:
            return None
        return max(0.0, time.time() - self.progress.last_ms / 1000)

    def rewind(self) -> int:
        """Forgets what waits and goes back to what is committed. Returns the bytes that waited."""
        dropped, self.waiting_bytes = self.waiting_bytes, 0
        self.waiting.clear()
        self.under_way = False
        done = self.progress
        self.checks = self.verifies and done is not None and done.last_base >= 0
        if done is None:
            self.position, self.epoch = 0, -1
        elif done.chained is not None and done.chained.id == self.source_id and done.local_id == self.local_id:
            # It came by way of another data centre before, and comes from the original itself now.
            self.checks, self.position, self.epoch = False, done.chained.next_offset, -1
        else:
            self.position = done.last_base if self.checks else done.source_next
            self.epoch = -1 if self.checks else done.last_epoch
            if self.stop is None and done.source_id != self.source_id:
                what = "was deleted and created anew, or was taken from elsewhere before"
                self.halt("source-recreated", f"{self.topic} in {self.dc} is not the one that was mirrored: it {what}")
            if self.stop is None and done.local_id != self.local_id:
                self.halt("target-recreated", f"{self.topic} was deleted here and created anew")
        self.on_change(self)
        return dropped

    def halt(self, kind: str, detail: str) -> None:
        self.stop = Stop(kind, detail, int(time.time() * 1000))
        self.on_stop(self)
        self.on_change(self)

    def wanted(self) -> Wanted | None:
        """What to fetch next; None: nothing now."""
        if self.stop is not None or self.waiting_bytes >= self.partition_bytes:
            return None
        return Wanted(self.position, self.epoch, self.partition_bytes)

    def take(self, found: Found) -> int:
        """Takes what was fetched from its position on. Returns the bytes that wait now in addition."""
        if found.diverged is not None:
            detail = f"its log ends its epoch {self.epoch} at {found.diverged}, and was read to {self.position}"
            self.halt("cut-back", detail)
            return 0
        self.end = found.last_stable
        if not len(found.records):
            return 0
        moved = committed_batches(found.records, found.aborted, self.position)
        batches = moved.batches
        if self.checks and self.progress is not None:
            done = self.progress
            if moved.next_offset <= done.last_base and moved.wrong is None:
                return 0  # the batch was cut off
            first = batches[0] if batches else None
            if first is None or (first.base, first.crc) != (done.last_base, done.last_crc):
                self.halt("cut-back", f"the batch at {done.last_base} is not the one that was mirrored")
                return 0
            batches = [batch for batch in batches if batch.base >= done.source_next]
            self.checks = False
        self.position = max(moved.next_offset, self.position)
        if moved.epoch is not None:
            # A control batch may be the first of a newer epoch; the log would seem to be cut back to before it.
            self.epoch = moved.epoch
        added = sum(batch.size_bytes for batch in batches)
        self.waiting.extend(batches)
        self.waiting_bytes += added
        if batches:
            self.on_waiting(self)
        elif self.passed is not None:
            self.on_passed(self)
        if moved.wrong is not None:
            # What stands before it goes on its way.
            self.halt("unreadable-batch", moved.wrong)
        return added

    def out_of_range(self, first: int, end: int) -> None:
        """What is retained there; its position is not within."""
        done = self.progress
        if self.checks and done is not None and first > done.last_base and done.source_next >= first:
            # The last batch is retired there; nothing is left to compare with.
            self.checks, self.position = False, done.source_next
            self.epoch = done.last_epoch
            self.on_change(self)
        elif self.position > end:
            self.halt("cut-back", f"its log ends at {end}, and was read to {self.position}")
        elif self.position >= first:
            self.on_change(self)
        elif done is None:
            self.position = first
            self.on_change(self)
        else:
            lost = first - done.source_next
            self.halt("records-removed", f"{lost} offsets from {done.source_next} on are not there any more")

    def draw(self, room: int) -> list[MovedBatch]:
        """Takes batches of at most so many bytes out, at least one if there is one."""
        drawn: list[MovedBatch] = []
        while self.waiting and (not drawn or self.waiting[0].size_bytes <= room):
            batch = self.waiting.popleft()
            room -= batch.size_bytes
            self.waiting_bytes -= batch.size_bytes
            drawn.append(batch)
        self.under_way = bool(drawn)
        if drawn:
            # Behind the last one there may be control records, which are passed with it.
            last = drawn[-1]
            self.drawn_to = Reached(last.end, last.epoch) if self.waiting else Reached(self.position, self.epoch)
        return drawn

    @property
    def passed(self) -> Reached | None:
        """How far it is beyond what is committed, where nothing but control and aborted records lies in between."""
        done = self.progress
        if done is None or self.waiting or self.under_way or self.checks or self.stop is not None:
            return None
        return Reached(self.position, self.epoch) if self.position > done.source_next else None
