"""The records of a table's topics that are not loaded yet, read over HTTP from a gateway of its data centre."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from http.client import FORBIDDEN
from typing import Any, Final

from logferry.client import Chunk
from logferry.loaders.errors import LoaderConfigError, LoadError
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicOffsets
from logferry.loaders.query.http_ranges import HttpTopics
from logferry.loaders.storage.tables import TableSnapshot, origin_of, tail_of, wanted_topics
from logferry.ops.cli.gateway_client import GatewayClient, RequestRefused, token_of
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError

_PAGE_S: Final = 30.0
ALONE: Final = "or read the table alone with --no-tail"


class HttpTail:
    """A gateway as the source of a tail. Reading again gives the same chunks: the ranges alone decide."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises UsageError."""
        self._token, self._url, self._ca_file = token_of(args), args.url, args.ca_file
        self._gateway = GatewayClient(args.url, self._token, args.ca_file, _PAGE_S)

    def ranges(self, snapshot: TableSnapshot, chosen: Sequence[str] | None) -> tuple[Range, ...]:
        """The ranges behind the snapshot now. ``chosen``: topics or patterns; None: those of the table.

        Raises CommandError, ConfigError, TopicChanged.
        """
        patterns = origin_of(snapshot, self._url, chosen).topics
        self._check_dc(snapshot)
        topics = {str(one["topic"]): one for one in self._ask("/v1/topics")["topics"]}
        names = [name for name in topics if any(fnmatchcase(name, pattern) for pattern in patterns)]
        wanted = wanted_topics(snapshot, names, is_chosen=chosen is not None)
        if hidden := [name for name in wanted if name not in topics]:
            raise CommandError(
                f"the gateway at {self._url} does not show {', '.join(hidden)}, a topic of the table; check that it is "
                f"a gateway of {snapshot.entry.dc} and that the token may read the topic, {ALONE}"
            )
        return tail_of(snapshot, _views(topics[name] for name in wanted), wanted)

    def chunks(self, ranges: Iterable[Range]) -> Iterator[Chunk]:
        """Exactly the chunks of these ranges. Raises LoadError, CommandError."""
        reads = [r for r in ranges if r.size]
        if not reads:
            return
        topics = sorted({r.topic for r in reads})
        try:
            with closing(HttpTopics([self._url], topics, self._token, self._ca_file, retry_s=_PAGE_S)) as door:
                for r in reads:
                    for page in door.chunks(r):
                        yield from page
        except LoaderConfigError as refused:
            raise CommandError(f"{refused}; {ALONE}") from None
        except LoadError as error:
            raise type(error)(f"{error}; {ALONE}") from None

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

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            return self._gateway.request("GET", path)
        except Unavailable as error:
            raise Unavailable(f"{error}; {ALONE}") from None


def _views(described: Iterable[Mapping[str, Any]]) -> dict[str, TopicOffsets]:
    views = {}
    for one in described:
        if lost := [at["partition"] for at in one["offsets"] if at["next"] is None]:
            raise Unavailable(f"{one['topic']}: partitions without a leader: {lost}; {ALONE}")
        offsets = {at["partition"]: PartitionOffsets(at["first"], at["next"]) for at in one["offsets"]}
        views[one["topic"]] = TopicOffsets(one["topic"], one["id"], offsets)
    return views
