"""What is printed of a run follows from the notes of writers and readers."""

from __future__ import annotations

from tests.datacenters import figures
from tests.datacenters.figures import Look, Phase, TableLook

_PHASE = Phase("cut", 1000, 11_000)


def test_a_write_belongs_to_the_phase_in_which_it_began() -> None:
    notes = [{"at_ms": float(at), "took_ms": took} for at, took in ((999, 9.0), (1000, 10.0), (10_999, 3000.0))]
    assert figures.writer_cells(notes, _PHASE) == ["2", "0.01 s", "3.00 s", "3.00 s"]
    assert figures.writer_cells([], _PHASE) == ["0", "", "", ""]


def test_silence_of_a_reader_counts_from_the_begin_and_to_the_end_of_the_phase() -> None:
    notes = [{"at_ms": 2000.0, "age_ms": 50.0, "chunks": 3, "bytes": 9, "breaks": 1}]
    assert figures.reader_cells(notes, _PHASE) == ["3", "9.00 s", "0.05 s", "0.05 s", "1"]
    assert figures.reader_cells([], _PHASE) == ["0", "10.00 s", "", "", "0"]


def test_a_copy_is_up_to_date_with_its_first_young_chunk() -> None:
    notes = [{"at_ms": at, "age_ms": age} for at, age in ((500.0, 1.0), (12_000.0, 9000.0), (13_500.0, 900.0))]
    assert figures.caught_up_s(notes, 11_000) == 2.5
    assert figures.caught_up_s(notes, 14_000) is None


def test_the_console_shows_lag_and_the_reason_of_a_wait_that_lasts() -> None:
    wait = {"reason": "no answer", "ended_ms": None}
    over = {"reason": "over", "ended_ms": 5}
    links = [{"lag_s": 4.0, "lag_records": 2, "last_wait": over}, {"lag_s": None, "lag_records": 1, "last_wait": wait}]
    document = {"workers": {"a": {"links": links}, "b": {"error": "no answer within 6 s"}}}
    assert figures.link_of(document) == (4.0, 3, "no answer")
    assert figures.link_of({"workers": {}}) == (None, None, None)
    looks = [Look(1000, 5, ("lane 3 is closed",), 4.0, 3, "no answer"), Look(2000, 5, None)]
    assert figures.console_cells(looks, _PHASE) == ["2", "1", "4.0 s", "no answer"]
    assert list(figures.problems(looks, [_PHASE])) == [("cut", "some lanes are closed")]


def test_rows_of_a_phase_are_those_since_the_look_before() -> None:
    looks = [TableLook(at, {"dc1": rows, "dc2": 5}, 3, 1) for at, rows in ((900.0, 10), (5000.0, 12), (9000.0, 17))]
    assert figures.table_cells(looks, _PHASE) == ["7", "0", "1 of 3"]


def test_it_is_said_how_far_the_loader_is_and_what_it_waits_for() -> None:
    assert figures.loaded_text([]) == "the loader has written no batch yet"
    looks = [
        TableLook(1.0, {"dc1": 1200, "dc2": 5}, 3, at, waits) for at, waits in ((3, ""), (1, "10:00 is ACTIVE: x"))
    ]
    assert figures.loaded_text(looks[:1]) == "1,200 rows of dc1, 5 rows of dc2; 3 of 3 segments READY"
    assert figures.loaded_text(looks).endswith("; 1 of 3 segments READY; 10:00 is ACTIVE: x")
