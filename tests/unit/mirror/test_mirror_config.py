"""The configuration of the mirror: replication cycles and doubled topics are rejected at the start."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.mirror.config import MirrorConfig
from pydantic import ValidationError

KAFKA = {"bootstrap_servers": "k:9092"}


def config(*remotes: dict[str, Any], **settings: Any) -> MirrorConfig:
    named = [{"kafka": KAFKA, **remote} for remote in remotes]
    return MirrorConfig.model_validate({"dc": "dc2", "kafka": KAFKA, "remote": named, **settings})


@pytest.mark.parametrize(
    ("remotes", "said"),
    [
        ([{"dc": "dc2"}], "remote: dc2 is this data centre itself"),
        ([{"dc": "dc1", "prefixes": ["dc1", "dc2"]}], "topics of dc2 are written here"),
        ([{"dc": "dc1"}, {"dc": "dc3", "prefixes": ["dc3", "dc1"]}], "topics of dc1 are taken from both dc1 and dc3"),
        ([{"dc": "dc1"}, {"dc": "dc1"}], "topics of dc1 are taken from both dc1 and dc1"),
        ([], "at least 1 item"),
        ([{"dc": "dc1", "bytes_per_s": 0}], "greater than 0"),
        ([{"dc": "dc1", "exclude": ["a b"]}], "remote.0.exclude.0"),
        ([{"dc": "dc1", "renamed": {"orders": "orders"}}], "renamed: orders: "),
        ([{"dc": "dc1", "renamed": {"orders": "dc3.orders"}}], "the copy must be named dc1.orders, not dc3.orders"),
        ([{"dc": "dc1", "renamed": {"dc1.a": "dc1.b"}}], "dc1.a: it has the name of a data centre already"),
        ([{"dc": "dc1", "renamed": {"a": "dc1.c", "b": "dc1.c"}}], "two topics cannot have one copy"),
    ],
)
def test_what_is_refused(remotes: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config(*remotes)


def test_a_hub_and_a_chain() -> None:
    hub = config({"dc": "dc1"}, {"dc": "dc3", "prefixes": ["dc3", "dc4"]})
    names = ("dc1.a", "dc3.a", "dc4.a", "dc2.a", "dc5.a", "dc1")
    assert [[remote.dc for remote in hub.remotes if remote.takes(name)] for name in names] == [
        ["dc1"],
        ["dc3"],
        ["dc3"],
        [],
        [],
        [],
    ]
    assert [hub.remotes[1].is_chained(name) for name in ("dc3.a", "dc4.a", "logferry.gateway.dc3.state")] == [
        False,
        True,
        False,
    ]


def test_excluded_topics_are_not_taken() -> None:
    [remote] = config({"dc": "dc1", "topics": ["a*", "b"], "exclude": ["*-debug", "b"]}).remotes
    names = ("dc1.a", "dc1.a-debug", "dc1.b", "dc1.abc")
    assert [name for name in names if remote.takes(name)] == ["dc1.a", "dc1.abc"]


def test_a_topic_without_a_data_centre_goes_by_the_name_of_its_copy() -> None:
    [remote] = config({"dc": "dc1", "topics": ["a"], "renamed": {"orders": "dc1.orders", "x": "dc1.a"}}).remotes
    # A topic there that has the name of such a copy is not mirrored.
    names = ("orders", "dc1.orders", "x", "dc1.a", "other")
    assert [remote.here(name) for name in names] == ["dc1.orders", None, "dc1.a", None, None]
    assert [remote.there(name) for name in ("dc1.orders", "dc1.a", "dc1.b")] == ["orders", "x", "dc1.b"]


def test_fewer_replicas_must_be_accepted_by_name() -> None:
    with pytest.raises(ValidationError, match="accept it by name: accept_weak_kafka = \\['replication'\\]"):
        config({"dc": "dc1"}, replicas=2)
    assert config({"dc": "dc1"}, replicas=2, accept_weak_kafka=["replication"]).replicas == 2


SHA = "0" * 64
OPERATOR = {"name": "operator", "sha256": SHA, "admin": ["*"]}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"listen": "192.0.2.1:80"}, "without tokens the mirror serves loopback only"),
        ({"listen": "0.0.0.0:80", "tokens": [OPERATOR]}, "set advertised_host"),
        ({"anonymous": True, "tokens": [OPERATOR]}, "anonymous: would give everybody"),
        ({"tokens": [OPERATOR, {**OPERATOR, "name": "other"}]}, "operator and other have the same sha256"),
        ({"tokens": [{**OPERATOR, "admin": ["nginx"]}]}, "operator: the mirror knows one right"),
        ({"tokens": [{**OPERATOR, "read": ["*"]}]}, "operator: the mirror knows one right"),
        ({"tls": {"certificate": "a", "key": "b", "ca": "c"}}, "tls.ca: has no effect"),
    ],
)
def test_what_would_let_others_in_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config({"dc": "dc1"}, **settings)


def test_what_is_served_to_others() -> None:
    public = {"listen": "192.0.2.1:80", "tokens": [OPERATOR]}
    bare = config({"dc": "dc1"}, **public)
    assert (bare.url(1), bare.shows_tokens) == ("http://192.0.2.1:81", True)
    safe = config({"dc": "dc1"}, **public, tls={"certificate": "a", "key": "b"})
    assert (safe.url(1), safe.shows_tokens) == ("https://192.0.2.1:81", False)
    assert config({"dc": "dc1"}, listen="192.0.2.1:80", anonymous=True).tokens == []
