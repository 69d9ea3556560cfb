"""What a file is called outside: ``<host>:<path>#<generation>``, as text that the contract allows.

``path`` is the absolute path at which the incarnation was first seen; it keeps it when it is renamed.
``generation`` is a number of which no two incarnations of a state folder share one (see `checkpoint`). In host
and path control characters, ``%`` and bytes that are not UTF-8 stand as ``%XX``. A name over the contract's limit
gets its middle replaced by a digest.
"""

from __future__ import annotations

import re

from logferry.client.files.fingerprint import digest
from logferry.gateway.contract.chunk import MAX_ATTRIBUTE_VALUE_BYTES, MAX_SOURCE_ID_BYTES

_ESCAPED = re.compile(r"[\x00-\x1f\x7f-\x9f%\ud800-\udfff]")


def source_id(host: str, path: str, generation: int) -> str:
    return _short(f"{printable(host)}:{printable(path)}", f"#{generation}")


def printable(text: str) -> str:
    """One-to-one, so different paths have different names."""
    return _ESCAPED.sub(
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogateescape")), text
    )


def attribute(text: str) -> str:
    """The same as the value of an attribute, cut at the contract's limit."""
    return printable(text).encode()[:MAX_ATTRIBUTE_VALUE_BYTES].decode(errors="ignore")


def _short(name: str, suffix: str) -> str:
    room = MAX_SOURCE_ID_BYTES - len(suffix)
    raw = name.encode()
    if len(raw) <= room:
        return name + suffix
    middle = f"~{digest(raw)}~"
    half = (room - len(middle)) // 2
    return raw[:half].decode(errors="ignore") + middle + raw[-half:].decode(errors="ignore") + suffix
