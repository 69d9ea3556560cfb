"""Exact offset ranges of partitions over a gateway's HTTP, or an error. Without Spark.

A range holds committed chunks only, so reading it again gives the same chunks. After a lost connection or an
unavailable gateway, the read resumes at the first missing offset.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from logferry.client.errors import LogferryError, OutOfRange, Rejected
from logferry.client.reading.decode import ReceivedChunk
from logferry.client.reading.requests import ReaderRequests, RetryLater, document_of, page_of
from logferry.client.reading.subscription import Cursors, Position, ReaderOptions
from logferry.client.transport.cluster import cluster_of
from logferry.client.transport.connections import Dialer, proxies_of
from logferry.loaders.errors import GatewayUnavailable, LoaderConfigError, Terminal, TopicChanged
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicPartition

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

Offsets = Mapping[TopicPartition, PartitionOffsets]
_T = TypeVar("_T")


class HttpTopics:
    """Topics over a gateway, for one thread. ``retry_s``: how long a gateway that does not answer is retried."""

    def __init__(
        self,
        urls: Sequence[str],
        topics: Sequence[str],
        token: str | None = None,
        ca_file: str | None = None,
        page_bytes: int = 1 << 20,
        retry_s: float = 120.0,
    ) -> None:
        """Raises LoaderConfigError."""
        self._retry_s = retry_s
        self._urls = ", ".join(urls)
        try:
            dialer = Dialer(ca_file, proxies=proxies_of(os.environ))
            cluster = cluster_of(urls, token)
            self._wanted = ReaderOptions(cluster, tuple(topics), follow=False, page_bytes=page_bytes, connections=1)
        except (ValueError, OSError) as error:
            raise LoaderConfigError(str(error)) from None
        self._link = ReaderRequests(self._wanted, dialer)

    def close(self) -> None:
        self._link.close()

    def offsets(self) -> dict[TopicPartition, PartitionOffsets]:
        """The present offsets of every partition. Raises LoadError."""
        found = {}
        for topic in self._wanted.topics:
            document = self._document(self._wanted.topic_path(topic))
            for one in document["offsets"]:
                place = TopicPartition(str(document["topic"]), int(one["partition"]))
                if one["next"] is None:
                    raise GatewayUnavailable(f"{place.topic}-{place.partition} has no leader; try again later")
                found[place] = PartitionOffsets(int(one["first"]), int(one["next"]))
        return found

    def resolve_cursors(self, where: str, offsets: Offsets) -> dict[TopicPartition, int]:
        """The offsets of `EARLIEST`, `LATEST`, a `Position` as text, or ``cursors:…`` for any data centre.

        Partitions that a position does not name start at their first offset. Raises LoadError.
        """
        if where == LATEST:
            return {place: at.stable for place, at in offsets.items()}
        firsts = {place: at.earliest for place, at in offsets.items()}
        if where == EARLIEST:
            return firsts
        try:
            position = (Cursors if where.startswith(Cursors.MARK) else Position).parse(where)
        except ValueError:
            forms = f"{EARLIEST}, {LATEST}, dc1.nginx:0:17,… or cursors:dc1.nginx:0:17,…"
            raise LoaderConfigError(
                f"{where!r} is neither earliest, latest, nor a position; it must be like {forms}"
            ) from None
        named = {TopicPartition(*place): at.offset for place, at in position.items()}
        if isinstance(position, Cursors):
            for place, offset in named.items():
                document = self._document(self._wanted.translate_path(place, f"offset={offset}"))
                named[place] = int(document["translated"])
        if strange := sorted(f"{p.topic}:{p.partition}" for p in named if p not in offsets):
            raise LoaderConfigError(
                f"the position names {', '.join(strange)}, which is not a partition of these topics"
            )
        return {**firsts, **named}

    def chunks(self, part: Range) -> Iterator[list[ReceivedChunk]]:
        """The chunks of exactly the range, a page at a time, in order. Raises LoadError where some are missing."""
        position = part.start
        until = time.monotonic() + self._retry_s
        while position < part.end:
            chunks, after = self._page(part, position)
            offsets = [chunk.offset for chunk in chunks]
            if after < position or any(
                b <= a for a, b in zip([position - 1, *offsets], [*offsets, after], strict=True)
            ):
                raise Terminal(f"{_said(part)}: the gateway answered {offsets[:3]}… up to {after} to offset {position}")
            if inside := [chunk for chunk in chunks if chunk.offset < part.end]:
                yield inside
            if after > position:
                until = time.monotonic() + self._retry_s
            elif time.monotonic() > until:
                raise TopicChanged(f"{_said(part)}: it ends at {after}; its log was truncated")
            else:
                time.sleep(0.1)
            position = after

    def _document(self, path: str) -> dict[str, Any]:
        return self._insist(lambda: document_of(self._link.ask(path)))

    def _page(self, part: Range, position: int) -> tuple[list[ReceivedChunk], int]:
        path = self._wanted.page_path((part.topic, part.partition), f"offset={position}", self._wanted.page_bytes, 0)
        return self._insist(lambda: page_of(self._link.ask(path, is_page=True)), _said(part))

    def _insist(self, ask: Callable[[], _T], what: str = "") -> _T:
        """Repeats the request until it is answered, for ``retry_s`` at most. Raises LoadError."""
        until, failures = time.monotonic() + self._retry_s, 0
        while True:
            try:
                return ask()
            except RetryLater as again:
                failures += 1
                pause_s = again.pause_s(failures)
                if time.monotonic() + pause_s > until:
                    said = f"{what}: " if what else ""
                    raise GatewayUnavailable(f"{said}no gateway answers at {self._urls}: {again}") from None
                time.sleep(pause_s)
            except LogferryError as error:
                said = f"{what or self._urls}: {error}"
                if isinstance(error, Rejected) and not isinstance(error, OutOfRange):
                    hint = " (the option token)" if error.status in (401, 403) else ""
                    raise LoaderConfigError(f"{said}{hint}") from None
                raise TopicChanged(said) from None


def _said(part: Range) -> str:
    return f"{part.topic} {part.partition}, offsets {part.start} to {part.end - 1}"


def ranges_between(starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> list[Range]:
    """The ranges that are not empty. A partition without a start is new, and starts at 0."""
    found = [Range(*place, "", starts.get(place, 0), end) for place, end in sorted(ends.items())]
    if wrong := [part for part in found if part.end < part.start]:
        raise LoaderConfigError(
            f"{wrong[0].topic} {wrong[0].partition}: its end {wrong[0].end} is before its start {wrong[0].start}"
        )
    return [part for part in found if part.end > part.start]
