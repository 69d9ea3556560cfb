"""What the demo asks the gateway workers: which lanes they serve, what they have under way, where the topic ends."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from logferry.ops.cli.problems import Unavailable

_TIMEOUT_S: Final = 5.0
_ESTABLISHED: Final = "01"
_SMALLEST_WRITE: Final = 512
_IN_FLIGHT: Final = re.compile(rb"^logferry_in_flight_bytes ([0-9.e+]+)", re.MULTILINE)


class NoAnswer(Exception):
    """The worker is not there, or broke off."""


def ask(url: str, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    """One request, on a connection of its own. Raises NoAnswer."""
    link = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        link.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = link.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"{url} does not answer: {error}") from None
    finally:
        link.close()


def create_topic(url: str, topic: str, partitions: int) -> None:
    """Raises Unavailable."""
    _document(url, f"/v1/topics/{topic}", "PUT", json.dumps({"partitions": partitions}).encode())


def ends(url: str, topic: str) -> dict[int, int]:
    """The next offset of each partition. Raises Unavailable."""
    described = _document(url, f"/v1/topics/{topic}")
    return {part["partition"]: part["next"] for part in described["offsets"]}


def lanes_served(url: str) -> frozenset[int]:
    """The lanes that this worker serves now; none if it does not answer."""
    try:
        _, body = ask(url, "/readyz")
        lanes: dict[str, str] = json.loads(body).get("lanes", {})
    except (NoAnswer, ValueError):
        return frozenset()
    return frozenset(int(number) for number, state in lanes.items() if state == "serving")


def mirror_lanes(url: str) -> frozenset[int]:
    """The lanes of a mirror's worker when it serves all of them, else none."""
    try:
        status, body = ask(url, "/readyz")
    except NoAnswer:
        return frozenset()
    return frozenset(map(int, json.loads(body)["lanes"])) if status == http.client.OK else frozenset()


def mirror_lag(url: str) -> int:
    """Records that a mirror's worker has not brought yet; 0 if it does not answer."""
    try:
        _, body = ask(url, "/v1/status")
    except NoAnswer:
        return 0
    return sum(partition["lag_records"] or 0 for partition in json.loads(body).get("partitions", []))


def in_flight_bytes(url: str) -> int:
    """How much of requests waits for this worker's answer now; 0 if it does not answer."""
    try:
        _, body = ask(url, "/metrics")
    except NoAnswer:
        return 0
    found = _IN_FLIGHT.search(body)
    return int(float(found[1])) if found else 0


def unread_bytes(url: str) -> int:
    """What was sent to this worker and waits in its sockets to be read; 0 where the system does not tell.

    Not counted is what is too small to be chunks: a reader's polls."""
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


def _document(url: str, path: str, method: str = "GET", body: bytes | None = None) -> dict[str, Any]:
    try:
        status, answer = ask(url, path, method, body)
    except NoAnswer as error:
        raise Unavailable(str(error)) from None
    if status not in (http.client.OK, http.client.CREATED):
        raise Unavailable(f"{method} {url}{path}: {status}: {answer.decode(errors='replace')[:500]}")
    document: dict[str, Any] = json.loads(answer)
    return document
