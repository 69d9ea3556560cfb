"""Memory that was freed goes back to the system, also where blocks in use lie between."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys

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


_LARGE_BLOCKS = """
import resource, sys
from types import SimpleNamespace
from logferry.gateway.service.processes import run_service

def use():
    blocks = [b"x" * (1 << 20) for _ in range(16)]

async def serve(*_):
    measure()

def measure():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        use()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

if sys.argv[1] == "service":
    config = SimpleNamespace(workers=1)
    sys.exit(run_service("plain", "text", ["--config", "x.toml", "--worker", "0"], lambda _: config, serve))
measure()
"""


def test_a_service_uses_large_blocks_that_it_freed_again() -> None:
    """Without a fault for each page: by default glibc gives them back at once."""
    if memory.trimmer() is None:
        pytest.skip("this C library has no such settings")

    def faults(where: str) -> int:
        command = [sys.executable, "-c", _LARGE_BLOCKS, where]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    pages_of_a_round = 16 * (1 << 20) // resource.getpagesize()
    assert faults("service") < pages_of_a_round < faults("plain program")
