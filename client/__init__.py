"""The push-client, and the library for programs: `Writer`, `Reader`, their asyncio faces, and a handler for logging.

Each name is loaded when it is first used: the push-client needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from logferry.client.aio.reader import AsyncReader as AsyncReader
    from logferry.client.aio.writer import AsyncWriter as AsyncWriter
    from logferry.client.errors import Closed as Closed
    from logferry.client.errors import Full as Full
    from logferry.client.errors import LogferryError as LogferryError
    from logferry.client.errors import OutOfRange as OutOfRange
    from logferry.client.errors import Rejected as Rejected
    from logferry.client.errors import Superseded as Superseded
    from logferry.client.errors import Unknown as Unknown
    from logferry.client.reading.decode import Chunk as Chunk
    from logferry.client.reading.decode import Line as Line
    from logferry.client.reading.decode import ReceivedChunk as ReceivedChunk
    from logferry.client.reading.reader import Reader as Reader
    from logferry.client.reading.subscription import Cursors as Cursors
    from logferry.client.reading.subscription import Position as Position
    from logferry.client.writing.logging_handler import LogferryHandler as LogferryHandler
    from logferry.client.writing.send_window import ChunkReceipt as ChunkReceipt
    from logferry.client.writing.writer import Writer as Writer

_EXPORTS = {
    "writing.writer": ("Writer",),
    "writing.send_window": ("ChunkReceipt",),
    "writing.logging_handler": ("LogferryHandler",),
    "reading.reader": ("Reader",),
    "reading.decode": ("Chunk", "ReceivedChunk", "Line"),
    "reading.subscription": ("Cursors", "Position"),
    "aio.writer": ("AsyncWriter",),
    "aio.reader": ("AsyncReader",),
    "errors": ("Closed", "Full", "LogferryError", "OutOfRange", "Rejected", "Superseded", "Unknown"),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("logferry")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "logferry":
            raise
        hint = f"{name} needs {error.name}: pip install 'logferry[client]'"
        raise ModuleNotFoundError(hint, name=error.name) from None


def __dir__() -> list[str]:
    return sorted(_MODULES)
