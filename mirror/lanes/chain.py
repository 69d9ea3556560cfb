"""Topics that a remote does not write but mirrors itself: a chain, dc1 → dc2 → dc3.

What dc3 copies are dc2's offsets; cursors and positions speak of dc1's. So the history that dc3 keeps is put together
from both steps: where dc2 says that its copy came from, and where dc3 put it. It is exact like each of them, and a
reader in dc3 needs to know of no chain.

* A record is written here only when dc2's books say which one of the original it is. They are committed with it there.
* What the books there lead back to here goes round in a circle, and is not written a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.config import ConfigError
from logferry.gateway.contract.offset_history import Place, Run
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import Kafka
from logferry.gateway.kafka.metadata_request import TopicView
from logferry.gateway.topics.offset_translation import Translation
from logferry.mirror.config import MirrorConfig, Remote
from logferry.mirror.copy.batch_rewrite import MovedBatch
from logferry.mirror.copy.partition import MirroredPartition

_BOOKS_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.02


class Origin(NamedTuple):
    """Where batches of a remote's copy came from: ``runs`` lead there from the original, whose topic has the ``id``."""

    id: bytes
    runs: Sequence[Run]


class Stopped(Exception):
    """Why a partition cannot go on. ``kind``: one of `partition.STOPS`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Chains:
    """``books``: of the mirrors of those remotes whose own copies are taken, by their data centre."""

    books: dict[str, Translation]

    def of(self, partition: MirroredPartition) -> Translation | None:
        """None: it comes from where it is written."""
        return self.books.get(partition.dc) if partition.is_chained else None

    async def origin(self, partition: MirroredPartition, batches: Sequence[MovedBatch]) -> Origin | None:
        """None: it comes from where it is written. Raises Stopped."""
        books = self.of(partition)
        if books is None:
            return None
        last = batches[-1].runs[-1]
        try:
            origin = await _origin(books, partition, batches[0].runs[0].source, last.source + last.size - 1)
        except (errors.KafkaError, Problem, OSError, TimeoutError) as error:
            raise Stopped("no-original", f"the books of the mirror in {partition.dc}: {error!r}") from error
        done = partition.progress
        before = None if done is None else done.chained
        if before is not None and before.id == origin.id and origin.runs:
            first = origin.runs[0].source
            if first < before.next_offset:
                detail = f"offset {first} of the original comes again; what is before {before.next_offset} is here"
                raise Stopped("comes-again", detail)
        return origin


async def _origin(books: Translation, partition: MirroredPartition, first: int, last: int) -> Origin:
    async with asyncio.timeout(_BOOKS_S):
        while True:
            found = await books.originals(partition.place, first, last)
            if found is not None:
                progress, runs = found
                if progress.source_id == partition.local_id:
                    raise Stopped("in-a-circle", f"{partition.dc} takes {partition.topic} from here itself")
                return Origin(progress.original.id, runs)
            await asyncio.sleep(_LOOK_AGAIN_S)


def chains(config: MirrorConfig, remotes: Iterable[tuple[Remote, Kafka]]) -> Chains:
    """A mirror there goes by the same prefix as this one."""
    return Chains(
        {
            remote.dc: Translation(kafka, config.prefix, remote.dc)
            for remote, kafka in remotes
            if set(remote.taken) != {remote.dc}
        }
    )


async def refuse_circles(
    chained: Chains, remote: Remote, theirs: dict[str, TopicView], ours: dict[str, TopicView]
) -> None:
    """Raises ConfigError when the remote takes here what is to be taken there; KafkaError, OSError, TimeoutError."""
    books = chained.books.get(remote.dc)
    for name, topic in theirs.items():
        local = ours.get(name)
        if books is None or local is None or not remote.is_chained(name):
            continue
        for partition in topic.partitions:
            place: Place = (name, partition.partition)
            try:
                progress = await books.progress(place)
            except Problem:
                continue  # nothing of it was mirrored yet
            if progress.source_id == local.id:
                raise ConfigError(
                    f"remote {remote.dc}: prefixes: {remote.dc} takes {name} from here itself, so it would go round "
                    f"in a circle; take it from {name.partition('.')[0]}, here or there"
                )
