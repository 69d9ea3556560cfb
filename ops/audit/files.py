"""Original files against the chunks that were stored of them.

A chunk of a file carries its place: `seqno` is the position after its last byte and `prev` the one before its first.
So each chunk is compared with the file's bytes there as it is read from the log, and nothing is kept. Where seqnos
are no positions, the chunks are taken end to end from the file's beginning.

Which source is the file is decided by content: among the sources that name its path, or another file of its folder
(logs are renamed when they are rotated), the one with which it has most bytes in common from the start on. Of equal
ones the one that names the path. Its differences count; the others are other incarnations of the path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from logferry.client.names import printable
from logferry.gateway.contract import Chunk
from logferry.ops.audit.lines import first_difference
from logferry.ops.problems import Unavailable, WrongUse

_NAME: Final = re.compile(r"[^/]*:(?P<path>/.*)#[0-9]+")
_HEAD_BYTES: Final = 256


@dataclass(slots=True)
class Pair:
    """One source next to one file. ``begin`` to ``reached``: the positions that are stored.

    ``equal_to``: up to where they are equal without a hole; ``flaw``: what is wrong there, empty while nothing is.
    """

    topic: str
    source_id: str
    names_it: bool
    by_position: bool
    begin: int
    reached: int
    equal_to: int
    recorded_ms: int = 0
    flaw: str = ""

    @property
    def equal_bytes(self) -> int:
        return self.equal_to - self.begin

    @property
    def rank(self) -> tuple[int, bool, int]:
        """The highest one is the file's source."""
        return self.equal_bytes, self.names_it, self.recorded_ms

    def take(self, original: Original, chunk: Chunk, recorded_ms: int) -> None:
        self.recorded_ms = recorded_ms
        start = self.reached
        if self.by_position:
            start = chunk.seqno - len(chunk.data) if chunk.prev is None else chunk.prev
        end = start + len(chunk.data)
        if not self.flaw and start > self.reached:
            self.flaw = f"the bytes {self.reached} to {start - 1} are not stored"
        if not self.flaw:
            there = original.read(start, len(chunk.data))
            same = first_difference(there, chunk.data) if there != chunk.data else len(there)
            if same < len(chunk.data):
                self.equal_to = max(self.equal_to, start + same)
                ends = f"the file ends at {start + same}, but more is stored" if same == len(there) else ""
                self.flaw = ends or f"the first difference is at position {start + same}"
            else:
                self.equal_to = max(self.equal_to, end)
        self.reached = max(self.reached, end)


@dataclass(slots=True)
class Original:
    """``names``: its absolute path, and where it really lies, as sources write them."""

    path: Path
    fd: int
    names: frozenset[str]
    pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)

    def read(self, start: int, size: int) -> bytes:
        """Fewer bytes than asked for at the end of the file. Raises Unavailable."""
        try:
            return os.pread(self.fd, size, start)
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be read: {error.strerror}") from error

    def begin(self, topic: str, source_id: str, path: str, chunk: Chunk) -> Pair | None:
        """The pair of a source, by its first chunk; None when it is surely another file's."""
        names_it = path in self.names
        start = chunk.seqno - len(chunk.data)
        by_position = start >= 0 and chunk.prev in (None, start)
        if not by_position:
            start = 0
        head = chunk.data[:_HEAD_BYTES]
        if not names_it and (not head or self.read(start, len(head)) != head):
            return None
        return Pair(topic, source_id, names_it, by_position, start, start, start)

    def report(self) -> Iterator[FileReport]:
        """One for each topic in which a source names the file, else one for the best match of all."""
        size = os.fstat(self.fd).st_size
        naming = {pair.topic for pair in self.pairs.values() if pair.names_it}
        groups = [[pair for pair in self.pairs.values() if pair.topic == topic] for topic in sorted(naming)]
        for group in groups or [list(self.pairs.values())]:
            yield _report(str(self.path), size, group)


class FileReport(NamedTuple):
    """``begin`` to ``recorded``: the positions that are stored of it. ``not_sent_bytes``: what comes after that.

    ``flaw``: empty when the stored bytes are the file's. ``topic`` and ``source_id`` are None where no source is it.
    """

    path: str
    topic: str | None
    source_id: str | None
    size_bytes: int
    begin: int
    recorded: int
    not_sent_bytes: int
    flaw: str

    @property
    def equal(self) -> bool:
        return not self.flaw


def _report(path: str, size: int, pairs: list[Pair]) -> FileReport:
    best = max(pairs, key=lambda pair: pair.rank, default=None)
    if best is None:
        flaw = "no source holds the beginning of this file" if size else ""
        return FileReport(path, None, None, size, 0, 0, size, flaw)
    rest = max(0, size - best.reached)
    return FileReport(path, best.topic, best.source_id, size, best.begin, best.reached, rest, best.flaw)


class OriginalFiles:
    """Files that are held open until `close`, and the pairs of each with the sources that may be it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises WrongUse where one is not a file that can be read."""
        self._by_folder: dict[str, list[Original]] = {}
        self._pairs: dict[tuple[str, str], list[tuple[Original, Pair]]] = {}
        self._all: list[Original] = []
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow symbolic links
        try:
            if not absolute.is_file():
                raise WrongUse(f"--file {path}: there is no such file")
            fd = os.open(absolute, os.O_RDONLY)
        except OSError as error:
            raise WrongUse(f"--file {path}: {error.strerror}") from None
        names = frozenset(printable(str(name)) for name in (absolute, absolute.resolve()))
        original = Original(absolute, fd, names)
        self._all.append(original)
        for folder in {os.path.dirname(name) for name in names}:  # noqa: PTH120 - text, with escapes
            self._by_folder.setdefault(folder, []).append(original)

    def close(self) -> None:
        for original in self._all:
            os.close(original.fd)
        self._all.clear()

    def take(self, topic: str, source_id: str, chunk: Chunk, recorded_ms: int) -> None:
        """The next chunk of a source, in the order of the log."""
        source = (topic, source_id)
        pairs = self._pairs.get(source)
        if pairs is None:
            pairs = self._pairs[source] = self._begin(source, chunk)
        for original, pair in pairs:
            pair.take(original, chunk, recorded_ms)

    def _begin(self, source: tuple[str, str], chunk: Chunk) -> list[tuple[Original, Pair]]:
        named = _NAME.fullmatch(source[1])
        path = chunk.attributes.get("path") or (named["path"] if named else "")
        found = []
        for original in self._by_folder.get(os.path.dirname(path), []):  # noqa: PTH120
            pair = original.begin(*source, path, chunk)
            if pair is not None:
                original.pairs[source] = pair
                found.append((original, pair))
        return found

    def reports(self) -> list[FileReport]:
        return [report for original in self._all for report in original.report()]
