"""What of a table's topics is not loaded yet, read over HTTP from a gateway of the data centre that it is loaded in."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from fnmatch import fnmatchcase
from http.client import FORBIDDEN
from typing import Any, Final

from logferry.client import Chunk, LogferryError, Position, Reader, Unknown
from logferry.client.reading.position import At
from logferry.loaders.errors import ConfigError
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicView
from logferry.loaders.storage.snapshot import Snapshot, tail_of, wanted_topics
from logferry.ops.cli import gateway_client as asking
from logferry.ops.cli.problems import Problem, Unavailable, WrongUse

_OPEN_S: Final = 10.0
_PAGE_S: Final = 30.0
ALONE: Final = "--no-tail answers from the table alone"


class Newest:
    """A gateway, and whom it is asked as. All of this is repeatable: the ranges decide what is read."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises WrongUse."""
        self._token, self._url = asking.token_of(args), args.url
        self._ca_file = args.ca_file
        self._gateway = asking.Gateway(args.url, self._token, asking.ca_file_of(args), _PAGE_S)

    def ranges(self, snapshot: Snapshot, chosen: Sequence[str] | None) -> tuple[Range, ...]:
        """What is behind the snapshot now. ``chosen``: topics or patterns; else those that the table is loaded from.

        Raises Problem, ConfigError, TopicChanged.
        """
        dc, origin = snapshot.entry.dc, snapshot.entry.origin
        patterns = chosen or (origin.topics if origin else ())
        if not patterns:
            raise ConfigError(
                f"{snapshot.path} was loaded by a version that did not note from which topics: name them by --topics"
            )
        self._check_dc(snapshot)
        topics = {str(one["topic"]): one for one in self._ask("/v1/topics")["topics"]}
        names = [name for name in topics if any(fnmatchcase(name, pattern) for pattern in patterns)]
        wanted = wanted_topics(snapshot, names, is_chosen=chosen is not None)
        if hidden := [name for name in wanted if name not in topics]:
            raise Problem(
                f"the gateway at {self._url} shows no {', '.join(hidden)}, which the table is loaded from: "
                f"is it one of {dc}, and may the token read it? {ALONE}"
            )
        return tail_of(snapshot, _views(snapshot, [topics[name] for name in wanted]), wanted)

    def chunks(self, ranges: Iterable[Range]) -> Iterator[Chunk]:
        """The chunks of exactly these ranges. Raises Problem."""
        ends = {(r.topic, r.partition): r.end for r in ranges}
        topics = sorted({r.topic for r in ranges if r.size})
        if not topics:
            return
        start = Position({(r.topic, r.partition): At(r.start) for r in ranges if r.topic in topics})
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
            raise Problem(f"{error}; {ALONE}") from None

    def _check_dc(self, snapshot: Snapshot) -> None:
        """Offsets of another data centre mean other records. Who may not ask for the status has to know."""
        try:
            dc = self._ask("/v1/status").get("dc")
        except asking.Refused as refused:
            if refused.status == FORBIDDEN:
                return
            raise
        if dc != snapshot.entry.dc:
            raise WrongUse(
                f"--gateway {self._url} is one of {dc}, the table holds offsets of {snapshot.entry.dc}: "
                f"name a gateway there; {ALONE}"
            )

    def _reader(self, topics: Sequence[str], start: Position) -> Reader:
        return Reader(
            self._url,
            topics,
            start=start,
            follow=False,
            token=self._token,
            ca_file=self._ca_file,
            drop_copies=False,
        )

    def _ask(self, path: str) -> dict[str, Any]:
        try:
            return self._gateway.ask("GET", path)
        except Unavailable as error:
            raise Unavailable(f"{error}; {ALONE}") from None


def _views(snapshot: Snapshot, described: Iterable[Mapping[str, Any]]) -> dict[str, TopicView]:
    """The gateway does not tell Kafka's ids of topics: one that was made anew shows by its offsets only."""
    known = {r.topic: r.topic_id for r in snapshot.entry.ranges}
    return {
        one["topic"]: TopicView(
            one["topic"],
            known.get(one["topic"], ""),
            {at["partition"]: PartitionOffsets(at["first"], at["next"]) for at in one["offsets"]},
        )
        for one in described
    }
