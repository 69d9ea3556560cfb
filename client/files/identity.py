"""The identity of a file, by its content (the bytes at its head and before the position), and the sourceId for it.

Device and inode find the candidate. They prove nothing: inodes are reused, and files are rewritten in place. The proof
is the *head*, a digest of the first bytes (up to `HEAD_BYTES`, fewer while the file is shorter), and the *mark*, the
bytes just before the position. After a restart the time of birth counts, too, if the file system has it: a file that
was removed and recreated may have the same inode and, if it begins with the same lines, the same head. If one of them
differs, the file is another incarnation: a file that is sent twice is visible, a file taken for another loses data.

*Earlier marks*, of positions before the last one, tell how much of a file is left whose end a power failure took.

One case is not detected: a file that is truncated and at once gets the very same bytes again, no fewer. They are taken
for the old ones, since a change of time without one of size proves nothing (`touch`). After power failures these may be
NUL bytes alone: those up to the position are taken for the ones that were sent.

The sourceId is ``<host>:<path>#<generation>``, as text that the contract allows. ``path`` is the absolute path at which
the incarnation was first seen; a rename does not change it. ``generation`` is unique among the incarnations of a state
folder (see `checkpoint`). In host and path, control characters, ``%`` and bytes that are not UTF-8 are written as
``%XX``. In a name over the contract's limit a digest replaces the middle.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from logferry.gateway.contract.names import MAX_ATTRIBUTE_VALUE_BYTES, MAX_SOURCE_ID_BYTES

try:
    from _blake2 import blake2b  # the one of hashlib, which takes 0.7 MB for the digests of OpenSSL, too
except ImportError:
    from hashlib import blake2b

HEAD_BYTES = 1024
MARK_BYTES = 256
MARKS_BACK = (4 << 10, 64 << 10, 1 << 20)  # so far before the position are the earlier marks
_ESCAPED = re.compile(r"[\x00-\x1f\x7f-\x9f%\ud800-\udfff]")
_BOOT_IDS = ("/proc/sys/kernel/random/boot_id",)
_MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_STATX_BYTES = 256
_STATX_BTIME = 0x800
_STATX_BTIME_AT = 80
_AT_EMPTY_PATH = 0x1000


class Fingerprint(NamedTuple):
    """Digest of ``length`` bytes. That of no bytes matches every file."""

    length: int
    digest: str


def digest(data: bytes) -> str:
    return str(blake2b(data, digest_size=16).hexdigest())


def fingerprint(data: bytes) -> Fingerprint:
    return Fingerprint(len(data), digest(data))


def born_ns(fd: int) -> int:
    """The birth of an open file's inode, in nanoseconds of Unix time; 0: unknown."""
    statx = _statx()
    raw = b"" if statx is None else statx(fd)
    if not raw or not struct.unpack_from("=I", raw)[0] & _STATX_BTIME:
        return 0
    seconds, nanoseconds = struct.unpack_from("=qI", raw, _STATX_BTIME_AT)
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


@functools.lru_cache(maxsize=1)
def _statx() -> Callable[[int], bytes] | None:
    """statx(2), which `os` does not offer: its raw answer, empty if there is none.

    None if Python was built without ctypes or may not use it, or the C library is too old.
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
    """The mark behind ``data``: the last `MARK_BYTES` before the new position."""
    last = bytes(data[-MARK_BYTES:])
    return last if len(last) == MARK_BYTES else (mark + last)[-MARK_BYTES:]


def source_id(host: str, path: str, generation: int, own_name: str = "") -> str:
    """``own_name``: in place of host and path."""
    name = printable(own_name) or f"{printable(host)}:{printable(path)}"
    suffix = f"#{generation}"
    room = MAX_SOURCE_ID_BYTES - len(suffix)
    raw = name.encode()
    if len(raw) <= room:
        return name + suffix
    middle = f"~{digest(raw)}~"
    half = (room - len(middle)) // 2
    return raw[:half].decode(errors="ignore") + middle + raw[-half:].decode(errors="ignore") + suffix


def printable(text: str) -> str:
    """One-to-one, so different paths have different names."""
    return _ESCAPED.sub(
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogateescape")), text
    )


def attribute(text: str) -> str:
    """As `printable`, for the value of an attribute: cut at the contract's limit."""
    return printable(text).encode()[:MAX_ATTRIBUTE_VALUE_BYTES].decode(errors="ignore")


def machine() -> str:
    """What tells this machine, or its system, from others; empty: it has nothing of that kind."""
    return _first_digest(_MACHINE_IDS)


def boot() -> str:
    """What tells this start of the system from others."""
    return _first_digest(_BOOT_IDS)


def _first_digest(paths: Iterable[str]) -> str:
    for path in paths:
        with suppress(OSError, ValueError):
            text = Path(path).read_text(encoding="ascii").strip()
            if text:
                return digest(text.encode())
    return ""
