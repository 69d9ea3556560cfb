"""The states of sources of other data centres, as the mirror brought them here."""

from __future__ import annotations

from typing import Any

import pytest
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.errors import Problem
from logferry.gateway.kafka.record_batch import KafkaRecord
from logferry.gateway.topics.copies import OffsetTranslation, RemoteSources

from tests.support.mirror_lane import MemoryCluster, topic


async def test_a_state_that_cannot_be_decoded_is_named_until_a_later_one_replaces_it() -> None:
    states = "logferry.gateway.dc1.state"
    kafka: Any = MemoryCluster("here", topic(states, 1), topic("logferry.mirror.dc2.state", 1))
    kafka.records["logferry.mirror.dc2.state", 0] = []
    source, state = SourceIdentity("dc1.t", None, "web"), SourceState(b"i" * 16, 0, 5, None, 0, 1)
    records = kafka.records[states, 0] = [KafkaRecord(0, 0, source.state_key(), b"\x09" + state.encode()[1:], [])]
    remote = RemoteSources(kafka, "logferry", OffsetTranslation(kafka, "logferry", "dc2"))
    with pytest.raises(Problem, match=rf"kafka-unavailable: {states}-0: .*web.* decoded: state of version 09"):
        await remote.find("dc1", source)
    records.append(KafkaRecord(1, 0, source.state_key(), state.encode(), []))
    assert await remote.find("dc1", source) == (state, None)
