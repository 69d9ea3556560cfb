"""The fake gateway's answers to readers: pages of a partition, read sessions, positions of consumers."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Generator
from fnmatch import fnmatchcase
from typing import Any

from logferry.client.reading.decode import ReceivedChunk
from logferry.client.testing.call import Answer, FakeCall, FakeStore, checked_object, number
from logferry.client.testing.consumers import FakeConsumer, FakeSession
from logferry.client.testing.message_pack import packed
from logferry.client.testing.stored import positions, row_object
from logferry.gateway.contract.chunk import MSGPACK, NDJSON
from logferry.gateway.contract.names import Cursor, Malformed, TopicPartition, split_topic
from logferry.gateway.errors import Problem

_LARGEST = 2**31 - 1
_PAGE_BYTES, _WAIT_MS = 8 << 20, 30_000
_SMALL_BYTES = 512  # smaller answers are not compressed
_LISTS_BYTES = 1 << 20
_KEEP_ALIVE_S = 10.0
_TICK_S = 0.1
_NAMES = {MSGPACK: MSGPACK, "*/*": MSGPACK, "application/*": MSGPACK, NDJSON: NDJSON, "application/json": NDJSON}
_CONSUMER = re.compile(r"[a-zA-Z0-9._-]{1,200}\Z")


def _media_type(call: FakeCall) -> str:
    accept = call.header("accept") or "*/*"
    for kind in (part.split(";")[0].strip().lower() for part in accept.split(",")):
        if kind in _NAMES:
            return _NAMES[kind]
    raise Problem("bad-request", f"Accept: none of {MSGPACK}, {NDJSON} fits {accept[:100]!r}")


def _filters(call: FakeCall) -> dict[str, str]:
    return {name[5:]: value for name, value in call.query.items() if name.startswith("attr.")}


def _partition(call: FakeCall) -> TopicPartition:
    topic = call.name(0, "topic")
    split_topic(topic)
    return topic, number(call.name(1, "partition"), "partition", _LARGEST)


def read(store: FakeStore, call: FakeCall) -> Answer:
    """Waits for a chunk that passes the filters, as long as the caller asks for."""
    media_type = _media_type(call)
    tp, filters = _partition(call), _filters(call)
    known = ("offset", "time_ms", "cursor", "source_prefix", "max_bytes", "wait_ms")
    call.knows_only(*known, *(f"attr.{name}" for name in filters))
    if sum(name in call.query for name in ("offset", "time_ms", "cursor")) > 1:
        raise Malformed("query: only one of offset, time_ms and cursor may be given")
    time_ms, asked = call.number("time_ms"), call.number("max_bytes", _LARGEST)
    wait_ms = call.number("wait_ms", _LARGEST) or 0
    start = call.query.get("offset", "earliest")
    at = 0 if start in ("earliest", "latest") else number(start, "offset")
    if "cursor" in call.query:
        cursor = Cursor.parse(call.query["cursor"])
        if cursor[:2] != tp:
            raise Malformed(f"cursor: {cursor} is not of {tp[0]}, partition {tp[1]}")
        at = cursor.offset
    partition = store.topic(tp[0]).partition(tp[1])
    if start == "latest":
        at = partition.end
    if time_ms is not None:
        at = next((chunk.offset for chunk in partition.chunks if chunk.recorded_ms >= time_ms), partition.end)
    if at > partition.end:
        detail = f"offset {at} is outside the retained offsets 0 to {partition.end}"
        raise Problem("out-of-range", detail, first=0, next=partition.end)
    session = FakeSession(frozenset(), call.query.get("source_prefix", ""), filters, is_packed=media_type == MSGPACK)
    deadline = time.monotonic() + min(wait_ms, _WAIT_MS) / 1000
    max_bytes = min(1 << 20 if asked is None else asked, _PAGE_BYTES)
    while True:
        found, size = list[ReceivedChunk](), 0
        next_offset = partition.end
        for chunk in partition.since(at):
            if session.passes(chunk):
                found.append(chunk)
                size += len(chunk.data)
            if found and size >= max_bytes and chunk is not partition.chunks[-1]:
                next_offset = chunk.offset + 1
                break
        left_s = deadline - time.monotonic()
        if found or left_s <= 0 or not store.is_open:
            break
        at = next_offset
        store.changed.wait(left_s)
    headers = {"Content-Type": media_type, "X-Next-Offset": str(next_offset), "Vary": "Accept-Encoding"}
    headers["X-Next-Cursor"] = str(Cursor(*tp, next_offset))
    body = b"".join(map(packed, found) if session.is_packed else (_line(row_object(chunk)) for chunk in found))
    if len(body) > _SMALL_BYTES and "gzip" in call.header("accept-encoding").lower():
        deflate = zlib.compressobj(1, wbits=31)
        body, headers["Content-Encoding"] = deflate.compress(body) + deflate.flush(), "gzip"
    return Answer(200, headers, body)


def _line(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def translate(store: FakeStore, call: FakeCall) -> Answer:
    """There is one data centre, so that each offset is its own translation."""
    topic, partition = _partition(call)
    dc, _ = split_topic(topic)
    call.knows_only("offset", "from", "to")
    offset = number(call.query.get("offset", ""), "offset")
    if {dc, call.query.get("from", dc), call.query.get("to", dc)} != {store.dc}:
        raise Malformed(f"query: from and to must be {store.dc}; the fake gateway has no other data centre")
    names = {"topic": topic, "partition": partition, "from": store.dc, "offset": offset, "to": store.dc}
    return Answer.of({**names, "translated": offset})


# ---- consumers -----------------------------------------------------------------------------------------------------


def _consumer(store: FakeStore, call: FakeCall) -> tuple[str, FakeConsumer]:
    name = call.name(0, "consumer")
    if not _CONSUMER.match(name):
        raise Malformed(f"consumer: {name[:200]!r} is not 1 to 200 of a-z A-Z 0-9 . _ -")
    if name.startswith("logferry."):
        raise Problem("conflict", "names that begin with logferry. are reserved for the groups of logferry itself")
    return name, store.consumers.get(name) or FakeConsumer(store)


def stream(store: FakeStore, call: FakeCall) -> Answer:
    name, consumer = _consumer(store, call)
    filters = _filters(call)
    call.knows_only("from", "source_prefix", *(f"attr.{one}" for one in filters))
    start = call.query.get("from", "earliest")
    if start not in ("earliest", "latest"):
        raise Malformed(f"from: {start[:40]!r} is neither earliest nor latest")
    media_type = _media_type(call)
    wanted = frozenset(call.topics)
    if not wanted:
        raise Malformed("topic: is missing from the query")
    for topic in sorted(wanted):
        if not any(sign in topic for sign in "*?["):
            split_topic(topic)
            store.topic(topic)
    found = frozenset(topic for topic in store.topics if any(fnmatchcase(topic, one) for one in wanted))
    if start == "latest":
        consumer.start_at_latest(name, found)
    session = FakeSession(wanted, call.query.get("source_prefix", ""), filters, is_packed=media_type == MSGPACK)
    store.consumers[name] = consumer
    parts = _stream(store, name, consumer, session)
    return Answer(200, {"Content-Type": media_type, "Cache-Control": "no-store"}, parts=parts)


def _stream(store: FakeStore, name: str, consumer: FakeConsumer, session: FakeSession) -> Generator[bytes, None, None]:
    """The frames as they come; empty parts in between, at which the server may find that the reader is gone."""
    encoded = packed if session.is_packed else _line
    with store.changed:
        consumer.join(session)
    try:
        yield encoded({"frame": "session", "session": session.id, "consumer": name})
        wrote_at = time.monotonic()
        while store.is_open:
            with store.changed:
                frames = consumer.frames(session)
                if not frames:
                    store.changed.wait(_TICK_S)
                    frames = consumer.frames(session)
            if not frames and time.monotonic() >= wrote_at + _KEEP_ALIVE_S:
                frames = [{"frame": "keep_alive"}]
            if frames:
                wrote_at = time.monotonic()
            yield b"".join(map(encoded, frames))
    finally:
        with store.changed:
            consumer.leave(session)


def commit(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only()
    name, consumer = _consumer(store, call)
    session = call.name(1, "session")
    if session not in consumer.sessions:
        raise Problem("superseded", f"the session {session[:200]} has ended or never existed; open a new one")
    said = checked_object(call.document(_LISTS_BYTES), "body", generation=int, positions=list)
    generation = said.get("generation")
    if not isinstance(generation, int) or not said.get("positions"):
        raise Malformed("body: generation and positions are needed")
    offsets: dict[TopicPartition, int] = {}
    for position in said["positions"]:
        one = checked_object(position, "positions", topic=str, partition=int, offset=int)
        if not {"topic", "partition", "offset"} <= one.keys():
            raise Malformed("positions: topic, partition and offset are needed")
        tp = one["topic"], one["partition"]
        if tp in offsets:
            raise Malformed(f"{tp[0]}, partition {tp[1]} is given more than once")
        offsets[tp] = one["offset"]
    consumer.commit(session, generation, offsets)
    cursors = [str(Cursor(*tp, offset)) for tp, offset in sorted(offsets.items())]
    made = {"consumer": name, "generation": generation, "positions": positions(offsets), "cursors": cursors}
    return Answer.of(made)


def offsets(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only()
    name, consumer = _consumer(store, call)
    topics = sorted({topic for topic, _ in consumer.committed})
    partitions = [(topic, number) for topic in topics for number in range(len(store.topics[topic].partitions))]
    found = {"consumer": name, "state": consumer.state, "members": len(consumer.sessions)}
    return Answer.of({**found, "positions": list(map(consumer.lag, partitions))})
