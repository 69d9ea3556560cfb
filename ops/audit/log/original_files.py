"""Compares original files with the chunks that are stored of them.

A chunk of a file carries its position: `seqno` is the position after its last byte, `prev` the one before its first.
Each chunk is compared with the file's bytes at that position while the log is read, so no chunk is held in memory.
Where seqnos are not positions, the chunks are laid end to end from the beginning of the file.

The source of a file is chosen by content. Candidates are the sources that name its path, or another file of its folder
(rotation renames logs). The one that has most bytes in common from the start is the file's source; of equal ones, the
one that names the path. Only its differences are reported; the others are other incarnations of the path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from logferry.client.files.identity import printable
from logferry.gateway.contract.chunk import Chunk
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.lines import MODULUS, first_difference
from logferry.ops.audit.digests.sums import chunk_digest, shown
from logferry.ops.cli.problems import Unavailable, UsageError

_NAME: Final = re.compile(r"[^/]*:(?P<path>/.*)#[0-9]+")
_HEAD_BYTES: Final = 256


@dataclass
class ProvenOriginal:
    """The proof of an original file: its identity in the file system, and the state of its pairs."""

    inode: list[int]
    pairs: list[list[Any]] = field(default_factory=list)


@dataclass(slots=True)
class Pair:
    """One source compared with one file. ``begin`` to ``reached``: the stored positions.

    ``equal_to``: the end of the part that is equal without a hole; ``flaw``: the first difference, empty if none.
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
    def rank(self) -> tuple[int, bool, int]:
        """The pair of the highest rank is the file's source."""
        return self.equal_to - self.begin, self.names_it, self.recorded_ms

    def take(self, original: OriginalFile, chunk: Chunk, recorded_ms: int) -> None:
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
class OriginalFile:
    """``names``: its absolute path, with and without symbolic links, as sources write them. ``is_known``: an earlier
    audit compared it, and this one resumes. ``is_replaced``: another file was at this path before, so that a source
    that names the path may belong to that file."""

    path: Path
    fd: int
    names: frozenset[str]
    is_known: bool = False
    is_replaced: bool = False
    pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)

    def read(self, start: int, size: int) -> bytes:
        """Returns fewer bytes at the end of the file. Raises Unavailable."""
        try:
            return os.pread(self.fd, size, start)
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be read: {error.strerror}") from error

    def begin(self, topic: str, source_id: str, path: str, chunk: Chunk) -> Pair | None:
        """The pair of a source, by its first chunk; None if the source certainly belongs to another file."""
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
        """One report for each topic in which a source names the file, else one for the best match of all."""
        size = os.fstat(self.fd).st_size
        naming = {pair.topic for pair in self.pairs.values() if pair.names_it}
        groups = [[pair for pair in self.pairs.values() if pair.topic == topic] for topic in sorted(naming)]
        for group in groups or [list(self.pairs.values())]:
            best = max(group, key=lambda pair: pair.rank, default=None)
            if best is None:
                flaw = "no source holds the beginning of this file" if size else ""
                yield FileReport(str(self.path), None, None, size, 0, 0, size, flaw)
            else:
                stored = (size, best.begin, best.reached, max(0, size - best.reached), best.flaw)
                sums = (best.chunks, shown(best.digest))
                yield FileReport(str(self.path), best.topic, best.source_id, *stored, *sums)


class FileReport(NamedTuple):
    """``begin`` to ``recorded``: the stored positions. ``not_sent_bytes``: the size of the rest of the file.

    ``flaw``: empty if the stored bytes are the file's. ``hash``: of its bytes, cut as the chunks are.
    ``topic`` and ``source_id`` are None where no source holds the file.
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


class OriginalFiles:
    """The files, open until `close`, and the pairs of each with the sources that may hold it.

    A file resumes from the proof of an earlier audit; a file that replaced another one is compared from its beginning.
    """

    def __init__(self, paths: Iterable[Path], proven: Mapping[str, ProvenOriginal] | None = None) -> None:
        """Raises UsageError for a path that is not a readable file."""
        self._proven = proven or {}
        self._by_folder: dict[str, list[OriginalFile]] = {}
        self._pairs: dict[tuple[str, str], list[tuple[OriginalFile, Pair]]] = {}
        self._fresh: dict[tuple[str, str], list[tuple[OriginalFile, Pair]]] = {}
        self._files: list[OriginalFile] = []
        self.replaced: list[str] = []
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        absolute = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow symbolic links
        if any(original.path == absolute for original in self._files):
            return
        try:
            if not absolute.is_file():
                raise UsageError(f"--file {path}: no such file")
            fd = os.open(absolute, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"--file {path}: {error.strerror}") from None
        names = frozenset(printable(str(name)) for name in (absolute, absolute.resolve()))
        original = OriginalFile(absolute, fd, names)
        self._restore(original)
        self._files.append(original)
        for folder in {os.path.dirname(name) for name in names}:  # noqa: PTH120 - text, with escapes
            self._by_folder.setdefault(folder, []).append(original)

    def _restore(self, original: OriginalFile) -> None:
        proven, stat = self._proven.get(str(original.path)), os.fstat(original.fd)
        if proven is None:
            return
        pairs = [Pair(*values) for values in proven.pairs]
        if proven.inode != [stat.st_dev, stat.st_ino] or stat.st_size < max((p.equal_to for p in pairs), default=0):
            self.replaced.append(str(original.path))
            original.is_replaced = True
            return
        original.is_known = True
        for pair in pairs:
            original.pairs[pair.topic, pair.source_id] = pair
            self._pairs.setdefault((pair.topic, pair.source_id), []).append((original, pair))

    def to_state(self) -> dict[str, ProvenOriginal]:
        found = {}
        for original in self._files:
            stat = os.fstat(original.fd)
            pairs = [list(astuple(pair)) for pair in original.pairs.values()]
            found[str(original.path)] = ProvenOriginal([stat.st_dev, stat.st_ino], pairs)
        return found

    def close(self) -> None:
        for original in self._files:
            os.close(original.fd)
        self._files.clear()

    def concerns(self, source_id: str) -> bool:
        """Whether a source that an earlier audit read may hold a file that no audit has compared."""
        named = _NAME.fullmatch(source_id)
        folder = os.path.dirname(named["path"]) if named else None  # noqa: PTH120
        return any(not original.is_known for original in self._by_folder.get(folder or "", []))

    def take(
        self, topic: str, source_id: str, chunk: Chunk, recorded_ms: int, *, is_first: bool = True, is_new: bool = True
    ) -> None:
        """Takes the next chunk of a source, in the order of the log. ``is_first``: no earlier audit read a chunk of it.

        ``is_new`` False: an earlier audit read the chunk; it is compared only with files that are new since then.
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

    def _begin(self, source: tuple[str, str], chunk: Chunk, *, of_known: bool) -> list[tuple[OriginalFile, Pair]]:
        named = _NAME.fullmatch(source[1])
        path = chunk.attributes.get("path") or (named["path"] if named else "")
        found = []
        for original in self._by_folder.get(os.path.dirname(path), []):  # noqa: PTH120
            pair = original.begin(*source, path, chunk) if original.is_known == of_known else None
            if pair is not None:
                original.pairs[source] = pair
                found.append((original, pair))
        return found

    def reports(self, findings: Findings) -> list[FileReport]:
        """One report a file and topic; differences and unsent ends are added to the findings."""
        for path in self.replaced:
            detail = "since the last audit the file was replaced or truncated: compared from its beginning"
            findings.add(Finding("file-replaced", path, detail, refutes=False))
        reports = [report for original in self._files for report in original.report()]
        for file in reports:
            source = f"{file.topic} {file.source_id}" if file.source_id else None
            if file.flaw and source is None and file.path in self.replaced:
                findings.add(Finding("not-sent-yet", file.path, f"new file: {file.flaw}", refutes=False))
            elif file.flaw:
                kind = "file-differs" if source else "file-not-stored"
                findings.add(Finding(kind, file.path, file.flaw, source))
            elif file.not_sent_bytes:
                detail = f"the last {file.not_sent_bytes} bytes of {file.size_bytes} are not sent yet"
                findings.add(Finding("not-sent-yet", file.path, detail, source, refutes=False))
            if source and file.begin:
                detail = f"stored from position {file.begin}; the part before was removed by retention or never sent"
                findings.add(Finding("file-begins-late", file.path, detail, source, refutes=False))
        return reports
