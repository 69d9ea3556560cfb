"""The fake gateway's answers to calls about topics and sources: sessions, heartbeats, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from logferry.client.testing.call import REQUEST_BYTES, Answer, FakeCall, FakeStore, checked_object, percent_decoded
from logferry.client.testing.message_pack import CutOff, unpacked
from logferry.client.testing.stored import FakeSource, FakeTopic
from logferry.gateway.contract.chunk import MSGPACK, Chunk
from logferry.gateway.contract.names import (
    MAX_SEQNO,
    Malformed,
    check_attributes,
    check_source_id,
    check_topic,
    full_topic,
)
from logferry.gateway.errors import Problem

_RETENTION_MS = 14 * 86_400_000
_REQUEST_CHUNKS = 10_000
_PAGE = 1000
_SHAPE = "an array [seqno, prev, created_ms, attributes, data]"


def topics(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only("at_ms", "sizes")
    at_ms, sizes = call.number("at_ms"), call.flag("sizes")
    return Answer.of({"topics": [one.described(at_ms, sizes=sizes) for _, one in sorted(store.topics.items())]})


def topic(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only("at_ms", "sizes")
    at_ms, sizes = call.number("at_ms"), call.flag("sizes")
    return Answer.of(store.topic(call.name(0, "topic")).described(at_ms, sizes=sizes))


def put_topic(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only()
    name = check_topic(call.name(0, "topic"))
    said = checked_object(call.document(), "body", partitions=int, retention_ms=object)
    retention_ms = said.get("retention_ms")
    if not 1 <= (said.get("partitions") or 0) <= 10_000:
        raise Malformed("partitions: is not a whole number from 1 to 10000")
    if not isinstance(retention_ms, (int, type(None))) or (retention_ms is not None and retention_ms < -1):
        raise Malformed("retention_ms: is not a whole number from -1")
    found, is_new = grow_topic(store, name, said["partitions"], retention_ms)
    return Answer.of(found.described(None, sizes=False), 201 if is_new else 200)


def grow_topic(store: FakeStore, name: str, partitions: int, retention_ms: int | None = None) -> tuple[FakeTopic, bool]:
    """The topic with so many partitions, and whether it is new. Raises Problem ``conflict``."""
    full = full_topic(store.dc, check_topic(name))
    if name.startswith(f"{store.dc}."):
        detail = f"the name {name} begins with the data centre {store.dc}; such names are reserved"
        raise Problem("conflict", detail)
    if is_new := full not in store.topics:
        store.topics[full] = FakeTopic(full, partitions, retention_ms)
    found = store.topics[full]
    if len(found.partitions) > partitions:
        detail = f"{full} has {len(found.partitions)} partitions; their number cannot be reduced"
        raise Problem("conflict", detail, partitions=len(found.partitions))
    found.grow(partitions)
    for consumer in store.consumers.values():
        consumer.reassign()
    return found, is_new


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


def sources(store: FakeStore, call: FakeCall) -> Answer:
    full = full_topic(store.dc, check_topic(call.name(0, "topic")))
    call.knows_only("prefix", "idle_for_ms", "after")
    prefix, after, idle_ms = call.query.get("prefix", ""), call.query.get("after", ""), call.number("idle_for_ms")
    before_ms = None if idle_ms is None else store.now_ms() - idle_ms
    found = [
        source
        for source in sorted(store.topic(full).sources.values(), key=lambda one: one.order)
        if source.source_id.startswith(prefix) and source.order > after
        if before_ms is None or source.alive_ms < before_ms
    ]
    following = found[_PAGE - 1].order if len(found) > _PAGE else None
    return Answer.of({"sources": [source.row() for source in found[:_PAGE]], "next": following})


def source(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only("partition_key", "dc")
    if call.query.get("dc", store.dc) != store.dc:
        raise Malformed(f"dc: {call.query['dc'][:40]!r} is not one of {store.dc}")
    full, key, source_id = _source(store, call)
    return Answer.of(_described(store, full, source_id, store.topic(full).sources.get((key, source_id))))


def forget(store: FakeStore, call: FakeCall) -> Answer:
    full, key, source_id = _source(store, call)
    call.knows_only("partition_key")
    if call.small_body():
        raise Malformed("body: must be empty to forget a source")
    before = store.topic(full).sources.pop((key, source_id), None)
    return Answer.of({**_described(store, full, source_id, before), "forgotten": before is not None})


def session(store: FakeStore, call: FakeCall) -> Answer:
    full, key, source_id = _source(store, call)
    call.knows_only("partition_key")
    if call.body:
        raise Malformed("body: must be empty to open a session")
    found = store.topic(full)
    opened = found.source(key, source_id, store.now_ms())
    opened.open_session(store.now_ms())
    found.keep(opened)
    return Answer.of({**_described(store, full, source_id, opened), "source_retention_ms": _RETENTION_MS})


def heartbeat(store: FakeStore, call: FakeCall) -> Answer:
    full, key, source_id = _source(store, call)
    call.knows_only("partition_key", "session")
    number = call.number("session")
    kinds: dict[str, Any] = {"watermark_ms": int, "position": int, "size": int, "finished": bool}
    said = checked_object(call.document(), "body", **kinds)
    found = store.topic(full)
    alive = found.source(key, source_id, store.now_ms())
    alive.heartbeat(number, said, store.now_ms())
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
    writer, now_ms = found.source(key, source_id, store.now_ms()), store.now_ms()
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
        except CutOff:
            raise Malformed(f"body: chunk {count} is cut off after {len(body) - at} bytes") from None
        except ValueError as error:
            raise Malformed(f"body: chunk {count} is not MessagePack, or not {_SHAPE}: {error}") from None
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
    seqno, prev, created_ms, attributes, data = item
    for name, value in (("seqno", seqno), ("prev", prev), ("created_ms", created_ms)):
        is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SEQNO
        if not is_number and (value is not None or name == "seqno"):
            raise Malformed(f"body: {where}: {name} is not a whole number from 0 to {MAX_SEQNO}")
    if attributes is not None and not isinstance(attributes, dict):
        raise Malformed(f"body: {where}: attributes is not a map")
    if not isinstance(data, bytes):
        raise Malformed(f"body: {where}: data is not bin")
    return _checked(Chunk(seqno, prev, created_ms, attributes or {}, data), where, chunk_bytes)


def _checked(chunk: Chunk, where: str, chunk_bytes: int) -> Chunk:
    if chunk.prev is not None and chunk.prev >= chunk.seqno:
        raise Malformed(f"{where}: prev {chunk.prev} is not below seqno {chunk.seqno}")
    check_attributes(chunk.attributes)
    if (size := len(chunk.data)) > chunk_bytes:
        detail = f"{where}: {size} bytes, a chunk may have {chunk_bytes}"
        raise Problem("too-large", detail, limit_bytes=chunk_bytes)
    return chunk
