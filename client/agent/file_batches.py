"""The batches of a source between its file and the gateway: cut behind those under way, let go, and cut alike again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from logferry.client.agent.config import Config, FileGroup
from logferry.client.files.batches import BatchLayout, BatchReader, SentBatch
from logferry.client.files.checkpoint import CheckpointEntry
from logferry.client.files.chunking import FileBatch, Limits
from logferry.client.files.identity import digest, fingerprint, grown
from logferry.client.files.tail import ByteSource, FileTail, ReadPlace
from logferry.client.transport.request_window import RequestWindow, Slot


class FileBatches:
    """``window``: those that were cut. ``reader``: cuts, and knows the layouts of those that were let go."""

    # A client has one for each of ten thousand files; so it has no attributes of its own before it needs them.
    __slots__ = "_attributes", "_entry", "_files", "_host", "reader", "window"

    def __init__(
        self, entry: CheckpointEntry, config: Config, files: FileGroup, window: RequestWindow[FileBatch]
    ) -> None:
        self.window = window
        sizes = config.chunk_bytes, config.line_bytes, config.request_bytes
        limits = _limits(*sizes, files.record_start, files.cut_lines, files.rules)
        self.reader = BatchReader(entry.source_id, limits)
        self._entry, self._files, self._host = entry, files, config.host
        self._attributes: dict[str, str] | None = None

    @property
    def attributes(self) -> dict[str, str]:
        """Of the next chunks."""
        return self._attributes or self._files.attributes_of(self._host, self._entry.path)

    @attributes.setter
    def attributes(self, labelled: dict[str, str]) -> None:
        self._attributes = labelled

    @property
    def held_bytes(self) -> int:
        return sum(len(slot.batch.data) for slot in self.window.slots)

    def data(self) -> bytes:
        """The bytes of all in the window."""
        return b"".join(slot.batch.data for slot in self.window.slots)

    def place(self, reading: ByteSource) -> ReadPlace:
        """Behind the last one in the window."""
        position, mark = reading.place
        for slot in self.window.slots:
            position, mark = slot.batch.end, grown(mark, slot.batch.data)
        return ReadPlace(position, mark)

    def next_slot(
        self,
        reading: ByteSource,
        now: float,
        created_ms: int,
        idle_s: float,
        may_run_ahead: bool,
        covered: Callable[[], None],
    ) -> Slot[FileBatch] | None:
        """The batch to send now. Calls ``covered`` if it makes the head of the file longer.

        Without ``may_run_ahead`` none is cut behind others. Raises `FileChanged` when the file holds something else.
        """

        def cut() -> FileBatch | None:
            ahead = len(self.window.slots)
            if ahead and not may_run_ahead:
                return None
            place = self.place(reading)
            batch = self.reader.next(reading, now, created_ms, idle_s, place, lambda: self.attributes, ahead)
            if batch is not None and isinstance(reading, FileTail) and reading.cover(batch.data, batch.start):
                covered()
            return batch

        return self.window.next_slot(now, cut)

    def let_go(self, mark: bytes) -> None:
        """Frees the memory of batches that wait; their bytes are read again, and cut alike."""
        if self.window.slots and not self.window.under_way:
            self.drop(mark)

    def drop(self, mark: bytes) -> None:
        """Also those under way: their outcome is awaited, and then they are read again and cut alike."""
        if self.window.slots:
            self.reader.kept = self._layouts(mark)
        self.window.clear()

    def resume(self, reading: ByteSource, layouts: list[BatchLayout], after_reboot: bool) -> None:
        """Continues behind what was acknowledged before ``layouts``, with these, if the file still has that.

        If the checkpoint is within one of them, the gateway had recorded a part of it: then they are of no use.
        """
        entry = self._entry
        layouts = [layout for layout in layouts if layout.end > entry.position]
        if layouts and entry.position <= layouts[0].start <= reading.end:
            reading.go_to(layouts[0].start)
            if layouts[0].before == digest(reading.mark) or not (layouts[0].before or after_reboot):
                entry.position, entry.mark = layouts[0].start, fingerprint(reading.mark)
                self.reader.kept = layouts
            else:
                reading.go_to(entry.position)

    def in_flight(self, reading: ByteSource) -> list[SentBatch]:
        """Those that were sent, or are about to be, in order."""
        return [SentBatch(self._entry.source_id, layout, reading.position) for layout in self._layouts(reading.mark)]

    def leaving(self, reading: ByteSource, batch: FileBatch) -> SentBatch:
        """One of the window, as it is about to be sent."""
        return next(sent for sent in self.in_flight(reading) if sent.layout.start == batch.start)

    def _layouts(self, mark: bytes) -> list[BatchLayout]:
        return BatchLayout.chain([slot.batch for slot in self.window.slots], mark) + list(self.reader.kept)


_limits = lru_cache(maxsize=64)(Limits)  # thousands of files have the same ones


class HeldBatches:
    """Bounds the memory of all sources' batches. Those that overtook another wait in memory, too: so they count.

    One thread stays free for the first batches of others: a gateway that takes the lines of one file alone very slowly
    delays no other file.
    """

    def __init__(self, threads: int, resting_bytes: int) -> None:
        self._threads = threads
        self._resting_bytes = resting_bytes
        self._sending: dict[FileBatches, None] = {}
        self._resting: dict[FileBatches, None] = {}

    def may_run_ahead(self, ready: Iterable[FileBatches]) -> bool:
        """Whether a batch may be sent behind others of its source. ``ready``: further ones that are about to leave."""
        self._sending = {one: None for one in self._sending if one.window.under_way}
        counted = dict.fromkeys((*self._sending, *ready))
        return sum(len(one.window.slots) for one in counted) < self._threads - 1

    def leaves(self, batches: FileBatches) -> None:
        """A request of this source is under way."""
        self._sending[batches] = None

    def is_too_much(self, batches: FileBatches) -> bool:
        """Few sources may keep the bytes that they wait to send again. True: this one is to read its again."""
        if batches.window.under_way or not batches.window.slots:
            return False
        resting = (one for one in (*self._resting, batches) if one.window.slots and not one.window.under_way)
        self._resting = dict.fromkeys(resting)
        return sum(one.held_bytes for one in self._resting) > self._resting_bytes
