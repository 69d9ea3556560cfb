"""Offset pairs and their history: what is stored byte for byte, and that every offset is found in few steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from logferry.gateway.contract.offset_history import (
    Chapter,
    Damaged,
    Original,
    Progress,
    Run,
    Signpost,
    composed,
    key_of,
    lane_of,
    merged,
    numbers_of,
    place_of,
    signposts_after,
    step_towards,
    within,
)

ID, LOCAL = b"i" * 16, b"l" * 16
POSTS = (Signpost(9, 700, 800), Signpost(5, 300, 400))


def test_a_state_byte_for_byte() -> None:
    state = Progress(ID, LOCAL, 1000, 1200, 990, 7, 0xFFEEDDCC, 1_700_000_000_000, 3, POSTS)
    raw = (
        b"\x01" + ID + LOCAL + b"\0\0\0\0\0\0\x03\xe8\0\0\0\0\0\0\x04\xb0\0\0\0\0\0\0\x03\xde\0\0\0\x07\xff\xee\xdd\xcc"
        b"\0\0\x01\x8b\xcf\xe5\x68\0\x03\x09\xbc\x05\xa0\x06\x05\xac\x02\x90\x03"
    )
    assert state.encode() == raw
    assert Progress.decode(raw) == state


def test_the_state_of_a_copy_of_a_copy_names_the_original() -> None:
    state = Progress(ID, LOCAL, 1000, 1200, 990, 7, 0xFFEEDDCC, 1_700_000_000_000, 3, POSTS)
    assert state.original == Original(ID, 1000)
    for posts in (POSTS, ()):
        for original in (Original(b"o" * 16, 650), Original(b"\0" * 15 + b"o", 0)):
            chained = replace(state, signposts=posts, chained=original)
            assert Progress.decode(chained.encode()) == chained
            assert chained.original == original
            assert chained.encode().startswith(replace(state, signposts=posts).encode())


def test_two_steps_are_composed_to_one() -> None:
    """Against the same by single records, with holes in either step."""
    for seed in range(300):
        rng = random.Random(seed)
        first, second = _random_runs(rng), _random_runs(rng)
        by_record = {run.local + i: run.source + i for run in first for i in range(run.size)}
        wanted = {
            by_record[run.source + i]: run.local + i
            for run in second
            for i in range(run.size)
            if run.source + i in by_record
        }
        found = composed(first, second)
        assert {run.source + i: run.local + i for run in found for i in range(run.size)} == wanted, f"seed {seed}"
        assert merged(found) == found
        assert all(run.size > 0 for run in found)


def test_what_runs_say_of_a_range_begins_and_ends_with_it() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        runs, first = _random_runs(rng), rng.randrange(30)
        last = first + rng.randrange(30)
        wanted = [
            (run.source + i, run.local + i) for run in runs for i in range(run.size) if first <= run.local + i <= last
        ]
        found = within(runs, first, last)
        assert [(run.source + i, run.local + i) for run in found for i in range(run.size)] == wanted, f"seed {seed}"
        assert all(run.size > 0 for run in found)


def _random_runs(rng: random.Random) -> list[Run]:
    runs, source, local = [], 0, 0
    for _ in range(rng.randrange(12)):
        source, local, size = source + rng.randrange(4), local + rng.randrange(4), rng.randrange(1, 6)
        runs.append(Run(source, local, size))
        source, local = source + size, local + size
    return runs


def test_a_chapter_byte_for_byte() -> None:
    chapter = Chapter(ID, 3, POSTS, (Run(1000, 1200, 10), Run(1012, 1211, 5)))
    raw = (
        b"\x01" + ID + b"\0\0\0\0\0\0\0\x03\x02\x09\xbc\x05\xa0\x06\x05\xac\x02\x90\x03\xe8\x07\xb0\x09\x0a\x02\x01\x05"
    )
    assert chapter.encode() == raw
    assert Chapter.decode(raw) == chapter


@pytest.mark.parametrize("raw", [b"", b"\x01", b"\x02" + bytes(60), b"\x01" + bytes(61) + b"\x80"])
def test_what_cannot_be_read_is_said_to_be_damaged(raw: bytes) -> None:
    with pytest.raises(Damaged):
        Progress.decode(raw)
    with pytest.raises(Damaged):
        Chapter.decode(raw)


def test_keys_name_a_topic_and_a_partition() -> None:
    assert key_of("dc1.nginx", 300) == b"dc1.nginx\0\0\0\x01\x2c"
    for number in (0, 300, 1 << 24):
        assert place_of(key_of("dc1.nginx", number)) == ("dc1.nginx", number)
    for raw in (b"", b"dc1", b"dc1.nginx-0001"):
        with pytest.raises(Damaged):
            place_of(raw)


def test_runs_that_follow_each_other_on_both_sides_are_one() -> None:
    runs = [Run(0, 0, 5), Run(5, 5, 5), Run(11, 10, 2), Run(13, 13, 1), Run(14, 14, 1)]
    assert merged(runs) == (Run(0, 0, 10), Run(11, 10, 2), Run(13, 13, 2))


class History:
    """Chapters as they would be stored, and the truth beside them: original offset → local offset."""

    def __init__(self, chapters: int, rng: random.Random) -> None:
        self.stored: dict[int, Chapter] = {}
        self.truth: dict[int, int] = {}
        self.posts: tuple[Signpost, ...] = ()
        source, local, offset = rng.randrange(3), 0, 0
        for number in range(chapters):
            runs = []
            for _ in range(rng.choice((1, 1, 1, 3))):
                size = rng.choice((1, 2, 40))
                runs.append(Run(source, local, size))
                self.truth.update((source + i, local + i) for i in range(size))
                source, local = source + size + rng.randrange(3), local + size + rng.randrange(2)
            offset += rng.randrange(1, 9)
            self.stored[offset] = Chapter(ID, number, self.posts, tuple(runs))
            self.posts = signposts_after(number, self.posts, Signpost(offset, runs[0].source, runs[0].local))
        self.end = source

    def find(self, offset: int, *, of_source: bool) -> tuple[Chapter | None, int]:
        posts, steps = self.posts, 0
        while True:
            step = step_towards(posts, offset, of_source=of_source)
            if step is None:
                return None, steps
            steps += 1
            chapter = self.stored[step.post.offset]
            if step.is_it:
                return chapter, steps
            posts = chapter.signposts


@pytest.mark.parametrize("chapters", [1, 2, 3, 4, 5, 16, 17, 64, 65, 500])
def test_every_offset_is_found_in_its_chapter_in_few_steps(chapters: int) -> None:
    history = History(chapters, random.Random(chapters))
    for source, local in history.truth.items():
        for offset, of_source in ((source, True), (local, False)):
            chapter, steps = history.find(offset, of_source=of_source)
            assert chapter is not None
            run = [r for r in chapter.runs if 0 <= offset - (r.source if of_source else r.local) < r.size]
            assert len(run) == 1
            assert source - run[0].source == local - run[0].local
            assert steps <= 3 * (chapters.bit_length() // 2 + 1) + 1


def test_what_lies_before_the_first_chapter_is_in_none() -> None:
    history = History(50, random.Random(2))
    first = min(history.truth)
    assert history.find(first - 1, of_source=True)[0] is None


@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_each_partition_is_of_one_lane(lanes: int) -> None:
    for topic in ("dc1.nginx", "dc1.app", "x"):
        found = {number: lane for lane in range(lanes) for number in numbers_of(topic, 10, lane, lanes)}
        assert found == {number: lane_of(topic, number, lanes) for number in range(10)}
