"""What a reader was asked for, checked, and the requests for it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote, urlencode

from logferry.client.gateways import USER_AGENT, cluster_of
from logferry.client.reading.position import At, Cursors, Partition, Position
from logferry.client.transport.cluster import Cluster

LONG_POLL_MS = 20_000


@dataclass(frozen=True)
class Wanted:
    """``start`` is ``earliest``, ``latest``, a time, or a position; partitions that it does not name are new.

    ``partitions``: only these, None: all. ``only``: the same with their topics, of a position that is all there is.
    """

    cluster: Cluster
    topics: tuple[str, ...]
    consumer: str | None
    start: str | datetime | Position
    partitions: frozenset[int] | None
    source_prefix: str
    attributes: Mapping[str, str]
    follow: bool
    max_chunks: int | None
    gzip: bool
    page_bytes: int
    connections: int
    on_revoked: Callable[[], None] = field(default=lambda: None)

    def headers(self, url: str, accept: str = "") -> dict[str, str]:
        headers = {"User-Agent": USER_AGENT, **self.cluster.authorization(url)}
        return {**headers, "Accept": accept} if accept else headers

    def topic_path(self, topic: str) -> str:
        return f"/v1/topics/{quote(topic, safe='')}"

    def page_path(self, partition: Partition, start: str, max_bytes: int, wait_ms: int, filtered: bool = True) -> str:
        """``start``: as in the interface, ``offset=17`` and its like."""
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

    def stored(self) -> dict[Partition, At]:
        return dict(self.start) if isinstance(self.start, Position) else {}

    def _filters(self) -> list[tuple[str, str]]:
        found = [("source_prefix", self.source_prefix)] if self.source_prefix else []
        return found + [(f"attr.{name}", value) for name, value in self.attributes.items()]

    def _consumer_path(self) -> str:
        return f"/v1/consumers/{quote(self.consumer or '', safe='')}"


def is_pattern(topic: str) -> bool:
    return any(mark in topic for mark in "*?[")


def _position(text: str) -> Position:
    try:
        return Cursors.parse(text) if text.startswith(Cursors.MARK) else Position.parse(text)
    except ValueError:
        raise ValueError(f"start: {text!r} is neither earliest, latest, nor a position's text") from None


def wanted(
    urls: str | Iterable[str],
    topic: str | Iterable[str],
    token: str | None,
    *,
    consumer: str | None,
    start: str | datetime | Position,
    partitions: Iterable[int] | None,
    source_prefix: str,
    attributes: Mapping[str, str] | None,
    follow: bool,
    max_chunks: int | None,
    gzip: bool,
    page_bytes: int,
    connections: int,
    on_revoked: Callable[[], None] | None = None,
) -> Wanted:
    """Raises ValueError, which names the argument."""
    topics = (topic,) if isinstance(topic, str) else tuple(topic)
    if not topics or not all(topics):
        raise ValueError("topic: at least one is needed, like nginx or dc1.nginx")
    if isinstance(start, str) and start not in ("earliest", "latest"):
        start = _position(start)
    if isinstance(start, datetime) and start.tzinfo is None:
        raise ValueError("start: a time needs a time zone, as in datetime(2026, 5, 4, tzinfo=timezone.utc)")
    if consumer is None and any(map(is_pattern, topics)):
        raise ValueError("topic: a pattern needs a consumer; without one, name the topics")
    if consumer is not None and isinstance(start, datetime):
        raise ValueError(
            "start: a consumer goes on where it is; PUT /v1/consumers/{consumer}/offsets sets it to a time"
        )
    if consumer is not None and partitions is not None:
        raise ValueError("partitions: they are divided among the readers of a consumer; leave them out")
    if max_chunks is not None and max_chunks < 0:
        raise ValueError(f"max_chunks: {max_chunks} is below 0")
    return Wanted(
        cluster=cluster_of(urls, token),
        topics=topics,
        consumer=consumer,
        start=start,
        partitions=None if partitions is None else frozenset(partitions),
        source_prefix=source_prefix,
        attributes=dict(attributes or {}),
        follow=follow,
        max_chunks=max_chunks,
        gzip=gzip,
        page_bytes=page_bytes,
        connections=connections,
        on_revoked=on_revoked or (lambda: None),
    )
