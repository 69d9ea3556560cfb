"""Log files of the hosts: written line by line, rotated in every mode of logrotate.

A file that is compressed or truncated was in its client's checkpoint before: what a client has never seen, and no
pattern shows any more, it cannot send. That is the limit of the guide's table of rotations, and not what is tested.
"""

from __future__ import annotations

import gzip
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from logferry.client.files.checkpoint import Checkpoint
from logferry.client.files.identity import HEAD_BYTES, fingerprint

from tests.soak.lines import NumberedLine, encode_line

_WORDS: Final = ("accept", "cache", "disk", "größe", "GET /index.html", "日本", "", "\ttab", "\\", '"', "session")
_SAMPLE_LINES: Final = 2000


class Messages:
    """Texts of lines: pieces of the logs in ``samples``, or words at random."""

    def __init__(self, samples: Path | None, rng: random.Random) -> None:
        self._rng = rng
        self._lines: list[str] = []
        for path in sorted(samples.glob("*.log")) if samples else ():
            with path.open(encoding="latin-1") as file:
                self._lines += [line.rstrip("\n") for _, line in zip(range(_SAMPLE_LINES), file, strict=False)]

    def one(self) -> str:
        if self._lines:
            return self._rng.choice(self._lines)
        return " ".join(self._rng.choices(_WORDS, k=self._rng.randint(3, 60)))


@dataclass
class HostFile:
    """One log of a host. ``truncated``: first and last number of each incarnation whose unsent lines may be lost."""

    log: str
    path: Path
    mode: str
    messages: Messages
    number: int = 0
    rotations: int = 0
    truncated: list[tuple[int, int]] = field(default_factory=list)
    _first: int = 1
    _file: IO[bytes] | None = None

    @property
    def pattern(self) -> str:
        """Rotated names, too, unless the rotated file is a copy."""
        return str(self.path) if self.mode.startswith("copytruncate") else f"{self.path}*"

    def write(self, count: int) -> None:
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        for _ in range(count):
            self.number += 1
            self._file.write(
                encode_line(NumberedLine(self.log, self.number, time.time_ns() // 1_000_000), self.messages.one())
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def rotate(self, is_known: Callable[[Path], bool]) -> bool:
        """False: it was not possible. ``is_known``: whether all clients of the host know this incarnation of a file."""
        self.write(1)
        older = self.path.with_name(self.path.name + ".1")
        at_risk = {"delaycompress": older, "create": None, "dateext": None}.get(self.mode, self.path)
        if at_risk is not None and at_risk.exists() and not is_known(at_risk):
            return False
        self.rotations += 1
        if self.mode == "dateext":
            older = self.path.with_name(f"{self.path.name}-{time.strftime('%Y%m%d')}-{self.rotations}")
        else:
            self._shift()
        if self.mode.startswith("copytruncate"):
            shutil.copyfile(self.path, older)
            os.truncate(self.path, 0)
            if self.mode.endswith("compress"):
                self.truncated.append((self._first, self.number))
        else:
            self.path.rename(older)
            self.write(2)  # as a program that has not reopened its log yet
            self.close()
        self._first = self.number + 1
        if self.mode.endswith("compress") and self.mode != "delaycompress":
            _compress(older)
        return True

    def _shift(self) -> None:
        """``.1`` becomes ``.2``, and so on; with delaycompress it is compressed on that occasion."""
        if self.mode == "delaycompress":
            plain = self.path.with_name(f"{self.path.name}.1")
            if plain.exists():
                _compress(plain)
        for number in range(self.rotations, 0, -1):
            for ending in ("", ".gz"):
                old = self.path.with_name(f"{self.path.name}.{number}{ending}")
                if old.exists():
                    old.rename(self.path.with_name(f"{self.path.name}.{number + 1}{ending}"))


def _compress(path: Path) -> None:
    packed = path.with_name(path.name + ".gz")
    with path.open("rb") as plain, gzip.open(packed, "wb") as into:
        shutil.copyfileobj(plain, into)
    path.unlink()


def is_in_checkpoints(state_dirs: Sequence[Path], path: Path) -> bool:
    """Whether each of these clients has sent some of this incarnation of the file, by its checkpoint on the disk."""
    with path.open("rb") as file:
        inode, begin = os.fstat(file.fileno()).st_ino, file.read(HEAD_BYTES)
    for folder in state_dirs:
        checkpoint = Checkpoint.peek(folder)
        entries = [entry for entry in checkpoint.entries.values() if entry.inode == inode and entry.position > 0]
        checkpoint.close()
        if not any(fingerprint(begin[: entry.head.length]) == entry.head for entry in entries):
            return False
    return True
