"""Which lines of a chunk are sent, and in which encoding. Pure.

The seqnos are positions in the file all the same: what is left out of a chunk only makes its data shorter. So rules
may change at any restart: what was recorded stays as it is, and the rest follows the new ones. The pieces of a line
that was split (see `chunking`) are sent whatever they hold: no piece shows the whole line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_FLAGS = re.compile(rb"\(\?[a-zA-Z]+\)")  # of the whole pattern; they stand before everything else


class LineRules(NamedTuple):
    """``include``, ``exclude``: searched for in each line without its newline, in UTF-8. ``encoding``: of the file."""

    include: tuple[re.Pattern[bytes], ...] = ()
    exclude: tuple[re.Pattern[bytes], ...] = ()
    encoding: str | None = None

    def sent(self, data: bytes, is_whole: bool) -> tuple[bytes, dict[str, str]]:
        """What is sent of the lines, and the attribute that counts those that are left out, if there are any."""
        if self.encoding is not None:
            data = data.decode(self.encoding, "replace").encode()
        if not is_whole or not (self.include or self.exclude):
            return data, {}
        lines = data.split(b"\n")
        last = lines.pop()
        kept = [line for line in lines if self._is_wanted(line)]
        if len(kept) == len(lines):
            return data, {}
        return b"".join(line + b"\n" for line in kept) + last, {"filtered": str(len(lines) - len(kept))}

    def _is_wanted(self, line: bytes) -> bool:
        is_included = not self.include or any(pattern.search(line) for pattern in self.include)
        return is_included and not any(pattern.search(line) for pattern in self.exclude)


def compiled(patterns: Sequence[str]) -> tuple[re.Pattern[bytes], ...]:
    """Raises ValueError if one is no regular expression.

    They stay apart: flags and references such as ``\\1`` are about one pattern.
    """
    return tuple(map(regular_expression, patterns))


def regular_expression(pattern: str, starts_line: bool = False) -> re.Pattern[bytes]:
    """``starts_line``: it matches at the starts of lines alone. Raises ValueError if it is none."""
    text = pattern.encode("utf-8", "surrogateescape")
    try:
        alone = re.compile(text)
        if not starts_line:
            return alone
        flags = _FLAGS.match(text)
        before = b"" if flags is None else flags.group()
        return re.compile(b"%b^(?:%b)" % (before, text[len(before) :]), re.MULTILINE)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None


def one_byte_encoding(name: str) -> str | None:
    """The encoding; None for UTF-8, whose bytes are sent as they are.

    Raises ValueError for one that is not known, or in which a character may take several bytes, or ASCII has other
    ones: lines are found by their newlines.
    """
    if name.lower().replace("_", "-") in ("utf-8", "utf8"):
        return None
    pairs = (bytes((first, second)) for first in range(128, 256) for second in (10, 65, 129, 228))
    try:
        is_fine = bytes(range(128)).decode(name) == bytes(range(128)).decode("ascii")
        is_fine = is_fine and all(len(pair.decode(name, "replace")) == 2 for pair in pairs)
    except (LookupError, UnicodeDecodeError):
        is_fine = False
    if not is_fine:
        raise ValueError(f"{name!r} is not utf-8, nor an encoding with one byte for each character, such as latin-1")
    return name
