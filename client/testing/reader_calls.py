"""The fake gateway's answers to readers: pages of a partition, read sessions, positions of consumers."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Generator, Iterable
from fnmatch import fnmatchcase
from typing import Any

from logferry.client.reading.decode import ReceivedChunk
from logferry.client.testing.call import Answer, FakeCall, FakeStore, checked_object, number
from logferry.client.testing.consumers import FakeConsumer, FakeSession, check_retained, ended
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
_PLAIN = "text/plain"
_NAMES = {
    MSGPACK: (MSGPACK, "*/*", "application/*"),
    NDJSON: (NDJSON, "application/json"),
    _PLAIN: (_PLAIN, "text/*"),
}
_CONSUMER = re.compile(r"[a-zA-Z0-9._-]{1,200}\Z")


def _media_type(call: FakeCall, offered: tuple[str, ...], named: tuple[str, ...]) -> str:
    """``named``: how the gateway names what it offers."""
    accept = call.header("accept")
    for part in accept.split(",") if accept else ["*/*"]:
        kind = part.split(";")[0].strip().lower()
        for found in offered:
            if kind in _NAMES[found]:
                return found
    raise Problem("bad-request", f"Accept: none of {', '.join(named)} fits {accept[:100]!r}")


def _filters(call: FakeCall) -> dict[str, str]:
    return {name[5:]: value for name, value in call.query.items() if name.startswith("attr.")}


def _partition(call: FakeCall) -> TopicPartition:
    topic = call.name(0, "topic")
    split_topic(topic)
    return topic, number(call.name(1, "partition"), "partition", _LARGEST)


def read(store: FakeStore, call: FakeCall) -> Answer:
    """Waits for a chunk that passes the filters, as long as the caller asks for."""
    media_type = _media_type(call, (MSGPACK, NDJSON, _PLAIN), (MSGPACK, NDJSON, _PLAIN, "text/event-stream"))
    tp, filters = _partition(call), _filters(call)
    known = ("offset", "time_ms", "cursor", "source_prefix", "max_bytes", "wait_ms")
    call.knows_only(*known, *(f"attr.{name}" for name in filters))
    if sum(name in call.query for name in ("offset", "time_ms", "cursor")) > 1:
        raise Malformed("query: only one of offset, time_ms and cursor may be given")
    start: object = call.query.get("offset", "earliest")
    if start not in ("earliest", "latest"):
        start = number(str(start), "offset")
    time_ms, asked = call.number("time_ms"), call.number("max_bytes", _LARGEST)
    wait_ms = call.number("wait_ms", _LARGEST) or 0
    if "cursor" in call.query:
        cursor = Cursor.parse(call.query["cursor"])
        if cursor[:2] != tp:
            raise Malformed(f"cursor: {cursor} is not of {tp[0]}, partition {tp[1]}")
        start = cursor.offset
    partition = store.topic_to_read(tp[0]).partition(tp[1])
    at = partition.start_at(start, time_ms)
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
    body = _encoded(found, media_type)
    if len(body) > _SMALL_BYTES and "gzip" in call.header("accept-encoding").lower():
        deflate = zlib.compressobj(1, wbits=31)
        body, headers["Content-Encoding"] = deflate.compress(body) + deflate.flush(), "gzip"
    return Answer(200, headers, body)


def _encoded(chunks: list[ReceivedChunk], media_type: str) -> bytes:
    if media_type == MSGPACK:
        return b"".join(map(packed, chunks))
    return b"".join(_line(row_object(chunk)) if media_type == NDJSON else chunk.data for chunk in chunks)


def _line(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def translate(store: FakeStore, call: FakeCall) -> Answer:
    """There is one data centre, so that each offset is its own translation."""
    topic = call.name(0, "topic")
    dc, _ = split_topic(topic)
    call.knows_only("offset", "from", "to")
    partition = number(call.name(1, "partition"), "partition", _LARGEST)
    offset = number(call.query.get("offset", ""), "offset")
    if {dc, call.query.get("from", dc), call.query.get("to", dc)} != {store.dc}:
        raise Malformed(
            f"query: from and to must be {dc} and {store.dc}; ask the gateways of other data centres for theirs"
        )
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
    media_type = _media_type(call, (MSGPACK, NDJSON), (MSGPACK, NDJSON))
    wanted = frozenset(call.lists["topic"])
    if not wanted:
        raise Malformed("topic: is missing from the query")
    for topic in sorted(wanted):
        if not any(sign in topic for sign in "*?["):
            split_topic(topic)
            store.topic_to_read(topic)
    found = frozenset(topic for topic in store.topics if any(fnmatchcase(topic, one) for one in wanted))
    cursors = {(cursor.topic, cursor.partition): cursor for cursor in map(Cursor.parse, call.lists["cursor"])}
    for cursor in cursors.values():
        if cursor.topic not in found:
            raise Malformed(f"cursor: {cursor} belongs to a topic that this session does not read")
    if cursors:
        consumer.set(name, _checked(store, {tp: cursor.offset for tp, cursor in cursors.items()}))
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
                try:
                    frames = consumer.frames(session)
                    if not frames:
                        store.changed.wait(_TICK_S)
                        frames = consumer.frames(session)
                except Problem as problem:
                    yield encoded({"frame": "error", "problem": problem.document()})
                    return
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
        raise ended(session)
    said = checked_object(call.document(_LISTS_BYTES), "body", generation=int, positions=list)
    generation = said.get("generation")
    if not isinstance(generation, int) or not said.get("positions"):
        raise Malformed("body: generation and positions are needed")
    offsets: dict[TopicPartition, int] = {}
    for position in said["positions"]:
        one = checked_object(position, "positions", topic=str, partition=int, offset=int)
        _add(store, offsets, (one.get("topic"), one.get("partition")), one.get("offset"))
    consumer.commit(session, generation, offsets)
    cursors = [str(Cursor(*tp, offset)) for tp, offset in sorted(offsets.items())]
    answer = {"consumer": name, "generation": generation, "positions": positions(offsets), "cursors": cursors}
    return Answer.of(answer)


def offsets(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only("records_only")
    call.flag("records_only")
    name, consumer = _consumer(store, call)
    named = set(call.lists["topic"])
    if any(sign in topic for topic in named for sign in "*?["):
        raise Malformed("topic: patterns are not allowed here; omit topic to get all topics with a position")
    for topic in sorted(named):
        split_topic(topic)
        store.topic_to_read(topic)
    wanted = named or {topic for topic, _ in consumer.committed}
    partitions = [(topic, n) for topic in sorted(wanted) for n in range(len(store.topics[topic].partitions))]
    lags = list(map(consumer.lag, partitions))
    return Answer.of({"consumer": name, "state": consumer.state, "members": len(consumer.sessions), "positions": lags})


def put_offsets(store: FakeStore, call: FakeCall) -> Answer:
    call.knows_only("dry_run")
    is_dry = call.flag("dry_run")
    name, consumer = _consumer(store, call)
    said = checked_object(call.document(_LISTS_BYTES), "body", positions=list, topic=str, to="end")
    wanted, topic, to = (said.get(key) for key in ("positions", "topic", "to"))
    if (not wanted) == (topic is None) or (topic is None) != (to is None):
        raise Malformed("body: Value error, either positions, or topic and to")
    found: dict[TopicPartition, int] = {}
    if topic is not None:
        split_topic(topic)
        time_ms = to if isinstance(to, int) else None
        for n, partition in enumerate(store.topic_to_read(topic).partitions):
            found[topic, n] = partition.start_at(to if time_ms is None else None, time_ms)
    for position in wanted or ():
        kinds: dict[str, Any] = {"topic": str, "partition": int, "offset": "end", "time_ms": int, "cursor": str}
        one = checked_object(position, "positions", **kinds)
        if sum(one.get(key) is not None for key in ("offset", "time_ms", "cursor")) != 1:
            raise Malformed("positions: exactly one of offset, time_ms and cursor is needed")
        if one.get("cursor") is not None:
            cursor = Cursor.parse(one["cursor"])
            _add(store, found, cursor[:2], cursor.offset)
            continue
        tp = one.get("topic"), one.get("partition")
        _add(store, found, tp, 0)
        start = store.topic_to_read(one["topic"]).partition(one["partition"]).start_at
        found[one["topic"], one["partition"]] = start(one.get("offset"), one.get("time_ms"))
    _checked(store, found)
    if not is_dry:
        consumer.set(name, found)
        store.consumers[name] = consumer
    return Answer.of({"consumer": name, "positions": positions(found)})


def _add(store: FakeStore, found: dict[TopicPartition, int], tp: Iterable[Any], offset: Any) -> None:
    topic, partition = tp
    if topic is None or partition is None or offset is None:
        raise Malformed("positions: topic, partition and offset are needed")
    if partition > _LARGEST:
        raise Malformed(f"positions: partition: is over {_LARGEST}")
    split_topic(topic)
    store.topic_to_read(topic)
    if (topic, partition) in found:
        raise Malformed(f"{topic}, partition {partition} is given more than once")
    found[topic, partition] = offset


def _checked(store: FakeStore, found: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Positions that can be read. Raises Problem."""
    for (topic, partition), offset in found.items():
        check_retained((topic, partition), offset, store.topic_to_read(topic).partition(partition).end)
    return found
