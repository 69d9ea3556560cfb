"""The records of the gateway's state topic: states of sources, and receipts of requests. Pure.

Those of uploads: `upload_state`.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final, NamedTuple

_STATE = struct.Struct(">BBI16sqqqq")
_HEARTBEAT = struct.Struct(">Bqqqq")
_BEAT_ENDS = _STATE.size + _HEARTBEAT.size
# The place of the session in a state.
_SESSION = slice(38, 46)
_NO_SESSION = bytes(8)
_HAS_RECORDED, _HAS_BASE, _HAS_HEARTBEAT, _HAS_TOKEN = 1, 2, 4, 8
_IS_APPENDED = 16
_HAS_ALL = _HAS_RECORDED | _HAS_BASE | _HAS_HEARTBEAT | _HAS_TOKEN | _IS_APPENDED
_RECEIPT = struct.Struct(">BI16sqqq16s")
# Of a heartbeat: it has a watermark, a position, a size (1, 2, 4).
_IS_FINISHED = 8
# The session was used. It stands among the flags of the heartbeat, since earlier versions stop a lane at a flag of the
# state that they do not know, and pass over one here. A state without a heartbeat gets an empty one, of the time 0.
_IS_USED = 16

STATE_VERSION = 1
_VERSION = bytes([STATE_VERSION])


class SourceIdentity(NamedTuple):
    """The identity of a source. ``topic`` is the full name (``dc1.nginx``); the key is part of the identity."""

    topic: str
    partition_key: str | None
    source_id: str

    @property
    def key(self) -> str:
        """The key that determines lane and partition."""
        return self.source_id if self.partition_key is None else self.partition_key

    def state_key(self) -> bytes:
        """The key of its record in the state topic. NUL parts the fields: it is in none of them."""
        if self.partition_key is None:
            return b"s%s\0%s" % (self.topic.encode(), self.source_id.encode())
        return b"k%s\0%s\0%s" % (self.topic.encode(), self.partition_key.encode(), self.source_id.encode())

    @classmethod
    def of_state_key(cls, raw: bytes) -> SourceIdentity:
        parts = raw[1:].decode().split("\0")
        if raw[:1] == b"s" and len(parts) == 2:
            return cls(parts[0], None, parts[1])
        if raw[:1] == b"k" and len(parts) == 3:
            return cls(parts[0], parts[1], parts[2])
        raise ValueError(f"state key {raw!r} cannot be decoded")


# Of a record without a value that opens each term of a lane, in the state topics of gateway and mirror.
FENCE_KEY: Final = b"fence"


class Heartbeat(NamedTuple):
    """The state that a source reports without a new chunk. ``at_ms``: when the gateway recorded it.

    ``watermark_ms``: it has sent all that happened before. ``position`` and ``size``: bytes of its file.
    """

    at_ms: int
    watermark_ms: int | None = None
    position: int | None = None
    size: int | None = None
    finished: bool | None = None

    def encode(self) -> bytes:
        given = (self.watermark_ms, self.position, self.size)
        flags = sum(1 << bit for bit, value in enumerate(given) if value is not None)
        return _HEARTBEAT.pack(flags | bool(self.finished) * _IS_FINISHED, self.at_ms, *(value or 0 for value in given))

    @classmethod
    def decode(cls, raw: bytes) -> Heartbeat:
        flags, at_ms, watermark_ms, position, size = _HEARTBEAT.unpack(raw)
        given = (watermark_ms if flags & 1 else None, position if flags & 2 else None, size if flags & 4 else None)
        return tuple.__new__(cls, (at_ms, *given, flags & _IS_FINISHED != 0))


class SourceState(NamedTuple):
    """The recorded state of a source. ``session`` 0: none was opened.

    ``written_ms``: the last chunk or session. ``heartbeat``: the last one, None if there was none. ``token``: the name
    of the token that opened the session, or that wrote first; None: it was none. ``is_used``: a chunk or heartbeat came
    with the session's number. ``appended_by``: the number of the transaction that appended last, and the lane gives the
    source's seqnos; 0: its writer gives them. Such a source has no sessions, and the number takes their place.
    """

    topic_id: bytes
    partition: int
    recorded: int | None
    base: int | None
    session: int
    written_ms: int
    heartbeat: Heartbeat | None = None
    token: str | None = None
    is_used: bool = False
    appended_by: int = 0

    @property
    def alive_ms(self) -> int:
        """The time of the last chunk, session or heartbeat."""
        return self.written_ms if self.heartbeat is None else max(self.written_ms, self.heartbeat.at_ms)

    def encode(self) -> bytes:
        flags = (self.recorded is not None) * _HAS_RECORDED | (self.base is not None) * _HAS_BASE
        if self.heartbeat is not None or self.is_used:
            flags |= _HAS_HEARTBEAT
        if self.token is not None:
            flags |= _HAS_TOKEN
        if self.appended_by:
            flags |= _IS_APPENDED
        numbers = (self.recorded or 0, self.base or 0, self.appended_by or self.session, self.written_ms)
        fixed = _STATE.pack(STATE_VERSION, flags, self.partition, self.topic_id, *numbers)
        if flags & _HAS_HEARTBEAT:
            beat = (self.heartbeat or Heartbeat(0)).encode()
            fixed += bytes([beat[0] | self.is_used * _IS_USED]) + beat[1:]
        return fixed if self.token is None else fixed + self.token.encode()

    @classmethod
    def decode(cls, raw: bytes) -> SourceState:
        """Raises ValueError as `token_at` does."""
        ends = token_at(raw)
        _, flags, partition, topic_id, recorded, base, session, written_ms = _STATE.unpack_from(raw)
        beat, is_used, appended_by = None, False, 0
        if flags & _HAS_HEARTBEAT:
            is_used = raw[_STATE.size] & _IS_USED != 0
            beat = Heartbeat.decode(raw[_STATE.size : _BEAT_ENDS])
            beat = beat if beat.at_ms else None
        if flags & _IS_APPENDED:
            session, appended_by = 0, session
        if not flags & _HAS_RECORDED:
            recorded = None
        if not flags & _HAS_BASE:
            base = None
        token = raw[ends:].decode() if flags & _HAS_TOKEN else None
        # The call of a class of named fields takes a third of all this.
        fields = (topic_id, partition, recorded, base, session, written_ms, beat, token, is_used, appended_by)
        return tuple.__new__(cls, fields)


def token_at(raw: bytes) -> int:
    """Where the name of the token begins in an encoded state; its end: there is none.

    Raises ValueError: another version, a flag that is not known, or another length than the flags say.
    """
    size = len(raw)
    if raw[:1] != _VERSION:
        raise ValueError(f"state of version {raw[:1].hex()}; this logferry reads version {STATE_VERSION:02}")
    flags = raw[1] if size > 1 else 0
    ends = _BEAT_ENDS if flags & _HAS_HEARTBEAT else _STATE.size
    if size < ends or flags > _HAS_ALL or (flags & _HAS_TOKEN != 0) != (size > ends):
        raise ValueError(f"state of {size} bytes with flags {raw[1:2].hex()}")
    if flags & _IS_APPENDED and raw[_SESSION] == _NO_SESSION:
        raise ValueError("state of a source that is appended to, without the number of the transaction")
    return ends


# Of the key of a receipt. The source's state key follows, and after a NUL the hash of the request's key.
RECEIPT_KIND: Final = b"r"


def receipt_key(source: SourceIdentity, key: str) -> bytes:
    """The key of the record of a receipt. ``key``: the request's idempotency key, of any length."""
    return b"%s%s\0%s" % (RECEIPT_KIND, source.state_key(), blake2b(key.encode(), digest_size=16).hexdigest().encode())


def source_of_record(key: bytes) -> SourceIdentity:
    """The source that a record of the state topic is about, be it a state or a receipt. Raises ValueError."""
    return SourceIdentity.of_state_key(key[1:].rpartition(b"\0")[0] if key[:1] == RECEIPT_KIND else key)


class Receipt(NamedTuple):
    """What was recorded for a request without seqnos: its answer, as long as the same request may come again.

    ``digest``: 16 bytes, of the request's content. ``token``: the name of the caller's, None: it had none.
    """

    topic_id: bytes
    partition: int
    first_seqno: int
    last_seqno: int
    at_ms: int
    digest: bytes
    token: str | None = None

    def encode(self) -> bytes:
        fixed = _RECEIPT.pack(
            STATE_VERSION, self.partition, self.topic_id, self.first_seqno, self.last_seqno, self.at_ms, self.digest
        )
        return fixed + (self.token or "").encode()

    @classmethod
    def decode(cls, raw: bytes) -> Receipt:
        """Raises ValueError: another version, or too short."""
        if raw[:1] != bytes([STATE_VERSION]) or len(raw) < _RECEIPT.size:
            raise ValueError(f"receipt of {len(raw)} bytes and version {raw[:1].hex()}")
        _, partition, topic_id, first, last, at_ms, digest = _RECEIPT.unpack_from(raw)
        return cls(topic_id, partition, first, last, at_ms, digest, raw[_RECEIPT.size :].decode() or None)
