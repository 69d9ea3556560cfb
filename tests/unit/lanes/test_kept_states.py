"""States are kept as in the state topic, and come back as they were."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity, SourceState
from logferry.gateway.lanes.dedup import SourceTable

I64 = st.integers(0, 2**63 - 1)
MAYBE = st.none() | st.just(0) | I64 | st.integers(0, 2**48)
STATES = st.builds(
    SourceState,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 70_000),
    MAYBE,
    MAYBE,
    I64 | st.integers(0, 2**48),
    I64 | st.integers(0, 2**48),
    st.none() | st.builds(Heartbeat, st.integers(1, 2**63 - 1), MAYBE, MAYBE, MAYBE, st.booleans()),
    st.none() | st.from_regex(r"[a-zA-Z0-9._-]{1,64}", fullmatch=True),
    st.booleans(),
    st.just(0),
)
# They have no session: the number of the transaction takes its place.
APPENDED = st.builds(lambda state, number: state._replace(session=0, appended_by=number), STATES, st.integers(1, 2**62))


@given(st.lists(STATES | APPENDED, max_size=20))
def test_what_is_kept_comes_back(states: list[SourceState]) -> None:
    table = SourceTable()
    for number, state in enumerate(states):
        table.apply(SourceIdentity("dc1.t", None, f"s{number}").state_key(), state.encode())
    for number, state in enumerate(states):
        assert table.get(SourceIdentity("dc1.t", None, f"s{number}"), state.topic_id) == state


def test_many_topics() -> None:
    table = SourceTable()
    ids = [number.to_bytes(16, "big") for number in range(300)]
    for topic_id in ids:
        table.apply(
            SourceIdentity(f"dc1.{topic_id.hex()}", None, "s").state_key(),
            SourceState(topic_id, 3, 9, 0, 7, 8).encode(),
        )
    for topic_id in ids:
        source = SourceIdentity(f"dc1.{topic_id.hex()}", None, "s")
        assert table.get(source, topic_id) == SourceState(topic_id, 3, 9, 0, 7, 8)


def test_workers_of_earlier_versions_read_a_state_whose_session_was_used() -> None:
    """They refuse unknown flags of a state and stop the lane; of a heartbeat they pass over them."""
    state = SourceState(bytes(16), 3, 9, 0, 7, 8, token="own", is_used=True)
    raw = state.encode()
    assert raw[0] == 1
    assert raw[1] == 1 | 2 | 4 | 8  # recorded, base, heartbeat, token: those that they know
    # A heartbeat of the time 0, with nothing in it: no source was ever heard of so early.
    assert raw[54:-3] == bytes([16]) + bytes(32)
    # What they write back says nothing of the use, and no heartbeat of the time 0 comes out of it.
    assert SourceState.decode(raw[:54] + bytes(33) + b"own") == state._replace(is_used=False)
