"""Names of topics, data centres, sources and attributes, URLs and tokens: checks, parsing, and the hash of a key.

Runs on Python 3.9, because the push-client carries it.
"""

from __future__ import annotations

import base64
import re
import zlib
from typing import NamedTuple
from urllib.parse import urlsplit

_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,200}\Z")
_DC = re.compile(r"[a-z0-9-]{1,32}\Z")
_ATTRIBUTE = re.compile(r"[a-z0-9._-]{1,64}\Z")
_CURSOR = re.compile(r"([^:]*):([0-9]+):([0-9]+)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Also those that turn the direction of writing, and what is no UTF-8.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_THIS_HOST = re.compile(r"localhost|::1|127(?:\.[0-9]{1,3}){3}")

# A Kafka topic by its full name, and the number of one of its partitions.
TopicPartition = tuple[str, int]

MAX_SEQNO = 2**63 - 1
MAX_SOURCE_ID_BYTES = 512
MAX_ATTRIBUTES = 64
MAX_ATTRIBUTE_VALUE_BYTES = 4096


class Malformed(ValueError):
    """A name, number or frame that breaks the contract; the text says what and where."""


class Cursor(NamedTuple):
    """A reader's position, valid in every data centre: the next record's offset in the original partition."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        found = _CURSOR.fullmatch(text)
        if not found:
            raise Malformed(f"cursor: {text!r} is not <dc>.<topic>:<partition>:<offset>")
        topic, partition, offset = found.groups()
        if len(partition) > 10 or len(offset) > 19 or int(offset) > MAX_SEQNO:
            raise Malformed(f"cursor: {text!r} has a number that is too large")
        return cls(topic, int(partition), int(offset))


def printed_topic_id(topic_id: bytes) -> str:
    """A topic's id as Kafka's tools print it, and as in a table's ledger."""
    return base64.urlsafe_b64encode(topic_id).decode().rstrip("=")


def check_topic(topic: str) -> str:
    """A topic without its data centre, as writers name it."""
    if not _TOPIC.match(topic) or topic in (".", ".."):
        raise Malformed(f"topic: {topic!r} is not 1 to 200 of a-z A-Z 0-9 . _ -")
    return topic


def check_dc(dc: str) -> str:
    if not _DC.match(dc):
        raise Malformed(f"dc: {dc!r} is not 1 to 32 of a-z 0-9 -")
    return dc


def check_source_id(source_id: str, what: str = "sourceId") -> str:
    """1 to 512 bytes of UTF-8 without control characters; ``.`` and ``..`` are refused: URL paths swallow them."""
    try:
        size = len(source_id.encode())
    except UnicodeEncodeError:
        raise Malformed(f"{what}: not UTF-8") from None
    if not 1 <= size <= MAX_SOURCE_ID_BYTES:
        raise Malformed(f"{what}: {size} bytes, allowed are 1 to {MAX_SOURCE_ID_BYTES}")
    if _CONTROL.search(source_id):
        raise Malformed(f"{what}: holds control characters")
    if source_id in (".", ".."):
        raise Malformed(f"{what}: . and .. are not allowed")
    return source_id


def check_attributes(attributes: dict[str, str]) -> dict[str, str]:
    if len(attributes) > MAX_ATTRIBUTES:
        raise Malformed(f"attributes: {len(attributes)}, allowed are {MAX_ATTRIBUTES}")
    for name, value in attributes.items():
        if not isinstance(name, str) or not _ATTRIBUTE.match(name):
            raise Malformed(f"attributes: the name {name!r} is not 1 to 64 of a-z 0-9 . _ -")
        if not isinstance(value, str):
            raise Malformed(f"attributes: the value of {name!r} is not text")
        if len(value.encode("utf-8", "surrogatepass")) > MAX_ATTRIBUTE_VALUE_BYTES:
            raise Malformed(f"attributes: the value of {name!r} is over {MAX_ATTRIBUTE_VALUE_BYTES} bytes")
    return attributes


def full_topic(dc: str, topic: str) -> str:
    """The Kafka topic of what was written to ``topic`` in ``dc``; the same name in every data centre."""
    return f"{dc}.{topic}"


def split_topic(full: str) -> tuple[str, str]:
    """``dc1.nginx`` → ``("dc1", "nginx")``. A dc has no dot, so the first one parts them."""
    dc, dot, topic = full.partition(".")
    if not dot or not _DC.match(dc) or not _TOPIC.match(topic):
        raise Malformed(f"topic: {full!r} is not <dc>.<topic>")
    return dc, topic


# ---- lane and partition of a source ---------------------------------------------------------------------------------


def lane_of(key: str, lanes: int) -> int:
    """By CRC-32 of the UTF-8 bytes: stable over versions and languages."""
    return zlib.crc32(key.encode()) % lanes


def partition_of(key: str, partitions: int) -> int:
    """The partition to which a new key is pinned; afterwards the pin decides."""
    return lane_of(key, partitions)


def origin_of(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None if it is not an http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return parts.scheme, parts.hostname, port


def is_this_host(host: str) -> bool:
    """Whether the name or address is of the loopback interface."""
    return _THIS_HOST.fullmatch(host) is not None


def is_plain(url: str) -> bool:
    """Whether what is sent to ``url`` can be read on the network: HTTP without TLS, and to another host."""
    origin = origin_of(url)
    return origin is not None and origin[0] == "http" and not is_this_host(origin[1])


def check_url(url: object, where: str) -> None:
    """Raises ValueError, which begins with ``where``."""
    if not isinstance(url, str) or origin_of(url) is None or "@" in url or "?" in url or "#" in url:
        raise ValueError(f"{where} {url!r} is not http(s)://host[:port][/path]")


def check_token(text: str, where: str) -> str:
    """The token, fit for a header. Raises ValueError, which names ``where`` and never the token."""
    token = text.strip()
    if not token.isascii() or not token.isprintable() or not token or " " in token:
        raise ValueError(f"{where}: does not hold a token, which is one word of printable ASCII")
    return token


def visible(text: str, kept: str = "") -> str:
    """Text of others for a terminal: control characters are escaped, but those ``kept``."""
    return _UNSEEN.sub(lambda found: found[0] if found[0] in kept else ascii(found[0])[1:-1], text)
