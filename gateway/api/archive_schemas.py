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
