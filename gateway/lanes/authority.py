"""Authority over a source: which token may write it. Pure.

A session belongs to the token that opened it, and lives until it was silent for the configured time: no chunk, no
heartbeat, no opening. The number of a session is no secret, so it gives no authority.

| request | of the session's token | of another token, the session lives | of another token, it was silent |
| --- | --- | --- | --- |
| chunk, heartbeat | by the rule of a chunk | ``superseded`` | ``superseded`` |
| opening | a new session | ``source-in-use`` | a new session, of this token now |
| opening by an administrator of the topic | a new session | a new session | a new session |

* A source without a session, or whose session was opened without a token, is everybody's who may write the topic.
* Without tokens, and among those who share one, one rule remains: where a session was
  opened, a chunk outside of it that jumps needs ``prev``. A mistaken seqno would silence the source.
* Decided in the lane, in the order of its transaction, by the brokers' time: if that is ahead, the session ends
  early and another token may open; if it is behind, another token waits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import SourceState

# A chunk outside of the session may be so far above the recorded seqno, or above zero, without ``prev``: one TiB.
MAX_UNCHAINED_JUMP: Final = 1 << 40


class Refusal(NamedTuple):
    """Nothing of the request is written. ``kind``: a problem kind; ``recorded``: the seqno that the log holds."""

    kind: str
    detail: str
    recorded: int | None
    retry_after_s: int | None = None


def refuse_write(state: SourceState, session: int | None, token: str | None) -> Refusal | None:
    """Why a chunk or heartbeat is refused; None: it is not. Only the newest session's number is accepted, or none."""
    if _is_foreign(state, token):
        detail = "another token opened the source's session; when that is silent, a session can be opened instead"
        return Refusal("superseded", detail, state.recorded)
    if session is None or session == state.session:
        return None
    newer = f"the newest is {state.session}" if state.session else "none is open"
    return Refusal("superseded", f"session {session} is not the source's session; {newer}", state.recorded)


def refuse_opening(
    state: SourceState, token: str | None, now_ms: int, lapse_ms: int, *, is_admin: bool
) -> Refusal | None:
    """Why a session may not be opened now; None: it may. ``lapse_ms``: after so long a silence a session has ended."""
    left_ms = state.alive_ms + lapse_ms - now_ms
    if is_admin or left_ms <= 0 or not _is_foreign(state, token):
        return None
    left_s = -(-min(left_ms, lapse_ms) // 1000)
    detail = (
        f"the source has a session of another token; it ends when that token is silent for another {left_s} s. Stop "
        "that writer, use another source id, or let an administrator open the session or forget the source"
    )
    return Refusal("source-in-use", detail, state.recorded, left_s)


def refuse_jump(state: SourceState, chunk: Chunk, session: int | None, recorded: int | None) -> str | None:
    """Why a chunk may not jump so far; None: it may. ``recorded``: before this chunk, with those of its request."""
    if not state.session or session is not None or chunk.prev is not None:
        return None
    jump = chunk.seqno - (recorded or 0)
    if jump <= MAX_UNCHAINED_JUMP:
        return None
    return (
        f"seqno {chunk.seqno} is {jump} above what is recorded, outside of the source's session; send the session's "
        "number, or prev"
    )


def _is_foreign(state: SourceState, token: str | None) -> bool:
    return state.session != 0 and state.token is not None and state.token != token
