"""One log of a region server, file by file: indexed to its present end, and written behind that.

A file is *ended* when nothing more can come: its trailer was read; or it lies in ``oldWALs``; or the next file of the
log had an entry before the read: HBase writes there once everything in the file before is on disk. Without a trailer,
the file must also be closed where it lies, and read to its end. What is then left without being a whole entry, HBase
never acknowledged.

A damaged file, or one of another kind, ends nothing: the log waits, and its file is read again in each round.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from logferry.client.events import log_event
from logferry.client.hbase.messages import ForeignBytes
from logferry.client.hbase.wal import entries
from logferry.client.hbase.wal.entries import LogEnd, LogEntry
from logferry.client.hbase.wal.file_names import WalFile
from logferry.client.hbase.wal.folders import LogFolders
from logferry.client.hbase.wal.region_order import BEGIN, Place

_BLOCK_BYTES = 4 << 20
_MOST_ENTRY_BYTES = 1 << 30
# A file that grows may look damaged for a moment.
_PATIENCE_S = 10.0


class ServerLog:
    """``indexed``, ``written``: where each continues; behind an ended file, that is the number above its own.
    ``refusal``: why its file cannot be read now.
    """

    def __init__(self, name: str, folders: LogFolders, begin: Place = BEGIN, files: Iterable[int] = ()) -> None:
        """``begin``, ``files``: of an earlier process, which had not written all of these files."""
        self.name, self._folders = name, folders
        self.indexed = self.written = begin
        self._files = {number: WalFile(name, number, "", False) for number in files}
        self._missing: set[int] = set()
        self._ends: dict[int, int] = {}
        self._reading: WalFile | None = None
        self.refusal = ""
        self._refused_s = 0.0
        self._is_reported = False

    @property
    def is_over(self) -> bool:
        """It has no file that is not written to its end."""
        return not self._files

    @property
    def unwritten_files(self) -> list[int]:
        return sorted(number for number in self._files if number >= self.written.number)

    def listed(self, files: dict[int, WalFile]) -> list[WalFile]:
        """Takes what is there now; the files that are lost: gone for two lists, and not written to their ends."""
        gone = self._files.keys() - files.keys()
        done = {number for number in gone if number < self.written.number}
        lost = {number for number in gone - done if number in self._missing}
        self._missing = gone - done - lost
        found = [self._files[number] for number in sorted(lost)]
        kept = {number: self._files[number] for number in self._missing}
        self._files = {**kept, **{number: one for number, one in files.items() if number >= self.written.number}}
        for number in lost:
            if self.indexed.number == number:
                self.indexed = Place(number + 1, 0)
            if self.written.number == number:
                self.written = Place(number + 1, 0)
        self._ends = {number: end for number, end in self._ends.items() if number >= self.written.number}
        return found

    # ---- the index --------------------------------------------------------------------------------------------------

    def index(self) -> Iterator[tuple[Place, LogEntry]]:
        """Every entry up to the present end. Raises ForeignBytes, OSError."""
        try:
            while (file := self._file_at(self.indexed)) is not None:
                yield from self._index_file(file)
                if self.indexed.number == file.number:
                    break
            self.refusal, self._is_reported = "", False
        except ForeignBytes as error:
            self._refuse(str(error))
            raise

    def _index_file(self, file: WalFile) -> Iterator[tuple[Place, LogEntry]]:
        at = self.indexed.at if self.indexed.number == file.number else 0
        is_final = file.is_closed or self._has_entry(file.number + 1)
        self._reading = file
        reader = _FileReader(self._folders, file.path, at)
        for start, entry in reader:
            self.indexed = Place(file.number, entry.end)
            yield Place(file.number, start), entry
        self.indexed = Place(file.number, reader.at)
        if not reader.is_ended and not is_final:
            return
        if not reader.is_ended:
            if reader.rest.endswith(entries.END_MAGIC):
                raise ForeignBytes(f"it is whole, but what begins at byte {reader.at} is no entry")
            if not self._folders.is_all(file.path, reader.at + len(reader.rest)):
                raise OSError(f"{file.path} is not closed, or was not shown to its end")
        if not reader.is_ended and reader.rest:
            log_event("hbase-wal-cut", file=file.path, at=reader.at, left_out_bytes=len(reader.rest))
        self._ends[file.number] = reader.at
        self.indexed = Place(file.number + 1, 0)

    def _has_entry(self, number: int) -> bool:
        """Whether the next file, from this number on, has one."""
        file = self._file_at(Place(number, 0))
        self._reading = file or self._reading
        return file is not None and next(iter(_FileReader(self._folders, file.path, 0)), None) is not None

    def _refuse(self, reason: str) -> None:
        now = time.monotonic()
        if reason != self.refusal:
            self.refusal, self._refused_s, self._is_reported = reason, now, False
        file = self._reading
        if file is None or self._is_reported or (now - self._refused_s < _PATIENCE_S and not file.is_closed):
            return
        self._is_reported = True
        log_event("hbase-wal-refused", file=file.path, reason=reason)

    # ---- the writing ------------------------------------------------------------------------------------------------

    def unwritten(self) -> Iterator[tuple[Place, LogEntry, Place]]:
        """The entries that are indexed and not written, and the place behind each. Raises ForeignBytes, OSError."""
        place = self.written
        while place < self.indexed:
            file = self._file_at(place)
            if file is None or file.number > self.indexed.number:
                return
            at = place.at if place.number == file.number else 0
            last = self._ends.get(file.number)
            until = self.indexed.at if last is None else last
            if at < until:
                for start, entry in _FileReader(self._folders, file.path, at):
                    yield Place(file.number, start), entry, Place(file.number, entry.end)
                    if entry.end >= until:
                        break
            if last is None:
                return
            place = Place(file.number + 1, 0)

    def wrote(self, place: Place) -> None:
        """All before this place is written or left out."""
        is_end = self._ends.get(place.number) == place.at
        self.written = Place(place.number + 1, 0) if is_end else place

    def _file_at(self, place: Place) -> WalFile | None:
        """The file of the place, or the next one."""
        number = min((one for one in self._files if one >= place.number), default=None)
        return None if number is None else self._files[number]


class _FileReader:
    """The whole entries of a file from a place, each with where it begins. When it is exhausted, ``at`` is where the
    next one will begin, ``rest`` what is there of it, and ``is_ended`` whether the trailer was there.
    """

    def __init__(self, folders: LogFolders, path: str, at: int) -> None:
        if not path:
            raise FileNotFoundError("the file is not there now")
        self._folders, self._path = folders, path
        self.at = at
        self.rest = b""
        self.is_ended = False

    def __iter__(self) -> Iterator[tuple[int, LogEntry]]:
        size = _BLOCK_BYTES
        while True:
            data = self._folders.read(self._path, self.at, size)
            begin = self.at
            for start, entry in self._in_block(memoryview(data), begin):
                self.at = entry.end
                yield start, entry
            if self.is_ended or len(data) < size:
                self.rest = data[self.at - begin :]
                return
            if self.at == begin:
                size *= 2
                if size > _MOST_ENTRY_BYTES:
                    raise ForeignBytes(f"the entry at byte {begin} has more than {_MOST_ENTRY_BYTES} bytes")

    def _in_block(self, data: memoryview, begin: int) -> Iterator[tuple[int, LogEntry]]:
        """``begin``: of the block in the file."""
        at = 0
        if begin == 0:
            end = entries.end_of_header(data)
            if end is None:
                return
            at = end
            self.at = end
        while True:
            try:
                found = entries.entry_at(data, at)
            except ForeignBytes as error:
                raise ForeignBytes(f"{error} of the block at byte {begin}") from None
            if found is None:
                return
            if isinstance(found, LogEnd):
                self.is_ended = True
                return
            yield begin + at, found._replace(end=begin + found.end)
            at = found.end
