"""The archive's protocol: a file in pieces under a transaction id, visible by its commit, whole and once.

``POST /v1/archive/{transaction}/store``, ``…/commit_request``, ``…/commit``; ``GET /v1/archive/{transaction}``. The
rules are those of `lanes.uploads`; the source of a transaction is ``archive/{token}/{transaction}``, whose lane follows
from the id. Answers hold nothing that changes, so that each repetition gets the same one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web
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
# What says where a file is from. The last one chooses the topic.
_METADATA: Final = ("host", "file", "log_type")
_MOST_PIECES: Final = 10_000
# Of the pieces that are kept in memory until they are committed; others are read from Kafka.
RECENT_BYTES: Final = 64 << 20


def _digest(call: Call) -> bytes:
    text = call.query.get("digest", "")
    if not _DIGEST.match(text):
        raise Malformed(f"digest: must be that of the answer to the last piece, {2 * DIGEST_BYTES} hexadecimal digits")
    return bytes.fromhex(text)


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

    def _by_owner(self, handle: Callable[[Call, str, Lane], Awaitable[dict[str, Any]]]) -> Handler:
        """The handler of a call: the owner of the transaction's lane answers, with the transaction's id first."""

        async def answer(call: Call) -> web.StreamResponse:
            transaction = check_source_id(call.first("transaction"), "transaction")
            source_id = check_source_id(f"archive/{call.caller.name or '-'}/{transaction}", "transaction")

            async def here(lane: Lane) -> web.StreamResponse:
                return json_response({"transaction": transaction, **await handle(call, source_id, lane)})

            return await self.appender.forwarding.answer(call.request, SourceIdentity("", None, source_id), here)

        return answer

    # ---- the calls --------------------------------------------------------------------------------------------------

    async def _store(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        appender = self.appender
        with appender.admission.reserved(call.request):
            piece = number(call.query.get("piece", ""), "piece", _MOST_PIECES)
            if piece == 0:
                raise Malformed("piece: the first one has the number 1")
            if piece == 1:
                topic, attributes = self._metadata(call)
                before = first_digest(topic, attributes)
            else:
                call.knows_only("piece", "digest")
                before, upload = _digest(call), await self._known(source_id, lane)
                topic, attributes = upload.topic, upload.attributes
            source = SourceIdentity(topic, None, source_id)
            facts = await self._facts(call, source)
            bounds = await appender.bounds(call.caller, source)
            body = await appender.admission.body(call.request)
            body = await decoded(body, call.request.headers.get("Content-Encoding", ""), bounds.data_bytes)
            if not body:
                raise Malformed("body: holds no data")
            checked(Chunk(0, None, None, attributes, body), f"piece {piece}", bounds)
            if appender.quotas.is_active:
                appender.quotas.take(call.caller.name, topic, len(body), 1)
            await lane.find_staging()
            after = await computed(len(body), next_digest, before, body)
            request = StorePiece(facts, source, piece, before, after, body, attributes, call.caller.name)
            upload = _upload_of((await lane.submit(request)).outcome)
            if upload.commit is None:
                self.recent.keep(after, body)
        return {"piece": piece, "digest": upload.digest_after(piece).hex(), "expires_ms": upload.expires_ms}

    async def _seal(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        source, facts, digest, _ = await self._ending(call, source_id, lane)
        request = SealUpload(facts, source, digest, token=call.caller.name)
        return _sealed(_upload_of((await lane.submit(request)).outcome))

    async def _commit(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        source, facts, digest, known = await self._ending(call, source_id, lane)
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
        return {"source_id": source_id, **_place(upload), "digest": upload.digest.hex()}

    async def _describe(self, call: Call, source_id: str, lane: Lane) -> dict[str, Any]:
        call.knows_only()
        table, upload = lane.table, await self._known(source_id, lane)
        await lane.confirm(table)
        state = "open" if not upload.is_sealed else "requested" if upload.commit is None else "committed"
        return {"state": state, "source_id": source_id, **_sealed(upload), **_place(upload)}

    # ---- their parts ------------------------------------------------------------------------------------------------

    def _metadata(self, call: Call) -> tuple[str, dict[str, str]]:
        """The topic of a new transaction, by its full name, and the attributes of its chunks. Raises Problem."""
        call.knows_only("piece", *_METADATA)
        attributes = header_attributes(call.request.headers.items())
        for name in _METADATA:
            value = call.query.get(name)
            if not value:
                raise Malformed(f"{name}: is missing from the query")
            if name in attributes:
                raise Malformed(f"header X-Attr-{name}: is given in the query")
            attributes[name] = value
        topic = topic_for(self.settings.topics, attributes["log_type"])
        if topic is None:
            detail = f"no rule of receivers.archive.topics fits the log type {attributes['log_type'][:100]!r}"
            raise Problem("unknown-topic", detail)
        return topic_of(self.appender.config.dc, topic), attributes

    async def _ending(
        self, call: Call, source_id: str, lane: Lane
    ) -> tuple[SourceIdentity, TopicFacts, bytes, UploadState]:
        call.knows_only("digest")
        digest = _digest(call)
        if await self.appender.admission.read(call.request):
            raise Malformed("body: must be empty")
        known = await self._known(source_id, lane)
        source = SourceIdentity(known.topic, None, source_id)
        return source, await self._facts(call, source), digest, known

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
        await lane.confirm(table)
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
