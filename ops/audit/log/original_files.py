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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from logferry.client.files.identity import printable
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import MODULUS, chunk_digest, first_difference, shown
from logferry.ops.audit.records.formats import StoredChunk
from logferry.ops.cli.problems import Unavailable, UsageError

_NAME: Final = re.compile(r"[^/]*:(?P<path>/.*)#[0-9]+")
_HEAD_BYTES: Final = 256


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

    def take(self, original: OriginalFile, chunk: StoredChunk, recorded_ms: int) -> None:
        self.recorded_ms = recorded_ms
        self.chunks += 1
        start = self.reached
        if self.by_position:
            start = chunk.seqno - len(chunk.data) if chunk.prev is None else chunk.prev
        if not self.flaw and start > self.reached:
            self.flaw = f"the bytes {self.reached} to {start - 1} are not stored"
        if not self.flaw:
            there = original.read(start, len(chunk.data))
            self.digest = (self.digest + chunk_digest(chunk.seqno, there)) % MODULUS
            same = first_difference(there, chunk.data) if there != chunk.data else len(there)
            self.equal_to = max(self.equal_to, start + same)
            if same < len(chunk.data):
                ends = f"the file ends at {start + same}, but more is stored" if same == len(there) else ""
                self.flaw = ends or f"the first difference is at position {start + same}"
        self.reached = max(self.reached, start + len(chunk.data))


@dataclass
class ProvenOriginal:
    """The proof of an original file: its identity in the file system, and its pairs."""

    inode: tuple[int, int]
    pairs: list[Pair] = field(default_factory=list)


@dataclass(slots=True)
class OriginalFile:
    """``names``: its absolute path, with and without symbolic links, as sources write them. ``is_known``: an earlier
    audit compared it, and this one resumes. ``is_replaced``: another file was at this path before, so that a source
    that names the path may belong to that file. ``pairs``: by topic and source."""

    path: Path
    fd: int
    names: frozenset[str]
    is_known: bool = False
    is_replaced: bool = False
    pairs: dict[tuple[str, str], Pair] = field(default_factory=dict)

    @property
    def inode(self) -> tuple[int, int]:
        stat = os.fstat(self.fd)
        return stat.st_dev, stat.st_ino

    def resume(self, proven: ProvenOriginal) -> None:
        reached = max((pair.equal_to for pair in proven.pairs), default=0)
        if proven.inode != self.inode or os.fstat(self.fd).st_size < reached:
            self.is_replaced = True
            return
        self.is_known = True
        self.pairs = {(pair.topic, pair.source_id): pair for pair in proven.pairs}

    def read(self, start: int, size: int) -> bytes:
        """Returns fewer bytes at the end of the file. Raises Unavailable."""
        try:
            return os.pread(self.fd, size, start)
        except OSError as error:
            raise Unavailable(f"{self.path} cannot be read: {error.strerror}") from error

    def begin(self, topic: str, source_id: str, path: str, chunk: StoredChunk) -> Pair | None:
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
            if not group:
                flaw = "no source holds the beginning of this file" if size else ""
                yield FileReport(str(self.path), None, None, size, 0, 0, size, flaw)
                continue
            best = max(group, key=lambda pair: pair.rank)
            stored = (size, best.begin, best.reached, max(0, size - best.reached), best.flaw)
            yield FileReport(str(self.path), best.topic, best.source_id, *stored, best.chunks, shown(best.digest))


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
        """``proven``: by path, in the form in which sources write it. Raises UsageError for an unreadable file."""
        self._by_folder: dict[str, list[OriginalFile]] = {}
        self._holding: dict[tuple[str, str], list[OriginalFile]] = {}
        self._begun: set[tuple[str, str]] = set()
        self._files: list[OriginalFile] = []
        try:
            # Not resolve(): it would follow symbolic links.
            for path in dict.fromkeys(Path(os.path.abspath(path)) for path in paths):  # noqa: PTH100
                self._open(path, (proven or {}).get(printable(str(path))))
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, proven: ProvenOriginal | None) -> None:
        try:
            if not path.is_file():
                raise UsageError(f"--file {path}: no such file")
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"--file {path}: {error.strerror}") from None
        names = frozenset(printable(str(name)) for name in (path, path.resolve()))
        original = OriginalFile(path, fd, names)
        self._files.append(original)
        if proven is not None:
            original.resume(proven)
        for source in original.pairs:
            self._holding.setdefault(source, []).append(original)
        for folder in {os.path.dirname(name) for name in names}:  # noqa: PTH120 - text, with escapes
            self._by_folder.setdefault(folder, []).append(original)

    def descriptors(self) -> list[int]:
        return [original.fd for original in self._files]

    def adopt(self, descriptors: Sequence[int]) -> None:
        """Called in another process, with its descriptors for the files."""
        for original, fd in zip(self._files, descriptors, strict=True):
            original.fd = fd

    def taken(self) -> list[tuple[int, Pair]]:
        """The pairs of the sources that were read since the last call, with the number of their file."""
        files = list(enumerate(self._files))
        found = [(at, one.pairs[source]) for at, one in files for source in self._begun if source in one.pairs]
        self._begun.clear()
        return found

    def merge(self, taken: Iterable[tuple[int, Pair]]) -> None:
        """Adds what another process has taken."""
        for at, pair in taken:
            self._files[at].pairs[pair.topic, pair.source_id] = pair

    def to_state(self) -> dict[str, ProvenOriginal]:
        return {printable(str(one.path)): ProvenOriginal(one.inode, [*one.pairs.values()]) for one in self._files}

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
        self, topic: str, chunk: StoredChunk, recorded_ms: int, *, is_known: bool = False, is_new: bool = True
    ) -> None:
        """Takes the next chunk of a source, in the order of the log. ``is_known``: earlier audits read the source.

        ``is_new`` False: an earlier audit read the chunk; it is compared only with files that are new since then.
        """
        source = (topic, chunk.source_id)
        if source not in self._begun:
            self._begun.add(source)
            self._begin(source, chunk, is_known)
        for original in self._holding.get(source, ()):
            if is_new or not original.is_known:
                original.pairs[source].take(original, chunk, recorded_ms)

    def _begin(self, source: tuple[str, str], chunk: StoredChunk, is_known: bool) -> None:
        """Pairs a source with the files that it may hold, unless an earlier audit has decided that."""
        named = _NAME.fullmatch(source[1])
        path = dict(chunk.attributes).get("path") or (named["path"] if named else "")
        for original in self._by_folder.get(os.path.dirname(path), []):  # noqa: PTH120
            if source in original.pairs or (is_known and original.is_known):
                continue
            pair = original.begin(*source, path, chunk)
            if pair is not None:
                original.pairs[source] = pair
                self._holding.setdefault(source, []).append(original)

    def reports(self, findings: Findings) -> list[FileReport]:
        """One report a file and topic; differences and unsent ends are added to the findings."""
        replaced = [str(original.path) for original in self._files if original.is_replaced]
        for path in replaced:
            detail = "since the last audit the file was replaced or truncated: compared from its beginning"
            findings.add(Finding("file-replaced", path, detail, refutes=False))
        reports = [report for original in self._files for report in original.report()]
        for file in reports:
            source = f"{file.topic} {file.source_id}" if file.source_id else None
            if file.flaw and source is None and file.path in replaced:
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
