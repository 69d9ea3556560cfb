"""What a source says of itself while there is nothing to send, and when its file is gone."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from logferry.client.agent.schedule import HeartbeatSchedule

EVERY = {"heartbeat_s": 60.0}


@pytest.fixture
def beats(gateway: Any) -> Any:
    """What was said, over all sources."""
    return lambda: [beat for stored in gateway.sources.values() for beat in stored.beats]


def quiet(client: Any) -> None:
    """A file without a name is let go."""
    for _ in range(3):
        client.step(client.config.rotated_timeout_s)
    client.settle()


@pytest.mark.parametrize("client", [EVERY], indirect=True)
def test_an_idle_file_says_how_far_it_is(client: Any, beats: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert beats() == []
    before_ms = time.time() * 1000
    for _ in range(10):
        client.step(6.0)
    (beat,) = beats()
    assert (beat["position"], beat["size"], beat["finished"]) == (4, 4, False)
    assert before_ms - 5 <= beat["watermark_ms"] < time.time() * 1000
    for _ in range(100):
        client.step(6.0)
    assert 10 <= len(beats()) <= 14


@pytest.mark.parametrize("client", [{**EVERY, "idle_s": 1e6}], indirect=True)
def test_where_half_a_line_waits_there_is_no_watermark(client: Any, beats: Any) -> None:
    client.write("a.log", b"one\nhal")
    client.settle()
    client.step(60.0)
    assert beats() == [{"position": 4, "size": 7, "finished": False}]


@pytest.mark.parametrize("client", [EVERY], indirect=True)
def test_a_file_with_news_needs_no_heartbeat(client: Any, beats: Any) -> None:
    for number in range(100):
        client.write("a.log", b"%d\n" % number)
        client.step(6.0)
    assert beats() == []


@pytest.mark.parametrize("client", [EVERY], indirect=True)
def test_a_file_that_is_gone_is_finished(client: Any, beats: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    (client.root / "a.log").unlink()
    quiet(client)
    assert beats()[-1] == {"position": 4, "size": 4, "finished": True}
    count = len(beats())
    quiet(client)
    assert len(beats()) == count
    assert not client.agent.watch.sources
    assert not client.checkpoint.entries


@pytest.mark.parametrize("client", [EVERY], indirect=True)
@pytest.mark.parametrize("restart", [False, True])
def test_the_end_of_a_source_is_repeated_until_it_is_acknowledged(
    client: Any, gateway: Any, beats: Any, restart: bool
) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    (client.root / "a.log").unlink()
    gateway.faults.extend(["cut before", "503", "500 before"] * 4)
    for _ in range(6):
        client.step(client.config.rotated_timeout_s)
    assert not [beat for beat in beats() if beat["finished"]]
    if restart:
        assert client.agent.remember(client.now)
        client.restart()
    gateway.faults.clear()
    quiet(client)
    assert [beat["position"] for beat in beats() if beat["finished"]] == [4]
    assert not client.checkpoint.entries


@pytest.mark.parametrize("client", [EVERY], indirect=True)
@pytest.mark.parametrize("down", [False, True])
def test_a_truncated_file_finishes_its_source_and_begins_another(client: Any, gateway: Any, down: bool) -> None:
    client.write("a.log", b"one\ntwo\n")
    client.settle()
    if down:
        assert client.agent.remember(client.now)
        client.close()
    os.truncate(client.root / "a.log", 0)
    client.write("a.log", b"new\n")
    if down:
        client.begin()
    client.settle()
    old, new = gateway.sources.values()
    assert [(beat["position"], beat["finished"]) for beat in old.beats] == [(8, True)]
    assert (new.content(), new.beats) == (b"new\n", [])
    assert client.agent.remember(client.now)
    client.restart()
    client.settle()
    assert len(old.beats) == 1


@pytest.mark.parametrize("client", [EVERY], indirect=True)
def test_what_was_seen_and_not_sent_shows_in_the_size(client: Any, gateway: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    client.write("a.log", b"two\n")
    client.agent.tick(client.now + 1.0)
    os.truncate(client.root / "a.log", 0)
    client.settle()
    (stored,) = gateway.sources.values()
    assert stored.beats == [{"position": 4, "size": 8, "finished": True}]


@pytest.mark.parametrize("client", [EVERY], indirect=True)
def test_a_file_removed_while_the_client_was_down_is_finished(client: Any, gateway: Any, beats: Any) -> None:
    """Where it ends is what the gateway has, which may be more than the checkpoint knows."""
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.write("a.log", b"two\n")
    client.settle()
    (client.root / "a.log").unlink()
    client.restart()
    client.settle()
    assert beats() == [{"position": 8, "finished": True}]
    assert not client.checkpoint.entries


@pytest.mark.parametrize("client", [EVERY], indirect=True)
def test_a_gateway_that_refuses_heartbeats_gets_the_lines_all_the_same(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.refuses_beats = True
    client.write("a.log", b"one\n")
    client.settle()
    client.step(60.0)
    assert "status=403" in caplog.text
    client.write("a.log", b"two\n")
    assert client.step(1.0) == 1
    assert client.stored() == [b"one\ntwo\n"]
    (client.root / "a.log").unlink()
    quiet(client)
    assert not client.agent.watch.sources


@pytest.mark.parametrize("client", [{**EVERY, "once": True}], indirect=True)
def test_a_run_that_ends_after_the_present_lines_sends_none(client: Any, gateway: Any, beats: Any) -> None:
    """Neither of a file that it sent, nor of one whose lines the gateway does not take."""
    client.write("a.log", b"one\n")
    client.write("b.log", b"x" * 3000 + b"\n")
    gateway.largest_chunk_bytes = 512
    client.step()
    client.settle()
    client.step(1000.0)
    assert client.agent.is_done()
    assert client.agent.failures()
    assert client.stored() == [b"one\n"]
    assert beats() == []


@pytest.mark.parametrize("client", [{"heartbeat_s": 0.0}], indirect=True)
def test_none_are_sent_where_they_are_not_wanted(client: Any, beats: Any) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    client.step(1000.0)
    (client.root / "a.log").unlink()
    quiet(client)
    assert beats() == []


@pytest.mark.parametrize("client", [EVERY], indirect=True)
def test_an_empty_file_is_not_spoken_of(client: Any, gateway: Any) -> None:
    client.write("a.log", b"")
    for _ in range(3):
        client.step(60.0)
    (client.root / "a.log").unlink()
    quiet(client)
    assert not gateway.requests
    assert not client.agent.watch.sources


@pytest.mark.parametrize("client", [EVERY], indirect=True)
@pytest.mark.parametrize("fault", ["503", "cut before", "500 before"])
def test_one_that_failed_is_not_repeated_before_its_time_and_holds_up_no_lines(
    client: Any, gateway: Any, beats: Any, fault: str
) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    gateway.faults.append(fault)
    client.step(60.0)
    count = len(gateway.requests)
    for _ in range(44):
        client.step(1.0)
    assert (len(gateway.requests), beats()) == (count, [])
    client.write("a.log", b"two\n")
    assert client.step(1.0) == 1
    assert client.stored() == [b"one\ntwo\n"]


@pytest.mark.parametrize("client", [EVERY], indirect=True)
def test_a_source_of_a_deleted_topic_is_rejected_once(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    (client.root / "a.log").unlink()
    gateway.topics = {"other"}
    client.restart()
    for _ in range(5):
        client.step(400.0)
    assert caplog.text.count("refused") == 1
    assert not client.agent.watch.sources
    assert not client.checkpoint.entries


def test_each_data_centre_that_was_left_hears_it_once() -> None:
    schedule = HeartbeatSchedule(60.0)
    for dc, session in ((1, 7), (2, 8), (3, 9)):
        schedule.leave(dc, session)
    found = [schedule.farewell(100, live=(1, 3)) for _ in range(3)]
    assert [each and (each[0], each[1], each[2].finished) for each in found] == [(3, 9, True), (1, 7, True), None]
    assert schedule.left == ()
