"""Memory that was freed goes back to the system, also where blocks in use lie between."""

from __future__ import annotations

import asyncio

import pytest
from logferry.gateway.service import memory

_BLOCK = 64 << 10
_BLOCKS = 4000


async def test_what_was_freed_between_blocks_in_use_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if memory.trimmer() is None:
        pytest.skip("this C library gives nothing back on request")
    monkeypatch.setattr(memory, "_LOOK_S", 0.01)
    task = asyncio.create_task(memory.return_freed_memory())
    await asyncio.sleep(0)
    before = memory.resident_bytes()
    blocks = [b"x" * _BLOCK for _ in range(_BLOCKS)]
    # Each keeps the end of the heap where it is.
    kept = [b"y" * 400 for _ in range(_BLOCKS)] + blocks[::50]
    blocks.clear()
    try:
        async with asyncio.timeout(60):
            while memory.resident_bytes() - before > _BLOCK * _BLOCKS / 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
    assert kept
