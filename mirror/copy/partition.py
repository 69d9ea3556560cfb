"""One mirrored partition: its fetched batches, its position, and the reason why it stopped. Pure.

Every reason to stop has a name; the other partitions continue. Nothing is skipped silently: a stopped partition
resumes when its cause is removed, or when an operator says where (`logferry mirror resume`).

A copy without a checkpoint begins at the first record that the remote log has; whoever asks reports it (see `remote`).
Once the log has answered, ``begins`` keeps that place, and what is removed behind it is a stop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.gateway.contract.mirror_state import MirrorCheckpoint
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.record_requests import FetchedPartition, FetchPosition
from logferry.gateway.kafka.types import TopicIdPartition
from logferry.mirror.copy.batch_rewrite import CopiedBatch, committed_batches

# Stop kind → what it means and what the operator does.
STOPS: Final = {
    "records-removed": "the remote log removed records before they were mirrored; resume after the hole: "
    "--from earliest",
    "log-truncated": "the remote log was truncated and may have diverged from what was mirrored; resume with "
    "--from OFFSET once it is clear which log is right",
    "source-recreated": "the topic was deleted and recreated in the remote data centre; mirror the new one as well: "
    "--from earliest",
    "source-deleted": "the topic was deleted in the remote data centre; the records mirrored so far remain here",
    "unreadable-batch": "a batch in the remote log cannot be read; resume after it: --from OFFSET",
    "fetch-rejected": "the remote data centre rejects fetches of the partition; remove the cause in the detail, "
    "the mirror retries every 5 seconds",
    "origin-unknown": "the remote mirror's offset history does not name the original offsets of these records; the "
    "mirror retries",
    "replication-cycle": "the remote data centre mirrors this topic from here; configure one of the two to take it "
    "from its own data centre",
    "duplicate-records": "these records are here already: a replication cycle, or the original log was truncated; "
    "resume after them: --from OFFSET",
    "write-rejected": "Kafka here rejects a batch; remove the cause that the detail names, the mirror retries every "
    "minute",
    "target-unavailable": "the partition here takes nothing now; repair the brokers that the detail names, the mirror "
    "continues by itself",
    "target-not-created": "the topic cannot be created here like its original; remove the cause that the detail names, "
    "the mirror retries every half minute",
    "target-not-empty": "the topic here holds records without a checkpoint of this mirror; resume to append the "
    "mirrored records after them",
    "target-unreadable": "the topic here has no checkpoint, and Kafka does not let the mirror see whether it is empty; "
    "grant Read on it, or remove the cause that the detail names, the mirror retries every minute",
    "target-recreated": "the topic was deleted and recreated here; mirror it from the start: --from earliest",
}


@dataclass(frozen=True, slots=True)
class StopReason:
    """``kind``: one of `STOPS`."""

    kind: str
    detail: str
    since_ms: int


class Reached(NamedTuple):
    """A position in the remote log: the next offset, and the epoch of the last batch before it, control batches too."""

    offset: int
    epoch: int


@dataclass(slots=True, eq=False)
class MirroredPartition:
    """A partition of one lane."""

    topic: str
    number: int
    dc: str
    source_id: bytes
    local_id: bytes
    partition_bytes: int
    # What is committed; None: nothing yet.
    checkpoint: MirrorCheckpoint | None
    # Unix time in milliseconds.
    clock_ms: Callable[[], int]
    # Where copies without a checkpoint begin, once the remote log has answered. It outlives a failure of the lane.
    begins: dict[TopicIdPartition, int] = field(default_factory=dict)
    # Whether the last batch is compared with the remote log before the next ones are read.
    verifies: bool = True
    is_chained: bool = False
    keeps_history: bool = True
    # The next offset to fetch, and the epoch of the last batch before it.
    position: int = 0
    epoch: int = -1
    waiting: deque[CopiedBatch] = field(default_factory=deque)
    waiting_bytes: int = 0
    stop: StopReason | None = None
    # The stop that the retry under way may end.
    retried: StopReason | None = None
    end: int | None = None
    checks: bool = False
    is_known_empty: bool = False
    # The end of the batches in the running transaction.
    taken_to: Reached = field(default_factory=lambda: Reached(0, -1))
    under_way: bool = False
    # When records arrived last, by the monotonic clock; `is_quiet`: that is a while ago.
    heard_at: float = 0.0
    is_quiet: bool = False
    copied_records: int = 0
    copied_bytes: int = 0
    # It may be fetched again, or no longer.
    on_change: Callable[[MirroredPartition], None] = lambda _: None
    # There is more to write.
    on_waiting: Callable[[MirroredPartition], None] = lambda _: None
    # It advanced over control and aborted records alone.
    on_passed: Callable[[MirroredPartition], None] = lambda _: None
    on_stop: Callable[[MirroredPartition], None] = lambda _: None

    @property
    def tp(self) -> TopicPartition:
        return self.topic, self.number

    @property
    def name(self) -> str:
        """As in error messages: ``dc1.nginx-3``."""
        return f"{self.topic}-{self.number}"

    @property
    def key(self) -> TopicIdPartition:
        """The key of its fetches."""
        return TopicIdPartition(self.source_id, self.number)

    @property
    def state(self) -> str:
        """``stopped``, ``mirroring``, ``caught-up``, or ``unseen``: no broker answered for it yet."""
        if self.last_stop is not None:
            return "stopped"
        if self.end is None:
            return "unseen"
        return "caught-up" if self._is_caught_up else "mirroring"

    @property
    def last_stop(self) -> StopReason | None:
        """Why nothing is copied. A retry ends it when a position is committed, or when there is nothing to copy."""
        return self.stop or self.retried

    @property
    def _is_caught_up(self) -> bool:
        return self.end is not None and not (self.waiting or self.under_way) and self.position >= self.end

    @property
    def lag_records(self) -> int | None:
        """Offsets that are committed in the remote log and not here; control records count until they are passed."""
        if self.end is None:
            return None
        if not (self.waiting or self.under_way):
            return max(0, self.end - self.position)
        return max(0, self.end - (0 if self.checkpoint is None else self.checkpoint.source_next))

    @property
    def lag_bytes(self) -> int | None:
        """Their size as stored, estimated by the mean size of the copied records; None before the first one."""
        if not self.lag_records:
            return self.lag_records
        return round(self.lag_records * self.copied_bytes / self.copied_records) if self.copied_records else None

    @property
    def lag_s(self) -> float | None:
        """The age of the last copied record while more are to come; 0 when it is caught up."""
        if self.state == "caught-up":
            return 0.0
        if self.end is None or self.checkpoint is None or self.checkpoint.last_base < 0:
            return None
        return max(0.0, (self.clock_ms() - self.checkpoint.last_ms) / 1000)

    def rewind(self) -> int:
        """Drops the waiting batches and returns to the checkpoint. Returns the bytes dropped."""
        dropped, self.waiting_bytes = self.waiting_bytes, 0
        self.waiting.clear()
        self.under_way = False
        done = self.checkpoint
        self.checks = self.verifies and done is not None and done.last_base >= 0
        if done is None:
            self.position, self.epoch = self.begins.get(self.key, 0), -1
        elif done.chained is not None and done.chained.id == self.source_id and done.local_id == self.local_id:
            # It was copied by way of another data centre before, and is copied from the original itself now.
            self.checks, self.position, self.epoch = False, done.chained.next_offset, -1
        else:
            self.position = done.last_base if self.checks else done.source_next
            self.epoch = -1 if self.checks else done.last_epoch
            if self.stop is None and done.source_id != self.source_id:
                what = "it was deleted and recreated, or was taken from another data centre before"
                self.halt("source-recreated", f"{self.topic} in {self.dc} is not the topic that was mirrored: {what}")
            if self.stop is None and done.local_id != self.local_id:
                self.halt("target-recreated", f"{self.topic} was deleted and recreated here")
        self.on_change(self)
        return dropped

    def halt(self, kind: str, detail: str) -> None:
        self.stop, self.retried = StopReason(kind, detail, self.clock_ms()), None
        self.on_stop(self)
        self.on_change(self)

    def wanted(self) -> FetchPosition | None:
        """The next fetch; None: none now."""
        if self.stop is not None or self.waiting_bytes >= self.partition_bytes:
            return None
        return FetchPosition(self.position, self.epoch, self.partition_bytes)

    def take(self, found: FetchedPartition) -> int:
        """Takes the answer of a fetch from its position. Returns the bytes added to those that wait."""
        if found.diverged is not None:
            detail = f"epoch {self.epoch} of the remote log ends at {found.diverged}; it was read to {self.position}"
            self.halt("log-truncated", detail)
            return 0
        self.end = found.last_stable
        self.begins.setdefault(self.key, self.position)
        if self._is_caught_up:
            self.retried = None
        if not len(found.records):
            return 0
        moved = committed_batches(found.records, found.aborted, self.position)
        batches = moved.batches
        if self.checks and self.checkpoint is not None:
            done = self.checkpoint
            if moved.next_offset <= done.last_base and moved.wrong is None:
                return 0  # the batch was cut off
            first = batches[0] if batches else None
            if first is None or (first.base, first.crc) != (done.last_base, done.last_crc):
                self.halt("log-truncated", f"the batch at {done.last_base} is not the one that was mirrored")
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
        if self.checkpoint is None and not (self.waiting or self.under_way):
            # Nothing but control and aborted records yet.
            self.begins[self.key] = self.position
        if batches:
            self.on_waiting(self)
        elif self.passed is not None:
            self.on_passed(self)
        elif self._is_caught_up:
            self.retried = None
        if moved.wrong is not None:
            # The batches before it are copied.
            self.halt("unreadable-batch", moved.wrong)
        return added

    def out_of_range(self, first: int, end: int) -> None:
        """The remote log retains the offsets from ``first`` to ``end``; the position is outside."""
        done = self.checkpoint
        if self.checks and done is not None and first > done.last_base and done.source_next >= first:
            # Retention removed the last batch there; nothing is left to compare with.
            self.checks, self.position = False, done.source_next
            self.epoch = done.last_epoch
            self.on_change(self)
        elif self.position > end:
            self.halt("log-truncated", f"the remote log ends at {end}; it was read to {self.position}")
        elif self.position >= first:
            self.on_change(self)
        elif done is None and self.key not in self.begins:
            # The original is older than its mirror.
            self.position = first
            self.on_change(self)
        else:
            next_offset = self.position if done is None else max(self.position, done.source_next)
            lost = first - next_offset
            self.halt("records-removed", f"the remote log no longer has {lost} offsets from {next_offset} on")

    def take_batches(self, room: int) -> list[CopiedBatch]:
        """Removes waiting batches of at most ``room`` bytes, at least one if there is one, for a transaction."""
        taken: list[CopiedBatch] = []
        while self.waiting and (not taken or self.waiting[0].size_bytes <= room):
            batch = self.waiting.popleft()
            room -= batch.size_bytes
            self.waiting_bytes -= batch.size_bytes
            taken.append(batch)
        self.under_way = bool(taken)
        if taken:
            # Control records may follow the last one, which are passed with it.
            last = taken[-1]
            self.taken_to = Reached(last.end, last.epoch) if self.waiting else Reached(self.position, self.epoch)
        return taken

    @property
    def passed(self) -> Reached | None:
        """The position beyond the checkpoint, if nothing but control and aborted records is in between."""
        done = self.checkpoint
        if done is None or self.waiting or self.under_way or self.checks or self.stop is not None:
            return None
        return Reached(self.position, self.epoch) if self.position > done.source_next else None
