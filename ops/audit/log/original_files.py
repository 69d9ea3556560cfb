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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.client.files.source_names import printable
from logferry.gateway.contract.chunk import Chunk
from logferry.ops.audit.digests.lines import MODULUS, first_difference
from logferry.ops.audit.digests.sums import chunk_digest, shown
from logferry.ops.cli.problems import Unavailable, WrongUse

_NAME: Final = re.compile(r"[^/]*:(?P<path>/.*)#[0-9]+")
_HEAD_BYTES: Final = 256


@dataclass
class KeptFile:
    """What is kept of an original file: which one it is for the file system, and the state of its pairs."""

    inode: list[int]
    pairs: list[list[Any]] = field(default_factory=list)


@dataclass(slots=True)
class Pair:
    """One source next to one file. ``begin`` to ``reached``: the positions that are stored.

    ``equal_to``: up to where they are equal without a hole; ``flaw``: what is wrong there, empty while nothing is.
    ``digest``: of the file's own bytes, cut as the chunks are.
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
    chunks: int = 0
    digest: int = 0

    @property
    def equal_bytes(self) -> int:
        return self.equal_to - self.begin

    @property
    def rank(self) -> tuple[int, bool, int]:
        """The highest one is the file's source."""
        return self.equal_bytes, self.names_it, self.recorded_ms

    def take(self, original: Original, chunk: Chunk, recorded_ms: int) -> None:
        self.recorded_ms = recorded_ms
        self.chunks += 1
        start = self.reached
        if self.by_position:
            start = chunk.seqno - len(chunk.data) if chunk.prev is None else chunk.prev
        end = start + len(chunk.data)
        if not self.flaw and start > self.reached:
            self.flaw = f"the bytes {self.reached} to {start - 1} are not stored"
        if not self.flaw:
            there = original.read(start, len(chunk.data))
            self.digest = (self.digest + chunk_digest(chunk.seqno, there)) % MODULUS
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
    """``names``: its absolute path, and where it really lies, as sources write them. ``is_known``: an earlier audit
    has compared it, and this one goes on. ``is_replaced``: it lies where another file was, so that a source may name
    it and be that one."""

    path: Path
    fd: int
    names: frozenset[str]
    is_known: bool = False
    is_replaced: bool = False
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
        if (not names_it or self.is_replaced) and (not head or self.read(start, len(head)) != head):
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

    ``flaw``: empty when the stored bytes are the file's. ``hash``: of its bytes, cut as the chunks are.
    ``topic`` and ``source_id`` are None where no source is it.
    """

    path: str
    topic: str | None
    source_id: str | None
    size_bytes: int
    begin: int
    recorded: int
    not_sent_bytes: int
    flaw: str
    chunks: int = 0
    hash: str = ""

    @property
    def equal(self) -> bool:
        return not self.flaw


def _report(path: str, size: int, pairs: list[Pair]) -> FileReport:
    best = max(pairs, key=lambda pair: pair.rank, default=None)
    if best is None:
        flaw = "no source holds the beginning of this file" if size else ""
        return FileReport(path, None, None, size, 0, 0, size, flaw)
    rest = max(0, size - best.reached)
    return FileReport(
        path,
        best.topic,
        best.source_id,
        size,
        best.begin,
        best.reached,
        rest,
        best.flaw,
        best.chunks,
        shown(best.digest),
    )


class OriginalFiles:
    """Files that are held open until `close`, and the pairs of each with the sources that may be it.

    With what an earlier audit kept, a file goes on from there; one that was put in another's place begins anew.
    """

    def __init__(self, paths: Iterable[Path], kept: Mapping[str, KeptFile] | None = None) -> None:
        """Raises WrongUse where one is not a file that can be read."""
        self._kept = kept or {}
        self._by_folder: dict[str, list[Original]] = {}
        self._pairs: dict[tuple[str, str], list[tuple[Original, Pair]]] = {}
        self._fresh: dict[tuple[str, str], list[tuple[Original, Pair]]] = {}
        self._all: list[Original] = []
        self.replaced: list[str] = []
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow symbolic links
        if any(original.path == absolute for original in self._all):
            return
        try:
            if not absolute.is_file():
                raise WrongUse(f"--file {path}: there is no such file")
            fd = os.open(absolute, os.O_RDONLY)
        except OSError as error:
            raise WrongUse(f"--file {path}: {error.strerror}") from None
        names = frozenset(printable(str(name)) for name in (absolute, absolute.resolve()))
        original = Original(absolute, fd, names)
        self._restore(original)
        self._all.append(original)
        for folder in {os.path.dirname(name) for name in names}:  # noqa: PTH120 - text, with escapes
            self._by_folder.setdefault(folder, []).append(original)

    def _restore(self, original: Original) -> None:
        kept, stat = self._kept.get(str(original.path)), os.fstat(original.fd)
        if kept is None:
            return
        pairs = [Pair(*said) for said in kept.pairs]
        if kept.inode != [stat.st_dev, stat.st_ino] or stat.st_size < max((p.equal_to for p in pairs), default=0):
            self.replaced.append(str(original.path))
            original.is_replaced = True
            return
        original.is_known = True
        for pair in pairs:
            original.pairs[pair.topic, pair.source_id] = pair
            self._pairs.setdefault((pair.topic, pair.source_id), []).append((original, pair))

    def to_keep(self) -> dict[str, KeptFile]:
        found = {}
        for original in self._all:
            stat = os.fstat(original.fd)
            pairs = [list(astuple(pair)) for pair in original.pairs.values()]
            found[str(original.path)] = KeptFile([stat.st_dev, stat.st_ino], pairs)
        return found

    def close(self) -> None:
        for original in self._all:
            os.close(original.fd)
        self._all.clear()

    def concerns(self, source_id: str) -> bool:
        """Whether a source that was read before may be a file that no audit has compared."""
        named = _NAME.fullmatch(source_id)
        folder = os.path.dirname(named["path"]) if named else None  # noqa: PTH120
        return any(not original.is_known for original in self._by_folder.get(folder or "", []))

    def take(
        self,
        topic: str,
        source_id: str,
        chunk: Chunk,
        recorded_ms: int,
        *,
        is_first: bool = True,
        is_new: bool = True,
    ) -> None:
        """The next chunk of a source, in the order of the log. ``is_first``: no earlier audit read one of it.

        ``is_new`` False: an earlier audit read it, and it is for the files alone that were not there then.
        """
        source = (topic, source_id)
        if source not in self._fresh:
            self._fresh[source] = self._begin(source, chunk, of_known=False)
        pairs = self._fresh[source]
        if is_new:
            if source not in self._pairs:
                self._pairs[source] = self._begin(source, chunk, of_known=True) if is_first else []
            pairs = pairs + self._pairs[source]
        for original, pair in pairs:
            pair.take(original, chunk, recorded_ms)

    def _begin(self, source: tuple[str, str], chunk: Chunk, *, of_known: bool) -> list[tuple[Original, Pair]]:
        named = _NAME.fullmatch(source[1])
        path = chunk.attributes.get("path") or (named["path"] if named else "")
        found = []
        for original in self._by_folder.get(os.path.dirname(path), []):  # noqa: PTH120
            pair = original.begin(*source, path, chunk) if original.is_known == of_known else None
            if pair is not None:
                original.pairs[source] = pair
                found.append((original, pair))
        return found

    def reports(self) -> list[FileReport]:
        return [report for original in self._all for report in original.report()]
