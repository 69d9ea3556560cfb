"""Two data centres: what was acknowledged by one is not sent to the other, and both together hold each line once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logferry.client.agent import agent as agent_module
from logferry.client.agent.config import DataCentre
from logferry.client.agent.main import main
from logferry.client.files.identity import HEAD_BYTES
from logferry.client.transport.connections import NoResponse

from tests.model.two_centres import FIRST, SECOND, TwoCentres
from tests.unit.client.agent.conftest import Client

ONE = b"one" + b"." * HEAD_BYTES + b"\n"  # longer than what the checkpoint has to know before anything leaves


class Both(TwoCentres):
    def contents(self) -> list[bytes]:
        """Of each source; its chunks have to meet end to end from the start."""
        contents = []
        for name, stored in self.together().items():
            content = b""
            for chunk in stored.chunks:
                content += chunk.data
                assert chunk.seqno == len(content), (name, chunk.seqno)
            contents.append(content)
        return sorted(contents)


@pytest.fixture
def both() -> Any:
    return Both()


@pytest.fixture
def client(tmp_path: Path, both: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    centres = DataCentre("first", (FIRST,)), DataCentre("second", (SECOND,))
    options = {"data_centres": centres, **getattr(request, "param", {})}
    client = Client(tmp_path, both, **options)
    yield client
    client.close()


def goes_away(client: Any, gateway: Any) -> None:
    """For longer than the client waits, and there is something to send."""
    here = client.agent.centres.here
    assert gateway is list(client.gateway.of.values())[here]
    gateway.is_away = True
    for _ in range(100):
        if client.agent.centres.here != here:
            return
        client.step()
    raise AssertionError("it stays where nothing works")


def comes_back(client: Any, gateway: Any) -> None:
    gateway.is_away = False
    for _ in range(100):
        if not client.agent.centres.here:
            client.settle()
            return
        client.step()
    raise AssertionError("it does not come back")


def moves_to_the_second(client: Any, both: Any) -> None:
    """The first one has ``ONE`` of the file, the second one its next line."""
    client.write("a.log", ONE)
    client.settle()
    client.write("a.log", b"two\n")
    goes_away(client, both.first)
    client.settle()


@pytest.mark.parametrize("fault", ["source-in-use", "503"])
def test_a_source_that_another_token_writes_is_no_reason_to_leave(client: Any, both: Any, fault: str) -> None:
    client.write("a.log", ONE)
    both.first.faults.extend([fault] * 40)
    for _ in range(30):
        client.step()
    assert client.agent.centres.here == (1 if fault == "503" else 0)
    both.first.faults.clear()
    client.settle()
    assert both.contents() == [ONE]


def test_it_continues_in_the_other_one_and_comes_back(client: Any, both: Any) -> None:
    moves_to_the_second(client, both)
    client.write("a.log", b"three\n")
    client.settle()
    comes_back(client, both.first)
    client.write("a.log", b"four\n")
    client.settle()
    (name,) = both.first.sources
    here, there = both.first.sources[name], both.second.sources[name]
    assert [(c.prev, c.data) for c in there.chunks] == [(len(ONE), b"two\n"), (len(ONE) + 4, b"three\n")]
    assert [(c.prev, c.data, c.attributes.get("resumed_at")) for c in here.chunks] == [
        (0, ONE, None),
        (None, b"four\n", str(len(ONE) + 10)),
    ]
    assert both.contents() == [ONE + b"two\nthree\nfour\n"]


@pytest.mark.parametrize("fault", ["cut after", "500 after", "cut before"])
@pytest.mark.parametrize("then", ["waits", "lets go", "is killed"])
def test_chunks_under_way_are_sent_again_unchanged(client: Any, both: Any, fault: str, then: str) -> None:
    client.write("a.log", ONE)
    client.settle()
    client.write("a.log", b"two\n")
    both.first.faults.append(fault)
    client.step()
    both.first.is_away = True
    client.write("a.log", b"three\n")  # cut again, this would be in the same chunk as the line before
    if then == "is killed":
        client.restart()
    for source in client.agent.watch.sources.values() if then == "lets go" else ():
        source.let_go()
    goes_away(client, both.first)
    client.settle()
    assert both.contents() == [ONE + b"two\nthree\n"]
    assert both.copies() == ("after" in fault)


@pytest.mark.parametrize("fault", ["cut after", "cut before"])
def test_a_chunk_whose_file_cannot_be_read_while_it_is_under_way_is_sent_again_unchanged(
    client: Any, both: Any, fault: str
) -> None:
    client.write("a.log", ONE)
    client.settle()
    client.write("a.log", b"two\n")
    client.now += 5.0
    client.agent.tick(client.now)
    ((source, job),) = client.agent.jobs(client.now, 1)
    both.first.faults.append(fault)
    outcome = client.pusher.perform(job)
    source.cannot_read(OSError(5, "Input/output error"), client.now, False)
    client.agent.finish(source, job, outcome, client.now)
    client.write("a.log", b"three\n")
    goes_away(client, both.first)
    client.settle()
    assert both.contents() == [ONE + b"two\nthree\n"]
    assert both.copies() == ("after" in fault)


def test_a_client_that_was_killed_sends_nothing_again_though_the_one_that_knows_is_gone(client: Any, both: Any) -> None:
    """Its checkpoint is older than what was acknowledged."""
    for number in range(10):
        client.write("a.log", b"%d\n" % number)
        client.step(0.2)
    assert len(both.contents()[0]) >= 16
    both.first.is_away = True
    client.restart()
    client.write("a.log", b"end\n")
    goes_away(client, both.first)
    client.settle()
    assert both.contents() == [(client.root / "a.log").read_bytes()]
    assert both.copies() <= 1  # the last one, whose answer may have been lost with the client


def test_after_a_restart_it_is_where_it_was_and_asks_there_before_it_comes_back(client: Any, both: Any) -> None:
    moves_to_the_second(client, both)
    client.restart()
    assert client.agent.centres.here == 1
    for number in range(10):
        client.write("a.log", b"%d\n" % number)
        client.step(0.2)
    both.first.is_away = False
    (client.root / "state" / "cuts.jsonl").unlink()  # so that only the other one knows how far it is
    client.restart()
    client.agent.centres.here = 0  # it was chosen to come back before anything was asked
    client.write("a.log", b"four\n")
    client.settle()
    assert both.contents() == [(client.root / "a.log").read_bytes()]
    assert both.copies() == 0
    assert both.first.sources.popitem()[1].chunks[-1].data.endswith(b"four\n")


def test_where_it_went_is_known_before_anything_is_sent_there(
    client: Any, both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "REMEMBER_EVERY_S", 1e9)  # only what has to be is written down
    client.write("a.log", ONE)
    client.settle()
    client.write("a.log", b"two\n")
    goes_away(client, both.first)
    for number in range(5):
        client.write("a.log", b"%d\n" % number)
        client.step(0.2)
    assert any(stored.chunks for stored in both.second.sources.values())
    both.first.is_away = False
    client.restart()
    client.settle()
    assert client.agent.centres.here == 1
    assert both.contents() == [(client.root / "a.log").read_bytes()]


@pytest.mark.parametrize("name", ["first", "renamed"])
def test_one_that_is_not_configured_any_more_has_what_it_has(client: Any, both: Any, name: str) -> None:
    moves_to_the_second(client, both)
    assert client.agent.remember(client.now)
    both.first.is_away = False
    client.config = client.config._replace(data_centres=(DataCentre(name, (FIRST,)),))
    client.restart()
    client.write("a.log", b"three\n")
    client.settle()
    assert both.contents() == [ONE + b"two\nthree\n"]
    assert both.copies() == 0


def test_another_one_that_dies_in_turn_costs_nothing(client: Any, both: Any) -> None:
    client.write("a.log", ONE)
    client.settle()
    for number in range(3):
        client.write("a.log", b"there %d\n" % number)
        goes_away(client, both.first)
        client.settle()
        client.write("a.log", b"unknown %d\n" % number)
        both.second.faults.append("cut after")
        both.first.is_away = False
        client.step()
        goes_away(client, both.second)
        client.settle()
        client.write("a.log", b"here %d\n" % number)
        client.settle()
        both.second.is_away = False
    assert both.contents() == [(client.root / "a.log").read_bytes()]
    assert both.copies() == 3


def test_one_that_forgot_is_sent_its_own_part_again_and_no_more(client: Any, both: Any) -> None:
    moves_to_the_second(client, both)
    both.second.sources.clear()
    client.restart()
    client.settle()
    assert both.contents() == [ONE + b"two\n"]
    assert both.copies() == 0


def test_refusals_and_quotas_are_not_evaded(client: Any, both: Any) -> None:
    client.write("a.log", ONE)
    client.settle()
    both.first.faults.extend(["429"] * 500)
    client.write("a.log", b"two\n")
    for _ in range(200):
        client.step()
    assert client.agent.centres.here == 0
    assert not both.second.sources


def test_files_that_are_quiet_say_farewell_to_the_one_they_leave(client: Any, both: Any) -> None:
    moves_to_the_second(client, both)
    comes_back(client, both.first)
    (there,), (here,) = both.second.sources.values(), both.first.sources.values()
    assert there.beats[-1] == {"position": len(ONE) + 4, "finished": True}
    client.step(400.0)
    assert here.beats[-1]["finished"] is False


def test_the_farewell_follows_the_session_in_the_other_one(client: Any, both: Any) -> None:
    """Else the source would be finished everywhere meanwhile, and the loader's segments would not wait for it."""
    moves_to_the_second(client, both)
    (there,) = both.second.sources.values()
    both.first.is_away = False
    both.first.faults.extend(["source-in-use"] * 500)
    while client.agent.centres.here:
        client.step()
    for _ in range(20):
        client.step()
    assert not any(beat["finished"] for beat in there.beats)
    both.first.faults.clear()
    client.settle()
    assert there.beats[-1]["finished"]


def test_the_farewell_of_a_file_that_is_gone_is_sent_where_no_session_can_be_opened(client: Any, both: Any) -> None:
    moves_to_the_second(client, both)
    (there,) = both.second.sources.values()
    client.write("b.log", ONE)
    both.first.is_away = False
    while client.agent.centres.here:
        client.step()
    both.first.topics.clear()
    (client.root / "a.log").unlink()
    for _ in range(30):
        client.step()
    assert there.beats[-1]["finished"]


def test_a_file_that_was_rotated_away_meanwhile_is_sent_to_its_end(client: Any, both: Any) -> None:
    client.write("a.log", ONE)
    client.settle()
    client.write("a.log", b"two\n")
    both.first.is_away = True
    client.step()
    (client.root / "a.log").unlink()
    goes_away(client, both.first)
    client.settle()
    assert both.contents() == [ONE + b"two\n"]


def test_a_copy_continues_where_the_other_one_left_off(client: Any, both: Any) -> None:
    """Copied and truncated when the client, just started, opens its session in the other one."""
    client.write("a.log", ONE + b"two\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.restart()
    both.first.is_away = True
    jobs: list[Any] = []
    while not client.agent.centres.here:
        for source, job in jobs:
            client.agent.finish(source, job, client.pusher.perform(job), client.now)
        client.now += 5.0
        dc = client.agent.centres.probe(client.now)
        if dc is not None:
            client.agent.centres.record(dc, client.pusher.probe(dc), client.now)
        client.agent.tick(client.now)
        jobs = client.agent.jobs(client.now, 1)
    ((source, job),) = jobs
    assert job.session is None
    client.write("a.log.1", ONE + b"two\nthree\n")
    client.write("a.log", b"another\n", "wb")
    client.agent.finish(source, job, client.pusher.perform(job), client.now)
    client.settle()
    assert both.contents() == [b"another\n", ONE + b"two\nthree\n"]


def test_what_a_copy_has_is_sent_as_it_was_cut(client: Any, both: Any) -> None:
    """Nobody knows whether the first one has it; then the file is copied and truncated."""
    client.write("a.log", b"one\n")
    both.first.faults.extend(["", "cut after"])
    client.step()
    client.step()
    (source,) = client.agent.watch.sources.values()
    source.let_go()
    both.first.is_away = True
    client.write("a.log.1", b"one\ntwo\n")
    client.write("a.log", b"1\n", "wb")
    goes_away(client, both.first)
    client.settle()
    assert both.contents() == [b"1\n", b"one\ntwo\n"]


def test_the_status_says_where_it_is_and_why(client: Any, both: Any, capsys: pytest.CaptureFixture[str]) -> None:
    moves_to_the_second(client, both)
    client.step(5.0)
    assert main(["--status", "--state-dir", str(client.root / "state")]) == 0
    said = capsys.readouterr().out
    assert "writes to the data centre second, for " in said
    assert re.search(r"s: nothing of first has worked for [67]\d s\n    first: nothing has worked for ", said)
    main(["--status", "--json", "--state-dir", str(client.root / "state")])
    assert json.loads(capsys.readouterr().out)["data_centre"]["here"] == "second"


def test_moves_are_logged(client: Any, both: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "logferry.client")
    moves_to_the_second(client, both)
    comes_back(client, both.first)
    events = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert [event for event in events if event.startswith("data-centre")] == ["data-centre-left", "data-centre-back"]


def test_where_nothing_answers_it_stays_and_loses_nothing(client: Any, both: Any) -> None:
    client.write("a.log", ONE)
    both.first.is_away = both.second.is_away = True
    for _ in range(50):
        client.step(20.0)
    assert client.agent.centres.here == 0
    with pytest.raises(NoResponse):
        both(f"{FIRST}/v1/x", {}, b"")
    both.second.is_away = False
    for _ in range(20):
        client.step()
    client.settle()
    assert both.contents() == [ONE]
