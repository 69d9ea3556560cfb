"""Compares another data centre's copy with the original: the records of both, partition by partition, in order.

The records themselves are compared (key, value, headers, time). The mirror's offset history is used only to find the
first common record after retention has removed the beginnings. Records of the original beyond the copy are reported as
not mirrored yet and refute nothing. The state file holds the offsets that are proven equal; the next run resumes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

from aiokafka import errors
from logferry.gateway.contract.names import TopicPartition, printed_topic_id
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.gateway.tls import kafka_options
from logferry.gateway.topics.copies import OffsetTranslation
from logferry.mirror.config import MirrorConfig
from logferry.ops.audit.compare.proven_file import ProvenCopy, ProvenState, read_state_file, write_state_file
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.digests.sums import Tally, add_to, chunk_digest
from logferry.ops.audit.log.read import connected, fetch
from logferry.ops.audit.records.batches import StoredRecord
from logferry.ops.audit.records.formats import NotAChunk, stored_chunk
from logferry.ops.cli.problems import UsageError

_FETCH_BYTES: Final = 1 << 20
_AT_ONCE: Final = 4
_SAVE_EVERY: Final = 20_000
_content: Final = attrgetter("key", "value", "headers", "timestamp_ms")

MISSING: Final = "the copy is missing"

Copies = MutableMapping[tuple[str, TopicPartition], ProvenCopy]


@dataclass(slots=True)
class PartitionFinding:
    """``wrong``: the difference that refutes, None if there is none. ``behind``: records that are not mirrored yet.

    ``compared``: records of this run; ``sources``: chunks, bytes and digest of each source's copy, of all runs.
    """

    topic: str
    partition: int
    compared: int = 0
    behind: int = 0
    wrong: str | None = None
    sources: dict[str, Tally] = field(default_factory=dict)


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

    def add_findings(self, findings: Findings) -> None:
        for partition in self.partitions:
            where = f"{self.copy}: {partition.topic}-{partition.partition}"
            if partition.wrong is not None:
                kind = "copy-missing" if partition.wrong == MISSING else "copy-differs"
                findings.add(Finding(kind, where, partition.wrong))
            elif partition.behind:
                detail = f"{partition.behind} records are not mirrored yet"
                findings.add(Finding("not-mirrored-yet", where, detail, count=partition.behind, refutes=False))

    def as_dict(self) -> dict[str, object]:
        head = {"exact": self.exact, "verdict": self.verdict, "original": self.original, "copy": self.copy}
        shown = ("topic", "partition", "compared", "behind", "wrong")
        return {**head, "partitions": [{name: getattr(found, name) for name in shown} for found in self.partitions]}


async def audit_mirror(
    config: MirrorConfig,
    original: str,
    topics: list[str],
    state_file: Path | None,
    progress: Callable[[str, int, int], None],
    *,
    full: bool = False,
) -> MirrorReport:
    """``state_file``: the proof of earlier runs. ``full``: compare everything in spite of it.

    Raises UsageError, and Unavailable when either Kafka cannot be read.
    """
    remote = next((remote for remote in config.remotes if original in remote.taken), None)
    if remote is None:
        names = ", ".join(dc for remote in config.remotes for dc in remote.taken)
        raise UsageError(f"this mirror does not copy {original}; it copies {names}")
    scope = {"mirror": f"{original}:{config.dc}"}
    state = ProvenState(scope) if state_file is None or full else read_state_file(state_file, scope)

    save: Callable[[], None] = partial(write_state_file, state_file, state) if state_file else lambda: None
    async with connected(kafka_options(remote.kafka)) as there, connected(kafka_options(config.kafka)) as here:
        try:
            dcs = (original, remote.dc, config.dc)
            comparison = CopyComparison(
                there, here, *dcs, config.prefix, remote.takes, state.copies, save, remote.renamed
            )
            return await comparison.run(topics, progress)
        finally:
            save()


@dataclass
class CopyComparison:
    """``there``, ``here``: the Kafka of the data centre ``remote``, from which the copy was taken, and of the ``copy``.

    ``original``: the data centre that owns the topics, different from ``remote`` only in a chain of mirrors.
    ``takes``: whether a topic is mirrored, by its full name. ``proven``: earlier proofs, which are updated.
    ``save``: called every 20,000 records, so that a run that is killed loses few. ``renamed``: the names of copies that
    differ, by those of their originals.
    """

    there: KafkaClient
    here: KafkaClient
    original: str
    remote: str
    copy: str
    prefix: str
    takes: Callable[[str], bool]
    proven: Copies
    save: Callable[[], None] = lambda: None
    renamed: Mapping[str, str] = field(default_factory=dict)
    compared: int = 0

    def __post_init__(self) -> None:
        self.ours = OffsetTranslation(self.here, self.prefix, self.copy)
        # In a chain it is compared with the copy that it was taken from; the history speaks of the original.
        is_chain = self.original != self.remote
        self._originals = {here: there for there, here in self.renamed.items()}
        self.theirs = OffsetTranslation(self.there, self.prefix, self.remote) if is_chain else None

    async def run(self, topics: Sequence[str], progress: Callable[[str, int, int], None]) -> MirrorReport:
        """Raises UsageError for a topic that does not exist, KafkaError."""
        begin = f"{self.original}."
        named = {topic if topic.startswith(begin) else begin + topic for topic in topics}
        views, copies = (await self.there.describe()).topics, (await self.here.describe()).topics
        wanted = {name for name in views if name.startswith(begin) and self.takes(name)}
        wanted |= {here for there, here in self.renamed.items() if there in views}
        views |= {here: views[there] for there, here in self.renamed.items() if there in views}
        if missing := ", ".join(sorted(named - wanted)):
            raise UsageError(
                f"{self.original} has no topic {missing} that is mirrored here; see `logferry topics list`"
            )
        places = [(name, p.partition) for name in sorted(named or wanted) for p in views[name].partitions]
        report = MirrorReport(self.original, self.copy)
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(place: TopicPartition) -> None:
            ids = [printed_topic_id(of[place[0]].id) if place[0] in of else "" for of in (views, copies)]
            async with gate:
                report.partitions.append(await self.partition(place, *ids))
            progress("mirror", len(report.partitions), len(places))

        await asyncio.gather(*map(one, places))
        report.partitions.sort(key=lambda found: (found.topic, found.partition))
        return report

    def _there(self, place: TopicPartition) -> TopicPartition:
        return self._originals.get(place[0], place[0]), place[1]

    async def partition(self, place: TopicPartition, original_id: str, copy_id: str) -> PartitionFinding:
        found, key = PartitionFinding(*place), (self.copy, place)
        before = self.proven.get(key)
        # With another topic the mirror stops by itself until the operator decides; here all is compared again.
        is_same = before is not None and (before.original_id, before.copy_id) == (original_id, copy_id)
        earlier = before if is_same else None
        try:
            # The copy's end first: what it holds by now, the original must hold.
            copy_end = await self.here.offset(*place, LATEST)
            original_end = await self.there.offset(*self._there(place), LATEST)
            if earlier is not None and (original_end < earlier.original or copy_end < earlier.copy):
                found.wrong = (
                    f"proven up to {earlier.original} there and {earlier.copy} here, but they end at {original_end} "
                    f"and {copy_end}: truncated"
                )
                found.sources = dict(earlier.sources)
                return found
            start = await self._start(place, earlier)
        except (errors.UnknownTopicOrPartitionError, Problem) as problem:
            found.wrong = problem.detail if isinstance(problem, Problem) else MISSING
            return found
        proven = ProvenCopy(original_id, copy_id, *start, dict(earlier.sources) if earlier is not None else {})
        found.sources = proven.sources
        if is_same or before is None:
            self.proven[key] = proven
        await self._compare(found, proven, original_end, copy_end)
        if found.wrong is None:
            self.proven[key] = proven
        return found

    async def _start(self, place: TopicPartition, proven: ProvenCopy | None) -> tuple[int, int]:
        """The offsets to begin at, there and here: the proven ones, else those of the first record that both have."""
        first, first_here = (
            await self.there.offset(*self._there(place), EARLIEST),
            await self.here.offset(*place, EARLIEST),
        )
        if proven is not None and proven.original >= first and proven.copy >= first_here:
            return proven.original, proven.copy
        if first == first_here == 0:
            return 0, 0
        ours, theirs = self.ours, self.theirs
        wanted = await ours.to_original(place, first_here)
        if theirs is not None:
            found = await theirs.to_here(place, wanted)
            wanted = (await theirs.checkpoint(place)).local_next if found is None else found
        original = max(first, wanted)
        copy = await ours.to_here(place, original if theirs is None else await theirs.to_original(place, original))
        return original, first_here if copy is None else max(copy, first_here)

    async def _compare(self, found: PartitionFinding, proven: ProvenCopy, original_end: int, copy_end: int) -> None:
        place = (found.topic, found.partition)
        copies = _records(self.here, place, proven.copy, copy_end)
        async for record in _records(self.there, self._there(place), proven.original, original_end):
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
            with suppress(NotAChunk):  # it has no source
                chunk = stored_chunk(copy)
                digest = chunk_digest(chunk.seqno, chunk.data)
                add_to(proven.sources, chunk.source_id, Tally(1, len(chunk.data), digest))
            proven.original, proven.copy = record.offset + 1, copy.offset + 1
            self.compared += 1
            if self.compared % _SAVE_EVERY == 0:
                self.save()
        left = await anext(copies, None)
        if left is not None:
            found.wrong = f"record {left.offset} here is not in the original, after {found.compared} alike"


async def _records(kafka: KafkaClient, place: TopicPartition, start: int, end: int) -> AsyncIterator[StoredRecord]:
    """The committed records up to an end that was taken before."""
    position = start
    while position < end:
        fetched = await fetch(kafka, place, position, max_bytes=_FETCH_BYTES)
        position = fetched.next_offset
        for record in fetched.records:
            if record.offset < end:
                yield record
