"""The checkpoint's entries whose files were not found yet, and which of them an open file is.

Device and inode find the entry. A reboot or a new mount may give the file system another device number, and some give
the file another inode, too. So on a miss an entry of another device is taken if its content and time of birth match,
and its inode or, where the birth is known, its path. An entry whose own device and inode are there comes first: the
caller opens these files before the others.

A power failure may take the end of a file, also bytes that were sent. What is left up to a known mark need not be sent
again. This holds after a reboot alone: else a program rewrote the file, and equal lines match any mark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from logferry.client.files.checkpoint import CheckpointEntry
from logferry.client.files.discover import FileKey
from logferry.client.files.identity import MARK_BYTES, Fingerprint
from logferry.client.files.tail import FileTail


class KnownFiles:
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

    def rest(self) -> list[tuple[FileKey, CheckpointEntry]]:
        return list(self._entries.items())

    def fits(self, tail: FileTail) -> bool:
        """The file is that of the entry with its device and inode."""
        entry = self._entries.get(tail.key)
        return entry is not None and not differs(tail, entry)

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
        earlier = [(position, Fingerprint(MARK_BYTES, digest)) for position, digest in entry.marks]
        for position, mark in [(entry.position, entry.mark), *earlier]:
            if not tail.differs(entry.head, position, mark):
                return position
        return 0


def differs(tail: FileTail, entry: CheckpointEntry) -> str:
    """Why the file is not the incarnation that the checkpoint knows; empty when it is."""
    if tail.born_ns and entry.born_ns and tail.born_ns != entry.born_ns:
        return "another file, made later, has its inode"
    return tail.differs(entry.head, entry.position, entry.mark)
