"""A relay of TCP connections that delays every byte, in a process of its own: a gateway that is far away.

    python -m logferry.ops.bench.harness.far_relay HOST PORT TARGET_HOST DELAY_S

listens at HOST:PORT and connects to TARGET_HOST:PORT. Each direction has the delay: a round trip takes twice as long.
The bandwidth has no limit. Prints a line when it listens.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Final

import uvloop

_PIECE_BYTES: Final = 256 << 10
_WAITING: Final = 1000  # pieces under way in one direction of a connection


async def _serve(host: str, port: int, target: str, delay_s: float) -> None:
    async def accept(near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far_in, far_out = await asyncio.open_connection(target, port, limit=_PIECE_BYTES)
        await asyncio.gather(_carry(near_in, far_out, delay_s), _carry(far_in, near_out, delay_s))

    server = await asyncio.start_server(accept, host, port, limit=_PIECE_BYTES)
    print("ready", flush=True)
    await server.serve_forever()


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter, delay_s: float) -> None:
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING)
    loop = asyncio.get_running_loop()

    async def deliver() -> None:
        with suppress(OSError):
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(due - loop.time(), 0.0))
                if not data:
                    break
                target.write(data)
                await target.drain()
        target.close()

    task = asyncio.create_task(deliver())
    data = b"-"
    while data:
        try:
            data = await source.read(_PIECE_BYTES)
        except OSError:
            data = b""
        await waiting.put((loop.time() + delay_s, data))
    await task


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
