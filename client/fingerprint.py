"""Is this the file that we know? Decided by what it holds: the bytes at its head and before our position.

Device and inode find the candidate; they are no proof, since inodes are used again and files are rewritten in
place. The proof is the *head*, a digest of the first bytes (up to `HEAD_BYTES`, fewer while the file is
shorter), and the *mark*, the bytes just before the position that was reached. Where either differs the answer
is "another incarnation": sending a file again is visible, taking one for another loses data.
"""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

HEAD_BYTES = 1024
MARK_BYTES = 256


class Fingerprint(NamedTuple):
    """Digest of ``length`` bytes. That of no bytes fits every file."""

    length: int
    digest: str


def of(data: bytes) -> Fingerprint:
    return Fingerprint(len(data), hashlib.blake2b(data, digest_size=16).hexdigest())


NOTHING = of(b"")


def grown(mark: bytes, data: bytes) -> bytes:
    """The mark after ``data`` was passed: the last `MARK_BYTES` before the new position."""
    return data[-MARK_BYTES:] if len(data) >= MARK_BYTES else (mark + data)[-MARK_BYTES:]


def differs(fd: int, head: Fingerprint, position: int, mark: Fingerprint) -> str:
    """Why the open file is not the incarnation with this head and mark; empty when it is."""
    size = os.fstat(fd).st_size
    if size < position:
        return f"truncated: it holds {size} bytes, {position} were sent"
    if of(os.pread(fd, head.length, 0)) != head:
        return f"its first {head.length} bytes are not what they were"
    if of(os.pread(fd, mark.length, position - mark.length)) != mark:
        return f"the {mark.length} bytes before position {position} are not what they were"
    return ""
