"""A gateway worker is killed at the worst moment: with requests in work and others on their way to it.

Requests take hundredths of a second, so hitting one would be luck. When the worker says that it has some in work it is
stopped (SIGSTOP), so that none of them is answered any more, until the kernel holds bytes for it that it has not read;
then it is killed (SIGKILL) like that. All that the writers sent it in between has no answer and an unknown outcome.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from logferry.ops.demo import gateways
from logferry.ops.demo.plan import DC
from logferry.ops.demo.wait import Waiting
from logferry.ops.stack.stack import Stack

_LOOK_S: Final = 0.003
_BUSY_S: Final = 10.0
_HELD_S: Final = 1.0


class Struck(NamedTuple):
    """A worker that was killed, and when. Both numbers of bytes are of requests; ``lanes``: it served so many."""

    name: str
    pid: int
    lanes: int
    in_work: int
    unread: int
    at: float

    def __str__(self) -> str:
        requests = f"{self.in_work:,} bytes of requests in work and {self.unread:,} unread"
        return f"{self.name} (pid {self.pid}), which served {self.lanes} lanes and had {requests}"


def kill_busy_worker(
    stack: Stack, owners: Sequence[int | None], waiting: Waiting, all_is_sent: Callable[[], bool]
) -> Struck:
    """Kills one of the workers with the most lanes, the first that has requests in work.

    ``owners``: the worker of each lane. Where nothing is left to send, any of them with nothing in work.
    """
    urls, pids = stack.urls(), stack.pids
    counts = [owners.count(worker) for worker in range(len(urls))]
    workers = [worker for worker, count in enumerate(counts) if count == max(counts)]
    caught = [(workers[0], 0)]
    deadline = time.monotonic() + _BUSY_S

    def is_caught() -> bool:
        for worker in workers:
            in_work = gateways.in_flight_bytes(urls[worker])
            if in_work:
                caught[:] = [(worker, in_work)]
                return True
        return time.monotonic() > deadline or all_is_sent()

    waiting.until(is_caught, "a gateway worker with requests in work", look_s=_LOOK_S)
    ((worker, in_work),) = caught
    name = f"gateway-{worker}"
    stack.kill(f"{DC}/{name}", signal.SIGSTOP)
    unread = _until_unread(urls[worker])
    stack.kill(f"{DC}/{name}")
    return Struck(name, pids[f"{DC}/{name}"], counts[worker], in_work, unread, time.monotonic())


def _until_unread(url: str) -> int:
    """Waits for requests that the stopped worker does not read; their bytes, 0 if none come soon."""
    deadline = time.monotonic() + _HELD_S
    while not (unread := gateways.unread_bytes(url)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return unread
