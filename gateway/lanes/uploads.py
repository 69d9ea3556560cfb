"""Uploads: transactions of the archive's protocol, by which a file becomes visible whole and once, or not at all. Pure.

Invariants:

* An upload is open, then sealed, then committed. Pieces are added to an open one alone, in order, so each digest has
  one meaning. What was committed stays so, with its answer, until it is forgotten.
* Every call names the content that it follows, by its digest: a call that finds other content in the state changes
  nothing. So nobody adds to, seals or commits what another client has stored under the same id.
* An upload that was not committed in time is gone. The call that finds it so ends it in the log before it is answered:
  no other worker, by its own clock, may take for alive what a client knows to be gone.
* It is of one incarnation of its topic, as the states of sources are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.contract.upload_state import StagedPiece, UploadState, piece_key, upload_key
from logferry.gateway.kafka.types import Record, TopicFacts
from logferry.gateway.lanes.dedup import Refusal
from logferry.gateway.lanes.receipts import UploadTable

_STATE_BYTES: Final = 256
_NONE_HERE: Final = "is not open here: it was never begun, or was not committed in time; begin again with piece 1"


class UploadRules(NamedTuple):
    """The settings that decide. ``commit_within_ms``: from the first piece on."""

    commit_within_ms: int = 30_000
    file_bytes: int = 32 << 20
    file_pieces: int = 1000


class Staging(NamedTuple):
    """The lane's partition of the staging topic, which it alone writes. ``end``: the next record has this offset, or
    a higher one."""

    tp: TopicPartition
    topic_id: bytes
    end: int


@dataclass(slots=True)
class StorePiece:
    """A request to keep a piece of a file. ``before``, ``after``: the digests around it. ``attributes``: of piece 1."""

    topic: TopicFacts
    source: SourceIdentity
    number: int
    before: bytes
    after: bytes
    data: bytes
    attributes: dict[str, str]
    token: str | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.data) + _STATE_BYTES


@dataclass(slots=True)
class SealUpload:
    """A request that all pieces are kept and none follows."""

    topic: TopicFacts
    source: SourceIdentity
    digest: bytes
    size_bytes: int = _STATE_BYTES
    token: str | None = None


@dataclass(slots=True)
class CommitUpload:
    """A request to make a file visible. ``chunks``: of the content that has the digest; none where it was committed
    when the request was made."""

    topic: TopicFacts
    source: SourceIdentity
    digest: bytes
    chunks: list[Chunk]
    size_bytes: int = _STATE_BYTES
    token: str | None = None


UploadRequest = StorePiece | SealUpload | CommitUpload


@dataclass(frozen=True, slots=True)
class UploadOutcome:
    """The answer to a request about an upload: its state after it.

    ``place``: the partition that it writes to, beside that of the states; None: none. ``span``: of a commit, the
    indexes of its records among those of the partition.
    """

    upload: UploadState
    place: TopicPartition | None = None
    span: tuple[int, int] | None = None


# ---- the rules of the calls ------------------------------------------------------------------------------------------


def decide_piece(known: UploadState | None, request: StorePiece, rules: UploadRules) -> str | Refusal:
    """``next`` or ``repeated``, or why the piece is not taken."""
    number, size = request.number, len(request.data) + (known.size_bytes if known else 0)
    if known is None and number > 1:
        return _unknown(request.source)
    count = len(known.pieces) if known else 0
    if known and number <= count:
        is_same = (known.digest_after(number - 1), known.digest_after(number)) == (request.before, request.after)
        return "repeated" if is_same else _conflict(f"piece {number} of it is another one")
    if number > count + 1:
        return Refusal("gap", f"piece {number}: the upload has {count} so far", None)
    if known and request.before != known.digest:
        return _conflict("the digest is not that of the pieces before this one")
    if known and known.is_sealed:
        return _conflict(f"the upload was requested to be committed with {count} pieces")
    if number > rules.file_pieces:
        return Refusal("too-large", f"piece {number}: a file may have {rules.file_pieces} (file_pieces)", None)
    if size > rules.file_bytes:
        return Refusal("too-large", f"the file has over {rules.file_bytes} bytes (file_bytes)", None)
    return "next"


def decide_end(known: UploadState | None, request: SealUpload | CommitUpload) -> str | Refusal:
    """``seal``, ``commit`` or ``repeated``, or why not."""
    if known is None:
        return _unknown(request.source)
    if request.digest != known.digest:
        return _conflict("the digest is not that of its pieces")
    if isinstance(request, SealUpload):
        return "repeated" if known.is_sealed else "seal"
    if known.commit is not None:
        return "repeated"
    return "commit" if known.is_sealed else Refusal("conflict", "commit_request comes before commit", None)


def _unknown(source: SourceIdentity) -> Refusal:
    return Refusal("unknown-transaction", f"{source.source_id.split('/', 2)[-1]} {_NONE_HERE}", None)


def _conflict(what: str) -> Refusal:
    return Refusal("conflict", f"{what}; use another transaction id", None)


# ---- the uploads of a transaction --------------------------------------------------------------------------------


def is_over(upload: UploadState, now_ms: int, window_ms: int) -> bool:
    """Whether it is as if it were not there."""
    if upload.is_expired:
        return upload.expires_ms + window_ms < now_ms
    at_ms = upload.expires_ms if upload.commit is None else upload.commit.at_ms + window_ms + 1
    return at_ms <= now_ms


def mark_of(upload: UploadState, now_ms: int, window_ms: int) -> UploadState | None:
    """What is kept of one that is over: of one that was not committed, for the window, that it was there."""
    mark = upload.as_gone()
    return mark if upload.commit is None and not is_over(mark, now_ms, window_ms) else None


# Drafts the chunks of a file, and its state as committed.
Publish = Callable[[CommitUpload, UploadState], UploadOutcome | Refusal]


@dataclass(slots=True)
class UploadDraft:
    """The uploads of one transaction of the lane in the making.

    ``window_ms``: for so long a committed one is remembered; None: nothing ends now, as the clocks differ. ``pieces``:
    the records for the staging topic.
    """

    table: UploadTable
    rules: UploadRules = field(default_factory=UploadRules)
    staging: Staging | None = None
    refused: Callable[[str, int], str | None] = lambda _topic, _partition: None
    states: dict[bytes, UploadState | None] = field(default_factory=dict)
    pieces: list[Record] = field(default_factory=list)
    _count: int = 0
    _bytes: int = 0

    def touches(self, source: SourceIdentity) -> bool:
        return bool(self.states) and upload_key(source.source_id) in self.states

    def add(self, request: UploadRequest, now_ms: int, publish: Publish) -> tuple[UploadOutcome | Refusal, bool]:
        """Decides the request. Returns the outcome and whether it changes the upload."""
        known = self._known(request)
        if isinstance(known, Refusal):
            return known, False
        if isinstance(request, StorePiece):
            outcome = self._store(request, known, now_ms)
        else:
            outcome = self._end(request, known, publish)
        if isinstance(outcome, Refusal) or outcome.upload is known:
            return outcome, False
        self.states[upload_key(request.source.source_id)] = outcome.upload
        return outcome, True

    def expire(self, keys: Iterable[bytes], now_ms: int, window_ms: int) -> Iterator[tuple[bytes, SourceIdentity]]:
        """Drafts the end of those that are over, with which this transaction has nothing else to do."""
        for key in keys:
            upload = None if key in self.states else self.table.read(key)
            if upload is not None and is_over(upload, now_ms, window_ms):
                has_room = self.table.kept.room(upload.token) > 0
                self.states[key] = mark_of(upload, now_ms, window_ms) if has_room else None
                yield key, SourceIdentity(upload.topic, None, key[1:].decode())

    def _known(self, request: UploadRequest) -> UploadState | Refusal | None:
        """The upload that the request is about, as of this transaction; None: there is none."""
        key = upload_key(request.source.source_id)
        found = self.states[key] if key in self.states else self.table.get(key)
        if found is None or found.is_expired:
            return None
        if found.topic != request.topic.name:
            return _conflict(f"its file goes to {found.topic}")
        return found if found.topic_id == request.topic.id else None

    def _store(self, request: StorePiece, known: UploadState | None, now_ms: int) -> UploadOutcome | Refusal:
        """Drafts the piece. The state is the one before for a piece that is repeated."""
        verdict = decide_piece(known, request, self.rules)
        if isinstance(verdict, Refusal):
            return verdict
        if known is not None and verdict == "repeated":
            return UploadOutcome(known)
        why = "archive is off" if self.staging is None else self.refused(*self.staging.tp)
        if self.staging is None or why is not None:
            return Refusal("kafka-unavailable", f"the staging topic takes nothing now: {why}", None)
        count, staged, token, size = self.table.count, self.table.staged, request.token, len(request.data)
        if known is None and self._count + 1 > count.room(token):
            return Refusal("overloaded", f"the lane has {count.used} uploads open (archive.lane_uploads)", None)
        if self._bytes + size > staged.room(token):
            return Refusal("overloaded", f"the lane keeps {staged.used} bytes of uploads (archive.lane_bytes)", None)
        if known is None:
            self._count += 1
            expires_ms = now_ms + self.rules.commit_within_ms
            known = UploadState(request.topic.name, request.topic.id, request.attributes, expires_ms, token)
        self._bytes += size
        piece = StagedPiece(self.staging.end + len(self.pieces), size, request.after)
        self.pieces.append((piece_key(request.source.source_id, request.number), request.data, []))
        return UploadOutcome(known._replace(pieces=(*known.pieces, piece)), self.staging.tp)

    def _end(
        self, request: SealUpload | CommitUpload, known: UploadState | None, publish: Publish
    ) -> UploadOutcome | Refusal:
        verdict = decide_end(known, request)
        if known is None or isinstance(verdict, Refusal):
            return verdict if isinstance(verdict, Refusal) else _unknown(request.source)
        if verdict == "repeated":
            return UploadOutcome(known)
        if isinstance(request, SealUpload):
            return UploadOutcome(known._replace(is_sealed=True))
        if len(request.chunks) != len(known.pieces):
            why = "the lane was reopened meanwhile; send the same request again"
            return Refusal("kafka-unavailable", why, None)
        return publish(request, known)
