"""What the client remembers: which incarnation of which file is which source. Positions are a hint only.

Invariants
* A source's entry is on the disk before the first chunk of it leaves, so that a client that is killed finds
  the same source again, asks the gateway for its position, and neither doubles nor loses a byte.
* An entry's head covers the first `fingerprint.HEAD_BYTES` of all that was ever sent of the source.
* The file on the disk is always one whole checkpoint: temporary file, fsync, rename, fsync of the folder.
* Generations only rise, beyond the clock too, so no two incarnations share a sourceId; with the checkpoint
  lost they begin at the present millisecond, above all that were given out before.
* One client at a time: the folder is locked for as long as the process lives.

A checkpoint that is missing or cannot be read costs doubles (every file becomes a new source, which shows in
its sourceId), never bytes. One that a newer version wrote is left alone: the client refuses to start.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from logferry.client.events import tell
from logferry.client.files.fingerprint import Fingerprint
from logferry.client.files.in_flight import Cut, load

VERSION = 4  # 1 had no `born_ns`, 2 no `topic`, 3 no `dc` and `since`
FILE = "checkpoint.json"
LOCK = "lock"
# As long as the gateway keeps what it knows of a silent source; afterwards an entry is of no use.
FORGET_AFTER_MS = 14 * 86_400_000


class StateUnusable(Exception):
    """The state folder cannot be used; the text says why. Starting again helps only after it was mended."""


class Entry:
    """One incarnation of a file. ``position``: what was acknowledged when this was written, or a little less.

    ``path``: where it was first seen, part of its name; ``last_path``: where it was last, after renames.
    ``away``: no pattern showed it there any more, and it was being read to its end.
    ``born_ns``: when its inode came to be; 0: not known. ``topic``: where its chunks go; empty: as configured.
    ``dc``: the data centre that takes its chunks, from position ``since`` on; what is before was acknowledged by
    another one. Empty: the first one, or none yet.
    """

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
    ) -> None:
        self.source_id = source_id
        self.path = path
        self.last_path = last_path
        self.device = device
        self.inode = inode
        self.head = head
        self.position = position
        self.mark = mark
        self.seen_ms = seen_ms
        self.away = away
        self.born_ns = born_ns
        self.topic = topic
        self.dc = dc
        self.since = since

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it changes


class Checkpoint:
    """The entries by sourceId, and the folder they are kept in. ``dc``: where the client was; empty: the first one."""

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock
        self.entries: dict[str, Entry] = {}
        self.generation = 0
        self.dc = ""
        self.cuts: dict[str, Cut] = {}  # of batches that had left when the client ended

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Locks the folder, which is made when missing, and reads what is there. Raises `StateUnusable`."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StateUnusable(f"{folder}: {error.strerror}") from None
        checkpoint = cls(folder, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            checkpoint._load()
        except BlockingIOError:
            checkpoint.close()
            raise StateUnusable(f"{folder}: another client is running on this state folder") from None
        except OSError as error:
            checkpoint.close()
            raise StateUnusable(f"{folder}: {error.strerror}") from None
        except StateUnusable:
            checkpoint.close()
            raise
        return checkpoint

    @classmethod
    def peek(cls, folder: Path) -> Checkpoint:
        """What is there, for reading only: no lock, nothing made or moved; do not `save` it. Raises `StateUnusable`."""
        checkpoint = cls(folder, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        try:
            checkpoint._take((folder / FILE).read_bytes())
        except FileNotFoundError:
            tell("state-new", folder=folder)
        except (ValueError, TypeError, KeyError) as error:
            tell("state-corrupt", file=folder / FILE, reason=error)
        except OSError as error:
            checkpoint.close()
            raise StateUnusable(f"{folder}: {error.strerror}") from None
        except StateUnusable:
            checkpoint.close()
            raise
        return checkpoint

    def close(self) -> None:
        """Unlocks; writes nothing."""
        os.close(self._lock)

    def next_generation(self) -> int:
        """A number that no incarnation has had: Unix time in milliseconds, or one more than the last."""
        self.generation = max(self.generation + 1, int(time.time() * 1000))
        return self.generation

    def save(self) -> None:
        """Durable when it returns. On OSError (disk full) the checkpoint before is still whole."""
        oldest = int(time.time() * 1000) - FORGET_AFTER_MS
        self.entries = {name: entry for name, entry in self.entries.items() if entry.seen_ms >= oldest}
        temporary = self._folder / (FILE + ".new")
        with temporary.open("wb") as file:
            file.write(_encode(self.generation, self.entries, self.dc))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._folder / FILE)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _load(self) -> None:
        path = self._folder / FILE
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            tell("state-new", folder=self._folder)
            return
        try:
            self._take(raw)
        except (ValueError, TypeError, KeyError) as error:
            aside = path.with_name(f"{FILE}.corrupt-{int(time.time() * 1000)}")
            path.replace(aside)
            tell("state-corrupt", file=aside, reason=error)

    def _take(self, raw: bytes) -> None:
        self.generation, self.entries, self.dc = _decode(raw)
        self.cuts = load(self._folder)


def _encode(generation: int, entries: dict[str, Entry], dc: str) -> bytes:
    rows = b", ".join(json.dumps(vars(entry)).encode() for entry in entries.values())  # each alone: takes less memory
    body = b'{"generation": %d, "dc": %b, "entries": [%b]}' % (generation, json.dumps(dc).encode(), rows)
    head = json.dumps({"format": "logferry-push", "version": VERSION, "crc32": zlib.crc32(body)}).encode()
    return head + b"\n" + body + b"\n"


def _decode(raw: bytes) -> tuple[int, dict[str, Entry], str]:
    """Raises ValueError, TypeError or KeyError for what no client of this version wrote."""
    first, _, rest = raw.partition(b"\n")
    head = json.loads(first)
    if head["format"] != "logferry-push":
        raise ValueError(f"format {head['format']!r}")
    if head["version"] > VERSION:
        raise StateUnusable(
            f"checkpoint of version {head['version']}, this client knows {VERSION}: "
            "use the newer client, or another state folder (which sends every file anew)"
        )
    body = rest.rstrip(b"\n")
    if zlib.crc32(body) != head["crc32"]:
        raise ValueError("the checksum does not fit")
    content = json.loads(body)
    entries = [_entry(fields) for fields in content["entries"]]
    return int(content["generation"]), {entry.source_id: entry for entry in entries}, str(content.get("dc", ""))


def _entry(fields: dict[str, Any]) -> Entry:
    entry = Entry(**fields)
    entry.head = Fingerprint(*fields["head"])
    entry.mark = Fingerprint(*fields["mark"])
    return entry
