"""The checker of `make soak` sees each kind of damage: a chunk, a line or a row lost, doubled, reordered or altered,
and a segment that is READY too early."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.soak import verdict
from tests.soak.lines import NumberedLine, decode_line, encode_line
from tests.soak.verdict import FileTruth, Row, SegmentChange, Stored, Witness
from tests.support.checker import Answer, History

HOST, LOG = "host1", "host1/create"
SOAK = Path(__file__).parents[2] / "soak"


@pytest.mark.parametrize("module", ["verdict", "evidence", "lines"])
def test_the_verdict_uses_none_of_the_code_that_it_judges(module: str) -> None:
    text = (SOAK / f"{module}.py").read_text(encoding="utf-8")
    assert re.findall(r"^\s*(?:from|import) logferry\.(?!ops\.cli\.problems)[\w.]+", text, re.M) == []


def lines(first: int, last: int) -> bytes:
    return b"".join(
        encode_line(NumberedLine(LOG, number, 1000 * number), f"text {number}") for number in range(first, last + 1)
    )


def chunks(source: str = "s", host: str | None = None, partition: int = 0) -> list[Stored]:
    """Lines 1 to 9 in three chunks."""
    found: list[Stored] = []
    at = 0
    for number in range(3):
        data = lines(3 * number + 1, 3 * number + 3)
        found.append(Stored(partition, 10 + 2 * number, source, at + len(data), at, data, (), 5000, host))
        at += len(data)
    return found


def lost(stored: list[Stored]) -> list[Stored]:
    return [stored[0], stored[2]]


def doubled(stored: list[Stored]) -> list[Stored]:
    return [*stored, stored[1]._replace(offset=20)]


def reordered(stored: list[Stored]) -> list[Stored]:
    return [stored[0], stored[2]._replace(offset=12), stored[1]._replace(offset=14)]


def altered(stored: list[Stored]) -> list[Stored]:
    return [stored[0], stored[1]._replace(data=stored[1].data.replace(b"text 5", b"text 6")), stored[2]]


def altered_first(stored: list[Stored]) -> list[Stored]:
    return [stored[0]._replace(data=stored[0].data.replace(b"text 1", b"text 2")), *stored[1:]]


def in_two_partitions(stored: list[Stored]) -> list[Stored]:
    return [stored[0], stored[1], stored[2]._replace(partition=1)]


def never_sent(stored: list[Stored]) -> list[Stored]:
    return [*stored, stored[2]._replace(seqno=stored[2].seqno + 1, prev=stored[2].seqno, offset=30)]


DAMAGE = [lost, doubled, reordered, altered, altered_first, in_two_partitions, never_sent]
Damage = Callable[[list[Stored]], list[Stored]]


def history(answer: Answer, *answered: Stored) -> History:
    found = History()
    for one in answered:
        found.note(one.source, one.seqno, one.data, answer)
    return found


def wrong_over_http(stored: list[Stored]) -> list[str]:
    return verdict.check_http(history("ok", *chunks()), stored)


def test_a_whole_topic_is_exact() -> None:
    assert wrong_over_http(chunks()) == []


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_of_chunks_over_http_is_seen(damage: Damage) -> None:
    assert wrong_over_http(damage(chunks())) != []


def test_what_every_answer_refused_is_not_stored_and_what_none_answered_may_be() -> None:
    (one, *_) = chunks()
    assert verdict.check_http(history("fail", one), [one]) != []
    assert verdict.check_http(history("fail", one), []) == []
    for stored in ([], [one]):
        assert verdict.check_http(history("unknown", one), stored) == []
    assert verdict.check_http(history("unknown", one), [one, one]) != []


@pytest.mark.parametrize("damage", [doubled, reordered, in_two_partitions])
def test_disorder_of_a_file_in_a_data_centre_is_seen(damage: Damage) -> None:
    assert verdict.check_http(History(), chunks(host=HOST)[1:]) == []
    assert verdict.check_http(History(), damage(chunks(host=HOST))) != []


def test_a_reader_that_misses_or_repeats_a_chunk_is_seen() -> None:
    got = [(one.offset, one.source, one.seqno, crc32(one.data)) for one in chunks()]
    assert verdict.check_reader(got, chunks()) == []
    for wrong in (got[:2], [got[0], got[2]], [*got, got[2]], got[::-1]):
        assert verdict.check_reader(wrong, chunks()) != []


# ---- files -----------------------------------------------------------------------------------------------------------


def wrong_in_files(stored: list[Stored], truth: FileTruth = FileTruth(LOG, 9)) -> tuple[list[str], int]:  # noqa: B008
    sources, unequal = verdict.union([stored])
    found, taken = verdict.check_files(sources, {HOST: [truth]})
    return unequal + found, taken


def test_a_file_in_two_data_centres_is_exact_and_an_unequal_copy_is_seen() -> None:
    first, second, third = chunks(host=HOST)
    sources, unequal = verdict.union([[first, second], [second, third]])
    assert unequal == []
    assert verdict.check_files(sources, {HOST: [FileTruth(LOG, 9)]}) == ([], 0)
    other = second._replace(data=second.data.replace(b"text", b"test"))
    assert verdict.union([[first, second], [other, third]])[1] != []


@pytest.mark.parametrize("damage", [lost, altered, altered_first, never_sent])
def test_damage_of_a_file_is_seen(damage: Damage) -> None:
    assert wrong_in_files(chunks(host=HOST)) == ([], 0)
    assert wrong_in_files(damage(chunks(host=HOST)))[0] != []


def test_lines_that_came_twice_by_another_generation_are_seen() -> None:
    again = chunks(source="s#2", host=HOST)[2]
    assert wrong_in_files([*chunks(host=HOST), again])[0] != []


def test_only_the_end_of_a_truncated_incarnation_may_be_missing() -> None:
    stored = chunks(host=HOST)
    assert wrong_in_files(stored[:2])[0] != []
    assert wrong_in_files(stored[:2], FileTruth(LOG, 9, [(1, 9)])) == ([], 3)
    assert wrong_in_files(stored[:2], FileTruth(LOG, 9, [(1, 8)]))[0] != []
    assert wrong_in_files(lost(stored), FileTruth(LOG, 9, [(1, 9)]))[0] != []


def test_a_copied_state_folder_begins_behind_its_position() -> None:
    stored = chunks(host=HOST)[1:]
    assert wrong_in_files(stored)[0] != []
    assert wrong_in_files(stored, FileTruth(LOG, 9, since=3)) == ([], 0)
    assert wrong_in_files(stored[1:], FileTruth(LOG, 9, since=3))[0] != []


def test_a_line_proves_itself() -> None:
    line = encode_line(NumberedLine(LOG, 7, 1000), 'größe \\ " \t')
    assert decode_line(line[:-1]) == NumberedLine(LOG, 7, 1000)
    for at in range(1, len(line) - 1):
        assert decode_line(line[:at] + bytes([line[at] ^ 1]) + line[at + 1 : -1]) is None
        assert decode_line(line[at:-1]) is None


# ---- tables ----------------------------------------------------------------------------------------------------------

START = datetime(2026, 11, 22, 10, tzinfo=UTC)


def rows() -> list[Row]:
    return [
        Row(one.source, one.seqno, number, text, START + timedelta(seconds=number), 1)
        for one in chunks()
        for number, text in enumerate(one.data.split(b"\n")[:-1])
    ]


def test_damage_of_a_table_is_seen() -> None:
    wanted = verdict.lines_of(verdict.union([chunks()])[0])
    good = rows()
    assert verdict.check_rows(wanted, good) == []
    for wrong in (
        good[1:],
        [*good, good[4]],
        [good[0]._replace(text=good[1].text), *good[1:]],
        [*good, good[4]._replace(line=99)],
        [good[0]._replace(seqno=1), *good[1:]],
    ):
        assert verdict.check_rows(wanted, wrong) != []


# The window closes in batch 1, written at 20 s; READY in batch 2, written at 25 s. A source is silent after 10 s.
CLOSED = SegmentChange(START, 1, "IMMUTABLE", 9, 1, 20_000)
READY = SegmentChange(START, 1, "READY", 9, 2, 25_000, silent=1)
LATE = Row("s", 10_000, 0, b"late", START, 3)
REOPENED = SegmentChange(START, 2, "ACTIVE", 10, 3, 30_000)


def wrong_in_segments(
    late: Row | None, ready: SegmentChange = READY, read_ms: int = 24_000, heard_ms: int = 5_000, beat_ms: int = 0
) -> tuple[list[str], dict[str, int]]:
    """``read_ms``: when the late row could be read; ``heard_ms``: when the source's other chunks were recorded."""
    read = {(one.source, one.seqno): heard_ms + 1 for one in chunks()}
    recorded = dict.fromkeys(read, heard_ms)
    after = [] if late is None else [late]
    read |= {(row.source, row.seqno): read_ms for row in after}
    witness = Witness(read, recorded, {"s": [(beat_ms, beat_ms + 1)]})
    changes = [ready, CLOSED] + [REOPENED for _ in after]
    found, counts = verdict.check_segments(changes, [*rows(), *after], witness, 10, 10)
    return found, dict(counts)


def test_a_ready_segment_without_late_rows_is_exact() -> None:
    assert wrong_in_segments(None) == ([], {})


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"read_ms": 19_999}, "missing from READY"),
        ({"heard_ms": 15_500}, "late from a live source"),
        ({"beat_ms": 15_500}, "late from a live source"),
        ({"ready": READY._replace(silent=0)}, "silent: "),
        ({"ready": READY._replace(rows=8)}, "count: "),
        ({"ready": READY._replace(version=7)}, "never closed"),
    ],
)
def test_a_segment_that_is_ready_too_early_is_seen(changed: dict[str, Any], wrong: str) -> None:
    found, _ = wrong_in_segments(LATE, **changed)
    assert [text for text in found if text.startswith(wrong)] != []


@pytest.mark.parametrize("changed", [{"heard_ms": 9_999}, {"beat_ms": 9_999}, {"heard_ms": 10_001, "beat_ms": 20_001}])
def test_a_source_that_is_silent_when_the_check_may_have_begun_comes_late_by_right(changed: dict[str, Any]) -> None:
    assert wrong_in_segments(LATE, **changed) == ([], {"late rows of silent sources": 1})


def test_a_source_that_nobody_had_read_comes_late_by_right_but_not_when_it_was_read_before() -> None:
    late = LATE._replace(source="new", seqno=100)
    assert wrong_in_segments(late, READY._replace(silent=0)) == ([], {"late rows of new sources": 1})
    assert wrong_in_segments(late, read_ms=19_999)[0] != []


def test_rows_that_no_segment_counts_are_seen() -> None:
    other = LATE._replace(event_time=START + timedelta(seconds=10), batch=0)
    assert [text for text in wrong_in_segments(other)[0] if text.startswith("no segment")] != []
