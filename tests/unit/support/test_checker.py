"""Every way to break the promise, planted: the checker must name it, and nothing where there is nothing."""

from __future__ import annotations

import pytest

from tests.support.checker import Answer, History, Stored, digest, violations


def history(**answers: list[Answer]) -> History:
    """``a10=["unknown", "ok"]``: chunk 10 of source a was answered so in two attempts."""
    made = History()
    for chunk, kinds in answers.items():
        for kind in kinds:
            made.note(chunk[0], int(chunk[1:]), chunk.encode(), kind)
    return made


def log(*records: str, partition: int = 0, first: int = 0) -> list[Stored]:
    """``"a10"`` or, with its prev, ``"a10<5"``, at offsets that have the holes of control records."""
    stored = []
    for number, text in enumerate(records):
        chunk, _, prev = text.partition("<")
        place = (partition, first + 2 * number)
        stored.append(Stored(chunk[0], *place, int(chunk[1:]), int(prev) if prev else None, digest(chunk.encode())))
    return stored


KEPT = [
    (history(), []),
    (history(a10=["ok"]), log("a10")),
    (history(a10=["fail"]), []),
    (history(a10=["unknown"]), []),
    (history(a10=["unknown"]), log("a10")),
    (history(a10=["fail", "unknown"]), log("a10")),
    (history(a10=["unknown", "fail"]), []),
    (history(a10=["fail", "unknown", "ok"]), log("a10")),
    (history(a10=["ok", "ok"]), log("a10<0")),
    (history(a10=["ok"], a20=["ok"], b5=["ok"], b7=["fail"]), log("a10", "b5", "a20<10")),
    (history(a10=["ok"], b10=["ok"]), log("a10") + log("b10", partition=1)),
    # Offsets decide, not the order in which the partitions were read.
    (history(a10=["ok"], a20=["ok"]), log("a20<10", first=8) + log("a10", first=2)),
]


@pytest.mark.parametrize(("answers", "stored"), KEPT)
def test_what_keeps_the_promise_is_not_complained_of(answers: History, stored: list[Stored]) -> None:
    assert violations(answers, stored) == []


BROKEN = [
    ("lost", history(a10=["ok"]), []),
    ("lost", history(a10=["unknown", "ok"], a20=["ok"]), log("a20")),
    ("lost", history(a10=["ok", "unknown"]), log("b10")),
    ("doubled", history(a10=["ok"]), log("a10", "a10")),
    ("doubled", history(a10=["unknown"]), log("a10", "a10")),
    ("doubled", history(a10=["ok"]), log("a10") + log("a10", partition=1)),
    ("was not recorded", history(a10=["fail"]), log("a10")),
    ("was not recorded", history(a10=["fail", "fail"]), log("a10")),
    ("other bytes", history(a10=["ok"]), [log("a10")[0]._replace(digest=digest(b"a1"))]),
    ("other bytes", history(a10=["unknown"]), [log("a10")[0]._replace(digest=digest(b""))]),
    ("never sent", history(a10=["ok"]), log("a10", "a20")),
    ("never sent", history(), log("a10")),
    ("seqno 10 at 2 follows 20", history(a10=["ok"], a20=["ok"]), log("a20", "a10")),
    ("follows", history(a10=["ok"]), log("a10", "a10")),
    ("prev 10 at 2 does not meet 15", history(a15=["ok"], a20=["ok"]), log("a15", "a20<10")),
    ("prev 17 at 2 does not meet 15", history(a15=["ok"], a20=["ok"]), log("a15", "a20<17")),
    ("partitions [0, 1]", history(a10=["ok"], a20=["ok"]), log("a10") + log("a20", partition=1)),
]


@pytest.mark.parametrize(("named", "answers", "stored"), BROKEN)
def test_each_violation_is_named(named: str, answers: History, stored: list[Stored]) -> None:
    assert any(named in violation for violation in violations(answers, stored))


def test_a_violation_names_its_chunk_and_its_places() -> None:
    [doubled, order] = violations(history(a10=["ok"], b5=["ok"]), log("a10", "b5", "a10"))
    assert doubled == "('a', 10) doubled: stored 2 times, at ['0@0', '0@4']"
    assert order == "a: seqno 10 at 4 follows 10"


def test_a_wrong_answer_to_a_correct_client_is_a_violation() -> None:
    made = history(a10=["ok"])
    made.protests.append("a at 10: 409 gap")
    assert violations(made, log("a10")) == ["a at 10: 409 gap"]


def test_a_recreated_topic_holds_what_is_acknowledged_from_then_on() -> None:
    made = history(a10=["ok"], a20=["fail"])
    made.topic_removed()
    made.note("a", 30, b"a30", "ok", began_in=0)
    made.note("a", 40, b"a40", "ok", began_in=1)
    assert violations(made, log("a40")) == [], "what was there before may be gone"
    assert violations(made, log("a10", "a30", "a40<30")) == [], "or have come again"
    assert made.acknowledged() == 1
    (lost,) = violations(made, [])
    assert "('a', 40) lost" in lost
    (stored,) = violations(made, log("a20", "a40"))
    assert "('a', 20) stored" in stored, "what was refused is not there whatever became of the topic"
