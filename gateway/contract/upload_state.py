"""The record of an upload in the gateway's state topic: a transaction of the archive's protocol, its file so far. Pure.

The digest of an upload chains its metadata and its pieces: that of the metadata is of their JSON, the next ones are of
the digest before and the piece. So a digest says which piece it follows, and what all of them hold.
"""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from typing import Any, Final, NamedTuple

UPLOAD_KIND: Final = b"u"
UPLOAD_VERSION: Final = 1
DIGEST_BYTES: Final = 16
_HEAD: Final = struct.Struct(">BI")
_PIECE: Final = struct.Struct(">qI16s")


def upload_key(source_id: str) -> bytes:
    """The key of its record in the state topic. ``source_id``: the id of the source that the file becomes."""
    return UPLOAD_KIND + source_id.encode()


def piece_key(source_id: str, number: int) -> bytes:
    """The key of a piece in the staging topic. ``number``: from 1 on."""
    return b"%s\0%d" % (source_id.encode(), number)


def next_digest(before: bytes, data: bytes) -> bytes:
    """The digest after a piece."""
    found = blake2b(before, digest_size=DIGEST_BYTES)
    found.update(data)
    return found.digest()


def first_digest(topic: str, attributes: dict[str, str]) -> bytes:
    """The digest before the first piece."""
    text = json.dumps([topic, sorted(attributes.items())], ensure_ascii=False)
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


class StagedPiece(NamedTuple):
    """``at_least``: its offset in the lane's partition of the staging topic, or lower. ``digest``: after it."""

    at_least: int
    size_bytes: int
    digest: bytes


class UploadCommit(NamedTuple):
    """Where its chunks are. ``at_ms``: when they were recorded."""

    partition: int
    first_seqno: int
    at_ms: int


class UploadState(NamedTuple):
    """``topic``: the full name. ``expires_ms``: it is gone then if it was not committed.

    ``is_sealed``: no piece follows. ``commit`` None: nothing of it is visible. ``is_expired``: it is gone, and all that
    is kept is that it was there.
    """

    topic: str
    topic_id: bytes
    attributes: dict[str, str]
    expires_ms: int
    token: str | None = None
    pieces: tuple[StagedPiece, ...] = ()
    is_sealed: bool = False
    commit: UploadCommit | None = None
    is_expired: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def digest(self) -> bytes:
        return self.digest_after(len(self.pieces))

    def digest_after(self, piece: int) -> bytes:
        """``piece``: its number; 0: before the first one."""
        return self.pieces[piece - 1].digest if piece else first_digest(self.topic, self.attributes)

    def as_gone(self) -> UploadState:
        """What is kept of one that was not committed: that it was there."""
        return self._replace(attributes={}, pieces=(), is_sealed=False, is_expired=True)

    def encode(self) -> bytes:
        found: dict[str, Any] = {**self._asdict(), "topic_id": self.topic_id.hex()}
        del found["pieces"]
        if not self.is_expired:
            del found["is_expired"]
        head = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
        return b"".join((_HEAD.pack(UPLOAD_VERSION, len(head)), head, *(_PIECE.pack(*piece) for piece in self.pieces)))

    @classmethod
    def decode(cls, raw: bytes) -> UploadState:
        """Raises ValueError or struct.error: another version, or not a state."""
        version, size = _HEAD.unpack_from(raw)
        if version != UPLOAD_VERSION:
            raise ValueError(f"upload of version {version}; this logferry reads version {UPLOAD_VERSION}")
        try:
            found = json.loads(raw[_HEAD.size : _HEAD.size + size])
            commit, pieces = found["commit"], [*_PIECE.iter_unpack(raw[_HEAD.size + size :])]
            if not pieces and not found.get("is_expired"):
                raise ValueError("an upload without pieces")
            return cls(
                **{
                    **found,
                    "topic_id": bytes.fromhex(found["topic_id"]),
                    "pieces": tuple(StagedPiece(*piece) for piece in pieces),
                    "commit": None if commit is None else UploadCommit(*commit),
                }
            )
        except (KeyError, TypeError) as wrong:
            raise ValueError(f"an upload's state that cannot be read: {wrong!r}") from None
