"""Is this the file that we know? Decided by what it holds: the bytes at its head and before our position.

Device and inode find the candidate; they are no proof, since inodes are used again and files are rewritten in
place. The proof is the *head*, a digest of the first bytes (up to `HEAD_BYTES`, fewer while the file is
shorter), and the *mark*, the bytes just before the position that was reached. Over a restart the time of birth
is asked, too, where the file system knows it: a file that was removed and made anew has the same inode and, if
it begins with the same lines, the same head. Where one of them differs the answer is "another incarnation":
sending a file again is visible, taking one for another loses data.

What none of this sees: a file that is truncated and at once gets the very bytes that it had, no fewer. They are
taken for the old ones, which a change of time without one of size does not contradict (`touch`).
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from typing import NamedTuple

try:
    from _blake2 import blake2b  # the one of hashlib, which takes 0.7 MB for the digests of OpenSSL, too
except ImportError:
    from hashlib import blake2b

HEAD_BYTES = 1024
MARK_BYTES = 256


_STATX_BYTES = 256
_STATX_BTIME = 0x800
_STATX_BTIME_AT = 80
_AT_EMPTY_PATH = 0x1000


class Fingerprint(NamedTuple):
    """Digest of ``length`` bytes. That of no bytes fits every file."""

    length: int
    digest: str


def digest(data: bytes) -> str:
    return str(blake2b(data, digest_size=16).hexdigest())


def of(data: bytes) -> Fingerprint:
    return Fingerprint(len(data), digest(data))


NOTHING = of(b"")


def born_ns(fd: int) -> int:
    """When the inode of an open file came to be, in nanoseconds of Unix time; 0 where that is not known."""
    statx = _statx()
    raw = b"" if statx is None else statx(fd)
    if not raw or not struct.unpack_from("=I", raw)[0] & _STATX_BTIME:
        return 0
    seconds, nanoseconds = struct.unpack_from("=qI", raw, _STATX_BTIME_AT)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


@functools.lru_cache(maxsize=1)
def _statx() -> Callable[[int], bytes] | None:
    """statx(2), which `os` does not offer yet: the raw answer, empty when there is none.

    None where the Python was built without ctypes, may not use it, or the C library is too old.
    """
    try:
        import ctypes

        call = ctypes.CDLL(None).statx
    except (ImportError, MemoryError, OSError, AttributeError):
        return None

    def ask(fd: int) -> bytes:
        buffer = ctypes.create_string_buffer(_STATX_BYTES)
        return buffer.raw if call(fd, b"", _AT_EMPTY_PATH, _STATX_BTIME, buffer) == 0 else b""

    return ask


def grown(mark: bytes, data: bytes | memoryview) -> bytes:
    """The mark after ``data`` was passed: the last `MARK_BYTES` before the new position."""
    last = bytes(data[-MARK_BYTES:])
    return last if len(last) == MARK_BYTES else (mark + last)[-MARK_BYTES:]


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
