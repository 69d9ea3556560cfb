"""A URL in the workers' group of Kafka gets no caller's token unless it can be a worker's."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request
from logferry.gateway.api.forwarding import Forwarding, is_worker
from logferry.gateway.api.status import warnings
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.config import Config
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import Admission

TOKENS = [{"name": "web", "sha256": "0" * 64, "write": ["*"]}]
PUBLIC = {"listen": "10.0.0.1:80", "advertised_host": "gw1.example", "tokens": TOKENS}
TLS = {**PUBLIC, "tls": {"certificate": "c.pem", "key": "k.pem"}}
LISTED = {**PUBLIC, "worker_hosts": ["gw?.example", "[[]::1]"]}


def config(settings: dict[str, Any]) -> Config:
    return Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "x:1"}, **settings})


@pytest.mark.parametrize(
    ("settings", "good", "bad"),
    [
        (
            {},
            ["http://127.0.0.1:8081", "http://localhost:1", "http://[::1]:1"],
            ["http://evil:1", "https://localhost:1"],
        ),
        (
            PUBLIC,
            ["http://gw2.example:80", "http://10.0.0.2:81", "http://gw_2:80"],
            [
                *("https://gw2.example:80", "ftp://gw2.example:80", "gw2.example:80", "http://gw2.example"),
                *("http://gw2.example:80/", "http://gw2.example:80?x", "http://gw2.example:80#", "http://a@gw2:80"),
                *("http://gw2.example:80\n", "http://gw2\n:80", "http://gw2:٣", "", "spark-1"),
            ],
        ),
        (TLS, ["https://gw2.example:80"], ["http://gw2.example:80"]),
        (LISTED, ["http://gw2.example:80", "http://[::1]:80"], ["http://evil.example:80", "http://10.0.0.1:80"]),
    ],
)
def test_what_can_be_a_worker(settings: dict[str, Any], good: list[str], bad: list[str]) -> None:
    assert [url for url in good if not is_worker(config(settings), url)] == []
    assert [url for url in bad if is_worker(config(settings), url)] == []


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (PUBLIC, True),
        ({**PUBLIC, "listen": "127.0.0.1:80"}, True),  # behind a proxy, its workers on any host
        (TLS, True),
        (
            {**PUBLIC, "tls": {"certificate": "c.pem", "key": "k.pem", "ca": "ca.pem"}},
            False,
        ),  # strangers have no certificate of it
        (LISTED, False),
        ({"tokens": TOKENS}, False),  # loopback alone
        ({"listen": "10.0.0.1:80", "anonymous": True}, False),
    ],
)
def test_that_any_host_may_get_tokens_is_named(settings: dict[str, Any], warned: bool) -> None:
    assert (
        any("worker_hosts" in text.partition(": ")[2] for text in warnings(config(settings), BrokerClock())) == warned
    )


async def test_a_token_is_not_sent_to_another() -> None:
    given = config(LISTED)
    forwarding = Forwarding(given, Mock(is_changing=False), Admission(given.limits))
    session: Any = Mock()
    forwarding._session = session
    for headers in ({}, {"X-Logferry-Redirect": "1"}):
        request = make_mocked_request("POST", "/v1/topics/x/sources/s/chunks", headers=headers)
        with pytest.raises(Problem, match="no URL of a worker here"):
            await forwarding._hand_on(request, "http://evil.example:80", 0)
        with pytest.raises(Problem, match="no URL of a worker here"):
            await forwarding.forward(request, "http://evil.example:80", "the worker")
    session.request.assert_not_called()
