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
from itertools import islice
from typing import Final

from logferry.gateway.contract.chunk import Chunk, record_headers
from logferry.gateway.contract.names import partition_of
from logferry.gateway.contract.source_state import Heartbeat, Receipt, SourceIdentity, SourceState, receipt_key
from logferry.gateway.contract.upload_state import UploadCommit, UploadState, upload_key
from logferry.gateway.kafka.types import Record, TopicFacts
from logferry.gateway.lanes.dedup import (
    SESSION_LAPSE_MS,
    Refusal,
    SourceTable,
    beat,
    decide_append,
    decide_write,
    open_session,
    refuse_opening,
    refuse_write,
    use_session,
)
from logferry.gateway.lanes.receipts import weight
from logferry.gateway.lanes.uploads import CommitUpload, UploadDraft, UploadOutcome, UploadRequest

REPEAT_WINDOW_MS: Final = 3_600_000  # by default


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
class AppendChunks:
    """A request to record chunks of one source, all or none, that get their seqnos from the lane.

    ``key``: the same request again has the same, and is a duplicate; None: each request is another one. ``digest``: 16
    bytes, of the content.
    """

    topic: TopicFacts
    source: SourceIdentity
    chunks: list[Chunk]
    size_bytes: int
    digest: bytes
    key: str | None = None
    token: str | None = None

    @property
    def receipt_key(self) -> bytes | None:
        return None if self.key is None else receipt_key(self.source, self.key)


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


Request = WriteChunks | AppendChunks | OpenSession | RecordHeartbeat | ForgetSource | UploadRequest


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """The answer to a `WriteChunks` or `AppendChunks`.

    ``span``: indexes of its records among those of its partition, None: none. ``receipt``: of an `AppendChunks`, the
    seqnos and the partition that its chunks got when they were recorded.
    """

    state: SourceState
    written: int
    duplicates: int
    span: tuple[int, int] | None
    receipt: Receipt | None = None


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


Outcome = WriteOutcome | SessionOutcome | HeartbeatOutcome | ForgetOutcome | UploadOutcome | Refusal


@dataclass(slots=True)
class Draft:
    """One transaction in the making. ``session_lapse_ms``: a session that is silent for so long has ended.

    ``number``: no other transaction has it. ``repeat_window_ms``: for so long a receipt counts, None: all count.
    ``refused``: why nothing may be written to a partition now, None: it may.
    ``chunks``: by (topic, partition), in order, each with its record's key. ``states``: of sources, and receipts, by
    their key in the state topic; None forgets.
    ``topics``: those that it writes to. ``uploads``: the part of it that is about those.
    """

    table: SourceTable
    now_ms: int
    max_seqno_jump: int | None = None
    session_lapse_ms: int = SESSION_LAPSE_MS
    refused: Callable[[str, int], str | None] = lambda _topic, _partition: None
    number: int = 1
    repeat_window_ms: int | None = REPEAT_WINDOW_MS
    chunks: dict[tuple[str, int], list[tuple[bytes, Chunk]]] = field(default_factory=dict)
    states: dict[bytes, bytes | None] = field(default_factory=dict)
    topics: dict[str, TopicFacts] = field(default_factory=dict)
    uploads: UploadDraft = field(init=False)
    size_bytes: int = 0
    _new_sources: int = 0
    _new_receipts: int = 0
    _decided_for: set[tuple[str, bytes]] = field(default_factory=set)
    _sources: dict[SourceIdentity, SourceState | None] = field(default_factory=dict)
    _pins: dict[tuple[str, str], int] = field(default_factory=dict)
    _forgotten: dict[SourceIdentity, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uploads = UploadDraft(self.table.uploads)

    def add(self, request: Request) -> tuple[Outcome, bool]:
        """Decides the request. Returns the outcome and whether it must wait for the commit to become true."""
        source = request.source
        if isinstance(request, ForgetSource):
            return self._forget(request)
        if isinstance(request, AppendChunks) and request.key is not None:
            known = self._receipt(request)
            if known is not None:
                return self._repeat(request, known), source in self._sources
        if isinstance(request, UploadRequest):
            return self._upload(request)
        refusal = self._refuse_new(source, request.token)
        if refusal is not None:
            return refusal, False
        state = self._state(request.topic, source, request.token)
        if isinstance(request, OpenSession):
            return self._open(request, state)
        if isinstance(request, RecordHeartbeat):
            return self._beat(request, state)
        return self._write(request, state), source in self._sources

    def _write(self, request: WriteChunks | AppendChunks, state: SourceState) -> WriteOutcome | Refusal:
        source = request.source
        if isinstance(request, AppendChunks):
            above = self._forgotten.get(source, 0)
            verdict = decide_append(state, request.chunks, self.now_ms, self.number, above)
        else:
            limits = (self.max_seqno_jump, request.token, self.session_lapse_ms)
            verdict = decide_write(state, request.chunks, request.session, self.now_ms, *limits)
        if isinstance(verdict, Refusal):
            return verdict
        span, receipt, partition = None, None, verdict.state.partition
        if verdict.chunks:
            why = self.refused(source.topic, partition)
            if why is not None:
                detail = f"partition {partition} of {source.topic} takes nothing now: {why}"
                return Refusal("kafka-unavailable", detail, None)
        if isinstance(request, AppendChunks):
            first, last = verdict.chunks[0].seqno, verdict.chunks[-1].seqno
            receipt = Receipt(request.topic.id, partition, first, last, self.now_ms, request.digest, request.token)
            refusal = self._keep_receipt(request, receipt)
            if refusal is not None:
                return refusal
        if verdict.chunks:
            span = self._append(source, partition, verdict.chunks)
            self.size_bytes += request.size_bytes
        if verdict.state is not state:
            self._put(request.topic, source, verdict.state)
        return WriteOutcome(verdict.state, len(verdict.chunks), verdict.duplicates, span, receipt)

    def _receipt(self, request: AppendChunks) -> Receipt | None:
        """Of the same request, drafted or committed; None: there is none that counts."""
        key = request.receipt_key
        if key is None:
            return None
        raw = self.states.get(key)
        found = self.table.receipts.get(key) if raw is None else Receipt.decode(raw)
        if found is None or found.topic_id != request.topic.id:
            return None
        is_over = self.repeat_window_ms is not None and found.at_ms + self.repeat_window_ms < self.now_ms
        return None if is_over else found

    def _repeat(self, request: AppendChunks, known: Receipt) -> Outcome:
        if known.digest != request.digest:
            return Refusal("key-reused", "a request with this Idempotency-Key and another content was recorded", None)
        state = self._state(request.topic, request.source, request.token)
        return WriteOutcome(state, 0, len(request.chunks), None, known)

    def _keep_receipt(self, request: AppendChunks, receipt: Receipt) -> Refusal | None:
        """Drafts the receipt of a request with a key. The refusal where the lane has no room for it."""
        key, shares = request.receipt_key, self.table.receipts.shares
        if key is None:
            return None
        if self._new_receipts + weight(key) > shares.room(request.token):
            held = f"{shares.used} of {shares.limit} receipts (receivers.lane_receipts)"
            held += f", {shares.of_token(request.token)} of this token" if request.token else ""
            return Refusal("overloaded", f"the lane holds {held}; a request without Idempotency-Key needs none", None)
        self._new_receipts += weight(key)
        self.states[key] = receipt.encode()
        return None

    def _refuse_new(self, source: SourceIdentity, token: str | None) -> Refusal | None:
        """The drafted ones count for everybody, so that a token may have a transaction's fewer than its share."""
        shares = self.table.shares
        if self._new_sources + shares.used < shares.limit // 8:
            return None
        key = source.state_key()
        if key in self.table or key in self.states or self._new_sources + weight(key) <= shares.room(token):
            return None
        held = f"{shares.used} of {shares.limit} sources (limits.lane_sources)"
        if shares.used < shares.limit:
            held += f", {shares.of_token(token)} of this token, which leaves room for others"
        return Refusal("overloaded", f"the lane holds {held}, and takes no new ones", None)

    def _upload(self, request: UploadRequest) -> tuple[Outcome, bool]:
        self.expire_uploads(1, upload_key(request.source.source_id))
        was_drafted = self.uploads.touches(request.source)
        outcome, is_new = self.uploads.add(request, self.now_ms, self._publish)
        if isinstance(outcome, Refusal) or not is_new:
            return outcome, was_drafted
        self.states[upload_key(request.source.source_id)] = outcome.upload.encode()
        self.size_bytes += request.size_bytes
        self._touch(request.topic)
        return outcome, True

    def _publish(self, request: CommitUpload, known: UploadState) -> UploadOutcome | Refusal:
        """Drafts the chunks of the file, and its state with their place."""
        source, token, kept = request.source, request.token, weight(known.encode())
        if self._new_receipts + kept > self.table.receipts.shares.room(token):
            return Refusal("overloaded", "the lane remembers no more requests now (receivers.lane_receipts)", None)
        state, refusal = self._state(request.topic, source, token), self._refuse_new(source, token)
        chunks = AppendChunks(request.topic, source, request.chunks, 0, request.digest, None, token)
        written = refusal or self._write(chunks, state)
        if isinstance(written, Refusal):
            return written
        self._new_receipts += kept
        finished = written.state._replace(heartbeat=Heartbeat(self.now_ms, finished=True))  # nobody waits for it
        self._put(request.topic, source, finished)
        commit = UploadCommit(finished.partition, (finished.recorded or 0) - written.written + 1, self.now_ms)
        return UploadOutcome(known._replace(commit=commit), (source.topic, finished.partition), written.span)

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

    def expire_receipts(self, limit: int) -> None:
        """Forgets the oldest receipts that no longer count: at most so many, or twice as many as it adds."""
        if self.repeat_window_ms is not None:
            expired = self.table.receipts.expired(self.now_ms - self.repeat_window_ms)
            for key in islice(expired, max(limit, 2 * self._new_receipts)):
                self.states.setdefault(key, None)

    def expire_uploads(self, limit: int, only: bytes | None = None) -> None:
        """Forgets so many uploads that were not committed in time, or are remembered no longer, with their sources."""
        if (window_ms := self.repeat_window_ms) is None:
            return
        keys = islice(self.uploads.table.ended(self.now_ms, window_ms), limit) if only is None else [only]
        for key, source in self.uploads.expire(keys, self.now_ms, window_ms):
            self.states[key] = (left := self.uploads.states[key]) and left.encode()
            if source.state_key() in self.table and source not in self._sources:
                self.states[source.state_key()] = self._sources[source] = None

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
        if known is not None:
            self._forgotten[source] = known.recorded or 0
        self.states[source.state_key()] = None
        self._touch(request.topic)
        return ForgetOutcome(known), True

    def touches(self, source: SourceIdentity) -> bool:
        return source in self._sources or self.uploads.touches(source)

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
