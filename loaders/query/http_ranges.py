"""Ranges of a topic's partitions over HTTP from a gateway: exactly what was asked for, or an error. Without Spark.

Reading a range again gives the same chunks: it is by offset, and only of what is committed. A gateway that is away, a
connection that is cut anywhere, is asked again from the first offset that is not here yet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from logferry.client.errors import LogferryError, OutOfRange, Rejected
from logferry.client.reading.decode import Chunk
from logferry.client.reading.link import Link
from logferry.client.reading.position import Position
from logferry.client.reading.requests import Again, document_of
from logferry.client.reading.start_positions import page_of, placed
from logferry.client.reading.subscription import Wanted, wanted
from logferry.client.transport.connections import Reply
from logferry.client.transport.dialer import Dialer, proxies_of
from logferry.loaders.errors import ConfigError, LoadError, Terminal, TopicChanged, Transient
from logferry.loaders.planning.plan import TopicPartition

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
_UNAUTHORIZED: Final = (401, 403)

_T = TypeVar("_T")


class Served(NamedTuple):
    """Of a partition: the first offset that is retained, and the one after the last committed record."""

    first: int
    next: int


class Part(NamedTuple):
    """The offsets [start, end) of one partition."""

    topic: str
    partition: int
    start: int
    end: int


class GatewayAway(Transient):
    """No gateway answered for as long as was to be waited."""


class Door:
    """A gateway, asked as one token; for one thread. ``retry_s``: how long one that does not answer is asked again."""

    def __init__(
        self,
        urls: Sequence[str],
        topics: Sequence[str],
        token: str | None = None,
        ca_file: str | None = None,
        page_bytes: int = 1 << 20,
        retry_s: float = 120.0,
    ) -> None:
        """Raises ConfigError."""
        self._retry_s = retry_s
        self._urls = ", ".join(urls)
        try:
            self._dialer = Dialer(ca_file, proxies=proxies_of(os.environ))
            self._wanted = self._wanting(urls, topics, token, page_bytes, EARLIEST)
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from None
        self._again = partial(self._wanting, urls, topics, token, page_bytes)
        self._link = Link(self._wanted, self._dialer)

    @staticmethod
    def _wanting(
        urls: Sequence[str], topics: Sequence[str], token: str | None, page_bytes: int, start: str | Position
    ) -> Wanted:
        return wanted(
            urls, topics, token, consumer=None, start=start, partitions=None, source_prefix="", attributes=None,
            follow=False, max_chunks=None, gzip=False, page_bytes=page_bytes, connections=1,
        )  # fmt: skip

    def close(self) -> None:
        self._link.close()

    def offsets(self) -> dict[TopicPartition, Served]:
        """Every partition of the topics as it is now. Raises LoadError."""
        found = {}
        for topic in self._wanted.topics:
            document = self._insist(partial(self._document, self._wanted.topic_path(topic)))
            for one in document["offsets"]:
                place = TopicPartition(str(document["topic"]), int(one["partition"]))
                found[place] = Served(int(one["first"]), int(one["next"]))
        return found

    def placed(self, where: str, offsets: Mapping[TopicPartition, Served]) -> dict[TopicPartition, int]:
        """Where that is: `EARLIEST`, `LATEST`, a `Position` as text, or ``cursors:…``, which hold in every data centre.

        Partitions that a position does not name begin at their first offset. Raises LoadError.
        """
        if where == LATEST:
            return {place: at.next for place, at in offsets.items()}
        firsts = {place: at.first for place, at in offsets.items()}
        if where == EARLIEST:
            return firsts
        try:
            asked = self._again(where)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        position = self._steps(placed(asked)).start
        if not isinstance(position, Position):
            raise ConfigError(f"{where!r} is not a position")
        named = {TopicPartition(*place): at.offset for place, at in position.items()}
        if strange := sorted(f"{p.topic}:{p.partition}" for p in named if p not in offsets):
            raise ConfigError(f"the position is of {', '.join(strange)}, which is not what is read")
        return {**firsts, **named}

    def chunks(self, part: Part) -> Iterator[list[Chunk]]:
        """The chunks of the range, a page at a time, in order. Raises LoadError; nothing of the range is left out then
        in silence, and nothing outside of it is ever given.
        """
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
                raise TopicChanged(f"{_said(part)}: it ends at {after}; its log was cut back")
            else:
                time.sleep(0.1)
            position = after

    def _document(self, path: str) -> dict[str, Any]:
        return document_of(self._link.ask(path))

    def _page(self, part: Part, position: int) -> tuple[list[Chunk], int]:
        path = self._wanted.page_path((part.topic, part.partition), f"offset={position}", self._wanted.page_bytes, 0)
        return self._insist(lambda: page_of(self._link.ask(path, accept=True)), _said(part))

    def _steps(self, steps: Generator[str, Reply, _T]) -> _T:
        """What a generator of the library comes to, its questions asked."""

        def run() -> _T:
            path = next(steps)
            while True:
                path = steps.send(self._insist(partial(self._link.ask, path)))

        try:
            return run()
        except StopIteration as done:
            found: _T = done.value
            return found
        except Again as again:
            raise GatewayAway(f"{self._urls}: {again}") from None
        except LogferryError as error:
            raise _sorted(error, self._urls) from None

    def _insist(self, ask: Callable[[], _T], what: str = "") -> _T:
        """Asks until there is an answer, or for so long. Raises LoadError."""
        until, failures = time.monotonic() + self._retry_s, 0
        while True:
            try:
                return ask()
            except Again as again:
                failures += 1
                pause_s = again.pause_s(failures)
                if time.monotonic() + pause_s > until:
                    said = f"{what}: " if what else ""
                    raise GatewayAway(f"{said}no gateway answers at {self._urls}: {again}") from None
                time.sleep(pause_s)
            except LogferryError as error:
                raise _sorted(error, what or self._urls) from None


def _sorted(error: LogferryError, what: str) -> LoadError:
    if isinstance(error, OutOfRange):
        return TopicChanged(f"{what}: {error}")
    if isinstance(error, Rejected) and error.status in _UNAUTHORIZED:
        return ConfigError(f"{what}: {error} (the option token)")
    if isinstance(error, Rejected):
        return ConfigError(f"{what}: {error}")
    return TopicChanged(f"{what}: {error}")


def _said(part: Part) -> str:
    return f"{part.topic} {part.partition}, offsets {part.start} to {part.end - 1}"


def parts(starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> list[Part]:
    """The ranges with something to read. One that has no start began after the start was taken: from 0. Pure."""
    found = [Part(*place, starts.get(place, 0), end) for place, end in sorted(ends.items())]
    if wrong := [part for part in found if part.end < part.start]:
        raise ConfigError(
            f"{wrong[0].topic} {wrong[0].partition}: it is to end at {wrong[0].end}, before its start {wrong[0].start}"
        )
    return [part for part in found if part.end > part.start]


__all__ = ["EARLIEST", "LATEST", "Door", "GatewayAway", "Part", "Served", "parts"]
