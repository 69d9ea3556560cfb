"""Syslog's framings, in pieces of any size; the RFCs' own examples; and anything at all in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.contract.syslog_frames import Framer, host_of, is_blank, line_of
from logferry.gateway.receivers.syslog import Datagrams, by_sender

LIMIT = 100
# Of RFC 5424 6.5 and RFC 3164 5.4.
EXAMPLES = [
    (b"<34>1 2003-10-11T22:14:15.003Z mymachine.example.com su - ID47 - 'su root' failed on /dev/pts/8",
     "mymachine.example.com"),
    (b"<165>1 2003-08-24T05:14:15.000003-07:00 192.0.2.1 myproc 8710 - - %% It's time to make the do-nuts.",
     "192.0.2.1"),
    (b'<165>1 2003-10-11T22:14:15.003Z mymachine.example.com evntslog - ID47 [exampleSDID@32473 iut="3" eventSource='
     b'"Application" eventID="1011"] \xef\xbb\xbfAn application event log entry...', "mymachine.example.com"),
    (b'<165>1 2003-10-11T22:14:15.003Z mymachine.example.com evntslog - ID47 [exampleSDID@32473 iut="3" eventSource='
     b'"Application" eventID="1011"][examplePriority@32473 class="high"]', "mymachine.example.com"),
    (b"<34>Oct 11 22:14:15 mymachine su: 'su root' failed for lonvick on /dev/pts/8", "mymachine"),
    (b"<0>1990 Oct 22 10:52:01 TZ-6 scapegoat.dmz.example.org sched[0]: That's All Folks!", None),
    (b"<165>1 - - app - - - nothing is known", None),
    (b"Use the BFG!", None),
]  # fmt: skip


@pytest.mark.parametrize(("message", "host"), EXAMPLES)
def test_the_sender_of_the_rfcs_examples(message: bytes, host: str | None) -> None:
    assert (host_of(message), line_of(message)) == (host, message)


def test_a_message_is_one_line() -> None:
    assert line_of(b"<1>a\nb\r\n") == b"<1>a#012b"


MESSAGES = st.binary(min_size=1, max_size=LIMIT).filter(lambda message: message.strip(b"\r\0 \n"))
FRAMES = st.lists(
    MESSAGES.map(lambda message: (message, b"%d %b" % (len(message), message)))
    | MESSAGES.map(lambda message: b"<" + message.replace(b"\n", b"")[: LIMIT - 1]).map(lambda m: (m, m + b"\n")),
    max_size=8,
)


def in_pieces(framer: Framer, stream: bytes, sizes: list[int]) -> list[bytes]:
    found, at = list[bytes](), 0
    for size in [*sizes, len(stream)]:
        found += framer.feed(stream[at : at + size])
        at += size
    return found


@given(FRAMES, st.lists(st.integers(0, 40), max_size=20))
def test_both_framings_in_pieces_of_any_size(frames: list[tuple[bytes, bytes]], sizes: list[int]) -> None:
    framer = Framer(LIMIT)
    found = in_pieces(framer, b"".join(frame for _, frame in frames), sizes)
    assert found == [message for message, _ in frames]
    assert (framer.end(), framer.too_long) == ([], 0)


@given(st.binary(max_size=600), st.lists(st.integers(0, 40), max_size=20))
def test_anything_in_bounded_memory_and_the_same_in_any_pieces(stream: bytes, sizes: list[int]) -> None:
    whole, framer = Framer(LIMIT), Framer(LIMIT)
    found = in_pieces(framer, stream, sizes)
    assert found == whole.feed(stream)
    assert not any(map(is_blank, found))
    assert len(framer._rest) <= LIMIT + 10
    assert all(len(message) <= LIMIT for message in found)


@pytest.mark.parametrize("long", [b"<1>" + b"x" * 500 + b"\n", b"500 " + b"y" * 500])
def test_a_message_that_is_too_long_is_passed_over_alone(long: bytes) -> None:
    framer = Framer(LIMIT)
    stream = b"<1>a\n" + long + b"<1>b\n4 <1>c"
    assert [one for at in range(len(stream)) for one in framer.feed(stream[at : at + 1])] == [b"<1>a", b"<1>b", b"<1>c"]
    assert framer.too_long == 1


def test_the_last_message_may_lack_its_newline() -> None:
    framer = Framer(LIMIT)
    assert framer.feed(b"<1>a\n<1>b") == [b"<1>a"]
    assert framer.end() == [b"<1>b"]
    assert framer.feed(b"9 <1>c") == framer.end() == []


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_any_message_is_one_line_of_a_named_sender(messages: list[bytes]) -> None:
    found = by_sender("192.0.2.1", messages)
    lines = [line for of_name in found.values() for line in of_name]
    assert sorted(lines) == sorted(line_of(message) for message in messages)
    assert not any(broken in line for line in lines for broken in b"\n\r\0")
    assert all(name.isprintable() and name.isascii() for name in found)


def test_names_of_senders_in_one_batch_are_bounded() -> None:
    found = by_sender("192.0.2.1", [b"<1>1 - host%d x" % number for number in range(1000)])
    assert (len(found), len(found["192.0.2.1"]), found["host0"]) == (101, 900, [b"<1>1 - host0 x"])


async def test_datagrams_that_wait_are_bounded_by_bytes_and_by_number() -> None:
    for data, most in ((b"x", 40_000), (b"x" * 1000, 10_000), (b"", 0), (b"\r\n\0", 0), (b"x" * 1001, 0)):
        datagrams = Datagrams(1000)
        for _ in range(50_000):
            datagrams.datagram_received(data, ("192.0.2.1", 514))
        assert len(datagrams.waiting) <= most
        while datagrams.waiting:
            await datagrams.take()
        assert datagrams.size_bytes == 0
