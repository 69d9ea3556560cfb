"""The fake gateway's answers to calls about topics and sources: sessions, heartbeats, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from logferry.client.testing.call import REQUEST_BYTES, Answer, FakeCall, FakeStore, checked_object, percent_decoded
from logferry.client.testing.message_pack import unpacked
from logferry.client.testing.stored import FakeSource
from logferry.gateway.contract.chunk import MSGPACK, Chunk
from logferry.gateway.contract.names import Malformed, check_attributes, check_source_id, check_topic, full_topic
from logferry.gateway.errors import Problem

_RETENTION_MS = 14 * 86_400_000
_REQUEST_CHUNKS = 10_000
_FIELDS: dict[str, Any] = {"seqno": int, "prev": int, "created_ms": int, "attributes": dict, "data": bytes}
_SHAPE = "an array [seqno, prev, created_ms, attributes, data]"


def topics(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only()
    return Answer.of({"topics": [one.described() for _, one in sorted(store.topics.items())]})


def topic(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only()
    return Answer.of(store.topic(call.name(0, "topic")).described())


# ---- sources -------------------------------------------------------------------------------------------------------


def _source(store: FakeStore, call: FakeCall) -> tuple[str, str | None, str]:
    """Topic, key and source id of the path and the query."""
    source_id = check_source_id(call.name(1, "sourceId"))
    key = call.query.get("partition_key")
    key = key if key is None else check_source_id(key, "partition_key")
    return full_topic(store.dc, check_topic(call.name(0, "topic"))), key, source_id


def _described(store: FakeStore, full: str, source_id: str, source: FakeSource | None) -> dict[str, Any]:
    return {
        "source_id": source_id,
        "topic": full,
        "session": source.session or None if source else None,
        "partition": source.partition if source else None,
        "recorded_seqno": source.recorded if source else None,
        "url": store.url,
    }


def source(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only("partition_key", "dc")
    if call.query.get("dc", store.dc) != store.dc:
        raise Malformed(f"dc: {call.query['dc'][:40]!r} is not one of {store.dc}")
    full, key, source_id = _source(store, call)
    return Answer.of(_described(store, full, source_id, store.topic(full).sources.get((key, source_id))))


def session(store: FakeStore, call: FakeCall) -> Answer:
    full, key, source_id = _source(store, call)
    call.knows_only("partition_key")
    if call.body:
        raise Malformed("body: must be empty to open a session")
    found = store.topic(full)
    opened = found.source(key, source_id)
    opened.open_session(store.now_ms())
    found.keep(opened)
    return Answer.of({**_described(store, full, source_id, opened), "source_retention_ms": _RETENTION_MS})


def heartbeat(store: FakeStore, call: FakeCall) -> Answer:
    full, key, source_id = _source(store, call)
    call.knows_only("partition_key", "session")
    number = call.number("session")
    checked_object(call.document(), "body", watermark_ms=int, position=int, size=int, finished=bool)
    found = store.topic(full)
    alive = found.source(key, source_id)
    alive.heartbeat(number)
    found.keep(alive)
    return Answer.of(_described(store, full, source_id, alive))


def write(store: FakeStore, call: FakeCall) -> Answer:
    full, key, source_id = _source(store, call)
    if (size := len(call.body)) > REQUEST_BYTES:
        detail = f"the body has {size} bytes; the limit of a request is {REQUEST_BYTES}"
        raise Problem("too-large", detail, limit_bytes=REQUEST_BYTES)
    found = store.topic(full)
    session = call.number("session")
    chunks = _chunks(store, call)
    writer, now_ms = found.source(key, source_id), store.now_ms()
    fresh = writer.take(chunks, session, now_ms)
    offsets = found.record(writer, fresh, now_ms)
    return Answer.of(
        {
            "source_id": source_id,
            "topic": full,
            "partition": writer.partition,
            "recorded_seqno": writer.recorded,
            "written": len(fresh),
            "duplicates": len(chunks) - len(fresh),
            "offsets": offsets,
        }
    )


# ---- chunks --------------------------------------------------------------------------------------------------------


def _chunks(store: FakeStore, call: FakeCall) -> list[Chunk]:
    if call.header("content-type").partition(";")[0].strip().lower() == MSGPACK:
        call.knows_only("session", "partition_key")
        return list(_packed_chunks(call.decoded_body(), store.chunk_bytes))
    call.knows_only("seqno", "prev", "session", "created_ms", "partition_key")
    seqno, prev, created_ms = call.number("seqno"), call.number("prev"), call.number("created_ms")
    if seqno is None:
        raise Malformed("seqno: is missing from the query")
    attributes: dict[str, str] = {}
    for name, value in call.headers:
        if name.startswith("x-attr-"):
            if name[7:] in attributes:
                raise Malformed(f"header {name}: is given more than once")
            attributes[name[7:]] = percent_decoded(value, f"header {name}")
    return [_checked(Chunk(seqno, prev, created_ms, attributes, call.decoded_body()), "chunk", store.chunk_bytes)]


def _packed_chunks(body: bytes, chunk_bytes: int) -> Iterator[Chunk]:
    """A stream of MessagePack arrays [seqno, prev, created_ms, attributes, data]."""
    at = count = 0
    while at < len(body):
        try:
            item, end = unpacked(body, at)
        except (ValueError, TypeError) as error:
            raise Malformed(f"body: chunk {count} is cut off, not MessagePack, or not {_SHAPE}: {error}") from None
        yield _chunk(item, f"chunk {count}", chunk_bytes)
        at, count = end, count + 1
        if count > _REQUEST_CHUNKS:
            detail = f"the body has more than {_REQUEST_CHUNKS} chunks"
            raise Problem("too-large", detail, limit_chunks=_REQUEST_CHUNKS)
    if not count:
        raise Malformed("body: holds no chunk")


def _chunk(item: Any, where: str, chunk_bytes: int) -> Chunk:
    if not isinstance(item, list) or len(item) != 5:
        raise Malformed(f"body: {where} is not {_SHAPE}")
    given: dict[str, Any] = checked_object(dict(zip(_FIELDS, item)), f"body: {where}", **_FIELDS)
    if not {"seqno", "data"} <= given.keys():
        raise Malformed(f"body: {where} has no seqno, or no data")
    return _checked(Chunk(**{"prev": None, "created_ms": None, "attributes": {}, **given}), where, chunk_bytes)


def _checked(chunk: Chunk, where: str, chunk_bytes: int) -> Chunk:
    if chunk.prev is not None and chunk.prev >= chunk.seqno:
        raise Malformed(f"{where}: prev {chunk.prev} is not below seqno {chunk.seqno}")
    check_attributes(chunk.attributes)
    if (size := len(chunk.data)) > chunk_bytes:
        detail = f"{where}: {size} bytes, a chunk may have {chunk_bytes}"
        raise Problem("too-large", detail, limit_bytes=chunk_bytes)
    return chunk
