"""How a writer ends: a chunk that is rejected, another writer of the source, an opening that comes late."""

from __future__ import annotations

from logferry.client.errors import Rejected, Superseded
from logferry.client.transport.source_request import GatewayAnswer, Outcome
from logferry.client.writing.send_window import OWN_OPENING_S, Limits

from tests.support.sender import Sender, opened


def test_a_refused_chunk_ends_it_when_all_before_it_is_acknowledged() -> None:
    sender = opened()
    sender.gateway.largest_chunk_bytes = 100
    sender.write(None)
    sender.turn()
    sender.write(None)
    sender.window.put(b"x" * 200, None, 0, {})
    sender.write(None)
    good, bad = sender.begin(), sender.begin()
    assert good is not None
    assert bad is not None
    answered = sender.arrive(good)
    sender.window.take(bad, sender.arrive(bad), sender.now)
    assert sender.window.failure is None
    sender.window.take(good, answered, sender.now)
    error = sender.window.error()
    assert isinstance(error, Rejected)
    assert (error.kind, error.status, error.recorded_seqno, error.unknown_to) == ("too-large", 413, 2, None)
    assert sender.window.next_job(sender.now) is None
    assert sender.stored.recorded == 2


def test_a_request_that_is_too_large_is_cut_in_two() -> None:
    sender = opened(Limits(batch_bytes=100_000))
    sender.write(*[None] * 40)
    job = sender.begin()
    assert job is not None
    too_large = GatewayAnswer(413, "too-large", "over the limit of a request")
    sender.window.take(job, Outcome(too_large, None), sender.now)
    sender.drain()
    sender.assert_exact()
    assert sum(url.endswith("chunks?session=1") for url, _ in sender.gateway.requests) > 1


def test_superseded_by_another_writer() -> None:
    sender = opened()
    sender.write(None)
    sender.drain()
    other = Sender(gateway=sender.gateway)
    other.turn()
    sender.write(None, None)
    sender.drain()
    error = sender.window.error()
    assert isinstance(error, Superseded)
    assert (error.recorded_seqno, error.unknown_to) == (1, None)
    other.write(None)
    other.drain()
    assert [chunk.seqno for chunk in sender.stored.chunks] == [1, 2]


def test_superseded_with_an_answer_lost_says_what_is_not_known() -> None:
    sender = opened()
    sender.write(None)
    sender.drain()
    sender.write(None, None)
    sender.turn("cut after")
    other = Sender(gateway=sender.gateway)
    other.turn()
    assert other.window.recorded == 2
    sender.drain()
    error = sender.window.error()
    assert isinstance(error, Superseded)
    assert (error.recorded_seqno, error.unknown_to) == (1, 2)


def late_opening(at: float) -> Sender:
    """Superseded by an opening of its own that the gateway carried out ``at`` that time."""
    sender = Sender()
    lost = sender.begin()
    assert lost is not None
    sender.window.take(lost, sender.arrive(lost, "cut before"), sender.now)
    sender.turn()
    sender.write(None)
    sender.turn("cut after")
    sender.now += at
    sender.arrive(lost)
    return sender


def test_its_own_opening_that_comes_late_does_not_supersede_it() -> None:
    sender = late_opening(1)
    sender.write(None)
    sender.drain()
    assert sender.window.failure is None
    sender.assert_exact()


def test_opened_once_more_it_begins_with_one_request_again() -> None:
    sender = late_opening(1)
    sender.write(None, None)
    while sender.gateway.sources["s"].session != sender.window.session:
        sender.turn()
    sender.gateway.sources["s"].recorded = None
    first = sender.begin()
    assert first is not None
    assert sender.begin() is None


def test_an_opening_that_comes_very_late_is_another_s() -> None:
    sender = late_opening(OWN_OPENING_S + 10)
    sender.drain()
    assert isinstance(sender.window.error(), Superseded)


def test_what_others_wrote_meanwhile_is_not_taken_for_its_own() -> None:
    sender = late_opening(1)
    other = Sender(gateway=sender.gateway)
    other.turn()
    other.write(50)
    other.drain()
    sender.write(None)
    sender.drain()
    error = sender.window.error()
    assert isinstance(error, Superseded)
    assert [chunk.seqno for chunk in sender.stored.chunks] == [1, 50]
