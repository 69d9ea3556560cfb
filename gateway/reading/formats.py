"""Rows of chunks and frames of read sessions, as MessagePack, lines of JSON or objects. Pure.

The order of frames says what belongs together: chunks of a partition come only between an ``assigned`` that names
it and the next ``revoked``, and every ``assigned`` starts at the consumer's committed position.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgpack
from logferry.gateway.contract.chunk import MSGPACK, NDJSON, bin_head, chunk_of_record
from logferry.gateway.contract.names import Cursor, Malformed, TopicPartition
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.record_batch import KafkaRecord

Frame = dict[str, Any]

KEEP_ALIVE: Final[Frame] = {"frame": "keep_alive"}
PLAIN: Final = "text/plain"
EVENTS: Final = "text/event-stream"
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    MSGPACK: (MSGPACK, "*/*", "application/*"), NDJSON: (NDJSON, "application/json"), PLAIN: (PLAIN, "text/*"),
    EVENTS: (EVENTS,),
}  # fmt: skip


# When a browser connects again after a problem: one that passes by itself, or one that lasts until it is dealt with.
_PASSING_MS: Final = 2000
_LASTING_MS: Final = 60_000


class Encoding(NamedTuple):
    """A format of the stream: ``frame`` writes any frame but a chunk's, ``chunk`` that of a row."""

    media_type: str
    frame: Callable[[Frame], bytes]
    chunk: Callable[[Row], bytes]


def media_type(accept: str, offered: Sequence[str]) -> str:
    """The first one of an Accept header, in its order, that is offered. Raises Problem when none is."""
    for part in accept.split(",") if accept else ["*/*"]:
        kind = part.split(";")[0].strip().lower()
        for found in offered:
            if kind in _NAMES[found]:
                return found
    raise Problem("bad-request", f"Accept: none of {', '.join(offered)} fits {accept[:100]!r}")


def encoding(accept: str) -> Encoding:
    """The format for an Accept header. Raises Problem when none fits."""
    if media_type(accept, (MSGPACK, NDJSON)) == MSGPACK:
        return Encoding(MSGPACK, _packed, lambda row: _packed({"frame": "chunk", **dict(zip(KEYS, row, strict=True))}))
    return Encoding(NDJSON, _line, lambda row: _line({"frame": "chunk", **row_object(row)}))


def _packed(frame: Frame) -> bytes:
    return bytes(msgpack.packb(frame))


def _line(frame: Frame) -> bytes:
    return json.dumps(frame, ensure_ascii=False).encode() + b"\n"


def _event_frame(frame: Frame) -> bytes:
    """A comment; of an ``error`` an event, with the time after which the browser is to connect again."""
    problem = frame.get("problem")
    if problem is None:
        return b": keep-alive\n\n"
    is_passing = problem["status"] in (408, 429) or problem["status"] >= 500
    pause_ms = _PASSING_MS if is_passing else _LASTING_MS
    return f"retry: {pause_ms}\nevent: problem\ndata: {json.dumps(problem)}\n\n".encode()


def event(row: Row, cursor: Cursor) -> bytes:
    """``cursor``: behind the row. JSON has no line ends, which would end the data."""
    return f"id: {cursor}\ndata: {json.dumps(row_object(row), ensure_ascii=False)}\n\n".encode()


def event_position(cursor: Cursor) -> bytes:
    """An id alone: the browser keeps it, and dispatches nothing."""
    return f"id: {cursor}\n\n".encode()


def session(session_id: str, consumer: str) -> Frame:
    return {"frame": "session", "session": session_id, "consumer": consumer}


def assigned(generation: int, starts: Mapping[TopicPartition, int], leaderless: Sequence[TopicPartition] = ()) -> Frame:
    """``offset``: where the partition's chunks start. ``waiting``: those that come when they have a leader, if any."""
    frame = {"frame": "assigned", "generation": generation, "partitions": positions(starts)}
    return {**frame, "waiting": _named(leaderless)} if leaderless else frame


def revoked(generation: int, partitions: Iterable[TopicPartition]) -> Frame:
    return {"frame": "revoked", "generation": generation, "partitions": _named(sorted(partitions))}


def _named(partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    return [{"topic": topic, "partition": number} for topic, number in partitions]


def caught_up(reached: Mapping[TopicPartition, int]) -> Frame:
    """``offset``: the position to commit, past records that are not chunks or that the filters exclude."""
    return {"frame": "caught_up", "partitions": positions(reached)}


def damaged(partition: TopicPartition, offset: int, problem: Problem) -> Frame:
    """The partition stops before ``offset``, alone; its chunks follow as soon as they can be read."""
    topic, number = partition
    return {"frame": "damaged", "topic": topic, "partition": number, "offset": offset, "problem": problem.document()}


def error(problem: Problem) -> Frame:
    """The last frame of a session that fails: the problem document that a request would have received."""
    return {"frame": "error", "problem": problem.document()}


def positions(offsets: Mapping[TopicPartition, int]) -> list[dict[str, Any]]:
    """Positions as every answer writes them."""
    return [{"topic": topic, "partition": number, "offset": at} for (topic, number), at in sorted(offsets.items())]


KEYS: Final = (
    *("dc", "topic", "partition", "offset", "source_id", "seqno", "prev"),
    *("created_ms", "recorded_ms", "attributes", "data"),
)

Row = tuple[Any, ...]


def row_of(dc: str, topic: str, partition: int, record: KafkaRecord) -> Row | None:
    """The row of a record, its fields by `KEYS`; None for a record that no gateway wrote."""
    offset, recorded_ms, key, value, headers = record
    try:
        seqno, prev, created_ms, attributes, data = chunk_of_record(value or b"", headers)
        source_id = (key or b"").decode()
    except (Malformed, UnicodeDecodeError):
        return None
    return dc, topic, partition, offset, source_id, seqno, prev, created_ms, recorded_ms, attributes, data


def row_object(row: Row) -> dict[str, Any]:
    """The row with its keys; data that is not UTF-8 is in base64, under a key of its own."""
    found = dict(zip(KEYS, row, strict=True))
    data: bytes = found.pop("data")
    try:
        found["data"] = data.decode()
    except UnicodeDecodeError:
        found["data_base64"] = base64.b64encode(data).decode()
    return found


# The head of a row in MessagePack: an array of so many fields.
_ARRAY: Final = bytes((0x90 + len(KEYS),))
# Less data is copied faster than it is spared a copy, within a row and in what is written.
_WHOLE_BYTES: Final = 1 << 10
_PIECE_BYTES: Final = 1 << 14


def _packed_rows(rows: Sequence[Row]) -> Iterator[bytes]:
    """The rows as MessagePack arrays. Data, a row's last field, is a part of its own."""
    pack = msgpack.Packer().pack
    for row in rows:
        data: bytes = row[-1]
        if len(data) < _WHOLE_BYTES:
            yield pack(row)
        else:
            yield _ARRAY
            yield pack(row[:-1])[1:]
            yield bin_head(len(data))
            yield data


def _json_lines(rows: Sequence[Row]) -> Iterator[bytes]:
    return (json.dumps(row_object(row), ensure_ascii=False).encode() + b"\n" for row in rows)


def _data(rows: Sequence[Row]) -> Iterator[bytes]:
    return (row[-1] for row in rows)


# Media type → rows to parts of bytes, of pages and of batches that are pushed: the same rows always give the same.
PARTS: Final[dict[str, Callable[[Sequence[Row]], Iterator[bytes]]]] = {
    MSGPACK: _packed_rows,
    NDJSON: _json_lines,
    PLAIN: _data,
}


def whole(parts: Callable[[Sequence[Row]], Iterator[bytes]]) -> Callable[[Sequence[Row]], bytes]:
    """Rows to bytes; data is copied once."""
    return lambda rows: b"".join(parts(rows))


ENCODERS: Final = {kind: whole(parts) for kind, parts in PARTS.items()}


def pieces(parts: Iterable[bytes]) -> list[bytes]:
    """The parts, to be written one after the other: small ones are put together, large ones are not copied."""
    found, small = list[bytes](), list[bytes]()
    for part in parts:
        if len(part) < _PIECE_BYTES:
            small.append(part)
        else:
            found += (b"".join(small), part) if small else (part,)
            small = []
    return [*found, b"".join(small)] if small else found


EVENT_STREAM: Final = Encoding(EVENTS, _event_frame, lambda row: event(row, Cursor(row[1], row[2], row[3] + 1)))
