"""The answer to chunks is the JSON of its fields, as the library writes it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from logferry.gateway.api.sources import written
from logferry.gateway.contract.source_state import SourceIdentity, SourceState
from logferry.gateway.lanes.transaction import WriteOutcome

NUMBERS = st.integers(0, 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(TEXTS, TEXTS, NUMBERS, st.none() | NUMBERS, NUMBERS, st.none() | st.tuples(NUMBERS, NUMBERS))
def test_the_answer_to_chunks(
    topic: str, source_id: str, partition: int, recorded: int | None, count: int, offsets: tuple[int, int] | None
) -> None:
    state = SourceState(bytes(16), partition, recorded, None, 0, 0)
    outcome = WriteOutcome(state, count, count + 1, None)
    document = {
        "source_id": source_id,
        "topic": topic,
        "partition": partition,
        "recorded_seqno": recorded,
        "written": count,
        "duplicates": count + 1,
        "offsets": offsets,
    }
    assert written(SourceIdentity(topic, None, source_id), outcome, offsets) == json.dumps(document)
