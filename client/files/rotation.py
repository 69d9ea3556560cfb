"""Files in which a known source continues: after a start, or as a copy that rotation made.

Copies come from ``copytruncate``, ``copy``, or a move to another file system. The bytes that a truncation took are in
the copy. So the source continues there, as if the file had been renamed, and the file itself begins a new source. A
copy is known by its name, which rotation derives from the file's, and by its content: the head, and the bytes before
the position. `compressed` has those that became a ``.gz``.

`KnownFiles` finds the source of an open file after a start. Device and inode find the entry. A reboot or a new mount
may give the file system another device number, and some give the file another inode, too. So on a miss an entry of
another device is taken if its content and time of birth match, and its inode or, where the birth is known, its path. An
entry whose own device and inode are there comes first: the caller opens these files before the others.

A power failure may take the end of a file, also bytes that were sent. What is left up to a known mark need not be sent
again, be it in the file or in a copy that was made of it before the client started. This holds after a reboot alone:
else a program rewrote the file, and equal lines match any mark.
"""

# Paths stay text, as in `discover`.
# ruff: noqa: PTH118

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

from logferry.client.files.checkpoint import CheckpointEntry
from logferry.client.files.discover import FileKey, files_beside, find_moved
from logferry.client.files.identity import HEAD_BYTES, MARK_BYTES, Fingerprint, fingerprint
from logferry.client.files.tail import FileChanged, FileTail

QUIET_S = 5.0  # a copy that did not grow for so long is complete
_STEP_BYTES = 1 << 18
_DERIVED = re.compile(r"(.+)[-._](?:\d[\d:T]*|old)(\.[^.\d][^.]*)?\Z")


def originals(name: str) -> list[str]:
    """The names from which rotation may have derived this one, by a number, a date or ``old`` behind it or before its
    ending. A copy of a copy has several.
    """
    found = []
    while derived := _DERIVED.match(name):
        name = derived[1] + (derived[2] or "")
        found.append(name)
    return found


def copy_depth(path: str) -> int:
    """By which an original sorts before its copies."""
    return len(original_paths(path))


class WantedCopy(NamedTuple):
    """What is known of the source: ``mark`` is before ``position``, ``data`` was read behind it."""

    path: str
    head: Fingerprint
    position: int
    mark: Fingerprint
    born_ns: int
    data: bytes | memoryview = b""

    def find(self, is_another: Callable[[FileTail], bool], now: float, once: bool) -> FileTail | None:
        """The copy beside the file, opened at the position."""
        beside = files_beside(self.path, lambda name, entry: name in originals(entry.name))
        for path in sorted(beside, key=copy_depth) if self.head.length else ():  # of a copy's copy is decided by it
            try:
                tail = FileTail.open(path, now, once)
            except OSError:
                continue
            if tail is not None and not is_another(tail) and self.is_in(tail):
                return tail
            if tail is not None:
                tail.close()
        return None

    def is_in(self, tail: FileTail) -> bool:
        """Whether the source continues in this file; then the file is at the position. Else it is as it was."""
        try:
            is_older = bool(tail.born_ns and self.born_ns and tail.born_ns < self.born_ns)
            is_other = tail.pread(len(self.data), self.position) != self.data
            if is_older or is_other or tail.differs(self.head, self.position, self.mark):
                return False
            tail.go_to(self.position)
            tail.head = self.head
            return True
        except (OSError, FileChanged):
            return False


class _Suspect:
    """``similar``: followed files from whose names, before renames, its own comes. ``whole_of``: the one that had every
    byte of it. ``sent_to``: so many of its bytes that one has sent. (No dataclass: that module takes 2 MB.)
    """

    def __init__(self, tail: FileTail, since: float, similar: list[FileTail], whole_of: FileTail | None) -> None:
        self.tail = tail
        self.since = since
        self.similar = similar
        self.whole_of = whole_of
        self.sent_to = 0


class Suspects:
    """Unknown files that begin as a followed file with a similar name. They may be copies in the making: they wait.

    They are kept open meanwhile, so that one which is removed is not lost.
    """

    def __init__(self) -> None:
        self._held: dict[FileKey, _Suspect] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def close(self) -> None:
        self.forget(tuple(self._held))

    def forget(self, keys: Iterable[FileKey]) -> None:
        """They are followed now, or not wanted."""
        for key in keys:
            if (suspect := self._held.pop(key, None)) is not None:
                suspect.tail.close()

    def gone(self, found: Container[FileKey], now: float) -> list[FileTail]:
        """Those that no pattern shows any more. They are to be decided now, with `begin_of`."""
        gone = [suspect for key, suspect in self._held.items() if key not in found]
        for suspect in gone:
            suspect.tail = suspect.tail.renewed(now)
        return [suspect.tail for suspect in gone]

    def _release(self, tail: FileTail) -> None:
        """It is decided, and followed with this descriptor."""
        suspect = self._held.pop(tail.key, None)
        if suspect is not None and suspect.tail is not tail:
            suspect.tail.close()

    def copy_of(self, wanted: WantedCopy, original: FileTail, now: float) -> FileTail | None:
        """The one in which the source continues, opened at the position; it is the caller's then."""
        for key, suspect in self._held.items() if wanted.head.length else ():
            if original in suspect.similar:
                suspect.tail = suspect.tail.renewed(now)
                if wanted.is_in(suspect.tail):
                    del self._held[key]
                    return suspect.tail
        return None

    def is_over(self, original: FileTail, sent_to: int) -> None:
        """The original ended; so many bytes of it were sent, or still are. What copies have of these is not sent."""
        for suspect in self._held.values():
            if suspect.whole_of is original and suspect.tail.size <= sent_to:
                suspect.sent_to = suspect.tail.size

    def similar_to(self, tail: FileTail) -> list[FileTail]:
        """Originals of a file that waits, which may have other names by now."""
        held = self._held.get(tail.key)
        return [] if held is None else held.similar

    def begin_of(self, tail: FileTail, likely: Iterable[FileTail], now: float, at_once: bool, gone: bool) -> int | None:
        """Where to begin with the file; None: it waits, and is kept open, until it has not grown for `QUIET_S`.
        ``likely``: followed files of which it may be a copy, by their names.

        A complete copy, once the original that is still there was sent so far, has nothing of its own: it begins at its
        end.
        """
        begin = self._begin_of(tail, likely, now, at_once, gone)
        if begin is not None:
            self._release(tail)
        return begin

    def _begin_of(
        self, tail: FileTail, likely: Iterable[FileTail], now: float, at_once: bool, gone: bool
    ) -> int | None:
        held = self._held.get(tail.key)
        if held is not None and 0 < held.sent_to <= tail.size:
            return held.sent_to
        similar = [each for each in likely if each.is_there() and _begins_as(tail, each)]
        is_another = not any(_may_be_of(tail, each) for each in similar)
        is_intact = all(each.is_intact() for each in similar)  # afterwards: a truncation makes them differ, too
        if is_another and is_intact:
            return 0
        whole_of = next((each for each in similar if _is_whole_copy(tail, each)), None) if is_intact else None
        same = held if held is not None and held.tail.size == tail.size else None
        since = now if same is None else same.since
        if at_once or (is_intact and (gone or now - since >= QUIET_S)):
            if whole_of is None:
                return 0  # also of an original that was truncated before any of it was sent
            if at_once or gone or whole_of.position >= tail.size:  # else a truncation may take what was not sent
                return tail.size
        if whole_of is None and same is not None:
            whole_of = same.whole_of
        self._release(tail)
        self._held[tail.key] = _Suspect(tail, since, similar, whole_of)
        return None  # an original that was truncated continues in its copy


def original_paths(path: str) -> list[str]:
    folder, name = os.path.split(path)
    return [os.path.join(folder, each) for each in originals(name)]


def _begins_as(tail: FileTail, original: FileTail) -> bool:
    """Also as the original did before it was truncated."""
    begin = tail.pread(HEAD_BYTES, 0)
    if len(begin) < original.head.length:
        return original.pread(len(begin), 0) == begin
    return fingerprint(begin[: original.head.length]) == original.head


def _may_be_of(tail: FileTail, original: FileTail) -> bool:
    """Its last bytes are also the original's; a copy in the making may end with zeros."""
    size = min(tail.size, MARK_BYTES)
    end = tail.pread(size, tail.size - size)
    return not end.strip(b"\0") or original.pread(size, tail.size - size) == end


def _is_whole_copy(tail: FileTail, original: FileTail) -> bool:
    """Every byte of it is in the original. Shorter files than a head are no proof: many begin with the same lines. Nor
    are NUL bytes alone: a power failure leaves these in several files.
    """
    if not HEAD_BYTES <= tail.size <= original.size:
        return False
    has_lines = False
    for at in range(0, tail.size, _STEP_BYTES):
        part = tail.pread(_STEP_BYTES, at)
        if part != original.pread(min(_STEP_BYTES, tail.size - at), at):
            return False
        has_lines = has_lines or bool(part.strip(b"\0"))
    return has_lines


class KnownFiles:
    """The checkpoint's entries whose files were not found yet."""

    def __init__(self, entries: Iterable[CheckpointEntry], rebooted: bool) -> None:
        self.rebooted = rebooted
        self._entries: dict[FileKey, CheckpointEntry] = {(entry.device, entry.inode): entry for entry in entries}
        self._by_inode: defaultdict[int, list[CheckpointEntry]] = defaultdict(list)
        self._by_path: defaultdict[str, list[CheckpointEntry]] = defaultdict(list)
        for entry in self._entries.values():
            self._by_inode[entry.inode].append(entry)
            self._by_path[entry.last_path].append(entry)

    def __contains__(self, key: FileKey) -> bool:
        return key in self._entries

    def may_have(self, path: str, facts: os.stat_result) -> bool:
        return facts.st_ino in self._by_inode or path in self._by_path

    def rest(self) -> list[tuple[FileKey, CheckpointEntry]]:
        return list(self._entries.items())

    def fits(self, tail: FileTail) -> bool:
        """The file is that of the entry with its device and inode."""
        entry = self._entries.get(tail.key)
        return entry is not None and not differs(tail, entry)

    def is_replaced(self, entry: CheckpointEntry, now: float) -> bool:
        """Its file, which may have been renamed in its folder, is gone or holds something else."""
        try:
            tail = FileTail.open(find_moved(entry.last_path, (entry.device, entry.inode)) or entry.last_path, now)
        except OSError:
            return False  # unknown: nothing may begin elsewhere
        if tail is None:
            return not os.path.lexists(entry.last_path)
        try:
            return bool(differs(tail, entry)) and not self.intact_to(tail, entry)
        finally:
            tail.close()

    def remove(self, entry: CheckpointEntry) -> None:
        """Before its device and inode are changed."""
        if self._entries.pop((entry.device, entry.inode), None) is not None:
            self._by_inode[entry.inode].remove(entry)
            self._by_path[entry.last_path].remove(entry)

    def candidate(self, tail: FileTail) -> CheckpointEntry | None:
        """The entry that the file may be: its content may still differ if device and inode are those of the entry."""
        entry: CheckpointEntry | None = self._entries.get(tail.key)
        if entry is not None and not differs(tail, entry):
            return entry
        device, inode = tail.key
        likely = list(self._by_inode.get(inode, ()))
        if tail.born_ns:
            likely += self._by_path.get(tail.path, ())
        for other in sorted(likely, key=lambda each: (each.inode != inode, each.last_path != tail.path)):
            is_known = other.inode == inode or other.born_ns == tail.born_ns
            if other.device == device or not is_known or not other.head.length:
                continue
            if not differs(tail, other) or self.intact_to(tail, other):
                return other
        return entry

    def intact_to(self, tail: FileTail, entry: CheckpointEntry) -> int:
        """The last known position up to which the file is what was sent; 0: none."""
        if not self.rebooted or (tail.born_ns and entry.born_ns and tail.born_ns != entry.born_ns):
            return 0
        return next((at for at, mark in self._places(entry) if not tail.differs(entry.head, at, mark)), 0)

    def copy_of(
        self, entry: CheckpointEntry, is_another: Callable[[FileTail], bool], now: float, once: bool
    ) -> FileTail | None:
        """The copy beside its file, opened at the last known position up to which it is what was sent."""
        for position, mark in self._places(entry):
            wanted = WantedCopy(entry.last_path, entry.head, position, mark, entry.born_ns)
            if (copy := wanted.find(is_another, now, once)) is not None:
                return copy
        return None

    def _places(self, entry: CheckpointEntry) -> list[tuple[int, Fingerprint]]:
        """Known positions with their marks, the last one first; earlier ones count after a reboot alone."""
        earlier = [(position, Fingerprint(MARK_BYTES, digest)) for position, digest in entry.marks]
        return [(entry.position, entry.mark), *(earlier if self.rebooted else ())]


def differs(tail: FileTail, entry: CheckpointEntry) -> str:
    """Why the file is not the incarnation that the checkpoint knows; empty when it is."""
    if tail.born_ns and entry.born_ns and tail.born_ns != entry.born_ns:
        return "another file, made later, has its inode"
    return tail.differs(entry.head, entry.position, entry.mark)
