"""A world around the pure part of uploads: a log, two workers that may both believe they own the lane, and clients.

The workers do with `Draft`, `SourceTable` and `resolve_upload` what lane and handler do. All clients use the same
transaction id, each with a content of its own or of another one; they are killed and start again. `Violated` is raised
at the first step after which the promise does not hold: what is visible is one client's file, whole and once in its
window; an answer is never false; what a client knows to be gone is never visible.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.contract.upload_state import UploadState, first_digest, next_digest, piece_key, upload_key
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes import resolution
from logferry.gateway.lanes.dedup import Refusal, SourceTable
from logferry.gateway.lanes.transaction import Draft, Outcome
from logferry.gateway.lanes.uploads import (
    CommitUpload,
    SealUpload,
    Staging,
    StorePiece,
    UploadOutcome,
    UploadRequest,
    UploadRules,
)

FACTS: Final = TopicFacts("dc1.t", b"t" * 16, 2, 1 << 20)
SOURCE: Final = SourceIdentity("dc1.t", None, "archive/-/x")
KEY: Final = upload_key(SOURCE.source_id)
STAGING: Final = ("staging", 0)
WITHIN_MS: Final = 12
WINDOW_MS: Final = 40
RULES: Final = UploadRules(WITHIN_MS, 1 << 20, 100)
# The files of the clients: the second one begins like the first, the third is another one of the same length.
FILES: Final = (
    ("a", [b"one", b"two"]),
    ("a", [b"one", b"two", b"three"]),
    ("a", [b"one", b"2"]),
    ("b", [b"one", b"two"]),
)


class Violated(AssertionError):
    """The promise does not hold."""


@dataclass(eq=False)
class Call:
    """A call on its way. ``before``: its digest. ``is_heard``: the client waits for the answer.

    ``staged``: the records in the staging topic when it was decided.
    """

    client: ArchiveClient
    kind: str
    number: int
    before: bytes
    is_heard: bool = True
    answer: str | None = None
    staged: int = 0


@dataclass(eq=False)
class ArchiveClient:
    """Runs the protocol with its file, and the same call again until it knows. ``step``: of its pieces, then 2 ends."""

    attributes: dict[str, str]
    pieces: list[bytes]
    step: int = 0
    digest: bytes = b""
    flying: list[Call] = field(default_factory=list)
    done: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        self.digest = first_digest(FACTS.name, self.attributes)

    @property
    def content(self) -> tuple[str, tuple[bytes, ...]]:
        return self.attributes["name"], tuple(self.pieces)

    def next_call(self) -> Call:
        if self.step < len(self.pieces):
            return Call(self, "store", self.step + 1, self.digest)
        return Call(self, "seal" if self.step == len(self.pieces) else "commit", 0, self.digest)

    def restart(self) -> None:
        """It forgets everything but its file."""
        for call in self.flying:
            call.is_heard = False
        self.flying.clear()
        self.step, self.digest = 0, first_digest(FACTS.name, self.attributes)

    def hears(self, call: Call, outcome: UploadOutcome | Refusal | None) -> None:
        """None: no certain answer, the same call is made again."""
        if call in self.flying:
            self.flying.remove(call)
        if not call.is_heard or outcome is None:
            return
        if isinstance(outcome, Refusal):
            if outcome.kind in ("unknown-transaction", "conflict", "gap"):
                self.restart()
        elif call.before == self.digest and call.kind == self.next_call().kind:
            self.digest = outcome.upload.digest_after(call.number) if call.kind == "store" else self.digest
            self.step = min(self.step + 1, len(self.pieces) + 1)


@dataclass
class ArchiveLog:
    """What Kafka holds. ``visible``: (when, content) of each file in the topic. ``late``: a commit on the wire."""

    epoch: int = 0
    states: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    staging: list[tuple[bytes, bytes] | None] = field(default_factory=list)
    deleted_to: int = 0
    visible: list[tuple[int, tuple[str, tuple[bytes, ...]], int]] = field(default_factory=list)
    late: tuple[Draft, int] | None = None


class ArchiveWorker:
    """One worker's lane. ``clock_ms``: how far its clock is from that of the world."""

    def __init__(self, world: ArchiveWorld) -> None:
        self.world, self.clock_ms = world, 0
        self.table, self.epoch, self.end = SourceTable(), -1, 0
        self.is_open = False
        self.queue: deque[tuple[Call, UploadRequest]] = deque()
        self.draft: Draft | None = None
        self.in_flight: list[tuple[Call, Outcome]] = []

    def submit(self, call: Call) -> None:
        """As the handler does it: what is unknown to the owner is refused, what may be committed is read."""
        if not self.is_open:
            return self.world.answer(call, None)
        known = self.table.uploads.get(KEY)
        if known is None and not (call.kind == "store" and call.number == 1):
            # `Lane.confirm`: only the owner may say so.
            refusal, call.staged = Refusal("unknown-transaction", "", None), len(self.world.log.staging)
            return self.world.answer(call, None if self.epoch != self.world.log.epoch else refusal)
        request: UploadRequest
        if call.kind == "store":
            data = call.client.pieces[call.number - 1]
            after = next_digest(call.before, data)
            request = StorePiece(FACTS, SOURCE, call.number, call.before, after, data, call.client.attributes)
        elif call.kind == "seal":
            request = SealUpload(FACTS, SOURCE, call.before)
        else:
            chunks = []
            if known is not None and known.commit is None and known.is_sealed and known.digest == call.before:
                found = self._read(known)
                if found is None:
                    return self.world.answer(call, None)
                chunks = [Chunk(0, None, 1, known.attributes, piece) for piece in found]
            request = CommitUpload(FACTS, SOURCE, call.before, chunks)
        self.queue.append((call, request))
        return None

    def _read(self, upload: UploadState) -> list[bytes] | None:
        """As `read_pieces`; None: a piece is missing."""
        found, digest = list[bytes](), upload.digest_after(0)
        for number, piece in enumerate(upload.pieces, 1):
            log = self.world.log
            for record in log.staging[max(piece.at_least, log.deleted_to) :]:
                if record is not None and record[0] == piece_key(SOURCE.source_id, number):
                    after = next_digest(digest, record[1])
                    if after == piece.digest:
                        found.append(record[1])
                        digest = after
                        break
        return found if len(found) == len(upload.pieces) else None

    def open(self) -> None:
        if self.draft is not None:
            return
        log = self.world.log
        log.epoch += 1
        log.late = None
        self.epoch, self.is_open = log.epoch, True
        self.table = SourceTable()
        for key, raw in log.states:
            self.table.apply(key, raw)
        self.end = len(log.staging)
        for call, outcome in self.in_flight:
            found = None
            if isinstance(outcome, UploadOutcome):
                found = resolution.resolve_upload(outcome, self.table.uploads.get(KEY))
            self.world.answer(call, found)
        self.in_flight.clear()

    def gather(self, count: int) -> None:
        if not self.is_open or self.draft is not None:
            return
        draft = Draft(self.table, self.world.now_ms + self.clock_ms)
        self.world.transactions += 1
        draft.number, draft.repeat_window_ms = self.world.transactions, WINDOW_MS
        draft.uploads.rules, draft.uploads.staging = RULES, Staging(STAGING, b"s" * 16, self.end)
        while self.queue and count:
            count -= 1
            call, request = self.queue.popleft()
            call.staged = len(self.world.log.staging)
            outcome, must_wait = draft.add(request)
            if must_wait:
                self.in_flight.append((call, outcome))
            elif self.epoch == self.world.log.epoch:
                self.world.answer(call, outcome)
            else:
                self.world.answer(call, None)
        draft.expire_uploads(10)
        self.draft = None if draft.is_empty() else draft

    def finish(self, how: str) -> None:
        """``commit``, ``answer-lost``, ``commit-lost``, ``commit-late``."""
        draft, log = self.draft, self.world.log
        if draft is None:
            return
        self.draft = None
        if self.epoch != log.epoch or how != "commit":
            if self.epoch == log.epoch and how == "answer-lost":
                self.world.append(draft)
            if self.epoch == log.epoch and how == "commit-late":
                log.late = draft, self.epoch
            self.is_open = False
            for call, _ in self.queue:
                self.world.answer(call, None)
            self.queue.clear()
            return
        before = len(log.staging)
        self.world.append(draft)
        for key, raw in draft.states.items():
            self.table.apply(key, raw)
        self.end = before + len(draft.uploads.pieces) if draft.uploads.pieces else self.end
        in_flight, self.in_flight = self.in_flight, []
        for call, outcome in in_flight:
            self.world.answer(call, outcome)

    def free(self) -> None:
        """Deletes what no upload needs, also where the lane is another worker's meanwhile."""
        log = self.world.log
        if self.is_open:
            log.deleted_to = max(log.deleted_to, self.table.uploads.needed_from(self.end))

    def kill(self) -> None:
        if self.draft is not None and self.epoch == self.world.log.epoch:
            self.world.log.late = self.draft, self.epoch
        for call, _ in (*self.in_flight, *self.queue):
            self.world.answer(call, None)
        self.in_flight.clear()
        self.queue.clear()
        self.draft, self.is_open = None, False


class ArchiveWorld:
    """Everything, and the steps that may be taken in any order, each with two numbers."""

    def __init__(self, clients: list[int]) -> None:
        self.now_ms, self.transactions = 1000, 0
        self.log = ArchiveLog()
        self.clients = [ArchiveClient({"name": FILES[n][0]}, FILES[n][1]) for n in clients]
        self.workers = [ArchiveWorker(self), ArchiveWorker(self)]
        self.workers[0].open()
        self.acknowledged = 0
        # What was staged before is of uploads that a client knows to be gone.
        self.gone_before = 0

    # ---- steps ------------------------------------------------------------------------------------------------------

    def call(self, a: int, b: int) -> None:
        client = self.clients[a % len(self.clients)]
        if len(client.flying) < 3:
            call = client.next_call()
            client.flying.append(call)
            self.workers[b % 2].submit(call)

    def call_again(self, a: int, b: int) -> None:
        """A call that the network delayed, of any step of the client; nobody hears the answer."""
        client = self.clients[a % len(self.clients)]
        digest, calls = first_digest(FACTS.name, client.attributes), []
        for number, data in enumerate(client.pieces, 1):
            calls.append(Call(client, "store", number, digest, is_heard=False))
            digest = next_digest(digest, data)
        calls += [Call(client, kind, 0, digest, is_heard=False) for kind in ("seal", "commit")]
        self.workers[b % 2].submit(calls[b // 2 % len(calls)])

    def serve(self, a: int, b: int) -> None:
        self.gather(a, b)
        self.workers[a % 2].finish("commit")

    def step(self, a: int, b: int) -> None:
        self.call(a, b)
        self.serve(b, b)

    def gather(self, a: int, b: int) -> None:
        self.workers[a % 2].gather(1 + b % 4)

    def commit(self, a: int, b: int) -> None:
        self.workers[a % 2].finish("commit")

    def fail(self, a: int, b: int) -> None:
        self.workers[a % 2].finish(("answer-lost", "commit-lost", "commit-late")[b % 3])

    def late_commit(self, a: int, b: int) -> None:
        if self.log.late is not None:
            (draft, _), self.log.late = self.log.late, None
            self.append(draft)

    def open(self, a: int, b: int) -> None:
        self.workers[a % 2].open()

    def kill(self, a: int, b: int) -> None:
        self.workers[a % 2].kill()

    def free(self, a: int, b: int) -> None:
        self.workers[a % 2].free()

    def restart_client(self, a: int, b: int) -> None:
        self.clients[a % len(self.clients)].restart()

    def pass_time(self, a: int, b: int) -> None:
        self.now_ms += 1 + b % 8

    def set_clock(self, a: int, b: int) -> None:
        self.workers[a % 2].clock_ms = b % 7 - 3

    # ---- what must hold ---------------------------------------------------------------------------------------------

    def append(self, draft: Draft) -> None:
        """Commits. What becomes visible is the file of a client, and not again within the window."""
        log = self.log
        log.states.extend(draft.states.items())
        log.staging.extend((key, value or b"") for key, value, _ in draft.uploads.pieces)
        if draft.uploads.pieces:
            log.staging.append(None)  # the marker
        for chunks in draft.chunks.values():
            written = [chunk for _, chunk in chunks]
            content = written[0].attributes["name"], tuple(chunk.data for chunk in written)
            if content not in [client.content for client in self.clients]:
                raise Violated(f"visible, and no client's file: {content}")
            seqnos = [chunk.seqno for chunk in written]
            if seqnos != list(range(seqnos[0], seqnos[0] + len(seqnos))):
                raise Violated(f"seqnos {seqnos}")
            for at_ms, _, last in log.visible:
                if draft.now_ms - at_ms <= WINDOW_MS:
                    raise Violated(f"visible twice within the window: at {at_ms} and {draft.now_ms}")
                if last >= seqnos[0]:
                    raise Violated(f"seqno {seqnos[0]} follows {last}")
            log.visible.append((draft.now_ms, content, seqnos[-1]))
            upload = draft.uploads.states[KEY]
            assert upload is not None
            first = log.staging.index((piece_key(SOURCE.source_id, 1), written[0].data), upload.pieces[0].at_least)
            if first < self.gone_before:
                raise Violated(f"visible, and a client knows it to be gone: {content}")

    def answer(self, call: Call, outcome: Outcome | None) -> None:
        if call.answer is not None:
            return
        call.answer = "none" if outcome is None else type(outcome).__name__
        found = outcome if isinstance(outcome, UploadOutcome | Refusal) else None
        if isinstance(found, UploadOutcome):
            self._check(call, found.upload)
        elif found is not None:
            if found.kind == "unknown-transaction":
                self.gone_before = max(self.gone_before, call.staged)
            is_own = self._is_kept() and self.log.visible[-1][1] == call.client.content
            if (
                found.kind != "kafka-unavailable"
                and self._is_kept()
                and (is_own or found.kind == "unknown-transaction")
            ):
                raise Violated(f"{call.kind} is refused, and the file is visible: {found}")
        call.client.hears(call, found)

    def _is_kept(self) -> bool:
        """Whether a file is visible and its window is surely not over, by any clock."""
        return bool(self.log.visible) and self.now_ms + 3 - self.log.visible[-1][0] <= WINDOW_MS - 3

    def _check(self, call: Call, upload: UploadState) -> None:
        """A yes is about the caller's own content, and durable."""
        digest, own = first_digest(FACTS.name, call.client.attributes), []
        for data in call.client.pieces:
            digest = next_digest(digest, data)
            own.append(digest)
        count = call.number if call.kind == "store" else len(own)
        if call.kind != "store" and len(upload.pieces) != count:
            raise Violated(f"{call.kind} of {len(upload.pieces)} pieces, the client has {count}")
        if [piece.digest for piece in upload.pieces[:count]] != own[:count]:
            raise Violated(f"{call.kind} {call.number} was acknowledged for another one's content")
        if call.kind == "commit":
            if upload.commit is None or not any(
                content == call.client.content and last - len(content[1]) + 1 == upload.commit.first_seqno
                for _, content, last in self.log.visible
            ):
                raise Violated(f"acknowledged, and not visible: {call.client.content}")
            self.acknowledged += 1

    def check_space(self) -> None:
        """What expired is gone, and its space with it; what is open can be read."""
        worker = self.workers[0]
        for _, raw in worker.table.uploads._open.items():
            if worker.epoch == self.log.epoch and worker._read(UploadState.decode(raw.raw)) is None:
                raise Violated("a piece of an open upload was deleted")
