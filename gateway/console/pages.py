"""The console: static files, which a browser runs against the documented interface.

Nothing in them is secret or made for a caller, so they need no token: the page asks for it, keeps it in memory, and
sends it with each of its requests. The headers let a page run its own files alone, show nothing of other addresses,
and be shown in no other page. The files are read at the first request.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aiohttp import web
from logferry.gateway.errors import Problem
from logferry.gateway.http.auth import Right
from logferry.gateway.http.router import Call, Routes

_FOLDER: Final = Path(__file__).with_name("files")
_PAGE: Final = "index.html"
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # A browser asks each time, so a page never mixes the files of two versions.
    "Cache-Control": "no-cache",
}


@dataclass(slots=True)
class ConsoleApi:
    """The handler. ``files``: name → content and entity tag, after the first request."""

    files: dict[str, tuple[bytes, str]] = field(default_factory=dict)

    def add_to(self, routes: Routes) -> None:
        routes.add("GET", "/console/{file}", "console", self.get, Right.OPEN)
        routes.add("GET", "/console", "console_page", self.get_page, Right.OPEN)

    async def get(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        if not self.files:
            self.files = await asyncio.to_thread(_read)
        name = call.segment(2, "file") or _PAGE
        if name not in self.files:
            raise Problem("not-found", f"the console has no file {name[:100]!r}")
        body, tag = self.files[name]
        headers = {**_HEADERS, "Content-Type": _TYPES[Path(name).suffix], "ETag": tag}
        if call.request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)

    async def get_page(self, call: Call) -> web.StreamResponse:
        """The page's files have addresses relative to it, so it needs its slash. A proxy may put a prefix before."""
        call.knows_only()
        return web.Response(status=307, headers={**_HEADERS, "Location": "console/"})


def _read() -> dict[str, tuple[bytes, str]]:
    bodies = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
    return {name: (body, f'"{hashlib.sha256(body).hexdigest()[:32]}"') for name, body in bodies.items()}
