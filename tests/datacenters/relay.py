"""The link between the two data centres where the kernel has no netem: IP packets between two TUN devices.

    python -m tests.datacenters.relay NAMESPACE NAMESPACE DELAY_S LOSS

Each packet arrives after the delay, in order, or, with the probability LOSS, never. SIGUSR1 cuts the link: nothing
arrives, and nobody is told. SIGUSR2 mends it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Final

DEVICE: Final = "wan0"
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET: Final = 0x40000000
_PACKET: Final = 65_536
_WAITING: Final = 10_000  # packets in one direction; more are dropped, as by a router


def main() -> None:
    first, second, delay, loss = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    ends = [_opened(first), _opened(second)]
    is_cut = [False]
    signal.signal(signal.SIGUSR1, lambda *_: is_cut.__setitem__(0, True))
    signal.signal(signal.SIGUSR2, lambda *_: is_cut.__setitem__(0, False))
    waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}
    to = {ends[0]: ends[1], ends[1]: ends[0]}
    print("ready", flush=True)
    while True:
        due = min((queue[0][0] for queue in waiting.values() if queue), default=None)
        left = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select(ends, [], [], left)
        now = time.monotonic()
        for end in readable:
            with suppress(BlockingIOError):
                while True:
                    packet, queue = os.read(end, _PACKET), waiting[to[end]]
                    if not is_cut[0] and random.random() >= loss and len(queue) < _WAITING:
                        queue.append((now + delay, packet))
        for end, queue in waiting.items():
            while queue and queue[0][0] <= now:
                _, packet = queue.popleft()
                if not is_cut[0]:
                    with suppress(OSError):  # its queue is full: a packet is lost
                        os.write(end, packet)


def _opened(namespace: str) -> int:
    """The device in that namespace, for this process."""
    with open(namespace, "rb") as file:  # noqa: PTH123
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


if __name__ == "__main__":
    main()
