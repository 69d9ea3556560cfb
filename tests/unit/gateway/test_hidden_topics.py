"""Push delivery says which topics Kafka hides from it: those seen before, and those that a subscription names in full.

Against Kafka: tests/integration/gateway/test_push_rights.py.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from logferry.gateway.delivery.catalog import SubscriptionView
from logferry.gateway.kafka.error_codes import TOPIC_AUTHORIZATION_FAILED, UNKNOWN_TOPIC_OR_PARTITION


class HidingKafka:
    def __init__(self) -> None:
        self.hidden: set[str] = set()
        self.asked: list[list[str]] = []

    async def describe(self, topics: list[str]) -> Any:
        self.asked.append(topics)
        codes = {
            name: TOPIC_AUTHORIZATION_FAILED if name in self.hidden else UNKNOWN_TOPIC_OR_PARTITION for name in topics
        }
        return SimpleNamespace(errors=codes)


def test_a_hidden_topic_is_named_until_it_is_seen_and_a_deleted_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    async def looks() -> None:
        kafka: Any = HidingKafka()
        entry = SimpleNamespace(definition=SimpleNamespace(topics=["dc1.named", "*.some", "dc1.[ab]", "dc1.absent"]))
        unused: Any = SimpleNamespace(entries={"one": entry})
        view = SubscriptionView(kafka, unused, unused, unused, unused, lambda: None)
        view._topics = dict.fromkeys(("dc1.seen", "dc1.deleted"), unused)
        kafka.hidden = {"dc1.named", "dc1.seen"}
        await view._find_hidden({"dc1.other"})
        assert kafka.asked == [["dc1.absent", "dc1.deleted", "dc1.named", "dc1.seen"]]
        assert [warning.split(",")[0] for warning in view.warnings] == [
            "Kafka hides dc1.named",
            "Kafka hides dc1.seen",
        ]
        view._topics = {}
        await view._find_hidden({"dc1.other"})
        assert kafka.asked[-1] == ["dc1.absent", "dc1.named", "dc1.seen"]
        assert len(view.warnings) == 2
        await view._find_hidden({"dc1.seen", "dc1.named", "dc1.absent"})
        assert (view.warnings, len(kafka.asked)) == ([], 2)

    asyncio.run(looks())
    said = capsys.readouterr().err
    assert said.count("topics_not_visible") == 2
    assert said.count("Kafka hides dc1.seen: grant Read on it") == 1
