"""Syslog over streams: the two framings of RFC 6587, and the sender's name in a message. Pure.

A message is recorded as it came, as one line: what would break the line is written as rsyslog does, ``#012``.
"""

from __future__ import annotations

import re
from typing import Final

# RFC 5424 has a version after the priority, RFC 3164 a date without a year.
_HOST: Final = re.compile(
    rb"<[0-9]{1,3}>(?:1 [^ ]{1,40} |[A-Z][a-z]{2} [ 0-9][0-9] [0-9:]{8} )([A-Za-z0-9._:-]{1,255}) "
)
_DIGITS: Final = 9
# Between messages: they are passed over at once, since a sender may send millions.
_BETWEEN: Final = re.compile(rb"[\r\n\0]+")
_LINE_BREAKS: Final = {b"\n": b"#012", b"\r": b"#015", b"\0": b"#000"}


def line_of(message: bytes) -> bytes:
    """The message as a line, without its newline."""
    message = message.rstrip(b"\r\n\0")
    for broken, written in _LINE_BREAKS.items():
        if broken in message:
            message = message.replace(broken, written)
    return message


def is_blank(message: bytes) -> bool:
    """Whether it says nothing: it becomes no line."""
    return not message.strip(b"\r\n\0 ")


def host_of(message: bytes) -> str | None:
    """The sender's name for itself; None: it says none."""
    found = _HOST.match(message)
    return None if found is None or found[1] == b"-" else found[1].decode()


class Framer:
    """Cuts a stream into messages. Which framing a message has, its first byte says: a digit or not.

    ``limit``: a longer message is passed over and counted in ``too_long``. What is kept is at most that, and one read.
    """

    __slots__ = ("_rest", "_skip", "limit", "too_long")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.too_long = 0
        self._rest = bytearray()
        self._skip = 0  # of a message that is too long: bytes to pass over, -1: up to the next newline

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are complete now."""
        self._rest += data
        found: list[bytes] = []
        at = 0
        while at < len(self._rest):
            taken = self._pass_over(at) if self._skip else self._next(at, found)
            if taken is None:
                break
            at = taken
        del self._rest[:at]
        return found

    def end(self) -> list[bytes]:
        """The last message of a stream that ended: senders with newlines may leave out the last one."""
        rest, self._rest = bytes(self._rest), bytearray()
        return [rest] if rest and not self._skip and not rest[:1].isdigit() else []

    def _pass_over(self, at: int) -> int:
        if self._skip > 0:
            taken = min(self._skip, len(self._rest) - at)
            self._skip -= taken
            return at + taken
        end = self._rest.find(b"\n", at)
        if end < 0:
            return len(self._rest)
        self._skip = 0
        return end + 1

    def _next(self, at: int, found: list[bytes]) -> int | None:
        """Takes the message at this place; where the next one begins, None: it is not complete."""
        if (between := _BETWEEN.match(self._rest, at)) is not None:
            return between.end()
        if 0x31 <= self._rest[at] <= 0x39:
            blank = self._rest.find(b" ", at, at + _DIGITS + 1)
            digits = bytes(self._rest[at:blank]) if blank > 0 else b""
            if digits.isdigit():
                size = int(digits)
                if size > self.limit:
                    self.too_long, self._skip = self.too_long + 1, size
                    return blank + 1
                if len(self._rest) < blank + 1 + size:
                    return None
                message = bytes(self._rest[blank + 1 : blank + 1 + size])
                if not is_blank(message):
                    found.append(message)
                return blank + 1 + size
            if blank < 0 and len(self._rest) - at <= _DIGITS and bytes(self._rest[at:]).isdigit():
                return None
        end = self._rest.find(b"\n", at)
        size = (len(self._rest) if end < 0 else end) - at
        if size > self.limit:
            self.too_long, self._skip = self.too_long + 1, -1
            return at
        if end < 0:
            return None
        message = bytes(self._rest[at:end])
        if not is_blank(message):
            found.append(message)
        return end + 1
