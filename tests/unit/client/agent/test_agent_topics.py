"""Which file goes to which topic, with which attributes, and what becomes of it when that is changed."""

from __future__ import annotations

import os
from typing import Any

import pytest
from logferry.client.agent.config import FileGroup


@pytest.fixture
def client(client: Any, gateway: Any) -> Any:
    """Two entries: a file belongs to the first that it fits."""
    gateway.topics = {"web", "rest", "other"}
    client.close()
    files = (
        FileGroup((str(client.root / "web*.log"),), "web", attributes={"type": "nginx"}),
        FileGroup((str(client.root / "*.log"),), "rest"),
    )
    client.config = client.config._replace(files=files)
    client.begin()
    return client


def topics(gateway: Any) -> dict[bytes, str]:
    return {stored.content(): stored.topic for stored in gateway.sources.values() if stored.chunks}


def change(client: Any, number: int, **changes: object) -> None:
    client.close()
    files = list(client.config.files)
    files[number] = files[number]._replace(**changes)
    client.config = client.config._replace(files=tuple(files))
    client.begin()


def test_each_file_goes_to_the_topic_of_the_first_entry_that_fits(client: Any, gateway: Any) -> None:
    client.write("web1.log", b"web\n")
    client.write("a.log", b"rest\n")
    client.settle()
    assert topics(gateway) == {b"web\n": "web", b"rest\n": "rest"}
    types = {stored.topic: stored.chunks[0].attributes.get("type") for stored in gateway.sources.values()}
    assert types == {"web": "nginx", "rest": None}


def test_a_new_incarnation_goes_where_the_old_one_went(client: Any, gateway: Any) -> None:
    client.write("web1.log", b"one\n")
    client.settle()
    os.truncate(client.root / "web1.log", 0)
    client.write("web1.log", b"new one\n")
    client.settle()
    assert topics(gateway) == {b"one\n": "web", b"new one\n": "web"}


def test_a_renamed_file_stays_in_its_topic_over_a_restart(client: Any, gateway: Any) -> None:
    client.write("web1.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    (client.root / "web1.log").rename(client.root / "archived")
    client.write("archived", b"two\n")
    client.restart()
    client.settle()
    assert topics(gateway) == {b"one\ntwo\n": "web"}
    (stored,) = gateway.sources.values()
    assert stored.chunks[-1].attributes["type"] == "nginx"


def test_a_file_renamed_to_what_fits_another_entry_begins_there_only_after_a_restart(
    client: Any, gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client.write("web1.log", b"one\n")
    client.settle()
    (client.root / "web1.log").rename(client.root / "old.log")
    client.write("old.log", b"two\n")
    client.settle()
    assert topics(gateway) == {b"one\ntwo\n": "web"}


def test_a_changed_topic_makes_a_new_source(client: Any, gateway: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Its seqnos are of the topic that it was in: in doubt all of it goes to the new one."""
    caplog.set_level("INFO", "logferry.client")
    client.write("web1.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    change(client, 0, topic="other")
    client.write("web1.log", b"two\n")
    client.settle()
    assert topics(gateway) == {b"one\n": "web", b"one\ntwo\n": "other"}
    assert "its topic is other now" in caplog.text


def test_changed_attributes_hold_from_then_on(client: Any, gateway: Any) -> None:
    client.write("web1.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    change(client, 0, attributes={"type": "apache"})
    client.write("web1.log", b"two\n")
    client.settle()
    (stored,) = gateway.sources.values()
    assert [chunk.attributes["type"] for chunk in stored.chunks] == ["nginx", "apache"]


def test_a_checkpoint_that_knew_no_topics_is_gone_on_with(client: Any, gateway: Any) -> None:
    client.write("web1.log", b"one\n")
    client.settle()
    assert client.agent.remember(client.now)
    client.close()
    client.begin()
    for entry in client.checkpoint.entries.values():
        entry.topic = ""
    client.write("web1.log", b"two\n")
    client.settle()
    assert topics(gateway) == {b"one\ntwo\n": "web"}
