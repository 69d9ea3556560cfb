"""The checkpoint: which incarnation of which file is which source. Its positions are only a hint.

Invariants
* A source's entry is on the disk before its first chunk is sent. So a client that is killed finds the same source
  again, asks the gateway for its position, and neither doubles nor loses a byte.
* An entry's head covers the first `identity.HEAD_BYTES` of everything that was ever sent of the source.
* The file on the disk is one whole checkpoint (temporary file, fsync, rename, fsync of the folder), and behind it a
  line for each later save, with the entries that it changed or removed. A save returns after fsync. A line without its
  checksum is one whose save never returned: it is left out, and the first save of a process writes a whole checkpoint.
* After a save that failed the next one writes a whole checkpoint: nothing is appended behind a torn line.
* Generations only rise, even if the clock goes back, so no two incarnations share a sourceId. With the checkpoint lost
  they begin at the present millisecond, above all earlier ones.
* One client at a time: the folder is locked for as long as the process lives.
* Each file has at most one entry in a checkpoint. Where it has several topics, the entries of the others are in
  checkpoints of their own (`Checkpoint.layer`), in folders that clients of older versions do not look at.
* A folder that was copied to another host gets new sourceIds (`Checkpoint.adopt`): two hosts never share one.

A checkpoint that is missing or unreadable costs duplicates (every file becomes a new source, which its sourceId shows),
never bytes. The client refuses to start with one of a newer version, and does not touch it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from logferry.client.events import log_event
from logferry.client.files.batches import BatchLayout, load
from logferry.client.files.identity import Fingerprint, boot, machine, source_id

# 1 had no `born_ns`, 2 no `topic`, 3 no `dc` and `since`, 4 no `host`, `machine`, `boot` and `marks`, 5 no later lines
# and no `heard_ms`, 6 no `real_path`
VERSION = 7
FILE = "checkpoint.json"
LOCK = "lock"
TOPICS, MAX_LAYERS = "topics", 16  # the folder of further layers, which are numbered from 2 on
HEAD_BYTES = 96  # of the first line, which is written last
# The gateway forgets a silent source after this time; an older entry is of no use.
FORGET_AFTER_MS = 14 * 86_400_000
# Lines are appended until they are as long as the checkpoint itself, and at least this long.
LEAST_APPENDED_BYTES = 1 << 20
WHOLE_EVERY_S = 86_400.0
# A gateway that knows nothing of a source, and did so long ago, has forgotten it: its chunks are recorded all the same.
EXPIRED_AFTER_MS = 86_400_000


class StateUnusable(Exception):
    """The state folder cannot be used; the text says why. A restart helps only after that was repaired."""


class CheckpointEntry:
    """One incarnation of a file. ``position``: acknowledged when this was written, or a little less.

    ``path``: its first path, part of its name; ``last_path``: its path after renames; ``real_path``: where symbolic
    links led that to, empty if nowhere else. ``away``: no pattern showed it there any more, and it was being read to
    its end. ``born_ns``: the birth of its inode; 0: unknown. ``topic``: of its
    chunks; empty: as configured. ``dc``: the data centre that takes its chunks from position ``since`` on; another one
    acknowledged those before, or another source did. Empty: the first one, or none yet. ``heard_ms``: Unix time in
    milliseconds at which a gateway answered about it, up to an hour late; 0: not known.
    """

    __slots__ = (
        *("source_id", "path", "last_path", "device", "inode", "head", "position", "mark", "seen_ms", "away"),
        *("born_ns", "topic", "dc", "since", "marks", "heard_ms", "real_path"),
    )

    def __init__(
        self,
        source_id: str,
        path: str,
        last_path: str,
        device: int,
        inode: int,
        head: Fingerprint,
        position: int,
        mark: Fingerprint,
        seen_ms: int,
        away: bool = False,
        born_ns: int = 0,
        topic: str = "",
        dc: str = "",
        since: int = 0,
        marks: Iterable[tuple[int, str]] = (),
        heard_ms: int = 0,
        real_path: str = "",
    ) -> None:
        self.source_id = source_id
        self.path, self.last_path = path, last_path
        self.device, self.inode = device, inode
        self.head = head
        self.position = position
        self.mark = mark
        self.seen_ms = seen_ms
        self.away = away
        self.born_ns = born_ns
        self.topic = topic
        self.dc, self.since = dc, since
        self.marks = tuple((position, digest) for position, digest in marks)
        self.heard_ms = heard_ms
        self.real_path = real_path

    @property
    def where(self) -> dict[str, str]:
        """Which source it is, for an event of the log."""
        return {"source": self.source_id, "topic": self.topic}

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


class Checkpoint:
    """The entries by sourceId, and the folder they are kept in. ``dc``: where the client was; empty: the first one.

    ``host``, ``machine`` and ``boot``: who wrote it, and since which start of the system; empty: not known.
    ``changed``: the sourceIds whose entries the next save has to write; whoever changes an entry adds its name.
    """

    def __init__(self, folder: Path, lock: int, first: Checkpoint | None = None) -> None:
        self.folder = folder
        self._layers = [self]
        self._first = first or self
        self._lock = lock
        self.entries: dict[str, CheckpointEntry] = {}
        self.changed: set[str] = set()
        self.generation = 0
        self.dc = self.host = self.machine = self.boot = ""
        self.cuts: dict[str, list[BatchLayout]] = {}  # of batches that were in flight when the client ended
        self.saved_ns = 0  # Unix time of the last save before this process; 0: there was none
        self._fd = -1  # for appending; -1: the next save writes a whole checkpoint
        self._whole_until = 0.0
        self._room = 0  # bytes that may still be appended

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Creates the folder if need be, locks it, and reads the checkpoint. Raises `StateUnusable`."""
        return cls._opened(folder, True)

    @classmethod
    def peek(cls, folder: Path) -> Checkpoint:
        """The checkpoint, read-only: without lock, and without any change on the disk. Raises `StateUnusable`."""
        return cls._opened(folder, False)

    @classmethod
    def _opened(cls, folder: Path, is_ours: bool) -> Checkpoint:
        with ExitStack() as undo:
            lock = -1
            try:
                if is_ours:
                    folder.mkdir(0o755, parents=True, exist_ok=True)
                    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                    undo.callback(os.close, lock)
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                checkpoint = cls(folder, lock)
                checkpoint._load(set_aside=is_ours)
                checkpoint._load_layers(set_aside=is_ours)
            except BlockingIOError:
                text = f"{folder}: another client uses this folder: stop it, or choose another"
                raise StateUnusable(text) from None
            except OSError as error:
                raise StateUnusable(f"{folder}: {error.strerror}") from None
            undo.pop_all()
        return checkpoint

    def close(self) -> None:
        """Unlocks; writes nothing."""
        for each in self._layers:
            open_ones, each._fd, each._lock = (each._fd, each._lock), -1, -1
            for fd in open_ones:
                if fd >= 0:
                    os.close(fd)

    def layer(self, number: int) -> Checkpoint:
        """This one for 0, and for each further number another one, whose folder its first save creates."""
        while len(self._layers) <= number:
            self._layers.append(Checkpoint(self.folder / TOPICS / str(len(self._layers) + 1), -1, self))
        return self._layers[number]

    @property
    def used_layers(self) -> int:
        """Up to the last one that has entries; at least 1."""
        return max((number for number, each in enumerate(self._layers, 1) if each.entries), default=1)

    def put(self, entry: CheckpointEntry) -> None:
        """The next save writes the entry."""
        self.entries[entry.source_id] = entry
        self.changed.add(entry.source_id)

    def drop(self, source_id: str) -> None:
        """The next save removes the entry, if there is one."""
        if self.entries.pop(source_id, None) is not None:
            self.changed.add(source_id)

    def adopt(self, host: str) -> bool:
        """Makes the checkpoint that of this host. If another one wrote it, its sources are that one's.

        Then every entry becomes a new source, which begins at the entry's position. True: do not send before `save`.
        """
        before, mine = (self.host, self.machine), (host, machine())
        self.host, self.machine = mine
        if not any(was and now and was != now for was, now in zip(before, mine)):
            return False
        log_event("state-copied", folder=self.folder, of=before[0], host=host, files=len(self.entries))
        for entry in self.entries.values():
            entry.source_id = source_id(host, entry.path, self.next_generation())
            entry.dc, entry.since = "", entry.position
        self.entries = {entry.source_id: entry for entry in self.entries.values()}
        self.cuts = {}
        return True

    def note_boot(self) -> bool:
        """Whether the system was rebooted since the checkpoint was written: only then may files have lost bytes."""
        before, self.boot = self.boot, boot()
        return before not in ("", self.boot)

    def next_generation(self) -> int:
        """A number that no incarnation has had: Unix time in milliseconds, or one more than the last."""
        number = max(self._first.generation + 1, int(time.time() * 1000))
        self.generation = self._first.generation = number
        return number

    @property
    def is_whole_next(self) -> bool:
        """The next save writes every entry, so all of them should be up to date; at least once a day, for `seen_ms`."""
        return self._fd < 0 or self._room <= 0 or time.monotonic() >= self._whole_until

    def save(self) -> None:
        """Durable when it returns. On OSError (disk full) the previous checkpoint is still whole."""
        whole = self.is_whole_next
        fd, self._fd = self._fd, -1
        try:
            if whole:
                fd, before = self._begin(), fd
                if before >= 0:
                    os.close(before)
            else:
                self._append(fd)
        except OSError:
            if fd >= 0:
                os.close(fd)
            raise
        self._fd = fd
        self.changed.clear()

    def _begin(self) -> int:
        """Writes a whole checkpoint; the descriptor for appending to it."""
        oldest = int(time.time() * 1000) - FORGET_AFTER_MS
        self.entries = {name: entry for name, entry in self.entries.items() if entry.seen_ms >= oldest}
        if self._first is not self:
            self._make_folder()
        temporary = self.folder / (FILE + ".new")
        crc32, size = 0, HEAD_BYTES
        with open(temporary, "wb", opener=owned) as file:
            file.write(b" " * HEAD_BYTES)
            for part in _body(self, self.entries.values()):  # one by one: with many files all take much memory
                file.write(part)
                crc32, size = zlib.crc32(part, crc32), size + len(part)
            file.write(b"\n")
            file.seek(0)
            head = json.dumps({"format": "logferry-push", "version": VERSION, "crc32": crc32}).encode()
            file.write(head.ljust(HEAD_BYTES - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / FILE)
        _sync_folder(self.folder)
        self._room, self._whole_until = max(size, LEAST_APPENDED_BYTES), time.monotonic() + WHOLE_EVERY_S
        return os.open(self.folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _make_folder(self) -> None:
        for folder in (self.folder.parent, self.folder):
            with suppress(FileExistsError):
                folder.mkdir(0o755)
            _sync_folder(folder.parent)

    def _append(self, fd: int) -> None:
        entries = [self.entries[name] for name in self.changed if name in self.entries]
        gone = [name for name in self.changed if name not in self.entries]
        body = b"".join(_body(self, entries, gone))
        line = b"%08x %b\n" % (zlib.crc32(body), body)
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(fd)
        self._room -= len(line)

    def _load(self, set_aside: bool) -> None:
        path = self.folder / FILE
        try:
            self.saved_ns = path.stat().st_mtime_ns
            content = _decode(path)
            self.entries, self.generation = content["entries"], int(content["generation"])
            self.dc, self.host, self.machine = (str(content.get(name, "")) for name in ("dc", "host", "machine"))
            self.boot = str(content.get("boot", ""))
            self.cuts = load(self.folder)
        except FileNotFoundError:
            log_event("state-new", folder=self.folder)
        except (ValueError, TypeError, KeyError) as error:
            self.saved_ns = 1  # what was sent is not known, so every file may have been begun
            if set_aside:
                path = path.replace(path.with_name(f"{FILE}.corrupt-{int(time.time() * 1000)}"))
            log_event("state-corrupt", file=path, reason=error)

    def _load_layers(self, set_aside: bool) -> None:
        there = [number for number in range(1, MAX_LAYERS) if (self.folder / TOPICS / str(number + 1) / FILE).exists()]
        for number in there:
            self.layer(number)._load(set_aside)
            if self.layer(number).saved_ns > 1:  # the first one is saved whenever any is
                self.layer(number).saved_ns = max(self.layer(number).saved_ns, self.saved_ns)
        self.generation = max(each.generation for each in self._layers)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def expires_ms(source_retention_ms: int | None) -> int:
    """For how long a source must be silent to be expired, at a gateway that retains sources so long; None: unknown.

    A tenth less, because an entry gets its time after the answer: some seconds, or until a full disk has room again.
    """
    return EXPIRED_AFTER_MS if source_retention_ms is None else min(EXPIRED_AFTER_MS, source_retention_ms * 9 // 10)


def owned(path: str, flags: int) -> int:
    """The opener of files that no other user may write, whatever the umask is."""
    return os.open(path, flags, 0o644)


def _body(of: Checkpoint, entries: Iterable[CheckpointEntry], gone: Sequence[str] = ()) -> Iterator[bytes]:
    facts = {name: getattr(of, name) for name in ("generation", "dc", "host", "machine", "boot")}
    start = json.dumps({**facts, "gone": gone} if gone else facts).encode()
    yield b'%b, "entries": [' % start[:-1]
    for number, entry in enumerate(entries):
        yield (b", " if number else b"") + json.dumps(entry.facts()).encode()
    yield b"]}"


def _decode(path: Path) -> dict[str, Any]:
    """Raises ValueError, TypeError or KeyError for bytes that no client of this version wrote."""
    first, _, rest = path.read_bytes().partition(b"\n")
    head = json.loads(first)
    if head["format"] != "logferry-push":
        raise ValueError(f"format {head['format']!r}")
    if head["version"] > VERSION:
        raise StateUnusable(
            f"checkpoint of version {head['version']}, this client knows {VERSION}: "
            "use the newer client, or another state folder (which sends every file again)"
        )
    body, *lines = rest.rstrip(b"\n").split(b"\n")
    content = _verified(body, head["crc32"])
    entries: dict[str, CheckpointEntry] = content["entries"]
    damaged = -1
    for number, line in enumerate(lines):
        try:
            later = _verified(line[9:], int(line[:8], 16))
        except (ValueError, TypeError, KeyError):
            damaged = number
            continue
        entries.update(later["entries"])
        for name in later.get("gone", ()):
            entries.pop(name, None)
        content = later
    if 0 <= damaged < len(lines) - 1:  # the last one is a save that was cut off
        log_event("state-corrupt", file=path, reason=f"change {damaged + 1} of {len(lines)} is damaged: left out")
    return {**content, "entries": entries}


def _verified(body: bytes, crc32: int) -> dict[str, Any]:
    """A body with its entries by sourceId."""
    if zlib.crc32(body) != crc32:
        raise ValueError("the checksum does not match")
    content: dict[str, Any] = json.loads(body)
    entries = [CheckpointEntry(**fields) for fields in content["entries"]]
    for entry in entries:
        entry.head, entry.mark = Fingerprint(*entry.head), Fingerprint(*entry.mark)
    return {**content, "entries": {entry.source_id: entry for entry in entries}}
