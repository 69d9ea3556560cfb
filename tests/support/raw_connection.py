"""One connection of a caller, on which it sends requests one after another."""

from __future__ import annotations

import asyncio
import json


class Line:
    """To a gateway without TLS."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token

    async def open(self) -> Line:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def ask(self, path: str, *headers: str, token: str = "") -> tuple[int, str]:
        """The status, and the caller's name or what is wrong; 0: the connection is closed."""
        head = [f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token or self.token}", *headers]
        try:
            self.writer.write("\r\n".join([*head, "", ""]).encode())
            answer = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, ""
        fields = dict(line.split(": ", 1) for line in answer.decode().split("\r\n")[1:-2])
        document = json.loads(await self.reader.readexactly(int(fields["Content-Length"])))
        return int(answer.split(b" ", 2)[1]), document.get("name") or document["detail"]

    async def close(self) -> None:
        self.writer.close()
        await asyncio.gather(self.writer.wait_closed(), return_exceptions=True)
