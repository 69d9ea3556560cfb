"""Tokens that cross the network in plain text are named: in the log, in the status, and in what an operator sees."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.gateway.api.status import warnings
from logferry.gateway.broker_clock import BrokerClock
from logferry.gateway.config import Config

TOKENS = [{"name": "web", "sha256": "0" * 64, "write": ["*"]}]
TLS = {"certificate": "c.pem", "key": "k.pem"}


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"listen": "10.0.0.1:80", "tokens": TOKENS}, True),
        ({"listen": "0.0.0.0:80", "advertised_host": "gateway", "tokens": TOKENS}, True),
        ({"listen": "10.0.0.1:80", "tokens": TOKENS, "tls": TLS}, False),
        ({"listen": "127.0.0.1:80", "tokens": TOKENS}, False),
        ({"listen": "10.0.0.1:80", "anonymous": True}, False),
    ],
)
def test_tokens_without_tls_on_a_public_address(settings: dict[str, Any], warned: bool) -> None:
    config = Config.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "x:1"}, **settings})
    assert config.shows_tokens == warned
    assert any("plain text" in text for text in warnings(config, BrokerClock())) == warned
