"""Free ports on the loopback address.

They are below the kernel's range for outgoing connections: when a killed broker restarts, no client's connection
may hold its port.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

from logferry.ops.cli.problems import Unavailable

_LOWEST = 10_240
_TRIES = 2_000
# Those that this process was given: what is to listen there may not have begun.
_given: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports without a listener now, and none twice in a process. Another process may still take one first."""
    first = free_block(count)
    return list(range(first, first + count))


def free_block(count: int) -> int:
    """The first of ``count`` consecutive ports without a listener."""
    choice = random.SystemRandom()
    for _ in range(_TRIES):
        first = choice.randrange(_LOWEST, _first_ephemeral_port() - count)
        block = range(first, first + count)
        if _given.isdisjoint(block) and all(map(is_free, block)):
            _given.update(block)
            return first
    raise Unavailable(f"found no {count} consecutive free ports on 127.0.0.1; end programs that listen there")


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _LOWEST + 1000 else 65_536
