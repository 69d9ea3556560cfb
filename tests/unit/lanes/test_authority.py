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


def test_a_session_lives_by_its_heartbeats_and_its_chunks(lane: Lane) -> None:
    assert isinstance(lane.asked(beating("own", NOW + LAPSE - 1), NOW + LAPSE - 1), HeartbeatOutcome)
    assert kind(lane.asked(opening("other"), NOW + 2 * LAPSE - 2)) == "source-in-use"
    assert kind(lane.asked(write(12, 10, token="own"), NOW + 2 * LAPSE - 2)) == "WriteOutcome"
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
