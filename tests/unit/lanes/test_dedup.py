"""The rule of a chunk as tables, the bytes of a state, and the pins of keys."""

from __future__ import annotations

import pytest
from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity, SourceState
from logferry.gateway.lanes.dedup import Advance, Refusal, SourceTable, beat, decide_write, open_session

ID = bytes(range(16))
OTHER_ID = bytes(16)
NOW = 1_700_000_000_000


def state(recorded: int | None = None, base: int | None = None, session: int = 0, partition: int = 3) -> SourceState:
    return SourceState(ID, partition, recorded, base, session, 5)


def chunk(seqno: int, prev: int | None = None) -> Chunk:
    return Chunk(seqno, prev, None, {}, b"x")


# ---- the rule of a chunk: recorded, base, the chunks as (seqno, prev) → what happens --------------------------

WRITTEN = [
    # Nothing is recorded: the first chunk is taken wherever it begins, and its prev is the base.
    (None, None, [(0, None)], [0], 0, (0, None)),
    (None, None, [(7, None)], [7], 0, (7, None)),
    (None, None, [(7, 6)], [7], 0, (7, 6)),
    (None, None, [(7, 0)], [7], 0, (7, 0)),
    (None, None, [(7, 5), (9, 7)], [7, 9], 0, (9, 5)),
    (None, None, [(7, None), (9, 7), (10, None)], [7, 9, 10], 0, (10, None)),
    # Above what is recorded.
    (10, None, [(11, None)], [11], 0, (11, None)),
    (10, None, [(2**63 - 1, None)], [2**63 - 1], 0, (2**63 - 1, None)),
    (10, 4, [(11, None)], [11], 0, (11, 4)),
    (10, 4, [(11, 10)], [11], 0, (11, 4)),
    (10, None, [(15, 10), (20, 15)], [15, 20], 0, (20, None)),
    # At or below it: duplicates, whatever their prev.
    (10, None, [(10, None)], [], 1, (10, None)),
    (10, None, [(0, None)], [], 1, (10, None)),
    (10, 4, [(10, 4)], [], 1, (10, 4)),
    (10, 4, [(5, 4)], [], 1, (10, 4)),
    (10, 4, [(8, 0)], [], 1, (10, 4)),
    # Some of both.
    (10, None, [(5, None), (10, 5), (15, 10)], [15], 2, (15, None)),
    (10, 4, [(5, 4), (11, None), (12, 11)], [11, 12], 1, (12, 4)),
]


@pytest.mark.parametrize(("recorded", "base", "asked", "written", "duplicates", "after"), WRITTEN)
def test_taken(
    recorded: int | None,
    base: int | None,
    asked: list[tuple[int, int | None]],
    written: list[int],
    duplicates: int,
    after: tuple[int, int | None],
) -> None:
    verdict = decide_write(state(recorded, base), [chunk(*place) for place in asked], None, NOW)
    assert isinstance(verdict, Advance)
    assert [one.seqno for one in verdict.chunks] == written
    assert verdict.duplicates == duplicates
    assert (verdict.state.recorded, verdict.state.base) == after
    assert (verdict.state.topic_id, verdict.state.partition, verdict.state.session) == (ID, 3, 0)
    assert verdict.state.written_ms == (NOW if written else 5)


REFUSED = [
    # prev is not what is recorded.
    (10, None, [(15, 12)], "gap"),
    (10, None, [(15, 11)], "gap"),
    (10, None, [(15, 9)], "overlap"),
    (10, None, [(11, 0)], "overlap"),
    # At or below the base: that part was never seen, so it can't be a duplicate.
    (10, 4, [(4, None)], "gap"),
    (10, 4, [(4, 2)], "gap"),
    (10, 4, [(0, None)], "gap"),
    (10, 4, [(2, 0), (11, 10)], "gap"),
    # A refusal anywhere refuses all.
    (10, None, [(11, None), (15, 12)], "gap"),
    (10, None, [(11, 10), (15, 10)], "overlap"),
    (None, None, [(7, 5), (9, 8)], "gap"),
    (None, None, [(7, 5), (9, 5)], "overlap"),
    # Seqnos inside a request rise.
    (None, None, [(7, None), (7, None)], "out-of-order"),
    (None, None, [(7, None), (6, None)], "out-of-order"),
    (10, None, [(8, None), (7, None)], "out-of-order"),
    (10, None, [(11, 10), (9, None)], "out-of-order"),
]


@pytest.mark.parametrize(("recorded", "base", "asked", "kind"), REFUSED)
def test_refused(recorded: int | None, base: int | None, asked: list[tuple[int, int | None]], kind: str) -> None:
    verdict = decide_write(state(recorded, base), [chunk(*place) for place in asked], None, NOW)
    assert isinstance(verdict, Refusal)
    assert (verdict.kind, verdict.recorded) == (kind, recorded)


@pytest.mark.parametrize(
    ("recorded", "asked", "is_taken"),
    [
        (None, [(100, None)], True),
        (None, [(2**62, None)], False),
        # The first one may begin anywhere, if it says so: what lies before is a gap then, and no duplicate.
        (None, [(2**62, 2**62 - 100)], True),
        (None, [(2**62, 2**62 - 101)], False),
        (10, [(110, 10)], True),
        (10, [(111, 10)], False),
        (10, [(111, None)], False),
        (10, [(60, 10), (160, 60)], True),
        (10, [(60, 10), (161, 60)], False),
        (10, [(5, None)], True),
    ],
)
def test_a_seqno_that_jumps_too_far_is_refused(
    recorded: int | None, asked: list[tuple[int, int | None]], is_taken: bool
) -> None:
    verdict = decide_write(state(recorded), [chunk(*place) for place in asked], None, NOW, max_jump=100)
    assert isinstance(verdict, Advance) is is_taken
    if isinstance(verdict, Refusal):
        assert (verdict.kind, verdict.recorded) == ("bad-request", recorded)


# ---- heartbeats ------------------------------------------------------------------------------------------


def test_a_heartbeat_keeps_what_it_does_not_say() -> None:
    first = beat(state(10, 4, session=7), Heartbeat(100, watermark_ms=90, position=5, size=50))
    second = beat(first, Heartbeat(200, position=6, finished=True))
    third = beat(second, Heartbeat(300, watermark_ms=0, finished=False))
    assert first.heartbeat == Heartbeat(100, 90, 5, 50, False)
    assert second.heartbeat == Heartbeat(200, 90, 6, 50, True)
    assert third.heartbeat == Heartbeat(300, 0, 6, 50, False)
    assert third._replace(heartbeat=None) == state(10, 4, session=7)


def test_a_write_keeps_the_heartbeat() -> None:
    verdict = decide_write(beat(state(10), Heartbeat(100, size=50)), [chunk(11)], None, NOW)
    assert isinstance(verdict, Advance)
    assert verdict.state.heartbeat == Heartbeat(100, None, None, 50, False)


def test_who_writes_again_is_not_finished() -> None:
    """Segments do not wait for a finished source: what it writes later would be missing from those called ready."""
    farewell = beat(state(10, session=7), Heartbeat(100, watermark_ms=90, finished=True))
    awake = Heartbeat(100, watermark_ms=90, finished=False)
    verdict = decide_write(farewell, [chunk(11)], None, NOW)
    assert isinstance(verdict, Advance)
    assert verdict.state.heartbeat == awake
    assert open_session(farewell, NOW).heartbeat == awake
    again = decide_write(farewell, [chunk(10)], None, NOW)
    assert isinstance(again, Advance)
    assert again.state.heartbeat == farewell.heartbeat


def test_a_source_is_alive_by_chunks_and_by_heartbeats() -> None:
    assert state().alive_ms == 5
    assert beat(state(), Heartbeat(100)).alive_ms == 100
    assert beat(state(), Heartbeat(3)).alive_ms == 5


# ---- sessions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [0, 1, 6, 8, 2**63 - 1])
def test_only_the_equal_session_is_accepted(session: int) -> None:
    verdict = decide_write(state(10, session=7), [chunk(11)], session, NOW)
    assert isinstance(verdict, Refusal)
    assert (verdict.kind, verdict.recorded) == ("superseded", 10)


def test_an_older_session_gets_no_answer_about_duplicates() -> None:
    assert isinstance(decide_write(state(10, session=7), [chunk(10)], 6, NOW), Refusal)


@pytest.mark.parametrize("session", [None, 7])
def test_the_newest_session_and_none_are_accepted(session: int | None) -> None:
    verdict = decide_write(state(10, session=7), [chunk(11)], session, NOW)
    assert isinstance(verdict, Advance)
    assert verdict.state.session == 7


def test_a_session_of_a_forgotten_state_is_not_accepted() -> None:
    assert isinstance(decide_write(state(), [chunk(1)], 7, NOW), Refusal)


def test_session_numbers_rise_and_begin_at_the_clock() -> None:
    first = open_session(state(10, 4), NOW)
    second = open_session(first, NOW)
    later = open_session(second, NOW + 1000)
    assert (first.session, second.session, later.session) == (NOW, NOW + 1, NOW + 1000)
    assert (later.recorded, later.base, later.partition, later.written_ms) == (10, 4, 3, NOW + 1000)


def test_a_clock_that_went_back_does_not_lower_the_session() -> None:
    assert open_session(state(session=NOW), NOW - 5000).session == NOW + 1


# ---- the bytes of a state --------------------------------------------------------------------------------

ENCODED = [
    (
        SourceState(ID, 3, 4096, 1024, 7, NOW),
        "01 03 00000003 000102030405060708090a0b0c0d0e0f"
        "0000000000001000 0000000000000400 0000000000000007 0000018bcfe56800",
    ),
    (
        SourceState(ID, 9999, 0, None, 0, NOW),
        "01 01 0000270f 000102030405060708090a0b0c0d0e0f"
        "0000000000000000 0000000000000000 0000000000000000 0000018bcfe56800",
    ),
    (
        SourceState(ID, 0, None, None, 2**63 - 1, 0),
        "01 00 00000000 000102030405060708090a0b0c0d0e0f"
        "0000000000000000 0000000000000000 7fffffffffffffff 0000000000000000",
    ),
    (
        SourceState(ID, 0, None, None, 0, 0, Heartbeat(NOW, 5, 6, 7, True)),
        "01 04 00000000 000102030405060708090a0b0c0d0e0f"
        "0000000000000000 0000000000000000 0000000000000000 0000000000000000"
        "0f 0000018bcfe56800 0000000000000005 0000000000000006 0000000000000007",
    ),
    (
        SourceState(ID, 0, 1, 0, 0, 0, Heartbeat(NOW, None, 0, None, False)),
        "01 07 00000000 000102030405060708090a0b0c0d0e0f"
        "0000000000000001 0000000000000000 0000000000000000 0000000000000000"
        "02 0000018bcfe56800 0000000000000000 0000000000000000 0000000000000000",
    ),
]


@pytest.mark.parametrize(("decoded", "encoded"), ENCODED)
def test_state_byte_for_byte(decoded: SourceState, encoded: str) -> None:
    assert decoded.encode() == bytes.fromhex(encoded)
    assert SourceState.decode(bytes.fromhex(encoded)) == decoded


def test_a_state_of_another_version_is_not_guessed() -> None:
    raw = b"\x02" + state(1).encode()[1:]
    with pytest.raises(ValueError, match="version 02"):
        SourceState.decode(raw)
    for source in (SourceIdentity("dc1.t", None, "s"), SourceIdentity("dc1.t", "k", "s")):
        with pytest.raises(ValueError, match="version 02"):
            SourceTable().apply(source.state_key(), raw)


STATE_KEYS = [
    (SourceIdentity("dc1.nginx", None, "web1/a.log"), b"sdc1.nginx\0web1/a.log"),
    (SourceIdentity("dc1.nginx", "web1", "web1/a.log"), b"kdc1.nginx\0web1\0web1/a.log"),
    (SourceIdentity("dc1.t", None, "ёж"), b"sdc1.t\0\xd1\x91\xd0\xb6"),
]


@pytest.mark.parametrize(("source", "raw"), STATE_KEYS)
def test_state_key_byte_for_byte(source: SourceIdentity, raw: bytes) -> None:
    assert source.state_key() == raw
    assert SourceIdentity.of_state_key(raw) == source


@pytest.mark.parametrize("raw", [b"", b"x", b"sdc1.t", b"sdc1.t\0a\0b", b"kdc1.t\0a", b"xdc1.t\0a"])
def test_a_state_key_of_another_kind_is_not_guessed(raw: bytes) -> None:
    with pytest.raises(ValueError, match="decoded"):
        SourceIdentity.of_state_key(raw)


def test_a_record_of_another_kind_stops_the_replay() -> None:
    with pytest.raises(ValueError, match="decoded"):
        SourceTable().apply(b"zdc1.t\0a", state(1).encode())


# ---- the table of a lane ---------------------------------------------------------------------------------

PLAIN = SourceIdentity("dc1.t", None, "a")
KEYED = SourceIdentity("dc1.t", "a", "b")
KEYED_TOO = SourceIdentity("dc1.t", "a", "c")


def table(*entries: tuple[SourceIdentity, SourceState]) -> SourceTable:
    made = SourceTable()
    for source, one in entries:
        made.apply(source.state_key(), one.encode())
    return made


def test_identity_is_topic_key_and_source_id() -> None:
    made = table((KEYED, state(10)))
    assert made.get(KEYED, ID) == state(10)
    assert made.get(SourceIdentity("dc1.t", None, "b"), ID) is None
    assert made.get(SourceIdentity("dc1.t", "b", "b"), ID) is None
    assert made.get(SourceIdentity("dc2.t", "a", "b"), ID) is None


def test_the_key_is_the_partition_key_or_the_source_id() -> None:
    assert (PLAIN.key, KEYED.key) == ("a", "a")


def test_a_recreated_topic_knows_nothing() -> None:
    made = table((PLAIN, state(10)), (KEYED, state(20)))
    assert made.get(PLAIN, OTHER_ID) is None
    assert made.get(KEYED, OTHER_ID) is None
    assert made.pinned("dc1.t", "a", OTHER_ID) is None


@pytest.mark.parametrize("pinning", [PLAIN, KEYED])
def test_sources_with_one_key_share_the_pin(pinning: SourceIdentity) -> None:
    made = table((pinning, state(10, partition=5)))
    assert made.pinned("dc1.t", "a", ID) == 5
    assert made.pinned("dc2.t", "a", ID) is None
    assert made.pinned("dc1.t", "b", ID) is None


def test_a_pin_lives_as_long_as_the_youngest_source_of_its_key() -> None:
    made = table((KEYED, state(1, partition=5)), (KEYED_TOO, state(1, partition=5)), (KEYED, state(2, partition=5)))
    made.apply(KEYED.state_key(), None)
    made.apply(KEYED.state_key(), None)
    assert made.pinned("dc1.t", "a", ID) == 5
    made.apply(KEYED_TOO.state_key(), None)
    assert made.pinned("dc1.t", "a", ID) is None
    made.apply(KEYED.state_key(), state(1, partition=6).encode())
    assert made.pinned("dc1.t", "a", ID) == 6


def test_the_last_state_counts_and_a_tombstone_forgets() -> None:
    made = table((PLAIN, state(10)), (PLAIN, state(11)), (KEYED_TOO, state(1)))
    assert made.get(PLAIN, ID) == state(11)
    assert {SourceIdentity.of_state_key(key): made.read(key) for key in made.state_keys()} == {
        PLAIN: state(11),
        KEYED_TOO: state(1),
    }
    made.apply(PLAIN.state_key(), None)
    made.apply(PLAIN.state_key(), None)
    assert made.get(PLAIN, ID) is None
    assert len(made) == 1
