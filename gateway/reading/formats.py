"""The frames of a read session and how they are written: MessagePack maps, or lines of JSON. Pure.

The order of frames says what belongs to whom: chunks of a partition come only between an ``assigned`` that names
it and the next ``revoked``, and every ``assigned`` starts where the consumer's committed position stood.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgpack
from logferry.gateway.contract.chunk import MSGPACK, NDJSON
from logferry.gateway.errors import Problem
from logferry.gateway.rows import KEYS, Row, row_object

Frame = dict[str, Any]
# A Kafka topic and the number of a partition of it.
Partition = tuple[str, int]

KEEP_ALIVE: Final[Frame] = {"frame": "keep_alive"}


class Encoding(NamedTuple):
    """A format of the stream: ``frame`` writes any frame but a chunk's, ``chunk`` that of a row."""

    media_type: str
    frame: Callable[[Frame], bytes]
    chunk: Callable[[Row], bytes]


def encoding(accept: str) -> Encoding:
    """The format for an Accept header. Raises Problem when none fits."""
    kinds = [part.split(";")[0].strip().lower() for part in accept.split(",")] if accept else ["*/*"]
    for kind in kinds:
        if kind in (MSGPACK, "*/*", "application/*"):
            return Encoding(MSGPACK, _packed, _packed_chunk)
        if kind in (NDJSON, "application/json"):
            return Encoding(NDJSON, _line, _chunk_line)
    raise Problem("bad-request", f"Accept: none of {MSGPACK}, {NDJSON} fits {accept[:100]!r}")


def _packed(frame: Frame) -> bytes:
    return bytes(msgpack.packb(frame))


def _packed_chunk(row: Row) -> bytes:
    return bytes(msgpack.packb({"frame": "chunk", **dict(zip(KEYS, row, strict=True))}))


def _line(frame: Frame) -> bytes:
    return json.dumps(frame, ensure_ascii=False).encode() + b"\n"


def _chunk_line(row: Row) -> bytes:
    return _line({"frame": "chunk", **row_object(row)})


def session(session_id: str, consumer: str) -> Frame:
    return {"frame": "session", "session": session_id, "consumer": consumer}


def assigned(generation: int, starts: Mapping[Partition, int]) -> Frame:
    """``offset``: where the partition's chunks start."""
    return {"frame": "assigned", "generation": generation, "partitions": positions(starts)}


def revoked(generation: int, partitions: Iterable[Partition]) -> Frame:
    named = [{"topic": topic, "partition": number} for topic, number in sorted(partitions)]
    return {"frame": "revoked", "generation": generation, "partitions": named}


def caught_up(reached: Mapping[Partition, int]) -> Frame:
    """``offset``: the position to commit; it has passed what is no chunk, and what the filters left out."""
    return {"frame": "caught_up", "partitions": positions(reached)}


def error(problem: Problem) -> Frame:
    """The last frame of a session that cannot go on: the problem document that a request would have got."""
    return {"frame": "error", "problem": problem.document()}


def positions(offsets: Mapping[Partition, int]) -> list[dict[str, Any]]:
    """Positions as every answer writes them."""
    return [{"topic": topic, "partition": number, "offset": at} for (topic, number), at in sorted(offsets.items())]
