"""Queries gateway workers (lanes, bytes in flight), and kills one at the worst moment.

The worst moment is with requests in progress and others on the way. Requests take hundredths of a second, so a blind
kill would rarely hit one. When a worker reports bytes in flight it is stopped (SIGSTOP), so that it answers none of
them, until the kernel holds unread bytes for it; then it is killed (SIGKILL). The outcome of all these requests is
unknown to the writers.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from logferry.ops.demo.plan import DC
from logferry.ops.demo.wait import BoundedWait
from logferry.ops.stack.service_workers import get
from logferry.ops.stack.stack import Stack

_ESTABLISHED: Final = "01"
_SMALLEST_WRITE: Final = 512
_LOOK_S: Final = 0.003
_BUSY_S: Final = 10.0
_STOPPED_S: Final = 1.0
_IN_FLIGHT: Final = re.compile(rb"^logferry_in_flight_bytes ([0-9.e+]+)", re.MULTILINE)


def lanes_served(url: str) -> frozenset[int]:
    """The lanes that a gateway worker serves now; none if it does not answer."""
    try:
        lanes: dict[str, str] = json.loads(get(url, "/readyz")[1]).get("lanes", {})
    except ValueError:
        return frozenset()
    return frozenset(int(number) for number, state in lanes.items() if state == "serving")


def mirror_lag(url: str) -> int:
    """Records that a mirror worker has not copied yet; 0 if it does not answer."""
    _, body = get(url, "/v1/status")
    return sum(partition["lag_records"] or 0 for partition in json.loads(body or b"{}").get("partitions", []))


def in_flight_bytes(url: str) -> int:
    """Bytes of the requests in progress at this worker; 0 if it does not answer."""
    found = _IN_FLIGHT.search(get(url, "/metrics")[1])
    return int(float(found[1])) if found else 0


def unread_bytes(url: str) -> int:
    """Bytes in the worker's sockets that it has not read; 0 on a system without /proc/net/tcp.

    Sockets with less than a chunk's size are left out: they are readers' polls."""
    port = f":{urlsplit(url).port:04X}"
    found = 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for _, local, _, state, queues, *_ in map(str.split, lines):
            if local.endswith(port) and state == _ESTABLISHED:
                waiting = int(queues.partition(":")[2], 16)
                found += waiting if waiting >= _SMALLEST_WRITE else 0
    return found


class KilledWorker(NamedTuple):
    """``said``: what it served and had in progress. ``at``: time of the kill."""

    name: str
    said: str
    at: float


def kill_busy_worker(
    stack: Stack, owners: Sequence[int | None], waiting: BoundedWait, all_is_sent: Callable[[], bool]
) -> KilledWorker:
    """Kills one of the workers with the most lanes: the first that has requests in progress.

    ``owners``: the worker of each lane. When all files are sent, it kills the first of them anyway.
    """
    urls, pids = stack.urls(), stack.pids
    counts = [owners.count(worker) for worker in range(len(urls))]
    workers = [worker for worker, count in enumerate(counts) if count == max(counts)]
    worker, in_progress, deadline = workers[0], 0, time.monotonic() + _BUSY_S

    def is_caught() -> bool:
        nonlocal worker, in_progress
        for candidate in workers:
            if size := in_flight_bytes(urls[candidate]):
                worker, in_progress = candidate, size
                return True
        return time.monotonic() > deadline or all_is_sent()

    waiting.until(is_caught, "a gateway worker has requests in progress", look_s=_LOOK_S)
    name = f"gateway-{worker}"
    stack.kill(f"{DC}/{name}", signal.SIGSTOP)
    deadline = time.monotonic() + _STOPPED_S
    while not (unread := unread_bytes(urls[worker])) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    stack.kill(f"{DC}/{name}")
    requests = f"{in_progress:,} bytes of requests in progress and {unread:,} unread"
    said = f"{name} (pid {pids[f'{DC}/{name}']}), which served {counts[worker]} lanes and had {requests}"
    return KilledWorker(name, said, time.monotonic())
