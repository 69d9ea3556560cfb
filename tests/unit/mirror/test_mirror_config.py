"""The configuration of the mirror: what would go round in a circle, or come twice, is refused before it starts."""

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
        ([{"dc": "dc1"}, {"dc": "dc3", "prefixes": ["dc3", "dc1"]}], "topics of dc1 would come from dc1 and from dc3"),
        ([{"dc": "dc1"}, {"dc": "dc1"}], "topics of dc1 would come from dc1 and from dc1"),
        ([], "at least 1 item"),
        ([{"dc": "dc1", "bytes_per_s": 0}], "greater than 0"),
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
