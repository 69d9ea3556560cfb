"""Changes of HBase in MessagePack as the lines of JSON that the same changes are in the other format. Pure.

One function for a whole chunk, which Spark's executors call; nothing else of the package is loaded there.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

# The null of MessagePack.
_END = b"\xc0"
_BYTES = ("row", "family", "qualifier", "value")


def json_lines(data: bytes | bytearray | None) -> bytes | None:
    """A line for each map. The bytes as they are where they are no such maps: so they reach the quarantine."""
    if data is None:
        return None
    import msgpack

    reader = msgpack.Unpacker(raw=False, strict_map_key=True, max_buffer_size=0)
    # The reader ends without a word where the last map is cut off, and takes the end mark into that map.
    reader.feed(bytes(data) + _END)
    try:
        *events, end = reader
        lines = [_line(event) for event in events]
    except (ValueError, TypeError, AttributeError, KeyError, msgpack.UnpackException):
        return bytes(data)
    return b"".join(lines) if end is None else bytes(data)


def _line(event: dict[str, Any]) -> bytes:
    found: dict[str, object] = {}
    for name, value in event.items():
        if name in _BYTES:
            try:
                found[name] = value.decode()
            except UnicodeDecodeError:
                found[f"{name}_base64"] = b64encode(value).decode()
        elif name == "tags":
            found[name] = [{"type": tag["type"], "data_base64": b64encode(tag["data"]).decode()} for tag in value]
        else:
            found[name] = value
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
