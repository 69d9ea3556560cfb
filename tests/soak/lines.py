"""Lines that prove themselves: each holds its log, its number in that log, and a checksum. Pure."""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple
from zlib import crc32

_LINE: Final = re.compile(rb'\{("t":(\d+),"s":"([^"\\]+)","n":(\d+),"m":.*),"c":"([0-9a-f]{8})"\}')
COLUMNS: Final = {"t": "bigint", "s": "string", "n": "bigint", "m": "string"}


class NumberedLine(NamedTuple):
    """``log``: who wrote it; ``number``: from 1, without a hole; ``time_ms``: event time, Unix time in ms."""

    log: str
    number: int
    time_ms: int


def encode_line(line: NumberedLine, message: str) -> bytes:
    """One JSON object and a newline."""
    body = (
        f'"t":{line.time_ms},"s":"{line.log}","n":{line.number},"m":{json.dumps(message, ensure_ascii=False)}'.encode()
    )
    return b'{%s,"c":"%08x"}\n' % (body, crc32(body))


def decode_line(data: bytes) -> NumberedLine | None:
    """Of a line without its newline; None if it is damaged or only a piece of a line."""
    found = _LINE.fullmatch(data)
    if found is None or crc32(found[1]) != int(found[5], 16):
        return None
    return NumberedLine(found[3].decode(), int(found[4]), int(found[2]))
