"""What of a table's topics is not loaded yet, read out of Kafka itself, for those who can reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from logferry.client import Chunk
from logferry.gateway.contract.chunk import Malformed, split_topic
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.rows import row_of
from logferry.loaders.errors import TopicChanged
from logferry.loaders.planning.plan import PartitionOffsets, Range, TopicView
from logferry.loaders.storage.snapshot import Snapshot, origin_of, tail_of, wanted_topics
from logferry.ops.audit.log.read import committed, connected
from logferry.ops.audit.tables.ledger_check import printed_id


class NewestOfKafka:
    """Repeatable: the ranges decide what is read. Kafka's ids of topics are compared, too."""

    def __init__(self, bootstrap_servers: str) -> None:
        self._servers = bootstrap_servers

    def ranges(self, snapshot: Snapshot, chosen: Sequence[str] | None) -> tuple[Range, ...]:
        """What is behind the snapshot now. ``chosen``: topics or patterns; else those that the table is loaded from.

        Raises Unavailable, ConfigError, TopicChanged.
        """
        patterns = origin_of(snapshot, self._servers, chosen).topics
        return asyncio.run(self._ranges(snapshot, patterns, chosen is not None))

    def chunks(self, ranges: Iterable[Range]) -> Iterator[Chunk]:
        """The chunks of exactly these ranges. Raises Unavailable, TopicChanged."""
        yield from asyncio.run(self._chunks([r for r in ranges if r.size]))

    async def _ranges(self, snapshot: Snapshot, patterns: Sequence[str], is_chosen: bool) -> tuple[Range, ...]:
        async with connected({"bootstrap_servers": self._servers}) as kafka:
            topics = (await kafka.describe()).topics
            fitting = [n for n in topics if _is_full(n) and any(fnmatchcase(n, pattern) for pattern in patterns)]
            configs = await kafka.configs(fitting) if fitting else {}
            names = [name for name in fitting if "compact" not in configs[name].get("cleanup.policy", "")]
            wanted = wanted_topics(snapshot, names, is_chosen=is_chosen)
            places = [(n, p.partition) for n in wanted if n in topics for p in topics[n].partitions]
            firsts = await kafka.offsets(places, EARLIEST) if places else {}
            nexts = await kafka.offsets(places, LATEST) if places else {}
        views = {
            name: TopicView(
                name,
                printed_id(topics[name].id),
                {n: PartitionOffsets(firsts[t, n], nexts[t, n]) for t, n in places if t == name},
            )
            for name in wanted
            if name in topics
        }
        return tail_of(snapshot, views, wanted)

    async def _chunks(self, ranges: Sequence[Range]) -> list[Chunk]:
        found: list[Chunk] = []
        async with connected({"bootstrap_servers": self._servers}) as kafka:
            await kafka.describe(sorted({r.topic for r in ranges}))
            for r in ranges:
                found += await _read(kafka, r)
        return found


async def _read(kafka: Kafka, r: Range) -> list[Chunk]:
    def lost(start: int, end: int) -> None:
        raise TopicChanged(f"{r.topic}: the records {start} to {end - 1} of partition {r.partition} were removed")

    found = []
    async for fetched in committed(kafka, (r.topic, r.partition), r.start, r.end, lost):
        for record in fetched.records:
            row = row_of(split_topic(r.topic)[0], r.topic, r.partition, record)
            # What no gateway wrote is a matter of the quarantine.
            if row is not None and r.start <= record.offset < r.end:
                found.append(Chunk(*row))
    return found


def _is_full(name: str) -> bool:
    try:
        split_topic(name)
    except Malformed:
        return False
    return True
