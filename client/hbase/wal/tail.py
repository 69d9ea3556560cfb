"""The loop that writes HBase's logs into a topic.

Each round lists the files, indexes what is new, and writes what is due (`RegionOrder`), each log in its order. A chunk
is that of a replication peer: the gateway records an edit once, whoever writes it and how often.

* Nothing that is not recorded counts as written; without a file of positions, a restart reads all logs again.
* A log that cannot be read now waits, and the others continue. But a region of which it may hold older entries waits,
  and so does the log behind it.
* A file that is gone before it was written to its end is a gap: it is logged, counted, and left out. One that came and
  went unseen shows in the sequence id with which a region is opened next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from logferry.client.events import log_event
from logferry.client.hbase.cells import CellBlock
from logferry.client.hbase.changes import CellFilter, EditKey, RegionChunk, chunks_of_edit
from logferry.client.hbase.definition import PeerDefinition
from logferry.client.hbase.delivery import GatewayDelivery, NotDelivered
from logferry.client.hbase.messages import ForeignBytes
from logferry.client.hbase.wal.entries import LogEntry, is_mark, region_event
from logferry.client.hbase.wal.file_names import WalFile
from logferry.client.hbase.wal.folders import LogFolders
from logferry.client.hbase.wal.positions import LogPosition, TailPositions, load_positions, save_positions
from logferry.client.hbase.wal.recorded import RecordedIds
from logferry.client.hbase.wal.region_order import Place, RegionOrder
from logferry.client.hbase.wal.server_log import ServerLog
from logferry.client.transport.cluster import GatewayCluster
from logferry.client.transport.connections import Dialer

_SAVE_EVERY_S = 5.0
_DELIVER_S = 30.0
_LOG_EVERY_S = 60.0
# Of one log, before it is the turn of the next.
_PART_BYTES = 4 << 20
_PART_ENTRIES = 5000
# So many rounds in which nothing can be written are no coincidence.
_IDLE_ROUNDS = 5


class TailOptions(NamedTuple):
    """``positions``: a file, or None. ``left_out``: names of files that are not read."""

    poll_s: float = 0.2
    positions: Path | None = None
    left_out: frozenset[str] = frozenset()


class _Part(NamedTuple):
    """Entries of a log: their chunks, the place behind them, and the entry behind that is not due."""

    chunks: list[RegionChunk]
    end: Place
    blocked: tuple[str, str, Place] | None
    bulk_loads: dict[str, int]


class LogTail:
    """``gaps``: files that were lost, never met, or passed over. ``chunks``: recorded so far, with duplicates."""

    def __init__(
        self,
        definition: PeerDefinition,
        folders: LogFolders,
        delivery: GatewayDelivery,
        recorded: RecordedIds,
        options: TailOptions,
    ) -> None:
        """Raises Unfit, OSError."""
        self._definition, self._options = definition, options
        self._folders, self._delivery, self._recorded = folders, delivery, recorded
        self._wanted = CellFilter(definition)
        known = load_positions(options.positions, definition) if options.positions else TailPositions({}, {})
        self._order = RegionOrder(known.last_ids)
        self._logs = {
            name: ServerLog(name, folders, begin, [one for one in files if f"{name}.{one}" not in options.left_out])
            for name, (begin, files) in known.logs.items()
        }
        for name, log in self._logs.items():
            self._order.passed(name, log.written)
        self._save_at = 0.0
        self._silent_until: dict[str, float] = {}
        self._idle_rounds = 0
        self._passed_over: set[str] = set()
        self.gaps = self.chunks = 0

    def run(self, stop: threading.Event) -> None:
        """Until ``stop`` is set. Raises OSError where the positions cannot be saved."""
        is_first = True
        while not stop.is_set():
            is_whole, is_busy = self.round(stop)
            self._save()
            if is_first and is_whole:
                log_event("hbase-tailing", topic=self._definition.topic, logs=len(self._logs))
                is_first = False
            if not is_busy:
                stop.wait(self._options.poll_s)
        self._save(at_once=True)

    def round(self, stop: threading.Event) -> tuple[bool, bool]:
        """Whether all logs were read to their ends, and whether anything was written."""
        return self._index(stop), self._write(stop)

    # ---- the index --------------------------------------------------------------------------------------------------

    def _index(self, stop: threading.Event) -> bool:
        """Whether all logs were read to their ends."""
        self._order.begin_round()
        try:
            found = self._folders.files()
        except OSError as error:
            self._log_wait(f"the files cannot be listed: {error}")
            return False
        self._take(found)
        self._report_others()
        is_whole = True
        for log in self._logs.values():
            try:
                for place, entry in log.index():
                    if stop.is_set():
                        return False
                    if self._wanted.wants_table(entry.table):
                        mark = is_mark(entry)
                        self._order.note(log.name, place, entry, region_event(entry) if mark else None, not mark)
                        self._idle_rounds = 0
            except FileNotFoundError:  # it moves, or is gone: the next list shows it
                is_whole = False
            except ForeignBytes:  # the log reports it
                is_whole = False
            except OSError as error:
                self._log_wait(f"{log.name} cannot be read: {error}")
                is_whole = False
        for missing in self._order.end_round(is_whole):
            self.gaps += 1
            log_event("hbase-wal-gap", **missing._asdict())
        return is_whole

    def _take(self, found: list[WalFile]) -> None:
        by_log: dict[str, dict[int, WalFile]] = {}
        for file in found:
            if Path(file.path).name not in self._options.left_out:
                by_log.setdefault(file.log, {})[file.number] = file
        for name in by_log.keys() - self._logs.keys():
            self._logs[name] = ServerLog(name, self._folders)
        for name, log in list(self._logs.items()):
            for lost in log.listed(by_log.get(name, {})):
                self.gaps += 1
                log_event("hbase-wal-gap", log=name, file=lost.number, last_path=lost.path or "unknown")
            self._order.passed(name, log.written)
            if log.is_over and name not in by_log:
                self._order.drop_log(name)
                del self._logs[name]

    def _report_others(self) -> None:
        for name in sorted(self._folders.passed_over - self._options.left_out - self._passed_over):
            self._passed_over.add(name)
            self.gaps += 1
            kind = "the log of synchronous replication" if name.endswith(".syncrep") else "of a kind that is not known"
            log_event("hbase-wal-passed-over", file=name, reason=f"{kind}: its changes are not written")

    # ---- the writing ------------------------------------------------------------------------------------------------

    def _write(self, stop: threading.Event) -> bool:
        """Whether anything was written."""
        is_busy = is_failed = False
        blocked = []
        for log in self._logs.values():
            if stop.is_set():
                return is_busy
            part = self._delivered(log)
            if part is None:
                is_failed = True
                continue
            is_busy = is_busy or part.end != log.written
            log.wrote(part.end)
            self._order.passed(log.name, log.written)
            if part.blocked is not None:
                blocked.append(part.blocked)
        # What failed is waited for, and no circle.
        self._idle_rounds = 0 if is_busy or is_failed or not blocked else self._idle_rounds + 1
        if self._idle_rounds >= _IDLE_ROUNDS and (run := self._order.give_way(blocked)) is not None:
            log_event("hbase-wal-waits", reason=f"{run.region} no longer waits for regions that may be its parents")
            self._idle_rounds = 0
        return is_busy

    def _delivered(self, log: ServerLog) -> _Part | None:
        """What is recorded now; None: it must be tried again."""
        try:
            part = self._part(log)
            self._deliver(part)
            return part
        except ForeignBytes as error:
            if self._may_log("hbase-wal-refused"):
                log_event("hbase-wal-refused", log=log.name, reason=error)
        except FileNotFoundError:  # as in the index
            pass
        except OSError as error:
            self._log_wait(f"{log.name} cannot be read: {error}")
        except NotDelivered as error:
            if error.kind and self._may_log("hbase-not-recorded"):
                log_event("hbase-not-recorded", kind=error.kind, reason=error)
        return None

    def _part(self, log: ServerLog) -> _Part:
        """Raises ForeignBytes, OSError."""
        by_region: dict[str, list[RegionChunk]] = {}
        bulk_loads: dict[str, int] = {}
        end, size, count = log.written, 0, 0
        for place, entry, behind in log.unwritten():
            if self._wanted.wants_table(entry.table):
                if not self._order.is_due(log.name, entry.region, place):
                    return self._part_of(by_region, end, (log.name, entry.region, place), bulk_loads)
                try:
                    chunks = list(self._chunks(entry, bulk_loads))
                except ForeignBytes as error:
                    if count:  # what is before it first
                        return self._part_of(by_region, end, None, bulk_loads)
                    raise ForeignBytes(f"file {place.number}, byte {place.at}: {error}") from None
                by_region.setdefault(entry.region, []).extend(chunks)
                size, count = size + len(entry.cells), count + 1
            end = behind
            if size >= _PART_BYTES or count >= _PART_ENTRIES:
                return self._part_of(by_region, end, None, bulk_loads)
        return self._part_of(by_region, log.indexed, None, bulk_loads)

    @staticmethod
    def _part_of(
        by_region: Mapping[str, list[RegionChunk]],
        end: Place,
        blocked: tuple[str, str, Place] | None,
        bulk_loads: dict[str, int],
    ) -> _Part:
        """Region by region, in the order in which they are met: so parents come before their daughters."""
        return _Part([one for chunks in by_region.values() for one in chunks], end, blocked, bulk_loads)

    def _chunks(self, entry: LogEntry, bulk_loads: dict[str, int]) -> Iterator[RegionChunk]:
        if entry.sequence_id < self._recorded.of(entry.table, entry.region):
            return
        block = CellBlock(entry.cells)
        edit = EditKey(entry.table, entry.region, entry.sequence_id, entry.write_time)
        cells = block.take(entry.cell_count)
        yield from chunks_of_edit(edit, cells, self._wanted, bulk_loads, self._definition.encoding)
        block.check_end()

    def _deliver(self, part: _Part) -> None:
        """Raises NotDelivered."""
        if part.chunks:
            self.chunks += self._delivery.deliver(part.chunks, time.monotonic() + _DELIVER_S).chunks
        for table, count in part.bulk_loads.items():
            log_event("hbase-bulk-load", table=table, count=count)

    # ---- positions, reports -----------------------------------------------------------------------------------------

    def _save(self, at_once: bool = False) -> None:
        if self._options.positions is None or (time.monotonic() < self._save_at and not at_once):
            return
        logs = {log.name: LogPosition(log.written, tuple(log.unwritten_files)) for log in self._logs.values()}
        save_positions(self._options.positions, self._definition, TailPositions(logs, self._order.last_ids()))
        self._save_at = time.monotonic() + _SAVE_EVERY_S

    def _log_wait(self, reason: str) -> None:
        if self._may_log("hbase-wal-waits"):
            log_event("hbase-wal-waits", reason=reason)

    def _may_log(self, event: str) -> bool:
        """What comes in each round is logged once in `_LOG_EVERY_S`."""
        may = time.monotonic() >= self._silent_until.get(event, 0.0)
        if may:
            self._silent_until[event] = time.monotonic() + _LOG_EVERY_S
        return may


def tail_logs(
    name: str,
    definition: PeerDefinition,
    folders: LogFolders,
    cluster: GatewayCluster,
    dialer: Dialer,
    options: TailOptions,
    stop: threading.Event,
) -> int:
    """How many gaps there are, when ``stop`` is set. Raises Unfit, OSError."""
    folders.check()
    delivery = GatewayDelivery(cluster, definition.topic, dialer, stop)
    recorded = RecordedIds(cluster, definition.topic, dialer)
    tail = LogTail(definition, folders, delivery, recorded, options)
    try:
        tail.run(stop)
    finally:
        recorded.close()
        log_event("stopped", name=name, status=int(tail.gaps > 0), chunks=tail.chunks, gaps=tail.gaps)
    return tail.gaps
