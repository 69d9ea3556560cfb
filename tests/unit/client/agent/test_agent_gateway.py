"""What the gateway answers, or does not, and what is done about it."""

from typing import Any

import pytest
from logferry.client.agent.config import DataCentre
from logferry.client.agent.source import FIGHT_WINDOW_S, REFUSED_S
from logferry.client.transport.cluster import RETRY_S, pause_s

from tests.support.fake_gateway import FakeGateway

MIB = 1 << 20


@pytest.mark.parametrize("fault", ["503", "500 before", "500 after", "cut before", "cut after", "429"])
@pytest.mark.parametrize("before", range(4))
def test_a_fault_of_any_request_costs_nothing(client: Any, gateway: FakeGateway, fault: str, before: int) -> None:
    gateway.faults.extend([""] * before + [fault] * 3)
    for number in range(4):
        client.write("a.log", b"%d\n" % number)
        client.settle()
    for _ in range(20):
        client.step(20.0)
    assert client.stored() == [b"0\n1\n2\n3\n"]


def test_retry_after_is_waited_for(client: Any, gateway: FakeGateway) -> None:
    client.write("a.log", b"one\n")
    client.step()
    gateway.faults.extend(["503"])
    client.step()
    requests = len(gateway.requests)
    assert client.step(0.9) == 0
    assert len(gateway.requests) == requests
    assert client.step(1.2) == 1


def test_after_an_unknown_outcome_the_very_same_bytes_are_sent(client: Any, gateway: FakeGateway) -> None:
    bodies = []

    class Spy(FakeGateway):
        def __call__(self, url: Any, headers: Any, body: Any, method: str = "POST") -> Any:
            bodies.append(body if isinstance(body, bytes) else b"".join(body))
            return super().__call__(url, headers, body, method)

    client.pusher.exchange = spy = Spy()
    client.write("a.log", b"one\n")
    client.step()
    spy.faults.append("cut after")
    client.step()
    client.write("a.log", b"two\n")
    client.settle()
    assert bodies[1] == bodies[2]
    assert [stored.content() for stored in spy.sources.values()] == [b"one\ntwo\n"]


def test_a_newer_session_is_answered_by_one_of_our_own_but_not_fought(
    client: Any, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    (stored,) = gateway.sources.values()
    stored.session += 5
    client.write("a.log", b"two\n")
    client.settle()
    assert client.stored() == [b"one\ntwo\n"]
    client.now += FIGHT_WINDOW_S
    for _ in range(2):
        stored.session += 5
        client.write("a.log", b"three\n")
        client.settle()
    assert client.stored() == [b"one\ntwo\nthree\n"]
    assert "another client writes this source" in caplog.text
    assert not client.agent.failures()
    (status,) = (source.status(client.now) for source in client.agent.watch.sources.values())
    assert status.error == "another client writes this source: superseded"
    client.now += REFUSED_S[1]
    client.write("a.log", b"four\n")
    client.settle()
    assert client.stored() == [b"one\ntwo\nthree\nthree\nfour\n"]


@pytest.mark.parametrize("client", [{"once": True}], indirect=True)
def test_with_once_a_source_that_another_client_writes_is_a_failure(client: Any, gateway: FakeGateway) -> None:
    client.write("a.log", b"one\n")
    client.step()
    (stored,) = gateway.sources.values()
    for _ in range(2):
        stored.session += 5
        client.step()
        client.step()
    assert list(client.agent.failures().values()) == ["another client writes this source: superseded"]


def test_two_clients_of_a_source_do_not_fight(client: Any, gateway: FakeGateway) -> None:
    client.write("a.log", b"one\n")
    client.settle()
    (stored,) = gateway.sources.values()
    for number in range(200):
        stored.session += 1
        client.write("a.log", b"%d\n" % number)
        client.step()
    assert stored.session < 200 + 30


def test_chunks_too_large_get_smaller_and_lines_are_split_if_need_be(client: Any, gateway: FakeGateway) -> None:
    gateway.largest_chunk_bytes = 2000
    client.write("a.log", b"".join(b"%d\n" % n for n in range(2000)) + b"x" * 5000 + b"\ny\n")
    client.settle()
    (stored,) = gateway.sources.values()
    assert stored.content() == (client.root / "a.log").read_bytes()
    assert max(len(chunk.data) for chunk in stored.chunks) <= 2000
    assert [c.attributes["split"] for c in stored.chunks if "split" in c.attributes][::4] == ["first", "last"]


def test_a_gateway_that_finds_everything_too_large_is_tried_slowly(
    client: Any, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.largest_chunk_bytes = 0
    client.write("a.log", b"one\n")
    client.settle()
    assert "refused" in caplog.text
    assert len(gateway.requests) < 50


def test_an_unknown_topic_is_reported_and_tried_again(
    client: Any, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.topics = {"other"}
    client.write("a.log", b"one\n")
    client.settle()
    assert "404" in caplog.text
    assert not client.stored()
    gateway.topics = {"t"}
    client.step(400.0)
    client.settle()
    assert client.stored() == [b"one\n"]


def test_an_overlap_is_cut_again_at_the_position_of_the_gateway(client: Any, gateway: FakeGateway) -> None:
    client.write("a.log", b"one\ntwo\n")
    client.step()
    stored = next(iter(gateway.sources.values()))
    gateway.faults.append("503")
    client.step(1.0)  # cut, and not recorded
    stored.recorded, stored.base = 4, 0  # another way recorded the first line
    client.settle()
    assert [(c.prev, c.data) for c in stored.chunks] == [(4, b"two\n")]


def test_an_owner_out_of_reach_is_reached_through_the_given_url(client: Any, gateway: FakeGateway) -> None:
    """The owner's address may mean nothing on this host: after a failure the gateway forwards."""
    gateway.other_url = "http://unreachable:9"
    asked = []

    class Spy(FakeGateway):
        def __call__(self, url: Any, headers: Any, body: Any, method: str = "POST") -> Any:
            asked.append(url.partition("/v1/")[0])
            if asked[-1] == "http://unreachable:9":
                gateway.faults.append("cut before")
            return gateway(url, headers, body, method)

    client.pusher.exchange = Spy()
    client.write("a.log", b"one\n")
    client.settle()
    assert asked == ["http://g:1", "http://unreachable:9", "http://g:1"]
    assert client.stored() == [b"one\n"]


@pytest.mark.parametrize("client", [{"threads": 2, "request_bytes": MIB}], indirect=True)
def test_memory_is_bounded_while_the_gateway_is_away(client: Any, gateway: FakeGateway) -> None:
    for number in range(20):
        client.write(f"{number}.log", b"%d\n" % number + (b"x" * 99 + b"\n") * 15_000)
    while len(gateway.sources) < 20:
        client.step()
    gateway.faults.extend(["cut after", "cut before"] * 200)
    most = 0
    while gateway.faults:
        client.step(20.0)
        most = max(most, client.agent.held_bytes())
    assert MIB < most <= 4 * MIB
    client.settle()
    for _ in range(20):
        client.step(20.0)
    assert sorted(client.stored()) == sorted(path.read_bytes() for path in client.root.glob("*.log"))


def test_the_absence_of_the_gateway_is_reported_once_and_its_return(
    client: Any, gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "logferry.client")
    client.write("a.log", b"one\n")
    gateway.faults.extend(["cut before"] * 10)
    while not client.stored():
        client.step(20.0)
    assert [word for word in caplog.text.split() if word.startswith("gateway-")] == ["gateway-away", "gateway-back"]


def test_pauses_grow_up_to_a_limit_and_are_not_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    first, longest = RETRY_S
    for number in range(1, 50):
        pauses = {pause_s(number, RETRY_S) for _ in range(20)}
        step = min(first * 2 ** (number - 1), longest)
        assert all(step / 2 <= pause <= step for pause in pauses)
        assert len(pauses) > 1
    monkeypatch.setattr("logferry.client.agent.source.random.uniform", lambda low, high: high)
    assert pause_s(10_000, RETRY_S) == longest


def test_behind_a_balancer_that_ends_tls_the_gateway_forwards(client: Any, gateway: FakeGateway) -> None:
    """Its workers' plain URLs must not see the token, so their redirects are not followed."""
    client.config = client.config._replace(data_centres=(DataCentre("g", ("https://g:1",), "secret"),))
    client.restart()
    gateway.token, gateway.other_url = "secret", "http://worker:2"
    gateway.faults.extend(["redirect"] * 100)
    for number in range(5):
        client.write("a.log", b"%d\n" % number)
        for _ in range(3):
            client.step(1.0)
    assert client.stored() == [b"0\n1\n2\n3\n4\n"]
    assert [stored.session for stored in gateway.sources.values()] == [2]
    assert {url.partition("/v1/")[0] for url, _ in gateway.requests} == {"https://g:1"}
