"""The content of one transaction of a lane, and the answer to each request in it. Pure: no I/O, no clock.

Invariants:

* Decisions are taken when the transaction is assembled, in the order of arrival, against the committed states plus
  the drafted ones of the same transaction. One transaction runs at a time, so no request is ever judged against a
  state that may still be undone, and a duplicate of a chunk in flight waits for its outcome.
* The states are in the same transaction as the chunks: log and states cannot disagree.
* An answer that depends on drafted state is given only after the commit.
* When a transaction fails, every request of the sources it touched fails with it, the queued ones too
  (`Draft.touches`): a later chunk must not overtake an earlier one that was undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.gateway.contract.names import partition_of
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity, SourceState
from logferry.gateway.kafka.types import Record, TopicFacts
from logferry.gateway.lanes.dedup import (
    SESSION_LAPSE_MS,
    Refusal,
    SourceTable,
    beat,
    decide_write,
    open_session,
    refuse_opening,
    refuse_write,
    use_session,
    weight,
)


@dataclass(slots=True)
class WriteChunks:
    """A request to record chunks of one source, all or none. ``token``: the name of the caller's, None: without one."""

    topic: TopicFacts
    source: SourceIdentity
    session: int | None
    chunks: list[Chunk]
    size_bytes: int
    token: str | None = None


@dataclass(slots=True)
class OpenSession:
    """A request for a new session; the source is pinned by it. ``is_admin``: the caller administers the topic."""

    topic: TopicFacts
    source: SourceIdentity
    size_bytes: int = 256
    token: str | None = None
    is_admin: bool = False


@dataclass(slots=True)
class RecordHeartbeat:
    topic: TopicFacts
    source: SourceIdentity
    session: int | None
    heartbeat: Heartbeat
    size_bytes: int = 256
    token: str | None = None


@dataclass(slots=True)
class ForgetSource:
    """A request to forget a source: its next chunk is the first again, without deduplication against older ones."""

    topic: TopicFacts
    source: SourceIdentity
    size_bytes: int = 256
    token: str | None = None


Request = WriteChunks | OpenSession | RecordHeartbeat | ForgetSource


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The answer to a `WriteChunks`. ``span``: indexes of its records among those of its partition, None: none."""

    state: SourceState
    written: int
    duplicates: int
    span: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    state: SourceState


@dataclass(frozen=True, slots=True)
class HeartbeatOutcome:
    state: SourceState


@dataclass(frozen=True, slots=True)
class ForgetOutcome:
    """The answer to a `ForgetSource`: the state before; None: the source was not known."""

    before: SourceState | None


Outcome = WriteOutcome | SessionOutcome | HeartbeatOutcome | ForgetOutcome | Refusal


@dataclass(slots=True)
class Draft:
    """One transaction in the making. ``session_lapse_ms``: a session that is silent for so long has ended.

    ``refused``: why nothing may be written to a partition now, None: it may.
    ``chunks``: by (topic, partition), in order, each with its record's key. ``states``: by state key, None forgets.
    ``topics``: those that it writes to.
    """

    table: SourceTable
    now_ms: int
    max_seqno_jump: int | None = None
    session_lapse_ms: int = SESSION_LAPSE_MS
    refused: Callable[[str, int], str | None] = lambda _topic, _partition: None
    chunks: dict[tuple[str, int], list[tuple[bytes, Chunk]]] = field(default_factory=dict)
    states: dict[bytes, bytes | None] = field(default_factory=dict)
    topics: dict[str, TopicFacts] = field(default_factory=dict)
    size_bytes: int = 0
    _new_sources: int = 0
    _decided_for: set[tuple[str, bytes]] = field(default_factory=set)
    _sources: dict[SourceIdentity, SourceState | None] = field(default_factory=dict)
    _pins: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, request: Request) -> tuple[Outcome, bool]:
        """Decides the request. Returns the outcome and whether it must wait for the commit to become true."""
        source = request.source
        if isinstance(request, ForgetSource):
            return self._forget(request)
        if self._is_one_too_many(source, request.token):
            shares = self.table.shares
            held = f"{shares.used} of {shares.limit} sources (limits.lane_sources)"
            if shares.used < shares.limit:
                held += f", {shares.of_token(request.token)} of this token, which leaves room for others"
            return Refusal("overloaded", f"the lane holds {held}, and takes no new ones", None), False
        state = self._state(request.topic, source, request.token)
        if isinstance(request, OpenSession):
            return self._open(request, state)
        if isinstance(request, RecordHeartbeat):
            return self._beat(request, state)
        limits = (self.max_seqno_jump, request.token, self.session_lapse_ms)
        verdict = decide_write(state, request.chunks, request.session, self.now_ms, *limits)
        if isinstance(verdict, Refusal):
            return verdict, source in self._sources
        span = None
        if verdict.chunks:
            why = self.refused(source.topic, verdict.state.partition)
            if why is not None:
                detail = f"partition {verdict.state.partition} of {source.topic} takes nothing now: {why}"
                return Refusal("kafka-unavailable", detail, None), False
            span = self._append(source, verdict.state.partition, verdict.chunks)
            self.size_bytes += request.size_bytes
        if verdict.state is not state:
            self._put(request.topic, source, verdict.state)
        outcome = WriteOutcome(verdict.state, len(verdict.chunks), verdict.duplicates, span)
        return outcome, source in self._sources

    def _is_one_too_many(self, source: SourceIdentity, token: str | None) -> bool:
        """The drafted ones count for everybody, so that a token may have a transaction's fewer than its share."""
        shares = self.table.shares
        if self._new_sources + shares.used < shares.limit // 8:
            return False
        key = source.state_key()
        if key in self.table or key in self.states:
            return False
        return self._new_sources + weight(key) > shares.room(token)

    def _open(self, request: OpenSession, state: SourceState) -> tuple[Outcome, bool]:
        token, is_admin = request.token, request.is_admin
        refusal = refuse_opening(state, token, self.now_ms, self.session_lapse_ms, is_admin=is_admin)
        if refusal is not None:
            return refusal, request.source in self._sources
        opened = open_session(state, self.now_ms, token)
        self._put(request.topic, request.source, opened)
        return SessionOutcome(opened), True

    def expire(self, key: bytes, before_ms: int) -> None:
        """Forgets a source that was last heard of before that time, unless this transaction has news of it."""
        state = self.table.read(key)
        if key not in self.states and state is not None and state.alive_ms < before_ms:
            self.states[key] = None
            self._sources[SourceIdentity.of_state_key(key)] = None

    def _beat(self, request: RecordHeartbeat, state: SourceState) -> tuple[Outcome, bool]:
        refusal = refuse_write(state, request.session, request.token)
        if refusal is not None:
            return refusal, request.source in self._sources
        after = beat(use_session(state) if request.session else state, request.heartbeat)
        self._put(request.topic, request.source, after)
        return HeartbeatOutcome(after), True

    def _forget(self, request: ForgetSource) -> tuple[Outcome, bool]:
        source = request.source
        known = self._sources[source] if source in self._sources else self.table.get(source, request.topic.id)
        if known is None and not self.touches(source):
            return ForgetOutcome(None), False
        self._sources[source] = None
        self.states[source.state_key()] = None
        self._touch(request.topic)
        return ForgetOutcome(known), True

    def touches(self, source: SourceIdentity) -> bool:
        return source in self._sources

    def is_empty(self) -> bool:
        return not self.states

    def changed_topic(self, ids: Mapping[str, bytes]) -> str | None:
        """A topic that is not, or not in every request, the one that the draft was decided for; None: all are.

        The facts of two requests may differ in age, so one draft may hold a topic from before and after it was
        recreated. Such a draft must not be committed, whatever the topic is now.
        """
        return next((name for name, topic_id in self._decided_for if ids.get(name) != topic_id), None)

    def _state(self, topic: TopicFacts, source: SourceIdentity, token: str | None) -> SourceState:
        state = self._sources[source] if source in self._sources else self.table.get(source, topic.id)
        if state is not None:
            return state
        pin = self._pins.get((source.topic, source.key))
        if pin is None:
            pin = self.table.pinned(source.topic, source.key, topic.id)
        if pin is None:
            pin = partition_of(source.key, topic.partitions)
        return SourceState(topic.id, pin, None, None, 0, self.now_ms, token=token)

    def _put(self, topic: TopicFacts, source: SourceIdentity, state: SourceState) -> None:
        self._sources[source] = state
        self._pins[source.topic, source.key] = state.partition
        key = source.state_key()
        if key not in self.states and key not in self.table:
            self._new_sources += weight(key)
        self.states[key] = state.encode()
        self._touch(topic)

    def _touch(self, topic: TopicFacts) -> None:
        self.topics[topic.name] = topic
        self._decided_for.add((topic.name, topic.id))

    def _append(self, source: SourceIdentity, partition: int, chunks: list[Chunk]) -> tuple[int, int]:
        drafted = self.chunks.setdefault((source.topic, partition), [])
        first = len(drafted)
        key = source.source_id.encode()
        drafted.extend((key, chunk) for chunk in chunks)
        return first, len(drafted) - 1

    def records(self, partition: tuple[str, int]) -> list[Record]:
        """The records for one of the partitions. Their headers cost more than all decisions, so they are made last."""
        return [(key, chunk.data, record_headers(chunk, self.now_ms)) for key, chunk in self.chunks[partition]]


def resolve(outcome: Outcome, replayed: SourceState | None) -> bool | None:
    """Whether a transaction of unknown outcome was committed, by what a replay after the fence says of one source.

    True is certain: the requested change is in the log, once. False is certain as well: after the fence
    nothing of the older transaction can be committed any more. None: the log can't tell, since another owner was
    there in between, and a newer session wrote past it, or another opening got the same number.

    A refusal rested on what that transaction may have undone and names a seqno that may not be recorded: it is
    never given, and the request wrote nothing.
    """
    if isinstance(outcome, Refusal):
        return False
    if isinstance(outcome, ForgetOutcome):
        # A source that is known again may have been forgotten in between.
        return True if replayed is None else False if replayed == outcome.before else None
    drafted = outcome.state
    if replayed is None or replayed.topic_id != drafted.topic_id:
        return False
    if isinstance(outcome, SessionOutcome):
        return None if replayed.session >= drafted.session else False
    if isinstance(outcome, HeartbeatOutcome):
        if replayed.heartbeat == drafted.heartbeat:
            return True
        return None if replayed.session != drafted.session or _is_newer(replayed, drafted) else False
    if replayed.base != drafted.base or replayed.recorded is None or replayed.recorded < (drafted.recorded or 0):
        return False
    return True if replayed.session == drafted.session else None


def _is_newer(state: SourceState, drafted: SourceState) -> bool:
    """Whether the state has a heartbeat that is not older than the drafted one, which it may have replaced."""
    if state.heartbeat is None or drafted.heartbeat is None:
        return False
    return state.heartbeat.at_ms >= drafted.heartbeat.at_ms
