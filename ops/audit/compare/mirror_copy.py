"""Another data centre's copy against the original: both sides' records, partition by partition, in order.

Read are the records themselves (key, value, headers, time), not what the mirror says of them; its history is only
asked where to begin when retention has removed the beginnings. What the original has beyond the copy is not mirrored
yet and is told, it refutes nothing. How far a partition is proven is kept in a file, so the next run goes on there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.chunk import Malformed
from logferry.gateway.errors import Problem
from logferry.gateway.fetch import KafkaRecord
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.tls import kafka_options
from logferry.gateway.topics.offset_translation import Translation
from logferry.mirror.config import MirrorConfig
from logferry.ops.audit.compare.proven_file import Kept, KeptCopy, read_kept, write_kept
from logferry.ops.audit.digests.sums import Tally, chunk_digest
from logferry.ops.audit.log.partition import decoded
from logferry.ops.audit.log.read import connected
from logferry.ops.audit.tables.ledger_check import Place, printed_id
from logferry.ops.cli.problems import WrongUse

_FETCH_BYTES: Final = 1 << 20
_AT_ONCE: Final = 4
_KEPT_EVERY: Final = 20_000

MISSING: Final = "the copy is missing"

_Books = tuple[Translation, Translation | None]
Copies = MutableMapping[tuple[str, Place], KeptCopy]


class Proven(NamedTuple):
    """Up to these offsets, in the original and in the copy, both are the same."""

    original: int
    copy: int


class Link(NamedTuple):
    """What is compared. ``remote``: the data centre of whose Kafka the copy was taken; ``original``: that whose topics
    they are, another one only in a chain. ``takes``: which topics, by their full names."""

    original: str
    remote: str
    copy: str
    prefix: str
    takes: Callable[[str], bool]


@dataclass(slots=True)
class PartitionFinding:
    """``wrong``: what refutes, None: nothing. ``behind``: records of the original that are not in the copy yet.

    ``compared``: records, by this run; ``sources``: chunks, bytes and digest of each source's copy, by all runs.
    """

    topic: str
    partition: int
    compared: int = 0
    behind: int = 0
    wrong: str | None = None
    sources: dict[str, Tally] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("topic", "partition", "compared", "behind", "wrong")}


@dataclass(slots=True)
class MirrorReport:
    original: str
    copy: str
    partitions: list[PartitionFinding] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return all(found.wrong is None for found in self.partitions)

    @property
    def verdict(self) -> str:
        compared, behind = sum(p.compared for p in self.partitions), sum(p.behind for p in self.partitions)
        where = f"{self.original} to {self.copy}: {len(self.partitions)} partitions, {compared:,} records compared"
        rest = f", {behind:,} not mirrored yet" if behind else ""
        if self.exact:
            return f"exact: {where}{rest}: the same records in the same order, nothing twice"
        wrong = [p for p in self.partitions if p.wrong is not None]
        return f"REFUTED: {where}{rest}: {len(wrong)} partitions differ"

    def as_dict(self) -> dict[str, object]:
        return {
            "exact": self.exact,
            "verdict": self.verdict,
            "original": self.original,
            "copy": self.copy,
            "partitions": [found.as_dict() for found in self.partitions],
        }


async def audit_mirror(
    config: MirrorConfig,
    original: str,
    topics: list[str],
    kept_in: Path | None,
    progress: Callable[[str, int, int], None],
    *,
    full: bool = False,
) -> MirrorReport:
    """``kept_in``: a file with what was proven. ``full``: everything is compared, whatever it says.

    Raises WrongUse, and Unavailable when either Kafka cannot be read.
    """
    remote = next((remote for remote in config.remotes if original in remote.taken), None)
    if remote is None:
        names = ", ".join(dc for remote in config.remotes for dc in remote.taken)
        raise WrongUse(f"this mirror brings nothing of {original}; it brings {names}")
    link = Link(original, remote.dc, config.dc, config.prefix, remote.takes)
    scope = {"mirror": f"{original}:{config.dc}"}
    kept = Kept(scope) if kept_in is None or full else read_kept(kept_in, scope)

    def save() -> None:
        if kept_in is not None:
            write_kept(kept_in, kept)

    async with connected(kafka_options(remote.kafka)) as there, connected(kafka_options(config.kafka)) as here:
        try:
            return await compare_copies(there, here, link, topics, kept.copies, progress, save)
        finally:
            save()


async def compare_copies(
    there: Kafka,
    here: Kafka,
    link: Link,
    topics: Sequence[str],
    kept: Copies,
    progress: Callable[[str, int, int], None],
    save: Callable[[], None] = lambda: None,
) -> MirrorReport:
    """``kept``: what was proven, which is brought up to date. ``save``: called now and then meanwhile.

    Raises WrongUse for a topic that there is not, KafkaError.
    """
    translation = Translation(here, link.prefix, link.copy)
    # In a chain it is compared with the copy that it was taken from; the history speaks of the original.
    books = None if link.original == link.remote else Translation(there, link.prefix, link.remote)
    named = {topic if topic.startswith(f"{link.original}.") else f"{link.original}.{topic}" for topic in topics}
    views, copies = (await there.describe()).topics, (await here.describe()).topics
    wanted = sorted(name for name in views if name.startswith(f"{link.original}.") and link.takes(name))
    if named - set(wanted):
        missing = ", ".join(sorted(named - set(wanted)))
        raise WrongUse(f"{link.original} has no topic {missing} that is mirrored here")
    places = [(name, p.partition) for name in sorted(named) or wanted for p in views[name].partitions]
    comparing = _Comparing(there, here, link, (translation, books), kept, save)
    report = MirrorReport(link.original, link.copy)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(place: Place) -> None:
        ids = [printed_id(of[place[0]].id) if place[0] in of else "" for of in (views, copies)]
        async with gate:
            report.partitions.append(await comparing.partition(place, ids[0], ids[1]))
        progress("mirror", len(report.partitions), len(places))

    await asyncio.gather(*map(one, places))
    report.partitions.sort(key=lambda found: (found.topic, found.partition))
    return report


@dataclass
class _Comparing:
    there: Kafka
    here: Kafka
    link: Link
    books: _Books
    kept: Copies
    save: Callable[[], None]
    news: int = 0

    async def partition(self, place: Place, original_id: str, copy_id: str) -> PartitionFinding:
        found = PartitionFinding(*place)
        kept = self.kept.get((self.link.copy, place))
        before = kept
        try:
            # The copy's end first: what it holds by now, the original must hold.
            copy_end = await self.here.offset(*place, LATEST)
            original_end = await self.there.offset(*place, LATEST)
            if kept is not None and (kept.original_id, kept.copy_id) != (original_id, copy_id):
                # The mirror knows of it and stands still until somebody decides; here all is compared anew.
                kept = None
            if kept is not None and (original_end < kept.original or copy_end < kept.copy):
                found.wrong = (
                    f"proven up to {kept.original} there and {kept.copy} here, but they end at {original_end} and "
                    f"{copy_end}: cut back"
                )
                found.sources = dict(kept.sources)
                return found
            start = await _start(self.there, self.here, self.books, place, kept)
        except errors.UnknownTopicOrPartitionError:
            found.wrong = MISSING
            return found
        except Problem as problem:
            found.wrong = problem.detail
            return found
        proven = KeptCopy(original_id, copy_id, start.original, start.copy)
        if kept is not None:
            proven.sources = {name: tally.plus(Tally()) for name, tally in kept.sources.items()}
        found.sources = proven.sources
        if kept is not None or before is None:
            self.kept[self.link.copy, place] = proven
        await self._compare(found, proven, original_end, copy_end)
        if found.wrong is None:
            self.kept[self.link.copy, place] = proven
        return found

    async def _compare(self, found: PartitionFinding, proven: KeptCopy, original_end: int, copy_end: int) -> None:
        place = (found.topic, found.partition)
        copies = _records(self.here, place, proven.copy, copy_end)
        async for record in _records(self.there, place, proven.original, original_end):
            copy = await anext(copies, None)
            if copy is None:
                found.behind += 1
                continue
            if _content(record) != _content(copy):
                found.wrong = (
                    f"record {record.offset} there and {copy.offset} here differ, after {found.compared} alike"
                )
                return
            found.compared += 1
            _count(proven.sources, copy)
            proven.original, proven.copy = record.offset + 1, copy.offset + 1
            self.news += 1
            if self.news % _KEPT_EVERY == 0:
                self.save()
        left = await anext(copies, None)
        if left is not None:
            found.wrong = f"record {left.offset} here is not in the original, after {found.compared} alike"


def _count(sources: dict[str, Tally], record: KafkaRecord) -> None:
    """A chunk of the copy, to its source. What no gateway wrote is of no source."""
    try:
        source_id, chunk = decoded(record)
    except Malformed:
        return
    digest = chunk_digest(chunk.seqno, chunk.data)
    sources.setdefault(source_id, Tally()).add(1, len(chunk.data), digest)


async def _start(there: Kafka, here: Kafka, books: _Books, place: Place, proven: KeptCopy | None) -> Proven:
    """Where both begin: at what is proven, else at the first record that both still have."""
    first, first_here = await there.offset(*place, EARLIEST), await here.offset(*place, EARLIEST)
    if proven is not None and proven.original >= first and proven.copy >= first_here:
        return Proven(proven.original, proven.copy)
    if first == first_here == 0:
        return Proven(0, 0)
    ours, theirs = books
    wanted = await ours.to_original(place, first_here)
    if theirs is not None:
        found = await theirs.to_here(place, wanted)
        wanted = (await theirs.progress(place)).local_next if found is None else found
    original = max(first, wanted)
    copy = await ours.to_here(place, original if theirs is None else await theirs.to_original(place, original))
    return Proven(original, first_here if copy is None else max(copy, first_here))


def _content(record: KafkaRecord) -> tuple[object, ...]:
    return record.key, record.value, record.headers, record.timestamp_ms


async def _records(kafka: Kafka, place: tuple[str, int], start: int, end: int) -> AsyncIterator[KafkaRecord]:
    """Committed ones, up to an end that was taken before."""
    position, found = start, deque[KafkaRecord]()
    while position < end:
        fetched = await kafka.fetch(*place, position, max_bytes=_FETCH_BYTES)
        position = fetched.next_offset
        found.extend(fetched.records)
        while found:
            record = found.popleft()
            if record.offset < end:
                yield record
