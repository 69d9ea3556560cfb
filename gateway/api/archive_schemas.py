"""Models of the answers about transactions of the archive."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_Number = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class PieceStored(BaseModel):
    """The piece is durable. ``digest``: of all up to it. ``expires_ms``: the transaction must be committed before."""

    model_config = ConfigDict(extra="forbid", strict=True)
    transaction: str
    piece: _Number
    digest: _Digest
    expires_ms: _Number


class UploadRequested(BaseModel):
    """All pieces are durable, and none follows."""

    model_config = ConfigDict(extra="forbid", strict=True)
    transaction: str
    pieces: _Number
    size_bytes: _Number
    digest: _Digest
    expires_ms: _Number


class UploadCommitted(BaseModel):
    """The file is visible: its pieces are the chunks of the source with these seqnos."""

    model_config = ConfigDict(extra="forbid", strict=True)
    transaction: str
    source_id: str
    topic: str
    partition: _Number
    first_seqno: _Number
    last_seqno: _Number
    digest: _Digest


class UploadDescription(UploadRequested):
    """Nulls: not visible yet."""

    state: Literal["open", "requested", "committed"]
    source_id: str
    topic: str
    partition: _Number | None
    first_seqno: _Number | None
    last_seqno: _Number | None


class BytesStored(BaseModel):
    """The bytes from ``offset`` up to ``stored_bytes`` are durable. The transaction must be committed before
    ``expires_ms``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    transaction_id: str
    offset: _Number
    stored_bytes: _Number
    expires_ms: _Number


class SizeConfirmed(BaseModel):
    """All bytes are durable, and none follows."""

    model_config = ConfigDict(extra="forbid", strict=True)
    transaction_id: str
    state: Literal["prepared"]
    stored_bytes: _Number
    expires_ms: _Number


class TransactionDescription(BaseModel):
    """``offsets``: the first and the last one of its chunks. Null: not visible, or its records were removed since."""

    model_config = ConfigDict(extra="forbid", strict=True)
    transaction_id: str
    state: Literal["open", "prepared", "committed", "expired"]
    stored_bytes: _Number
    topic: str
    partition: _Number | None
    offsets: Annotated[list[_Number], Field(min_length=2, max_length=2)] | None
