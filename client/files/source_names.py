"""The sourceId of a file: ``<host>:<path>#<generation>``, as text that the contract allows.

``path`` is the absolute path at which the incarnation was first seen; a rename does not change it. ``generation`` is
unique among the incarnations of a state folder (see `checkpoint`). In host and path, control characters, ``%`` and
bytes that are not UTF-8 are written as ``%XX``. In a name over the contract's limit a digest replaces the middle.
"""

from __future__ import annotations

import re

from logferry.client.files.fingerprint import digest
from logferry.gateway.contract.names import MAX_ATTRIBUTE_VALUE_BYTES, MAX_SOURCE_ID_BYTES

_ESCAPED = re.compile(r"[\x00-\x1f\x7f-\x9f%\ud800-\udfff]")


def source_id(host: str, path: str, generation: int) -> str:
    name, suffix = f"{printable(host)}:{printable(path)}", f"#{generation}"
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
