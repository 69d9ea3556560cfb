"""The records of a table's topics that are not loaded yet, read over HTTP from a gateway of its data centre."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from http.client import FORBIDDEN
from typing import Any, Final

from logferry.client import Chunk, LogferryError, Position, Reader, Unknown
from logferry.client.reading.subscription import ReadOffset
from logferry.loaders.errors import LoaderConfigError
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicOffsets
from logferry.loaders.storage.snapshot import TableSnapshot, tail_of, wanted_topics
from logferry.ops.cli.gateway_client import GatewayClient, RequestRefused, token_of
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError

_OPEN_S: Final = 10.0
_PAGE_S: Final = 30.0
ALONE: Final = "or read the table alone with --no-tail"


class HttpTail:
    """A gateway as the source of a tail. Reading again gives the same chunks: the ranges alone decide."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises UsageError."""
        self._token, self._url = token_of(args), args.url
        self._ca_file = args.ca_file
        self._gateway = GatewayClient(args.url, self._token, args.ca_file, _PAGE_S)

    def ranges(self, snapshot: TableSnapshot, chosen: Sequence[str] | None) -> tuple[Range, ...]:
        """The ranges behind the snapshot now. ``chosen``: topics or patterns; None: those of the table.

        Raises CommandError, ConfigError, TopicChanged.
        """
        dc, origin = snapshot.entry.dc, snapshot.entry.origin
        patterns = chosen or (origin.topics if origin else ())
        if not patterns:
            raise LoaderConfigError(
                f"{snapshot.path} does not name its topics (it was loaded by an older version); pass them with --topics"
            )
        self._check_dc(snapshot)
        topics = {str(one["topic"]): one for one in self._ask("/v1/topics")["topics"]}
        names = [name for name in topics if any(fnmatchcase(name, pattern) for pattern in patterns)]
        wanted = wanted_topics(snapshot, names, is_chosen=chosen is not None)
        if hidden := [name for name in wanted if name not in topics]:
            raise CommandError(
                f"the gateway at {self._url} does not show {', '.join(hidden)}, a topic of the table; check that it is "
                f"a gateway of {dc} and that the token may read the topic, {ALONE}"
            )
        return tail_of(snapshot, _views(snapshot, [topics[name] for name in wanted]), wanted)

    def chunks(self, ranges: Iterable[Range]) -> Iterator[Chunk]:
        """Exactly the chunks of these ranges. Raises CommandError."""
        ends = {(r.topic, r.partition): r.end for r in ranges}
        topics = sorted({r.topic for r in ranges if r.size})
        if not topics:
            return
        start = Position({(r.topic, r.partition): ReadOffset(r.start) for r in ranges if r.topic in topics})
        try:
            with closing(self._reader(topics, start)) as reader:
                reader.open(_OPEN_S)
                while not reader.is_over:
                    chunk = reader.read(_PAGE_S)
                    if chunk is None and not reader.is_over:
                        raise Unavailable(f"the gateway at {self._url} has not answered for {_PAGE_S:.0f} s; {ALONE}")
                    if chunk is not None and chunk.offset < ends.get((chunk.topic, chunk.partition), 0):
                        yield chunk
        except Unknown as unknown:
            raise Unavailable(f"no gateway answers at {self._url}: {unknown}; {ALONE}") from None
        except LogferryError as error:
            raise CommandError(f"{error}; {ALONE}") from None

    def _check_dc(self, snapshot: TableSnapshot) -> None:
        """Offsets mean other records in another data centre. Not checked if the token may not read the status."""
        try:
            dc = self._ask("/v1/status").get("dc")
        except RequestRefused as refused:
            if refused.status == FORBIDDEN:
                return
            raise
        if dc != snapshot.entry.dc:
            raise UsageError(
                f"--url {self._url} is a gateway of {dc}, but the table holds offsets of {snapshot.entry.dc}; "
                f"name a gateway of {snapshot.entry.dc}, {ALONE}"
            )

    def _reader(self, topics: Sequence[str], start: Position) -> Reader:
        return Reader(
            self._url, topics, start=start, follow=False, token=self._token, ca_file=self._ca_file, drop_copies=False
        )

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            return self._gateway.request("GET", path)
        except Unavailable as error:
            raise Unavailable(f"{error}; {ALONE}") from None


def _views(snapshot: TableSnapshot, described: Iterable[Mapping[str, Any]]) -> dict[str, TopicOffsets]:
    """A gateway of an earlier version has no topic ids: there a recreated topic is noticed by its offsets only."""
    known = {r.topic: r.topic_id for r in snapshot.entry.ranges}
    return {
        one["topic"]: TopicOffsets(
            one["topic"],
            one.get("id") or known.get(one["topic"], ""),
            {at["partition"]: PartitionOffsets(at["first"], at["next"]) for at in one["offsets"]},
        )
        for one in described
    }
