"""What a replay says of a transaction whose commit was not answered. Pure."""

from __future__ import annotations

from logferry.gateway.contract.source_state import Receipt, SourceState
from logferry.gateway.contract.upload_state import UploadState
from logferry.gateway.lanes.dedup import Refusal
from logferry.gateway.lanes.transaction import (
    ForgetOutcome,
    HeartbeatOutcome,
    Outcome,
    SessionOutcome,
    WriteOutcome,
)
from logferry.gateway.lanes.uploads import UploadOutcome


def resolve(outcome: Outcome, replayed: SourceState | None, receipt: Receipt | None = None) -> bool | None:
    """Whether a transaction of unknown outcome was committed, by what a replay after the fence says of one source.

    True is certain: the requested change is in the log, once. False is certain as well: after the fence
    nothing of the older transaction can be committed any more. None: the log can't tell, since another owner was
    there in between, and a newer session wrote past it, or another opening got the same number.

    ``receipt``: what the replay has of the same request without seqnos. Uploads: `resolve_upload`.

    A refusal rested on what that transaction may have undone and names a seqno that may not be recorded: it is
    never given, and the request wrote nothing.
    """
    if isinstance(outcome, Refusal):
        return False
    if isinstance(outcome, ForgetOutcome):
        # A source that is known again may have been forgotten in between.
        return True if replayed is None else False if replayed == outcome.before else None
    if isinstance(outcome, UploadOutcome):
        return None
    drafted = outcome.state
    if isinstance(outcome, WriteOutcome) and outcome.receipt is not None:
        return _resolve_append(outcome, outcome.receipt, replayed, receipt)
    if replayed is None or replayed.topic_id != drafted.topic_id:
        return False
    if isinstance(outcome, SessionOutcome):
        return None if replayed.session >= drafted.session else False
    if isinstance(outcome, HeartbeatOutcome):
        if replayed.heartbeat == drafted.heartbeat:
            return True
        return None if replayed.session != drafted.session or _is_newer(replayed, drafted) else False
    if replayed.base != drafted.base or replayed.recorded is None or replayed.recorded < (drafted.recorded or 0):
        return False
    return True if replayed.session == drafted.session else None


def _resolve_append(
    outcome: WriteOutcome, drafted: Receipt, state: SourceState | None, found: Receipt | None
) -> bool | None:
    """Seqnos say nothing: another owner gave the same ones to other chunks. The transaction's number says it."""
    topic_id = outcome.state.topic_id
    if found is not None and (found.topic_id, found.digest) == (topic_id, drafted.digest):
        return True  # of this attempt or of another one
    if state is None:
        return None  # never recorded, or recorded and forgotten
    if state.topic_id != topic_id:
        return False
    if outcome.written and state.appended_by == outcome.state.appended_by:
        return True
    is_before = state.base == outcome.state.base and (state.recorded or 0) < drafted.last_seqno
    return False if is_before else None


def _is_newer(state: SourceState, drafted: SourceState) -> bool:
    """Whether the state has a heartbeat that is not older than the drafted one, which it may have replaced."""
    if state.heartbeat is None or drafted.heartbeat is None:
        return False
    return state.heartbeat.at_ms >= drafted.heartbeat.at_ms


def resolve_upload(outcome: UploadOutcome, found: UploadState | None) -> UploadOutcome | None:
    """The outcome of a request whose commit was not answered, by the state that a replay after the fence found.

    None: the log does not tell, the client repeats the call. What another attempt has recorded is as good.
    """
    drafted = outcome.upload
    if found is None or found.topic_id != drafted.topic_id or len(found.pieces) < len(drafted.pieces):
        return None
    is_same = found.digest_after(len(drafted.pieces)) == drafted.digest
    is_same &= found.is_sealed >= drafted.is_sealed and (found.commit is not None) >= (drafted.commit is not None)
    if drafted.is_sealed and len(found.pieces) != len(drafted.pieces):
        return None
    return UploadOutcome(found) if is_same else None
