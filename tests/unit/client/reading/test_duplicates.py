"""Second copies of chunks: what another data centre had is dropped, nothing else is, whatever came first."""

from __future__ import annotations

import random

import pytest
from logferry.client.reading.decode import ReceivedChunk
from logferry.client.reading.duplicates import DuplicateFilter, spans_data_centres


def chunk(dc: str, seqno: int, prev: int | None, source: str = "web") -> ReceivedChunk:
    return ReceivedChunk(dc, f"{dc}.nginx", 0, 0, source, seqno, prev, 0, 0, {}, b"")


@pytest.mark.parametrize("seed", range(200))
def test_each_chunk_once_whatever_came_first(seed: int) -> None:
    """A source moves, and some chunks are recorded in both data centres; the logs are read interleaved."""
    rng = random.Random(seed)
    seqnos, seqno = [0], 0
    for _ in range(rng.randint(5, 60)):
        seqno += rng.randint(1, 9)
        seqnos.append(seqno)
    logs: dict[str, list[ReceivedChunk]] = {"dc1": [], "dc2": []}
    at, here = 1, "dc1"
    while at < len(seqnos):
        end = min(len(seqnos), at + rng.randint(1, 10))
        for number in range(at, end):
            # The first chunk after it came back says nothing of the one before.
            gap = not logs[here] or logs[here][-1].seqno != seqnos[number - 1]
            prev = None if gap and rng.random() < 0.5 and logs[here] else seqnos[number - 1]
            if not any(known.seqno == seqnos[number] for known in logs[here]):
                logs[here].append(chunk(here, seqnos[number], prev))
        here = "dc2" if here == "dc1" else "dc1"
        at = max(1, end - rng.randint(0, 3))
        if end == len(seqnos):
            break
    copies, handed_out = DuplicateFilter(), []
    queues = {dc: list(log) for dc, log in logs.items()}
    while any(queues.values()):
        dc = rng.choice([dc for dc, queue in queues.items() if queue])
        one = queues[dc].pop(0)
        if not copies.is_duplicate(one):
            handed_out.append(one.seqno)
    assert sorted(handed_out) == seqnos[1:]


def test_sources_and_topics_are_apart() -> None:
    copies = DuplicateFilter()
    assert not copies.is_duplicate(chunk("dc1", 5, 4))
    assert not copies.is_duplicate(chunk("dc2", 5, 4, source="db"))
    assert not copies.is_duplicate(chunk("dc2", 5, 4)._replace(topic="dc2.other"))
    assert not copies.is_duplicate(chunk("dc2", 4, 3))
    assert copies.is_duplicate(chunk("dc2", 5, 4))


def test_what_was_silent_for_longest_is_forgotten() -> None:
    copies = DuplicateFilter(most_sources=2)
    for source in ("a", "b", "a", "c"):
        copies.is_duplicate(chunk("dc1", 1, 0, source))
    assert [copies.is_duplicate(chunk("dc2", 1, 0, source)) for source in ("c", "a")] == [True, True]
    assert not copies.is_duplicate(chunk("dc2", 1, 0, "b"))


@pytest.mark.parametrize(
    ("topics", "several"),
    [(["dc1.nginx"], False), (["*.nginx"], True), (["dc1.nginx", "dc2.nginx"], True), (["dc1.a", "dc2.b"], False)],
)
def test_copies_are_looked_for_where_there_can_be_any(topics: list[str], several: bool) -> None:
    assert spans_data_centres(topics) is several
