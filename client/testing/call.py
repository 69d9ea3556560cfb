"""A request to the fake gateway, taken apart as the gateway does it, and the answer to it."""

from __future__ import annotations

import gzip
import json
import math
import re
import threading
import time
import zlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from logferry.client.testing.stored import FakeTopic
from logferry.gateway.contract.names import MAX_SEQNO, Malformed, check_topic, full_topic
from logferry.gateway.errors import Problem

if TYPE_CHECKING:
    from logferry.client.testing.consumers import FakeConsumer

REQUEST_BYTES = 16 << 20
SMALL_BODY_BYTES = 4096
_NUMBER = re.compile(r"[0-9]{1,19}\Z", re.ASCII)
_BROKEN = re.compile(r"%(?![0-9a-fA-F]{2})")


class FakeStore:
    """All that the fake gateway keeps, guarded by `changed`. ``url``: its own; ``is_open``: it serves."""

    def __init__(self, dc: str, chunk_bytes: int) -> None:
        self.dc, self.chunk_bytes, self.url, self.is_open = dc, chunk_bytes, "", False
        self.changed = threading.Condition(threading.RLock())
        self.topics: dict[str, FakeTopic] = {}
        self.consumers: dict[str, FakeConsumer] = {}

    @staticmethod
    def now_ms() -> int:
        return time.time_ns() // 1_000_000

    def topic(self, name: str) -> FakeTopic:
        """By its short or full name. Raises Problem ``unknown-topic``, which names the command that creates it."""
        full = name if name.startswith(f"{self.dc}.") else full_topic(self.dc, check_topic(name))
        if full not in self.topics:
            short = full.partition(".")[2]
            detail = f"there is no topic {short} in {self.dc}; create it: logferry topics create {short} --partitions 4"
            raise Problem("unknown-topic", detail, topic=full)
        return self.topics[full]


@dataclass
class Answer:
    """``parts``: of a stream, instead of a body."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    parts: Generator[bytes, None, None] | None = None

    @classmethod
    def of(cls, document: Any, status: int = 200) -> Answer:
        return cls(status, {"Content-Type": "application/json"}, json.dumps(document).encode())

    @classmethod
    def refusing(cls, problem: Problem, target: str) -> Answer:
        document = {**problem.document(), "instance": target}
        headers = {"Content-Type": "application/problem+json"}
        if problem.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
        if problem.status == 401:
            headers["WWW-Authenticate"] = 'Bearer realm="logferry"'
        return cls(problem.status, headers, json.dumps(document).encode())


@dataclass
class FakeCall:
    """``headers``: names in lower case. ``names``: of the path. ``topics``: the query may give several."""

    target: str
    headers: list[tuple[str, str]]
    body: bytes
    names: list[str] = field(default_factory=list)
    query: dict[str, str] = field(default_factory=dict)
    topics: list[str] = field(default_factory=list)

    def header(self, name: str) -> str:
        return next((value for known, value in self.headers if known == name), "")

    def name(self, place: int, what: str) -> str:
        return percent_decoded(self.names[place], what)

    def knows_only(self, *names: str) -> None:
        for name in self.query:
            if name not in names:
                known = ", ".join(names) or "none"
                raise Malformed(f"query: {name[:60]!r} is not a parameter of this route; it takes {known}")

    def number(self, name: str, limit: int = MAX_SEQNO) -> int | None:
        return number(self.query[name], name, limit) if name in self.query else None

    def document(self, limit: int = SMALL_BODY_BYTES) -> Any:
        if (size := len(self.body)) > limit:
            raise Problem("too-large", f"the body has {size} bytes; this call takes {limit}", limit_bytes=limit)
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise Malformed(f"body: not JSON: {error}") from None

    def parse_query(self) -> None:
        for item in filter(None, self.target.partition("?")[2].split("&")):
            name, _, value = item.partition("=")
            name = percent_decoded(name.replace("+", " "), "query")
            value = percent_decoded(value.replace("+", " "), f"query: {name}")
            if name == "topic":
                self.topics.append(value)
            elif name in self.query:
                raise Malformed(f"query: {name} is given more than once")
            else:
                self.query[name] = value

    def decoded_body(self) -> bytes:
        encoding = self.header("content-encoding").strip().lower()
        if encoding in ("", "identity"):
            return self.body
        if encoding in ("gzip", "x-gzip"):
            return _gunzipped(self.body)
        why = "the fake gateway has no zstd" if encoding == "zstd" else "is not gzip, zstd or identity"
        raise Problem("unsupported-media-type", f"Content-Encoding: {encoding[:40]!r} {why}")


def number(text: str, what: str, limit: int = MAX_SEQNO) -> int:
    if not _NUMBER.match(text) or int(text) > limit:
        raise Malformed(f"{what}: {text[:40]!r} is not a whole number from 0 to {limit}")
    return int(text)


def percent_decoded(text: str, what: str) -> str:
    if _BROKEN.search(text):
        raise Malformed(f"{what}: a % is not followed by two hexadecimal digits")
    try:
        return unquote_to_bytes(text.encode("utf-8", "surrogateescape")).decode()
    except UnicodeDecodeError:
        raise Malformed(f"{what}: not UTF-8") from None


def checked_object(found: Any, what: str, **kinds: Any) -> dict[str, Any]:
    """``kinds``: what each key takes, ``int`` for a whole number. A key with null is left out."""
    if not isinstance(found, dict):
        raise Malformed(f"{what}: is not an object")
    given = {name: value for name, value in found.items() if value is not None}
    for name, value in given.items():
        if (kind := kinds.get(name)) is None:
            raise Malformed(f"{what}: {name}: is not known; known are {', '.join(kinds)}")
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or not 0 <= value <= MAX_SEQNO)):
            raise Malformed(f"{what}: {name}: is no {kind.__name__}")
    return given


def _gunzipped(body: bytes) -> bytes:
    try:
        found = gzip.decompress(body)
    except (OSError, EOFError, zlib.error) as error:
        raise Malformed(f"body: not gzip: {error}") from None
    if not body:
        raise Malformed("body: the gzip stream is cut off")
    if len(found) > REQUEST_BYTES:
        raise Problem("too-large", f"the body is over {REQUEST_BYTES} bytes when unpacked", limit_bytes=REQUEST_BYTES)
    return found
