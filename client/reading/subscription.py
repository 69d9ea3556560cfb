"""The validated arguments of a reader, among them where it resumes, and the paths of its requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple
from urllib.parse import quote, urlencode

from logferry.client.transport.cluster import GatewayCluster
from logferry.gateway.contract.names import Cursor, Malformed

Partition = tuple[str, int]


class ReadOffset(NamedTuple):
    """``offset``: of the next chunk. ``lines``: how many of its lines were delivered already."""

    offset: int
    lines: int = 0

    def __str__(self) -> str:
        return f"{self.offset}+{self.lines}" if self.lines else str(self.offset)


class Position(dict[Partition, ReadOffset]):
    """Topic and partition → where to resume. Its text is ``dc1.nginx:0:17,dc1.nginx:3:81234``.

    The offsets are those of the data centre that was read.
    """

    @classmethod
    def parse(cls, text: str) -> Position:
        """The inverse of `str`; also takes one or more cursors, separated by commas. Raises ValueError."""
        places = {}
        for item in text.split(",") if text else ():
            cursor, plus, lines = item.partition("+")
            if plus and not (lines.isascii() and lines.isdigit()):
                raise Malformed(f"position: {item!r} is not <dc>.<topic>:<partition>:<offset>, or that and +<lines>")
            topic, partition, offset = Cursor.parse(cursor)
            places[topic, partition] = ReadOffset(offset, int(lines or 0))
        return cls(places)

    def __str__(self) -> str:
        return ",".join(f"{topic}:{number}:{at}" for (topic, number), at in sorted(self.items()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}.parse({str(self)!r})"


class Cursors(Position):
    """A position that is valid in every data centre: it has offsets of the original partitions.

    Its text begins with ``cursors:``.
    """

    MARK = "cursors:"

    @classmethod
    def parse(cls, text: str) -> Cursors:
        """The inverse of `str`. Raises ValueError."""
        return cls(super().parse(text.removeprefix(cls.MARK)))

    def __str__(self) -> str:
        return self.MARK + super().__str__()


LONG_POLL_MS = 20_000
SILENCE_S = 30.0  # in a session the gateway sends something every 10 s


@dataclass
class ReaderOptions:
    """``start``: ``earliest``, ``latest``, a time, or a position; partitions that it does not name are new.

    ``partitions``: only these; None: all. Raises ValueError, which names the argument.
    """

    cluster: GatewayCluster
    topics: tuple[str, ...]
    consumer: str | None = None
    start: str | datetime | Position = "earliest"
    partitions: frozenset[int] | None = None
    source_prefix: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    follow: bool = True
    max_chunks: int | None = None
    gzip: bool = False
    page_bytes: int = 1 << 20
    connections: int = 8

    def __post_init__(self) -> None:
        if not self.topics or not all(self.topics):
            raise ValueError("topic: at least one is needed, like nginx or dc1.nginx")
        if isinstance(self.start, str) and self.start not in ("earliest", "latest"):
            self.start = _position(self.start)
        if isinstance(self.start, datetime) and self.start.tzinfo is None:
            raise ValueError("start: a time needs a time zone, as in datetime(2026, 5, 4, tzinfo=timezone.utc)")
        if self.consumer is None and any(map(is_pattern, self.topics)):
            raise ValueError("topic: a pattern needs a consumer; without one, name the topics")
        if self.consumer is not None and isinstance(self.start, datetime):
            raise ValueError(
                "start: a consumer resumes where it has committed; PUT /v1/consumers/{consumer}/offsets sets it to a"
                " time"
            )
        if self.consumer is not None and self.partitions is not None:
            raise ValueError("partitions: the readers of a consumer share its partitions; leave the argument out")
        if self.max_chunks is not None and self.max_chunks < 0:
            raise ValueError(f"max_chunks: {self.max_chunks} is below 0")

    def topic_path(self, topic: str) -> str:
        return f"/v1/topics/{quote(topic, safe='')}"

    def page_path(self, partition: Partition, start: str, max_bytes: int, wait_ms: int, filtered: bool = True) -> str:
        """``start``: as in the interface, for example ``offset=17``."""
        topic, number = partition
        filters = "&" + urlencode(self._filters()) if filtered and self._filters() else ""
        query = f"{start}&max_bytes={max_bytes}&wait_ms={wait_ms}{filters}"
        return f"{self.topic_path(topic)}/partitions/{number}/chunks?{query}"

    def translate_path(self, partition: Partition, query: str) -> str:
        topic, number = partition
        return f"{self.topic_path(topic)}/partitions/{number}/translate?{query}"

    def stream_path(self, topics: Iterable[str]) -> str:
        start = "latest" if self.start == "latest" else "earliest"
        query = urlencode([*(("topic", topic) for topic in topics), ("from", start), *self._filters()])
        return f"{self._consumer_path()}/stream?{query}"

    def commit_path(self, session: str) -> str:
        return f"{self._consumer_path()}/sessions/{quote(session, safe='')}/commit"

    def reads(self, number: int) -> bool:
        return self.partitions is None or number in self.partitions

    def stored(self) -> dict[Partition, ReadOffset]:
        return dict(self.start) if isinstance(self.start, Position) else {}

    def _filters(self) -> list[tuple[str, str]]:
        found = [("source_prefix", self.source_prefix)] if self.source_prefix else []
        return found + [(f"attr.{name}", value) for name, value in self.attributes.items()]

    def _consumer_path(self) -> str:
        return f"/v1/consumers/{quote(self.consumer or '', safe='')}"


def topics_of(topic: str | Iterable[str]) -> tuple[str, ...]:
    """The argument ``topic``: one or several."""
    return (topic,) if isinstance(topic, str) else tuple(topic)


def is_pattern(topic: str) -> bool:
    return any(mark in topic for mark in "*?[")


def _position(text: str) -> Position:
    try:
        return Cursors.parse(text) if text.startswith(Cursors.MARK) else Position.parse(text)
    except ValueError:
        raise ValueError(f"start: {text!r} is neither earliest, latest, nor a position's text") from None
