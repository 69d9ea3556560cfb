"""Ports on the loopback address that are free and stay so.

They are taken from below the range that the kernel gives to outgoing connections: a broker that is killed and
started again a second later must not find its port under somebody's client.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from logferry.ops.cli.problems import Unavailable

_LOWEST = 10_240
_TRIES = 2_000


def free_ports(count: int) -> list[int]:
    """Distinct ports that nothing listens on now. Another process can still be faster to use one."""
    choice = random.SystemRandom()
    ports: list[int] = []
    with ExitStack() as held:
        for _ in range(_TRIES):
            if len(ports) == count:
                return ports
            port = choice.randrange(_LOWEST, _first_ephemeral_port())
            listener = _listener(port)
            if listener is not None:
                held.enter_context(listener)
                ports.append(port)
    raise Unavailable(f"no {count} free ports found on 127.0.0.1")


def free_block(count: int) -> int:
    """The first of ``count`` ports in a row that nothing listens on."""
    choice = random.SystemRandom()
    for _ in range(_TRIES):
        first = choice.randrange(_LOWEST, _first_ephemeral_port() - count)
        if all(is_free(port) for port in range(first, first + count)):
            return first
    raise Unavailable(f"no {count} free ports in a row found on 127.0.0.1")


def is_free(port: int) -> bool:
    listener = _listener(port)
    if listener is None:
        return False
    listener.close()
    return True


def _listener(port: int) -> socket.socket | None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.close()
        return None
    return listener


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _LOWEST + 1000 else 65_536
