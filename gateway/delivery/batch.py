"""Batches of a subscription: which chunks they hold, their bytes, and their headers. Pure.

The bytes are a function of the records between two offsets and of the shape alone: the same batch has the same bytes on
every worker, at every attempt.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import cramjam
from logferry.gateway.contract.chunk import MSGPACK, NDJSON, TRACEPARENT, Chunk, Headers, record_headers
from logferry.gateway.contract.delivery_state import UnitKey
from logferry.gateway.http.request import valid_trace
from logferry.gateway.reading.formats import PARTS, PLAIN, Row, pieces
from logferry.gateway.subscriptions import Filters, compiled

# Counted for each chunk beside its data.
ROW_BYTES: Final = 100
MOST_CHUNKS: Final = 10_000
_QUICK_ROWS: Final = 200
_QUICK_BYTES: Final = 1 << 16
_LAST_MS: Final = 253_402_300_799_999
# The places in a row.
_OFFSET, _SOURCE, _SEQNO, _CREATED, _RECORDED, _ATTRIBUTES, _DATA = 3, 4, 5, 7, 8, 9, 10


class BatchShape:
    """What the bytes of a unit's batches depend on, besides their place."""

    def __init__(self, text: str, shard: int) -> None:
        """``text``: of `PushSubscription.shape`. Raises ValueError."""
        found = json.loads(text)
        self.text, self._shard, self._shards = text, shard, int(found["shards"])
        self._parts, self.content_type = _FORMATS[found["format"]]
        self._copies = found["format"] in ("msgpack", "text")
        self.compression: str = found["compression"]
        filters = Filters.model_validate(found["filters"])
        self._prefix, self._attributes = filters.source_prefix, filters.attributes.items()
        self._pattern = None if filters.pattern is None else compiled(filters.pattern)

    def takes(self, row: Row) -> bool:
        """Whether the chunk belongs into a batch."""
        source: str = row[_SOURCE]
        if self._shards > 1 and zlib.crc32(source.encode()) % self._shards != self._shard:
            return False
        if not (source.startswith(self._prefix) and self._attributes <= row[_ATTRIBUTES].items()):
            return False
        return self._pattern is None or self._pattern.search(row[_DATA]) is not None

    def is_quick(self, rows: Sequence[Row]) -> bool:
        """Whether `pieces` takes less than a thread costs: large rows are not copied, some bytes are escaped."""
        if self._copies and len(rows) <= _QUICK_ROWS:
            return True
        return sum(map(size_of, rows)) <= _QUICK_BYTES

    def pieces(self, rows: Sequence[Row]) -> list[bytes]:
        """The body, in pieces."""
        return pieces(self._parts(rows))

    def compressed(self, body: bytes) -> bytes:
        if self.compression == "gzip":
            return gzip.compress(body, 6, mtime=0)
        return bytes(cramjam.zstd.compress(body, level=1)) if self.compression == "zstd" else body


@dataclass(frozen=True, slots=True)
class DeliveryBatch:
    """``start`` and ``end``: the offsets that it takes the place of; ``first`` and ``last``: of its chunks.

    ``pieces``: of the body. They are the data of the rows where that is large, so that a batch is in memory once.
    """

    start: int
    end: int
    rows: list[Row]
    pieces: list[bytes]

    @property
    def first(self) -> int:
        return int(self.rows[0][_OFFSET])

    @property
    def last(self) -> int:
        return int(self.rows[-1][_OFFSET])

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.pieces))

    def middle(self) -> int:
        """Where the second half begins; there are two chunks at least."""
        return int(self.rows[len(self.rows) // 2][_OFFSET])


def size_of(row: Row) -> int:
    return len(row[_DATA]) + ROW_BYTES


def cut(rows: Iterable[Row], max_bytes: int) -> tuple[int, int | None]:
    """How many bytes the chunks have up to where a batch is full, and the offset after that; None: it is not full.

    At least one chunk is in it.
    """
    size = count = 0
    last: int | None = None
    for row in rows:
        more = size_of(row)
        if last is not None and size + more > max_bytes:
            return size, last + 1
        size, count, last = size + more, count + 1, row[_OFFSET]
        if count == MOST_CHUNKS or size >= max_bytes:
            return size, row[_OFFSET] + 1
    return size, None


def headers(
    key: UnitKey,
    batch: DeliveryBatch,
    shape: BatchShape,
    *,
    epoch: int,
    replay: int,
    secrets: Sequence[bytes],
    now_s: int,
) -> dict[str, str]:
    """The headers of an attempt. Signature and body: of the bytes before they are compressed."""
    sources = len({row[_SOURCE] for row in batch.rows})
    found = {
        "Content-Type": shape.content_type,
        "X-Logferry-Subscription": key.subscription,
        "X-Logferry-Token": f"{key.topic}/{key.partition}/{batch.first}-{batch.last}",
        "X-Logferry-Epoch": str(epoch),
        "X-Logferry-Replay": str(replay),
        "X-Logferry-Shard": str(key.shard),
        "X-Logferry-Chunks": str(len(batch.rows)),
    }
    if sources == 1:
        source = quote(batch.rows[0][_SOURCE], safe="/:@!$'()*+,;~")
        found["X-Logferry-Source"] = f"{source} {batch.rows[0][_SEQNO]}-{batch.rows[-1][_SEQNO]}"
    traces = {trace for row in batch.rows if (trace := row[_ATTRIBUTES].get(TRACEPARENT)) is not None}
    if len(traces) == 1 and (only := valid_trace(traces.pop())) is not None:
        found[TRACEPARENT] = only
    if shape.compression != "none":
        found["Content-Encoding"] = shape.compression
    if secrets:
        found["X-Logferry-Signature"] = signature(batch.pieces, secrets, now_s)
    return found


def signature(body: Iterable[bytes], secrets: Sequence[bytes], now_s: int) -> str:
    """``t=<unix s>,v1=<hex>``, with a ``v1`` for each key. ``body``: its pieces."""
    codes = [hmac.new(key, b"%d." % now_s, hashlib.sha256) for key in secrets]
    for piece in body:
        for code in codes:
            code.update(piece)
    return ",".join([f"t={now_s}", *(f"v1={code.hexdigest()}" for code in codes)])


class DeadLetter(NamedTuple):
    """A chunk that the receiver rejected, for the dead-letter topic."""

    topic: str
    key: bytes
    data: bytes
    headers: Headers


def dead_letter(topic: str, key: UnitKey, row: Row, detail: str) -> DeadLetter:
    """``detail``: why it was rejected; said with its place in attributes."""
    said = {"dead.subscription": key.subscription, "dead.topic": key.topic, "dead.reason": detail[:1000]}
    said |= {"dead.partition": str(key.partition), "dead.offset": str(row[3])}
    chunk = Chunk(row[5], row[6], row[7], {**row[9], **said}, row[10])
    return DeadLetter(topic, row[4].encode(), row[10], record_headers(chunk))


def _cloudevents(rows: Sequence[Row]) -> Iterator[bytes]:
    yield json.dumps(list(map(_event, rows)), ensure_ascii=False).encode()


def _event(row: Row) -> dict[str, Any]:
    """CloudEvents 1.0, JSON: source and id name an event; extensions are lower case."""
    dc, topic, partition, offset, source_id, seqno, _prev, created_ms, recorded_ms, attributes, data = row
    found: dict[str, Any] = {
        "specversion": "1.0",
        "type": "logferry.chunk",
        "source": f"/{topic}/{quote(source_id, safe='/')}",
        "id": str(seqno),
        "time": _rfc3339(created_ms if created_ms is not None else recorded_ms),
        "dc": dc,
        "partition": partition,
        "offset": str(offset),  # a number of JSON in CloudEvents has 32 bits
        "recordedms": str(recorded_ms),
    }
    if attributes:
        found["attributes"] = json.dumps(attributes, ensure_ascii=False, sort_keys=True)
    try:
        return {**found, "datacontenttype": "text/plain; charset=utf-8", "data": data.decode()}
    except UnicodeDecodeError:
        encoded = base64.b64encode(data).decode()
        return {**found, "datacontenttype": "application/octet-stream", "data_base64": encoded}


def _rfc3339(time_ms: int) -> str:
    """Years after 9999 have no form there: they stand at the end of 9999."""
    moment = datetime.fromtimestamp(min(time_ms, _LAST_MS) // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_ms % 1000:03}Z"


_FORMATS: Final[dict[str, tuple[Callable[[Sequence[Row]], Iterator[bytes]], str]]] = {
    "ndjson": (PARTS[NDJSON], NDJSON),
    "msgpack": (PARTS[MSGPACK], MSGPACK),
    "text": (PARTS[PLAIN], PLAIN),
    "cloudevents": (_cloudevents, "application/cloudevents-batch+json"),
}
