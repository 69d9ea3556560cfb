"""Who may write a source, as a table: the token of its session, another one, and none."""

from __future__ import annotations

import pytest
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity, SourceState
from logferry.gateway.lanes.dedup import MAX_UNCHAINED_JUMP, Refusal, SourceTable, refuse_opening
from logferry.gateway.lanes.transaction import (
    Draft,
    ForgetSource,
    HeartbeatOutcome,
    OpenSession,
    Outcome,
    RecordHeartbeat,
    Request,
    SessionOutcome,
    WriteChunks,
    WriteOutcome,
)

from tests.support import lane_requests
from tests.support.lane_requests import LAPSE, NOW, TOPIC, committed

MONTH = 30 * 86_400_000
HUGE = 2**63 - 1
WEB = SourceIdentity("dc1.t", None, "web")


def write(seqno: int, prev: int | None = None, *, session: int | None = None, token: str | None = None) -> WriteChunks:
    return lane_requests.write(WEB, (seqno, prev), session=session, token=token)


def opening(token: str | None, *, is_admin: bool = False) -> OpenSession:
    return OpenSession(TOPIC, WEB, 256, token, is_admin)


def beating(token: str | None, now_ms: int, session: int | None = None) -> RecordHeartbeat:
    return RecordHeartbeat(TOPIC, WEB, session, Heartbeat(now_ms), token=token)


class Lane:
    """Each request in a transaction of its own."""

    def __init__(self) -> None:
        self.table = SourceTable()
        self.token: str | None = None

    def asked(self, request: Request, now_ms: int = NOW) -> Outcome:
        (outcome,) = committed(self.table, request, now_ms=now_ms)
        return outcome

    @property
    def state(self) -> SourceState:
        state = self.table.get(WEB, TOPIC.id)
        assert state is not None
        return state


@pytest.fixture
def lane() -> Lane:
    """The token *own* has a session, which wrote up to 10."""
    lane = Lane()
    lane.asked(opening("own"))
    assert isinstance(lane.asked(write(10, 0, session=lane.state.session, token="own")), WriteOutcome)
    return lane


def kind(outcome: Outcome) -> str:
    return outcome.kind if isinstance(outcome, Refusal) else type(outcome).__name__


@pytest.mark.parametrize("silent_ms", [0, LAPSE - 1, LAPSE, MONTH])
@pytest.mark.parametrize("token", ["other", None])
def test_another_token_writes_nothing_with_or_without_the_sessions_number(
    lane: Lane, token: str | None, silent_ms: int
) -> None:
    before, now = lane.state, NOW + silent_ms
    for request in (
        write(HUGE, token=token),
        write(11, 10, token=token),
        write(11, 10, session=before.session, token=token),
        write(5, token=token),
        beating(token, now),
        beating(token, now, before.session),
    ):
        assert kind(lane.asked(request, now)) == "superseded"
    assert lane.state == before
    assert kind(lane.asked(write(11, 10, session=before.session, token="own"), now)) == "WriteOutcome"


@pytest.mark.parametrize(
    ("token", "is_admin", "silent_ms", "expected"),
    [
        ("own", False, 0, "SessionOutcome"),
        ("own", False, MONTH, "SessionOutcome"),
        ("other", False, 0, "source-in-use"),
        (None, False, 0, "source-in-use"),
        ("other", False, LAPSE - 1, "source-in-use"),
        ("other", False, LAPSE, "SessionOutcome"),
        ("other", False, MONTH, "SessionOutcome"),
        ("other", True, 0, "SessionOutcome"),
        # The clock of this host was set back: the session lives, and whoever has it is not disturbed.
        ("other", False, -MONTH, "source-in-use"),
        ("own", False, -MONTH, "SessionOutcome"),
    ],
)
def test_who_may_open_a_session(lane: Lane, token: str | None, is_admin: bool, silent_ms: int, expected: str) -> None:
    before = lane.state
    outcome = lane.asked(opening(token, is_admin=is_admin), NOW + silent_ms)
    assert kind(outcome) == expected
    if isinstance(outcome, SessionOutcome):
        assert (lane.state.token, lane.state.recorded) == (token, 10)
        assert lane.state.session > before.session
        # The session before it is not continued, by whichever token.
        assert kind(lane.asked(write(11, 10, session=before.session, token="own"))) == "superseded"
    else:
        assert isinstance(outcome, Refusal)
        assert outcome.retry_after_s is not None
        assert 0 < outcome.retry_after_s <= LAPSE // 1000


@pytest.mark.parametrize("is_used", [True, False])
def test_a_session_lives_by_its_heartbeats_and_its_chunks(lane: Lane, is_used: bool) -> None:
    """For other tokens also by those without its number, where it was only opened."""
    if not is_used:
        lane.asked(opening("own"))
    session = lane.state.session if is_used else None
    assert isinstance(lane.asked(beating("own", NOW + LAPSE - 1, session), NOW + LAPSE - 1), HeartbeatOutcome)
    assert kind(lane.asked(opening("other"), NOW + 2 * LAPSE - 2)) == "source-in-use"
    written = lane.asked(write(12, 10, session=session, token="own"), NOW + 2 * LAPSE - 2)
    assert kind(written) == "WriteOutcome"
    assert kind(lane.asked(opening("other"), NOW + 3 * LAPSE - 3)) == "source-in-use"
    assert kind(lane.asked(opening("other"), NOW + 3 * LAPSE - 2)) == "SessionOutcome"


def test_a_refused_heartbeat_keeps_no_session_alive(lane: Lane) -> None:
    lane.asked(beating("other", NOW + LAPSE - 1), NOW + LAPSE - 1)
    assert lane.state.heartbeat is None
    assert kind(lane.asked(opening("other"), NOW + LAPSE)) == "SessionOutcome"


def test_a_source_without_a_session_is_everybodys() -> None:
    """Also one whose session was opened without a token: as before there were tokens."""
    lane = Lane()
    for seqno, token in enumerate(("own", "other", None), 1):
        assert kind(lane.asked(write(seqno, token=token))) == "WriteOutcome"
        assert kind(lane.asked(beating(token, NOW))) == "HeartbeatOutcome"
    lane.asked(opening(None))
    assert kind(lane.asked(write(4, 3, token="own"))) == "WriteOutcome"
    assert kind(lane.asked(opening("own"))) == "SessionOutcome"
    assert kind(lane.asked(write(5, 4, token="other"))) == "superseded"


def test_a_forgotten_source_is_everybodys(lane: Lane) -> None:
    lane.asked(ForgetSource(TOPIC, WEB))
    assert kind(lane.asked(write(1, token="other"))) == "WriteOutcome"


@pytest.mark.parametrize("opener", [None, "own"])
def test_outside_of_a_session_a_jump_needs_prev(opener: str | None) -> None:
    """Those who share a token, or have none, cannot be told apart: a mistaken seqno must not silence the source."""
    lane = Lane()
    assert kind(lane.asked(write(MAX_UNCHAINED_JUMP + 1, token=opener))) == "WriteOutcome"
    lane.asked(ForgetSource(TOPIC, WEB))
    lane.asked(opening(opener))
    for seqno in (HUGE, MAX_UNCHAINED_JUMP + 1):
        assert kind(lane.asked(write(seqno, token=opener))) == "bad-request"
    assert kind(lane.asked(write(MAX_UNCHAINED_JUMP, token=opener))) == "WriteOutcome"
    assert kind(lane.asked(write(2 * MAX_UNCHAINED_JUMP + 1, token=opener))) == "bad-request"
    assert kind(lane.asked(write(2 * MAX_UNCHAINED_JUMP + 1, MAX_UNCHAINED_JUMP, token=opener))) == "WriteOutcome"
    assert kind(lane.asked(write(HUGE, session=lane.state.session, token=opener))) == "WriteOutcome"


def test_a_request_of_many_small_steps_may_go_far() -> None:
    lane = Lane()
    lane.asked(opening("own"))
    steps = [Chunk(number * MAX_UNCHAINED_JUMP, None, None, {}, b"x") for number in (1, 2, 3)]
    assert kind(lane.asked(WriteChunks(TOPIC, WEB, None, steps, 3, "own"))) == "WriteOutcome"
    steps = [Chunk(number * MAX_UNCHAINED_JUMP, None, None, {}, b"x") for number in (4, 6)]
    assert kind(lane.asked(WriteChunks(TOPIC, WEB, None, steps, 3, "own"))) == "bad-request"
    assert lane.state.recorded == 3 * MAX_UNCHAINED_JUMP


def test_decided_within_the_transaction() -> None:
    """An opening earlier in the same transaction counts; so does what is refused because of it."""
    draft = Draft(SourceTable(), NOW)
    opened, _ = draft.add(opening("own"))
    assert isinstance(opened, SessionOutcome)
    refused, must_wait = draft.add(write(HUGE, token="other"))
    assert (kind(refused), must_wait) == ("superseded", True)
    assert not draft.chunks


# ---- those who share a token, or have none -------------------------------------------------------------------


@pytest.fixture(params=[None, "own"])
def used(request: pytest.FixtureRequest) -> Lane:
    """The caller's token, or none, has a session that was used by its number, up to 500."""
    lane = Lane()
    lane.token = request.param
    lane.asked(opening(lane.token))
    first = WriteChunks(TOPIC, WEB, lane.state.session, [Chunk(500, 400, None, {}, b"x")], 1, lane.token)
    assert isinstance(lane.asked(first), WriteOutcome)
    return lane


def test_while_a_session_writes_nothing_is_written_without_its_number(used: Lane) -> None:
    before, token = used.state, used.token
    for now in (NOW, NOW + LAPSE - 1, NOW - MONTH):
        for request in (
            write(10**12, token=token),
            write(HUGE, 500, token=token),
            write(501, 500, token=token),
            lane_requests.write(WEB, (500, None), (501, None), token=token),
        ):
            refusal = used.asked(request, now)
            assert kind(refusal) == "superseded"
            assert isinstance(refusal, Refusal)
            assert f"session={before.session}" in refusal.detail
            assert "open a session" in refusal.detail
            assert refusal.recorded == 500
    assert used.state == before
    written = used.asked(write(501, 500, session=before.session, token=token))
    assert isinstance(written, WriteOutcome)
    assert (written.written, written.duplicates) == (1, 0)


def test_the_refusal_says_when_the_session_lapses(used: Lane) -> None:
    refusal = used.asked(write(501, token=used.token), NOW + 100_000)
    assert isinstance(refusal, Refusal)
    assert "800 s" in refusal.detail


def test_what_is_recorded_is_a_duplicate_with_and_without_the_number(used: Lane) -> None:
    before = used.state
    same = used.asked(write(500, 400, token=used.token))
    assert isinstance(same, WriteOutcome)
    assert (same.written, same.duplicates) == (0, 1)
    assert kind(used.asked(write(400, token=used.token))) == "gap"
    assert used.state == before


def test_the_token_may_open_a_session_at_once(used: Lane) -> None:
    before = used.state.session
    assert kind(used.asked(opening(used.token))) == "SessionOutcome"
    assert kind(used.asked(write(501, 500, session=before, token=used.token))) == "superseded"
    # Opened, and not used yet: who opened it for the facts may write without it.
    assert kind(used.asked(write(501, 500, token=used.token))) == "WriteOutcome"
    assert kind(used.asked(beating(used.token, NOW))) == "HeartbeatOutcome"


@pytest.mark.parametrize("use", ["chunk", "duplicate", "heartbeat", "nothing"])
def test_a_session_is_used_by_its_number_alone(use: str) -> None:
    lane = Lane()
    lane.asked(write(10))
    lane.asked(opening(None))
    number = lane.state.session
    uses: dict[str, Request] = {
        "chunk": write(11, session=number),
        "duplicate": write(10, session=number),
        "heartbeat": beating(None, NOW, number),
        "nothing": write(11),
    }
    lane.asked(uses[use])
    assert kind(lane.asked(write(12))) == ("WriteOutcome" if use == "nothing" else "superseded")
    assert lane.state.recorded == (12 if use == "nothing" else 10 if use in ("duplicate", "heartbeat") else 11)
    assert kind(lane.asked(write(13, session=number))) == "WriteOutcome"


def test_a_chunk_without_the_number_ends_a_session_that_is_silent(used: Lane) -> None:
    number, token = used.state.session, used.token
    # A duplicate keeps no session alive.
    assert kind(used.asked(write(500, token=token), NOW + LAPSE - 1)) == "WriteOutcome"
    assert kind(used.asked(write(501, token=token), NOW + LAPSE)) == "WriteOutcome"
    # Its writer does not know of 501, and must not take it for its own.
    assert kind(used.asked(write(501, session=number, token=token), NOW + LAPSE)) == "superseded"
    assert kind(used.asked(write(502, token=token), NOW + LAPSE)) == "WriteOutcome"
    assert used.state.token == token


@pytest.mark.parametrize("has_number", [True, False])
def test_its_heartbeats_and_chunks_keep_a_used_session_alive(used: Lane, has_number: bool) -> None:
    """A heartbeat needs no number: a program may give it with its chunks alone."""
    number, token = used.state.session, used.token
    beaten = used.asked(beating(token, NOW + LAPSE - 1, number if has_number else None), NOW + LAPSE - 1)
    assert kind(beaten) == "HeartbeatOutcome"
    assert kind(used.asked(write(501, token=token), NOW + 2 * LAPSE - 2)) == "superseded"
    assert kind(used.asked(write(501, session=number, token=token), NOW + 2 * LAPSE - 2)) == "WriteOutcome"
    assert kind(used.asked(write(502, token=token), NOW + 3 * LAPSE - 3)) == "superseded"
    assert kind(used.asked(write(502, token=token), NOW + 3 * LAPSE - 2)) == "WriteOutcome"


def test_a_session_that_lapsed_is_resumed_where_nobody_came_in_between(used: Lane) -> None:
    number = used.state.session
    assert kind(used.asked(write(501, session=number, token=used.token), NOW + MONTH)) == "WriteOutcome"
    assert kind(used.asked(write(502, token=used.token), NOW + MONTH)) == "superseded"


def test_a_forgotten_source_has_no_session(used: Lane) -> None:
    used.asked(ForgetSource(TOPIC, WEB))
    assert kind(used.asked(write(1))) == "WriteOutcome"


def test_a_use_earlier_in_the_transaction_counts() -> None:
    table = SourceTable()
    (opened,) = committed(table, opening(None))
    assert isinstance(opened, SessionOutcome)
    draft = Draft(table, NOW)
    assert draft.add(write(1, session=opened.state.session))[1]
    refused, must_wait = draft.add(write(10**12))
    assert (kind(refused), must_wait) == ("superseded", True)


def test_the_time_that_is_left_is_rounded_up() -> None:
    state = SourceState(TOPIC.id, 0, 5, None, 7, NOW, token="own")
    refusal = refuse_opening(state, "other", NOW + LAPSE - 1, LAPSE, is_admin=False)
    assert refusal is not None
    assert (refusal.retry_after_s, refusal.recorded) == (1, 5)


@pytest.mark.parametrize("heartbeat", [None, Heartbeat(NOW, position=9, finished=False)])
@pytest.mark.parametrize("token", [None, "t", "a-token.of_64" + "x" * 51])
def test_the_table_keeps_the_token(token: str | None, heartbeat: Heartbeat | None) -> None:
    state = SourceState(TOPIC.id, 3, 10, 0, 7, NOW, heartbeat, token)
    table = SourceTable()
    table.apply(WEB.state_key(), state.encode())
    assert SourceState.decode(state.encode()) == state
    assert table.get(WEB, TOPIC.id) == state
    assert table.shares.of_token(token) == 1


def test_more_tokens_than_a_byte_can_name() -> None:
    table = SourceTable()
    states = {
        SourceIdentity("dc1.t", None, f"s{number}"): SourceState(TOPIC.id, 1, 5, 0, 7, NOW, token=f"token-{number}")
        for number in range(300)
    }
    for source, state in states.items():
        table.apply(source.state_key(), state.encode())
    assert {source: table.get(source, TOPIC.id) for source in states} == states
    for source in states:
        table.apply(source.state_key(), None)
    assert table.shares.used == 0
