"""The archive's protocol: a file in pieces under a transaction id, visible by its commit, whole and once.

The rules are those of `lanes.uploads`; the source of a transaction is ``archive/{token}/{transaction}``, whose lane
follows from the id. Answers hold nothing that changes, so that each repetition gets the same one. There are two forms
of the calls:

* ``POST /v1/archive/{transaction}/store``, ``…/commit_request``, ``…/commit``; ``GET /v1/archive/{transaction}``, with
  numbers of pieces and digests;
* ``POST /store``, ``/commit_request``, ``/commit``; ``GET /transactions/{transaction}``, with offsets of bytes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final

from aiohttp import web
from aiokafka.errors import OffsetOutOfRangeError, UnknownTopicOrPartitionError
from logferry.gateway.api.sources import CHUNK_OVERHEAD_BYTES, check_durable, decoded, refused, topic_of
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.names import Malformed, check_source_id
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.contract.upload_state import DIGEST_BYTES, UploadState, first_digest, next_digest, upload_key
from logferry.gateway.errors import LaneMoved, Problem
from logferry.gateway.http.admission import computed
from logferry.gateway.http.auth import Right
from logferry.gateway.http.request import checked, header_attributes, number
from logferry.gateway.http.router import Call, Handler, Routes, json_response
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import Refusal
from logferry.gateway.lanes.lane import Lane
from logferry.gateway.lanes.staging_topic import RecentPieces, read_pieces
from logferry.gateway.lanes.transaction import Outcome
from logferry.gateway.lanes.uploads import CommitUpload, SealUpload, StorePiece, UploadOutcome
from logferry.gateway.metrics import RECEIVED
from logferry.gateway.receiver_settings import ArchiveSettings, topic_for
from logferry.gateway.receivers.append import Appender

_DIGEST: Final = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}\Z", re.ASCII)
_MOST_PIECES: Final = 10_000
# For the offsets of a file, among the records since its commit.
_LOOKS: Final = 32
_LOOK_BYTES: Final = 1 << 20
_TRIES: Final = 60
_PAUSE_S: Final = 0.05
# Of the pieces that are kept in memory until they are committed; others are read from Kafka.
RECENT_BYTES: Final = 64 << 20


def _digest(call: Call) -> bytes:
    text = call.query.get("digest", "")
    if not _DIGEST.match(text):
        raise Malformed(f"digest: must be that of the answer to the last piece, {2 * DIGEST_BYTES} hexadecimal digits")
    return bytes.fromhex(text)


def _in_query(call: Call) -> str:
    return call.query.get("transaction_id", "")


def _in_path(call: Call) -> str:
    return call.segment(2, "transaction_id")


def _sealed(upload: UploadState) -> dict[str, Any]:
    return {
        "pieces": len(upload.pieces),
        "size_bytes": upload.size_bytes,
        "digest": upload.digest.hex(),
        "expires_ms": upload.expires_ms,
    }


def _place(upload: UploadState) -> dict[str, Any]:
    """Where its chunks are; nulls while nothing is visible."""
    commit = upload.commit
    first, partition = (None, None) if commit is None else (commit.first_seqno, commit.partition)
    last = None if first is None else first + len(upload.pieces) - 1
    return {"topic": upload.topic, "partition": partition, "first_seqno": first, "last_seqno": last}


def _expired(source_id: str) -> Problem:
    detail = f"{source_id.split('/', 2)[2]} was not committed in time, and nothing of it is kept; use another id"
    return Problem("expired", detail)


async def _offsets(lane: Lane, source_id: str, upload: UploadState) -> list[int] | None:
    """The first and the last offset of its chunks, which stand side by side; None: not visible, or removed since.

    Kafka shows a transaction some milliseconds after its commit.
    """
    for _ in range(_TRIES):
        found = await _visible_offsets(lane, source_id, upload)
        if found is not None or upload.commit is None:
            return found
        if lane.kafka.clock.now_ms() - upload.commit.at_ms > _TRIES * _PAUSE_S * 1000:
            return None
        await asyncio.sleep(_PAUSE_S)
    return None


async def _visible_offsets(lane: Lane, source_id: str, upload: UploadState) -> list[int] | None:
    commit = upload.commit
    if commit is None:
        return None
    key, tp = source_id.encode(), (upload.topic, commit.partition)
    try:
        position = await lane.kafka.offset(*tp, commit.at_ms)
        for _ in range(_LOOKS):
            if position < 0:
                return None
            fetched = await lane.kafka.fetch(*tp, position, max_bytes=_LOOK_BYTES)
            for record in fetched.records:
                if record.key == key:
                    return [record.offset, record.offset + len(upload.pieces) - 1]
            if fetched.at_end:
                return None
            position = fetched.next_offset
    except (OffsetOutOfRangeError, UnknownTopicOrPartitionError):
        pass
    return None


def _upload_of(outcome: Outcome) -> UploadState:
    """Raises Problem for a refusal."""
    if isinstance(outcome, Refusal):
        raise refused(outcome)
    if not isinstance(outcome, UploadOutcome):
        raise Problem("internal", "another answer than that of an upload")
    return outcome.upload


@dataclass(frozen=True, slots=True)
class ArchiveApi:
    appender: Appender
    settings: ArchiveSettings
    recent: RecentPieces
    # One file at a time is read into memory.
    _reader: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add_to(self, routes: Routes) -> None:
        path = "/v1/archive/{transaction}"
        routes.add("POST", path + "/store", "archive_store", self._by_owner(self._store), Right.KNOWN)
        routes.add("POST", path + "/commit_request", "archive_seal", self._by_owner(self._seal), Right.KNOWN)
        routes.add("POST", path + "/commit", "archive_commit", self._by_owner(self._commit), Right.KNOWN)
        routes.add("GET", path, "archive", self._by_owner(self._describe), Right.KNOWN)
        by_offset = partial(self._by_owner, name="transaction_id")
        routes.add("POST", "/store", "file_store", by_offset(self._store_at, _in_query), Right.KNOWN)
        routes.add("POST", "/commit_request", "file_commit_request", by_offset(self._seal_size, _in_query), Right.KNOWN)
        routes.add("POST", "/commit", "file_commit", by_offset(self._commit_known, _in_query), Right.KNOWN)
        routes.add(
            "GET", "/transactions/{transaction}", "file_transaction", by_offset(self._show, _in_path), Right.KNOWN
        )

    def _by_owner(
        self,
        handle: Callable[[Call, str, Lane], Awaitable[dict[str, Any]]],
        id_of: Callable[[Call], str] = lambda call: call.first("transaction"),
        name: str = "transaction",
    ) -> Handler:
        """The handler of a call: the owner of the transaction's lane answers, with the transaction's id first."""

        async def answer(call: Call) -> web.StreamResponse:
            transaction = check_source_id(id_of(call), name)
            source_id = check_source_id(f"archive/{call.caller.name or '-'}/{transaction}", name)

            async def here(lane: Lane) -> web.StreamResponse:
                return json_response({name: transaction, **await handle(call, source_id, lane)})

            return await self.appender.forwarding.answer(call.request, SourceIdentity("", None, source_id), here)

        return answer

    # ---- the calls --------------------------------------------------------------------------------------------------

    async def _store(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        with self.appender.admission.reserved(call.request):
            piece = number(call.query.get("piece", ""), "piece", _MOST_PIECES)
            if piece == 0:
                raise Malformed("piece: the first one has the number 1")
            if piece == 1:
                call.knows_only("piece", "host", "file", "log_type")
                topic, attributes = self._metadata(call)
                before = first_digest(topic, attributes)
            else:
                call.knows_only("piece", "digest")
                before, upload = _digest(call), await self._known(source_id, lane)
                topic, attributes = upload.topic, upload.attributes
            upload, _ = await self._keep(call, lane, SourceIdentity(topic, None, source_id), piece, before, attributes)
        return {"piece": piece, "digest": upload.digest_after(piece).hex(), "expires_ms": upload.expires_ms}

    async def _keep(
        self, call: Call, lane: Lane, source: SourceIdentity, piece: int, before: bytes, attributes: dict[str, str]
    ) -> tuple[UploadState, int]:
        """The body as that piece; returns the state with it, and its size. Raises Problem."""
        appender = self.appender
        facts = await self._facts(call, source)
        bounds = await appender.bounds(call.caller, source)
        body = await appender.admission.body(call.request)
        body = await decoded(body, call.request.headers.get("Content-Encoding", ""), bounds.data_bytes)
        if not body:
            raise Malformed("body: holds no data")
        checked(Chunk(0, None, None, attributes, body), f"piece {piece}", bounds)
        if appender.quotas.is_active:
            appender.quotas.take(call.caller.name, source.topic, len(body), 1)
        await lane.find_staging()
        after = await computed(len(body), next_digest, before, body)
        request = StorePiece(facts, source, piece, before, after, body, attributes, call.caller.name)
        upload = _upload_of((await lane.submit(request)).outcome)
        if upload.commit is None:
            self.recent.keep(after, body)
        return upload, len(body)

    async def _seal(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        call.knows_only("digest")
        return _sealed(await self._sealed_now(call, source_id, lane, _digest(call)))

    async def _sealed_now(self, call: Call, source_id: str, lane: Lane, digest: bytes) -> UploadState:
        source, facts, _ = await self._ending(call, source_id, lane)
        request = SealUpload(facts, source, digest, token=call.caller.name)
        return _upload_of((await lane.submit(request)).outcome)

    async def _commit(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        call.knows_only("digest")
        upload = await self._committed_now(call, source_id, lane, _digest(call))
        return {"source_id": source_id, **_place(upload), "digest": upload.digest.hex()}

    async def _committed_now(self, call: Call, source_id: str, lane: Lane, digest: bytes) -> UploadState:
        source, facts, known = await self._ending(call, source_id, lane)
        is_new = known.commit is None and known.is_sealed and known.digest == digest
        chunks: list[Chunk] = []
        async with self._reader:
            if is_new:
                place = lane.config.staging_topic, lane.number
                data = await read_pieces(lane.kafka, place, source_id, known, self.recent)
                chunks = [Chunk(0, None, None, known.attributes, piece) for piece in data]
            size = known.size_bytes + CHUNK_OVERHEAD_BYTES * len(chunks) if chunks else 0
            request = CommitUpload(facts, source, digest, chunks, size + len(source_id), call.caller.name)
            answer = lane.submit(request)
        try:
            upload = _upload_of((await answer).outcome)
        except Problem as problem:
            RECEIVED.labels("archive", problem.kind).inc()
            raise
        for piece in upload.pieces:
            self.recent.drop(piece.digest)
        RECEIVED.labels("archive", "recorded" if is_new else "duplicate").inc()
        return upload

    async def _describe(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        call.knows_only()
        table, upload = lane.table, await self._known(source_id, lane)
        await lane.confirm(table, source_id)
        state = "open" if not upload.is_sealed else "requested" if upload.commit is None else "committed"
        return {"state": state, "source_id": source_id, **_sealed(upload), **_place(upload)}

    # ---- the calls with offsets --------------------------------------------------------------------------------------

    async def _store_at(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        call.knows_only("transaction_id", "offset", "type", "host", "file")
        with self.appender.admission.reserved(call.request):
            offset = number(call.query.get("offset", ""), "offset")
            topic, attributes = self._metadata(call, "type")
            known = await self._open_or_new(source_id, lane, is_new=True)
            if known is not None and known.commit is None and (known.topic, known.attributes) != (topic, attributes):
                raise Problem("conflict", "the transaction was begun for another file; use another transaction id")
            ends = list(accumulate(piece.size_bytes for piece in known.pieces)) if known else []
            stored = ends[-1] if ends else 0
            if offset > stored:
                detail = f"the bytes from {stored} to {offset} are missing; send them first"
                raise Problem("incomplete", detail, stored_bytes=stored)
            try:
                piece = [0, *ends].index(offset) + 1
            except ValueError:
                detail = f"no piece began at the byte {offset}; continue at {stored}"
                raise Problem("conflict", detail, stored_bytes=stored) from None
            before = known.digest_after(piece - 1) if known else first_digest(topic, attributes)
            with self._or_gone(source_id, lane):
                source = SourceIdentity(topic, None, source_id)
                upload, size = await self._keep(call, lane, source, piece, before, attributes)
        return {"offset": offset, "stored_bytes": offset + size, "expires_ms": upload.expires_ms}

    async def _seal_size(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        call.knows_only("transaction_id", "size")
        size = number(call.query.get("size", ""), "size")
        known = await self._open_or_new(source_id, lane)
        if known is None or known.size_bytes < size:
            stored = known.size_bytes if known else 0
            detail = f"{stored} of {size} bytes are stored; send the others first"
            raise Problem("incomplete", detail, stored_bytes=stored)
        if known.size_bytes > size:
            detail = f"{known.size_bytes} bytes are stored, more than {size}; use another transaction id"
            raise Problem("conflict", detail, stored_bytes=known.size_bytes)
        with self._or_gone(source_id, lane):
            upload = await self._sealed_now(call, source_id, lane, known.digest)
        return {"state": "prepared", "stored_bytes": upload.size_bytes, "expires_ms": upload.expires_ms}

    async def _commit_known(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        call.knows_only("transaction_id")
        known = await self._open_or_new(source_id, lane)
        with self._or_gone(source_id, lane):
            digest = known.digest if known else b""
            return await self._shown(await self._committed_now(call, source_id, lane, digest), source_id, lane)

    async def _show(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        call.knows_only()
        table = lane.table
        found = table.uploads.read(upload_key(source_id)) or await self._known(source_id, lane)
        await lane.confirm(table, source_id)
        return await self._shown(found, source_id, lane)

    async def _shown(self, upload: UploadState, source_id: str, lane: Lane) -> dict[str, Any]:
        state = "open" if not upload.is_sealed else "prepared" if upload.commit is None else "committed"
        return {
            "state": "expired" if upload.is_expired else state,
            "stored_bytes": upload.size_bytes,
            "topic": upload.topic,
            "partition": _place(upload)["partition"],
            "offsets": await _offsets(lane, source_id, upload),
        }

    async def _open_or_new(self, source_id: str, lane: Lane, *, is_new: bool = False) -> UploadState | None:
        """The transaction; None: ``is_new``, and it was never begun. Raises Problem ``expired`` where it is gone."""
        table = lane.table
        found = table.uploads.read(upload_key(source_id))
        if found is not None and found.is_expired:
            await lane.confirm(table, source_id)
            raise _expired(source_id)
        return None if found is None and is_new else await self._known(source_id, lane)

    @contextmanager
    def _or_gone(self, source_id: str, lane: Lane) -> Iterator[None]:
        """What the lane has just ended is ``expired``, and not unknown."""
        try:
            yield
        except Problem as problem:
            found = lane.table.uploads.read(upload_key(source_id)) if problem.kind == "unknown-transaction" else None
            if found is None or not found.is_expired:
                raise
            raise _expired(source_id) from None

    # ---- their parts ------------------------------------------------------------------------------------------------

    def _metadata(self, call: Call, log_type: str = "log_type") -> tuple[str, dict[str, str]]:
        """The topic of a new transaction, by its full name, and the attributes of its chunks. Raises Problem.

        ``log_type``: the name of what chooses the topic.
        """
        attributes = header_attributes(call.request.headers.items())
        for name in ("host", "file", log_type):
            value = call.query.get(name)
            if not value:
                raise Malformed(f"{name}: is missing from the query")
            if name in attributes:
                raise Malformed(f"header X-Attr-{name}: is given in the query")
            attributes[name] = value
        topic = topic_for(self.settings.topics, attributes[log_type])
        if topic is None:
            detail = f"no rule of receivers.archive.topics fits the log type {attributes[log_type][:100]!r}"
            raise Problem("unknown-topic", detail)
        return topic_of(self.appender.config.dc, topic), attributes

    async def _ending(self, call: Call, source_id: str, lane: Lane) -> tuple[SourceIdentity, TopicFacts, UploadState]:
        if await self.appender.admission.read(call.request):
            raise Malformed("body: must be empty")
        known = await self._known(source_id, lane)
        source = SourceIdentity(known.topic, None, source_id)
        return source, await self._facts(call, source), known

    async def _known(self, source_id: str, lane: Lane) -> UploadState:
        """The transaction as the owner of its lane knows it. Raises Problem ``unknown-transaction``, or LaneMoved.

        Also one that was not committed in time: its commit may be under way, so that the lane alone calls it gone.
        """
        if lane.state != "serving":
            raise LaneMoved("not-owner-yet", f"lane {lane.number} is {lane.state}: {lane.why}")
        table = lane.table
        found = table.uploads.get(upload_key(source_id))
        if found is not None:
            return found
        await lane.confirm(table, source_id)
        raise Problem(
            "unknown-transaction",
            f"{source_id.split('/', 2)[2]}: it was never begun, or was not committed in time; begin again with piece 1",
        )

    async def _facts(self, call: Call, source: SourceIdentity) -> TopicFacts:
        """Of the topic, after the caller's right to write it as the source. Raises Problem."""
        await self.appender.bounds(call.caller, source)
        facts = await self.appender.topics.facts(source.topic)
        check_durable(facts)
        return facts
