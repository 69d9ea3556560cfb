"""The bodies of Splunk's HTTP Event Collector: JSON objects one after the other. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from logferry.gateway.errors import Problem
from logferry.gateway.receiver_settings import Rules, topic_for

# Commas, colons and brackets: a body of so many small values takes some 100 MB of memory when it is parsed.
_TOKENS: Final = 1_000_000
_EVENTS: Final = 100_000
_BLANK: Final = re.compile(r"\s*")
_MAC_BITS: Final = 20
_MAC: Final = (1 << _MAC_BITS) - 1


class Code(NamedTuple):
    """One of the collector's answers: its status, code and text."""

    status: int
    code: int
    text: str


SUCCESS: Final = Code(200, 0, "Success")
TOKEN_REQUIRED: Final = Code(401, 2, "Token is required")
INVALID_TOKEN: Final = Code(403, 4, "Invalid token")
NO_DATA: Final = Code(400, 5, "No data")
INVALID_DATA: Final = Code(400, 6, "Invalid data format")
INCORRECT_INDEX: Final = Code(400, 7, "Incorrect index")
INTERNAL: Final = Code(500, 8, "Internal server error")
BUSY: Final = Code(503, 9, "Server is busy")
CHANNEL_MISSING: Final = Code(400, 10, "Data channel is missing")
INVALID_CHANNEL: Final = Code(400, 11, "Invalid data channel")
EVENT_REQUIRED: Final = Code(400, 12, "Event field is required")
EVENT_BLANK: Final = Code(400, 13, "Event field cannot be blank")
HEALTHY: Final = Code(200, 17, "HEC is healthy")


class BadEvent(Exception):
    """The request is refused as a whole; ``number``: of the event at fault, None: it is none in particular."""

    def __init__(self, code: Code, number: int | None = None) -> None:
        super().__init__(code.text)
        self.code, self.number = code, number


class Event(NamedTuple):
    """One event as a line of JSON, without its newline."""

    line: bytes
    index_name: str
    host: str | None


def parse_events(body: bytes, index: str) -> list[Event]:
    """The events of a body. ``index``: of those that name none. Raises BadEvent, Problem ``too-large``."""
    if sum(map(body.count, (b",", b":", b"[", b"{"))) > _TOKENS:
        raise Problem("too-large", f"the body has more than {_TOKENS} values and keys")
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise BadEvent(INVALID_DATA) from None
    found = list[Event]()
    for number, read in enumerate(_objects(text)):
        if number >= _EVENTS:
            raise Problem("too-large", f"the body has more than {_EVENTS} events")
        found.append(_event(number, *read, index))
    if not found:
        raise BadEvent(NO_DATA)
    return found


def group_events(body: bytes, index: str, rules: Rules) -> dict[str, tuple[list[bytes], str | None]]:
    """The lines of each topic, and the host of its events if all have the same. Raises as `parse_events` does."""
    topics: dict[str, str | None] = {}
    lines: dict[str, list[bytes]] = {}
    hosts: dict[str, set[str | None]] = {}
    for number, event in enumerate(parse_events(body, index)):
        name = event.index_name
        if name not in topics:
            topics[name] = topic_for(rules, name)
        topic = topics[name]
        if topic is None:
            raise BadEvent(INCORRECT_INDEX, number)
        lines.setdefault(topic, []).append(event.line)
        hosts.setdefault(topic, set()).add(event.host)
    return {topic: (of_topic, _only(hosts[topic])) for topic, of_topic in lines.items()}


def _only(hosts: set[str | None]) -> str | None:
    return next(iter(hosts)) if len(hosts) == 1 else None


def _objects(text: str) -> Iterator[tuple[Any, str]]:
    """The values, each with its text. NaN and Infinity, which Python takes, are no JSON."""
    decoder, at, number = json.JSONDecoder(parse_constant=_refuse), 0, 0
    while (at := _BLANK.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            raise BadEvent(INVALID_DATA, number) from None
        yield value, text[at:end]
        at, number = end, number + 1


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _event(number: int, value: Any, text: str, index: str) -> Event:
    if not isinstance(value, dict):
        raise BadEvent(INVALID_DATA, number)
    if value.get("event") is None:
        raise BadEvent(EVENT_REQUIRED, number)
    if value["event"] == "":
        raise BadEvent(EVENT_BLANK, number)
    own, host = value.get("index", index), value.get("host")
    if not isinstance(own, str):
        raise BadEvent(INCORRECT_INDEX, number)
    if not isinstance(host, str | None):
        raise BadEvent(INVALID_DATA, number)
    # A line break in JSON is a blank, since texts hold none. The numbers stay as they came.
    return Event(text.replace("\n", " ").replace("\r", " ").encode(), own, host or None)


def ack_id(channel: str, number: int) -> int:
    """An acknowledgement id: a number, and a checksum by which any worker knows that it was given to this channel.

    It is given after the commit, so what it stands for is recorded. Below 2^52, exact in JSON.
    """
    number &= 0xFFFFFFFF
    mac = blake2b(f"{channel}\0{number}".encode(), digest_size=4).digest()
    return number << _MAC_BITS | int.from_bytes(mac, "big") & _MAC


def is_acked(channel: str, ack: int) -> bool:
    """Whether the id was given to the channel."""
    return 0 <= ack < 1 << 52 and ack_id(channel, ack >> _MAC_BITS) == ack
