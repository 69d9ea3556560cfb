"""A lane of the mirror: it alone writes the mirrored partitions that fall to it, and knows how far each is.

The order that makes it exact is the gateway's: fence first, then read how far each partition is, then go on exactly
there. One transaction holds record batches, the chapters of the history that say which offset is which, and the
progress of the partitions. Killed before the commit: nothing of it is in any log. After it: all of it is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from logferry.gateway import log
from logferry.gateway.contract.offset_history import (
    Chapter,
    Original,
    Place,
    Progress,
    Signpost,
    composed,
    key_of,
    merged,
    numbers_of,
    signposts_after,
)
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.client import EARLIEST, LATEST, Kafka
from logferry.gateway.kafka.metadata_request import NO_ID, TopicView
from logferry.gateway.kafka.record_batch import CODECS, batches
from logferry.gateway.kafka.transactional_producer import Fenced, NotCommitted, Part, TransactionalProducer
from logferry.gateway.lanes.lifecycle import KeptLane
from logferry.gateway.lanes.transaction import Record
from logferry.gateway.topics.offset_translation import Translation
from logferry.mirror import metrics
from logferry.mirror.books import filled, read_progress, runs_of
from logferry.mirror.config import MirrorConfig
from logferry.mirror.copy.batch_rewrite import MovedBatch
from logferry.mirror.copy.coalesce import gathered
from logferry.mirror.copy.partition import MirroredPartition, Stop
from logferry.mirror.lanes.chain import Chains, Origin, Stopped
from logferry.mirror.lanes.target_topics import Targets
from logferry.mirror.remote.cluster import Link
from logferry.mirror.remote.flow_control import Budget

_BATCH_BYTES: Final = 1 << 20
_FETCH_BYTES: Final = 1 << 18
# These stops end by themselves: it is tried again after so long.
_AGAIN_S: Final = {"refused": 60.0, "no-original": 5.0}
_CODEC: Final = CODECS["zstd"]

# So long it waits for a record that takes the word of passed markers along.
_PASS_S: Final = 0.5

Drawn = dict[MirroredPartition, list[MovedBatch]]
Origins = dict[MirroredPartition, Origin]


class CannotResume(Exception):
    """The text says why, and what can be done."""


def _say_stop(partition: MirroredPartition) -> None:
    stop = partition.stop
    if stop is not None:
        log.event(
            "error",
            "partition_stopped",
            topic=partition.topic,
            partition=partition.number,
            dc=partition.dc,
            stop=stop.kind,
            detail=stop.detail,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class MirrorLane(KeptLane):
    """``links``: by the data centre whose topics they bring."""

    config: MirrorConfig
    kafka: Kafka
    targets: Targets
    links: dict[str, Link]
    budget: Budget
    chains: Chains
    partitions: dict[Place, MirroredPartition] = field(default_factory=dict)
    _producer: TransactionalProducer | None = None
    _progress: dict[Place, Progress] = field(default_factory=dict)
    _ready: dict[MirroredPartition, None] = field(default_factory=dict)
    _refused: dict[Place, Stop] = field(default_factory=dict)
    _as_they_are: set[Place] = field(default_factory=set)
    _resumes: dict[Place, tuple[Progress, asyncio.Future[None]]] = field(default_factory=dict)
    _passed: dict[MirroredPartition, None] = field(default_factory=dict)
    _passing: bool = False
    _drawn_bytes: int = 0
    _pairs_next: int = 0
    _topic_ids: tuple[bytes, bytes] = (NO_ID, NO_ID)

    # ---- as it is kept ----------------------------------------------------------------------------------------

    @property
    def producer(self) -> TransactionalProducer | None:
        return self._producer

    @property
    def is_done(self) -> bool:
        return True

    def failed(self, error: BaseException) -> None:
        metrics.failed(self.number, error)
        self.targets.doubt()
        for link in self.links.values():
            link.look_again()
        if isinstance(error, Fenced):
            return
        if isinstance(error, NotCommitted) and error.refused in self.partitions:
            if error.refused not in self._as_they_are:
                # The topic here may allow less than its original: what was gathered is tried as it is.
                self._as_they_are.add(error.refused)
                return
            self._refused[error.refused] = Stop("refused", str(error), int(time.time() * 1000))

    def ended(self) -> None:
        metrics.closed(self.number)
        for _, done in self._resumes.values():
            if not done.done():
                done.set_exception(CannotResume(f"lane {self.number} moved to another worker; try again"))

    async def drop_producer(self) -> None:
        self._leave_all()
        if self._producer is not None:
            producer, self._producer = self._producer, None
            await producer.discard()

    def _leave_all(self) -> None:
        for partition in self.partitions.values():
            self.links[partition.dc].unfollow(partition)
            self.budget.give(partition.waiting_bytes)
        self.budget.give(self._drawn_bytes)
        self._drawn_bytes = 0
        self.partitions = {}
        self._ready = {}

    # ---- opening ----------------------------------------------------------------------------------------------

    async def open(self, *, first: bool) -> None:
        if self._producer is not None:
            return
        started = time.monotonic()
        self.course.enter("fencing", "another worker may have had it" if self._doubted else None)
        self._doubted = False
        self._producer = TransactionalProducer(self.kafka, self.config.lane(self.number))
        await self._producer.fence()
        fenced = time.monotonic()
        self.course.enter("replaying")
        pairs, state = self.config.pairs_topic, self.config.state_topic
        self._topic_ids = ((await self.kafka.describe_topic(pairs)).id, (await self.kafka.describe_topic(state)).id)
        self._pairs_next = await self.kafka.offset(pairs, self.number, LATEST)
        self._progress = await read_progress(self.kafka, state, self.number)
        self.course.enter("serving", "open")
        now = time.monotonic()
        for link in self.links.values():
            self.adopt(link, link.topics)
        metrics.opened(self.number, first=first, replay_s=now - fenced)
        log.event(
            "info",
            "lane_open",
            lane=self.number,
            partitions=len(self.partitions),
            fence_ms=round((fenced - started) * 1000),
            replay_ms=round((now - fenced) * 1000),
        )

    def adopt(self, link: Link, topics: dict[str, TopicView]) -> None:
        """Follows the partitions of this lane among the topics as they are there now."""
        if self.state != "serving":
            return
        for topic in topics.values():
            target = self.targets.known.get(topic.name)
            for number in numbers_of(topic.name, len(topic.partitions), self.number, self.config.lanes):
                self._adopt(link, topic, number, target)
        gone = [p for p in self.partitions.values() if p.dc == link.remote.dc and p.topic not in topics]
        for partition in gone:
            if partition.stop is None:
                partition.halt("source-deleted", f"{partition.topic} is not in {link.remote.dc} any more")

    def _adopt(self, link: Link, topic: TopicView, number: int, target: TopicView | None) -> None:
        if target is None or number >= len(target.partitions):
            return  # it is not made yet
        place = (topic.name, number)
        known = self.partitions.get(place)
        if known is not None and (known.source_id, known.local_id) == (topic.id, target.id):
            refused = self._refused.get(place)
            if refused is not None and time.time() - refused.since_ms / 1000 > _AGAIN_S[refused.kind]:
                del self._refused[place]
                known.stop = None
                self.budget.give(known.rewind())
            elif known.stop is not None and known.stop.kind == "source-deleted":
                known.stop = None
                known.on_change(known)
            return
        if known is not None:
            link.unfollow(known)
            self.budget.give(known.rewind())
            self._ready.pop(known, None)
        partition = MirroredPartition(
            topic=topic.name,
            number=number,
            dc=link.remote.dc,
            source_id=topic.id,
            local_id=target.id,
            partition_bytes=self.config.limits.partition_bytes,
            progress=self._progress.get(place),
            verifies=topic.name not in self.targets.compacted,
            is_chained=link.remote.is_chained(topic.name),
            keeps_history=topic.name not in link.sources,
            stop=self._refused.get(place),
            on_waiting=self._has_waiting,
            on_passed=self._has_passed,
            on_stop=_say_stop,
        )
        partition.rewind()
        self.partitions[place] = partition
        link.follow(partition)

    def _has_waiting(self, partition: MirroredPartition) -> None:
        self._ready[partition] = None
        self._wake.set()

    def _has_passed(self, partition: MirroredPartition) -> None:
        if not self._passed:
            asyncio.get_running_loop().call_later(_PASS_S, self._pass_soon)
        self._passed[partition] = None

    def _pass_soon(self) -> None:
        self._passing = True
        self._wake.set()

    # ---- serving ----------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        while True:
            while not (self._ready or self._resumes or self._doubted or self._closing or self._passing):
                self._wake.clear()
                await self._wake.wait()
            if self._closing:
                return
            producer = self._producer
            if self._doubted or producer is None:
                await self.drop_producer()
                await self.open(first=False)
                continue
            await producer.settled()
            if self._resumes:
                await self._resume(producer)
                continue
            if self._passing:
                self._passing = False
                await self._pass(producer)
                continue
            drawn = await self._into_known(self._draw())
            origins = await self._origins(drawn)
            if not drawn:
                continue
            self.course.begin()
            started = time.monotonic()
            await self._transact(producer, drawn, origins)
            self.course.commit()
            metrics.committed(time.monotonic() - started, drawn)
            if producer.is_troubled:
                await self.drop_producer()
                await self.open(first=False)

    def _draw(self) -> Drawn:
        """What the next transaction holds; those that had no place in it come first in the one after it."""
        room, drawn = self.config.limits.transaction_bytes, Drawn()
        for partition in list(self._ready):
            if room <= 0:
                break
            del self._ready[partition]
            found = partition.draw(room)
            if found:
                size = sum(batch.size_bytes for batch in found)
                drawn[partition] = found
                self._drawn_bytes += size
                room -= size
            if partition.waiting:
                self._ready[partition] = None
            partition.on_change(partition)
        return drawn

    async def _into_known(self, drawn: Drawn) -> Drawn:
        """What nothing is known of must be empty here: the mirror whose copy it is may have lost its state."""
        unknown = [partition for partition in drawn if partition.progress is None and not partition.is_known_empty]
        if not unknown:
            return drawn
        wrong = await filled(self.kafka, [partition.place for partition in unknown])
        for partition in unknown:
            if partition.place in wrong:
                self._put_back(partition, drawn)
                partition.halt("target-not-empty", f"{partition.topic}-{partition.number} has records here")
            else:
                partition.is_known_empty = True
        return drawn

    async def _origins(self, drawn: Drawn) -> Origins:
        """Of those that are copies where they come from; what is not known of now is no longer among the drawn."""
        chained = [partition for partition in drawn if partition.is_chained]
        found = await asyncio.gather(*(self.chains.origin(p, drawn[p]) for p in chained), return_exceptions=True)
        origins: Origins = {}
        for partition, origin in zip(chained, found, strict=True):
            if isinstance(origin, Stopped):
                self._put_back(partition, drawn)
                partition.halt(origin.kind, str(origin))
                if origin.kind in _AGAIN_S and partition.stop is not None:
                    self._refused[partition.place] = partition.stop
            elif isinstance(origin, BaseException):
                raise origin
            elif origin is not None:
                origins[partition] = origin
        return origins

    def _put_back(self, partition: MirroredPartition, drawn: Drawn) -> None:
        """It is fetched again when it goes on."""
        given = sum(batch.size_bytes for batch in drawn.pop(partition))
        self._drawn_bytes -= given
        self.budget.give(given + partition.rewind())

    async def _transact(self, producer: TransactionalProducer, drawn: Drawn, origins: Origins) -> None:
        """Raises NotCommitted or OutcomeUnknown; everything is fetched again then, from where the log says."""
        written = {partition: list(gathered(found, self._batch_bytes(partition))) for partition, found in drawn.items()}
        parts = {
            partition: Part(partition.topic, partition.number, partition.local_id, deque(batches_of_it))
            for partition, batches_of_it in written.items()
        }
        await producer.write(list(parts.values()))
        chapters: list[Record] = []
        states: list[Record] = []
        progress: dict[MirroredPartition, Progress] = {}
        for partition, found in drawn.items():
            runs = merged(runs_of(written[partition], parts[partition]))
            local_next = runs[-1].local + runs[-1].size
            before, origin, chained = partition.progress, origins.get(partition), None
            source_id = partition.source_id if origin is None else origin.id
            old = None if before is None or before.original.id != source_id else before
            number, posts = (0, ()) if old is None else (old.chapters, old.signposts)
            if origin is not None:
                runs = composed(origin.runs, runs)
                next_offset = 0 if old is None else old.original.next_offset
                chained = Original(source_id, runs[-1].source + runs[-1].size if runs else next_offset)
            key, last = key_of(*partition.place), found[-1]
            if runs and partition.keeps_history:
                chapters.append((key, Chapter(source_id, number, posts, runs).encode(), []))
                post = Signpost(self._pairs_next + len(chapters) - 1, runs[0].source, runs[0].local)
                number, posts = number + 1, signposts_after(number, posts, post)
            progress[partition] = Progress(
                source_id=partition.source_id,
                local_id=partition.local_id,
                source_next=partition.drawn_to.offset,
                local_next=local_next,
                last_base=last.base,
                last_epoch=partition.drawn_to.epoch,
                last_crc=last.crc,
                last_ms=last.last_ms,
                chapters=number,
                signposts=posts,
                chained=chained,
            )
            states.append((key, progress[partition].encode(), []))
        await self._keep_books(producer, chapters, states)
        await producer.commit()
        if chapters:
            self._pairs_next += len(chapters) + 1  # the commit's own marker
        for partition, reached in progress.items():
            partition.progress = self._progress[partition.place] = reached
            partition.under_way = False
            if partition.passed is not None:
                self._has_passed(partition)
            partition.moved_records += sum(batch.size for batch in drawn[partition])
            partition.moved_bytes += sum(batch.size_bytes for batch in drawn[partition])
        self.budget.give(self._drawn_bytes)
        self._drawn_bytes = 0

    async def _pass(self, producer: TransactionalProducer) -> None:
        """Commits how far it is behind the last record: a cursor that has passed the markers there is good here."""
        passed, self._passed = self._passed, {}
        progress: dict[MirroredPartition, Progress] = {}
        for partition in passed:
            reached, done = partition.passed, partition.progress
            if reached is not None and done is not None and self.partitions.get(partition.place) is partition:
                progress[partition] = replace(done, source_next=reached.offset, last_epoch=reached.epoch)
        if not progress:
            return
        states: list[Record] = [(key_of(*p.place), reached.encode(), []) for p, reached in progress.items()]
        await self._keep_books(producer, [], states)
        await producer.commit()
        for partition, after in progress.items():
            partition.progress = self._progress[partition.place] = after

    def _batch_bytes(self, partition: MirroredPartition) -> int:
        """What small batches may be gathered into; 0: none are, since that was refused."""
        if partition.place in self._as_they_are:
            return 0
        return min(_BATCH_BYTES, self.targets.batch_bytes.get(partition.topic, 0))

    async def _keep_books(
        self,
        producer: TransactionalProducer,
        chapters: list[Record],
        states: list[Record],
    ) -> None:
        now_ms = int(time.time() * 1000)
        books = [Part(*producer.lane.state, self._topic_ids[1], deque(batches(states, _BATCH_BYTES, now_ms, _CODEC)))]
        if chapters:
            written = deque(batches(chapters, _BATCH_BYTES, now_ms, _CODEC))
            books.append(Part(self.config.pairs_topic, self.number, self._topic_ids[0], deque(written)))
        await producer.write(books)
        for part in books[1:]:
            first, base = part.offsets[0]
            if base < 0:
                raise NotCommitted(f"{part.topic}-{part.number}: the offset of a chapter is not known")
            if base != self._pairs_next + first:
                # A marker that Kafka left out (see `markers`): ending this by an abort would end the transaction before
                # alike. A reader of the history looks around where a chapter was foretold.
                log.event("warning", "chapter_elsewhere", lane=self.number, foretold=self._pairs_next, at=base)
                self._pairs_next = base - first

    # ---- going on after a stop --------------------------------------------------------------------------------

    async def resume(self, place: Place, start: int | None) -> int:
        """Goes on at an offset there (None: the first that is there) and returns it; committed when this returns.

        Raises CannotResume, and KafkaError.
        """
        partition = self.partitions.get(place)
        producer = self._producer
        if partition is None or producer is None or self.state != "serving":
            raise CannotResume(f"{place[0]}-{place[1]} is not mirrored by this lane at the moment; try again")
        if partition.stop is None:
            raise CannotResume(f"{place[0]}-{place[1]} has not stopped")
        if partition.stop.kind == "source-deleted":
            raise CannotResume(f"{place[0]} is not in {partition.dc} any more")
        remote = self.links[partition.dc].kafka
        first, end = await remote.offset(*place, EARLIEST), await remote.offset(*place, LATEST)
        at = first if start is None else start
        if not first <= at <= end:
            raise CannotResume(
                f"{partition.dc} has the offsets {first} to {end} of {place[0]}-{place[1]}, {at} is outside"
            )
        books = self.chains.of(partition)
        before = partition.progress
        is_same = before is not None and before.source_id == partition.source_id
        is_same = is_same and before is not None and before.local_id == partition.local_id
        if before is None or not is_same:
            local = 0 if before is None or before.local_id != partition.local_id else before.local_next
            after = Progress(partition.source_id, partition.local_id, at, local, -1, -1, 0, 0, 0, ())
        else:
            after = replace(before, source_next=at, last_base=-1, last_epoch=-1)
        if books is not None and before is not None and before.local_id == partition.local_id:
            after = await _of_the_same_original(books, place, before, after)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resumes[place] = (after, done)
        self._wake.set()
        await done
        return at

    async def _resume(self, producer: TransactionalProducer) -> None:
        resumes, self._resumes = self._resumes, {}
        try:
            states: list[Record] = [(key_of(*place), after.encode(), []) for place, (after, _) in resumes.items()]
            await self._keep_books(producer, [], states)
            await producer.commit()
        except BaseException as error:
            for _, done in resumes.values():
                if not done.done():
                    done.set_exception(CannotResume(f"Kafka here did not take it: {error!r}; try again"))
            raise
        for place, (after, done) in resumes.items():
            self._progress[place] = after
            self._refused.pop(place, None)
            partition = self.partitions.pop(place, None)
            if partition is not None:
                self.links[partition.dc].unfollow(partition)
                self.budget.give(partition.rewind())
                self._ready.pop(partition, None)
            log.event("info", "partition_resumed", topic=place[0], partition=place[1], source_next=after.source_next)
            if not done.done():
                done.set_result(None)
        for link in self.links.values():
            self.adopt(link, link.topics)


async def _of_the_same_original(books: Translation, place: Place, before: Progress, after: Progress) -> Progress:
    """The history goes on as long as the original is the same, whichever way its records come. Raises CannotResume."""
    try:
        original_id = (await books.progress(place)).original.id
        if original_id != before.original.id:
            return after
        original = Original(original_id, await books.to_original(place, after.source_next))
    except Problem as problem:
        raise CannotResume(problem.detail) from None
    return replace(after, chained=original, chapters=before.chapters, signposts=before.signposts)
