"""What one transaction of a lane holds, and what each request is told afterwards. Pure: no I/O, no clock.

Invariants:

* Decisions are taken when the transaction is put together, in the order of arrival, against the committed
  states plus what was drafted before in the same transaction. One transaction runs at a time, so nothing is ever
  judged against what may still be undone, and a duplicate of a chunk that is under way waits for its outcome.
* The states go into the same transaction as the chunks: the log and what is known of it cannot disagree.
* An answer that rests on drafted state is given after the commit only.
* When a transaction fails, every request of the sources it touched fails with it, the queued ones too
  (`Draft.touches`): a later chunk must not overtake an earlier one that was undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from logferry.gateway.contract.chunk import Chunk, Headers, partition_of, record_headers
from logferry.gateway.lanes.dedup import (
    Heartbeat,
    Refusal,
    Source,
    SourceState,
    SourceTable,
    beat,
    decide_write,
    open_session,
    superseded,
)


class TopicFacts(NamedTuple):
    """What is known of a Kafka topic; ``id`` changes when it is deleted and created anew."""

    name: str
    id: bytes
    partitions: int
    max_message_bytes: int


@dataclass(slots=True)
class Write:
    """A request to record chunks of one source, all or none."""

    topic: TopicFacts
    source: Source
    session: int | None
    chunks: list[Chunk]
    size_bytes: int


@dataclass(slots=True)
class OpenSession:
    """A request for a new session; the source is pinned by it."""

    topic: TopicFacts
    source: Source
    size_bytes: int = 256


@dataclass(slots=True)
class Beat:
    """A request to record what a source says of itself."""

    topic: TopicFacts
    source: Source
    session: int | None
    heartbeat: Heartbeat
    size_bytes: int = 256


@dataclass(slots=True)
class Forget:
    """A request to forget a source: its next chunk is the first again, and deduplication knows nothing of it."""

    topic: TopicFacts
    source: Source
    size_bytes: int = 256


Request = Write | OpenSession | Beat | Forget


@dataclass(frozen=True, slots=True)
class Written:
    """The answer to a `Write`. ``span``: indexes of its records among those of its partition, None: none."""

    state: SourceState
    written: int
    duplicates: int
    span: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class SessionOpened:
    state: SourceState


@dataclass(frozen=True, slots=True)
class Beaten:
    """The answer to a `Beat`."""

    state: SourceState


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The answer to a `Forget`: what was known before, None: nothing."""

    before: SourceState | None


Outcome = Written | SessionOpened | Beaten | Forgotten | Refusal


# Key, value (None forgets a state), headers: a plain tuple, there is one for each chunk.
Record = tuple[bytes, bytes | None, Headers]


@dataclass(slots=True)
class Draft:
    """One transaction in the making.

    ``records``: by (topic, partition), in order. ``states``: by state key, None forgets. ``topics``: those that it
    writes to.
    """

    table: SourceTable
    now_ms: int
    max_seqno_jump: int | None = None
    max_sources: int | None = None
    records: dict[tuple[str, int], list[Record]] = field(default_factory=dict)
    states: dict[bytes, bytes | None] = field(default_factory=dict)
    topics: dict[str, TopicFacts] = field(default_factory=dict)
    size_bytes: int = 0
    _new_sources: int = 0
    _decided_for: set[tuple[str, bytes]] = field(default_factory=set)
    _sources: dict[Source, SourceState | None] = field(default_factory=dict)
    _pins: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, request: Request) -> tuple[Outcome, bool]:
        """Decides the request. Returns the outcome and whether it must wait for the commit to become true."""
        source = request.source
        if not isinstance(request, Forget) and self._is_one_too_many(source):
            detail = f"{self.max_sources} sources are known to the lane, and this one is not; it takes no new ones"
            return Refusal("overloaded", detail, None), False
        state = self._state(request.topic, source)
        if isinstance(request, OpenSession):
            opened = open_session(state, self.now_ms)
            self._put(request.topic, source, opened)
            return SessionOpened(opened), True
        if isinstance(request, Beat):
            return self._beat(request, state)
        if isinstance(request, Forget):
            return self._forget(request)
        verdict = decide_write(state, request.chunks, request.session, self.now_ms, self.max_seqno_jump)
        if isinstance(verdict, Refusal):
            return verdict, source in self._sources
        span = None
        if verdict.chunks:
            self._put(request.topic, source, verdict.state)
            span = self._append(source, verdict.state.partition, verdict.chunks)
            self.size_bytes += request.size_bytes
        outcome = Written(verdict.state, len(verdict.chunks), verdict.duplicates, span)
        return outcome, source in self._sources

    def _is_one_too_many(self, source: Source) -> bool:
        if self.max_sources is None or len(self.table) + self._new_sources < self.max_sources:
            return False
        key = source.state_key()
        return key not in self.table and key not in self.states

    def expire(self, key: bytes, before_ms: int) -> None:
        """Forgets a source that was last heard of before that time, unless this transaction has news of it."""
        state = self.table.read(key)
        if key not in self.states and state is not None and state.alive_ms < before_ms:
            self.states[key] = None
            self._sources[Source.of_state_key(key)] = None

    def _beat(self, request: Beat, state: SourceState) -> tuple[Outcome, bool]:
        refusal = superseded(state, request.session)
        if refusal is not None:
            return refusal, request.source in self._sources
        after = beat(state, request.heartbeat)
        self._put(request.topic, request.source, after)
        return Beaten(after), True

    def _forget(self, request: Forget) -> tuple[Outcome, bool]:
        source = request.source
        known = self._sources[source] if source in self._sources else self.table.get(source, request.topic.id)
        if known is None and not self.touches(source):
            return Forgotten(None), False
        self._sources[source] = None
        self.states[source.state_key()] = None
        self._touch(request.topic)
        return Forgotten(known), True

    def touches(self, source: Source) -> bool:
        return source in self._sources

    def is_empty(self) -> bool:
        return not self.states

    def partitions(self) -> set[tuple[str, int]]:
        """What it writes to, and one partition of each topic whose sources alone it changes."""
        written = set(self.records)
        return written | {(topic, 0) for topic in self.topics.keys() - {topic for topic, _ in written}}

    def changed_topic(self, ids: Mapping[str, bytes]) -> str | None:
        """A topic that is not, or not in every request, the one that the draft was decided for; None: all are.

        The facts of two requests may differ in age, so one draft may have met a topic before and after it was
        created anew. Such a draft must not be committed whatever the topic is now.
        """
        return next((name for name, topic_id in self._decided_for if ids.get(name) != topic_id), None)

    def _state(self, topic: TopicFacts, source: Source) -> SourceState:
        state = self._sources[source] if source in self._sources else self.table.get(source, topic.id)
        if state is not None:
            return state
        pin = self._pins.get((source.topic, source.key))
        if pin is None:
            pin = self.table.pinned(source.topic, source.key, topic.id)
        if pin is None:
            pin = partition_of(source.key, topic.partitions)
        return SourceState(topic.id, pin, None, None, 0, self.now_ms)

    def _put(self, topic: TopicFacts, source: Source, state: SourceState) -> None:
        self._sources[source] = state
        self._pins[source.topic, source.key] = state.partition
        key = source.state_key()
        if key not in self.states and key not in self.table:
            self._new_sources += 1
        self.states[key] = state.encode()
        self._touch(topic)

    def _touch(self, topic: TopicFacts) -> None:
        self.topics[topic.name] = topic
        self._decided_for.add((topic.name, topic.id))

    def _append(self, source: Source, partition: int, chunks: list[Chunk]) -> tuple[int, int]:
        records = self.records.setdefault((source.topic, partition), [])
        first = len(records)
        key = source.source_id.encode()
        for chunk in chunks:
            records.append((key, chunk.data, record_headers(chunk, self.now_ms)))
        return first, len(records) - 1


def resolve(outcome: Outcome, replayed: SourceState | None) -> bool | None:
    """Whether a transaction of unknown outcome was committed, by what a replay after the fence says of one source.

    True is certain: what the request asked for is in the log, once. False is certain as well: after the fence
    nothing of the older transaction can be committed any more. None: the log can't tell, since another owner was
    there in between, and a newer session wrote past it, or another opening got the same number.

    A refusal rested on what that transaction may have undone and names a seqno that may not be recorded: it is
    never given, and the request wrote nothing.
    """
    if isinstance(outcome, Refusal):
        return False
    if isinstance(outcome, Forgotten):
        return replayed is None
    drafted = outcome.state
    if replayed is None or replayed.topic_id != drafted.topic_id:
        return False
    if isinstance(outcome, SessionOpened):
        return None if replayed.session >= drafted.session else False
    if isinstance(outcome, Beaten):
        return replayed.heartbeat == drafted.heartbeat
    if replayed.base != drafted.base or replayed.recorded is None or replayed.recorded < (drafted.recorded or 0):
        return False
    return True if replayed.session == drafted.session else None
