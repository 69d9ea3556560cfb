"""The states of the audited topics' sources, and their comparison with the log. Pure.

A lane writes chunks and the state of their source in one transaction, so the recorded seqno of each source is the
last one in the log. A state above the log means that acknowledged chunks are lost. A log above the state means that
a transaction was committed in part, and that the source's next chunk may be recorded twice.

The log may grow during the audit. The order of reading makes the comparison exact: first the end of each partition
(the fence), then the states, then the ends again. Records below the fence were decided before the states were read;
every record that a state refers to lies below the later end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logferry.gateway.kafka.requests import TopicMetadata
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.log.chain import Chain
from logferry.ops.audit.log.partition import ExpectedSources, PartitionLog
from logferry.ops.audit.records.formats import (
    LANES,
    RECEIPT,
    UPLOAD,
    StoredSource,
    StoredState,
    source_key,
    stored_lanes,
    stored_state,
)

_FORGOTTEN: Final = "the source was deleted or expired: only its log could be checked"


class RecordedState(NamedTuple):
    """The state of one source."""

    source: StoredSource
    state: StoredState


@dataclass(slots=True)
class SourceStates:
    """Records are applied in offset order.

    ``topics``: states of other topics are skipped; None: none is skipped. ``forgotten``: (topic, source) of tombstones,
    while Kafka retains them. ``reborn``: those of them that were recorded again, with the base of each time.
    ``by_topic``: the newest state of each key. ``counts``: the newest epoch and number of lanes, by lane.
    """

    topic: str
    lanes: int
    topics: frozenset[str] | None
    findings: Findings
    forgotten: set[tuple[str, str]] = field(default_factory=set)
    reborn: dict[tuple[str, str], list[int | None]] = field(default_factory=dict)
    by_topic: dict[str, dict[bytes, RecordedState]] = field(default_factory=dict)
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)
    # States in a lane other than their key's, by lane and key: where their offset is, and of which source.
    _misplaced: dict[tuple[int, bytes], tuple[int, StoredSource]] = field(default_factory=dict)
    _dropped: set[bytes] = field(default_factory=set)

    def other_number(self) -> int | None:
        """The number of lanes by the newest record of it, where the states must be read again by it; None: not so.

        A change of it is one transaction. Of partitions that were read up to ends before and after it, some have it.
        """
        if not self.counts or (len(set(self.counts.values())) == 1 and self._newest == self.lanes):
            return None
        return self._newest

    @property
    def _newest(self) -> int:
        return max(self.counts.values())[1]

    def finish(self) -> None:
        """After all lanes: a state that is stored in a lane other than its key's, and has not moved, is a finding."""
        for (lane, _), (offset, source) in sorted(self._misplaced.items()):
            owner, where = source.lane(self.lanes), f"{self.topic}-{lane}"
            detail = f"a state in lane {lane}, but the key belongs to lane {owner}: two lanes may write this source"
            self.findings.add(Finding("state-in-wrong-lane", where, detail, source.source_id, offset, offset))

    def apply(self, lane: int, offset: int, key: bytes, value: bytes | None, is_moved: bool = False) -> None:
        """A record that cannot be decoded is a finding. ``is_moved``: its state is in another lane since."""
        where = f"{self.topic}-{lane}"
        if key[:1] == UPLOAD:
            return
        try:
            if key == LANES:
                if value is not None:
                    self.counts[lane] = max(self.counts.get(lane, (0, 0)), stored_lanes(value))
                return
            source = source_key(key)
            if source is None and value is not None:
                raise ValueError("a fence with a value")
            if source is None:
                return
            if self.topics is not None and source.topic not in self.topics:
                return
            if key[:1] == RECEIPT:
                return  # of a request, which the log cannot contradict
            state = None if value is None else stored_state(value)
        except ValueError as error:
            self.findings.add(Finding("state-unreadable", where, str(error), None, offset, offset))
            return
        if source.lane(self.lanes) != lane:
            self._misplaced.pop((lane, key), None)
            if state is not None:
                self._misplaced[lane, key] = offset, source
            return
        if state is None:
            self.by_topic.get(source.topic, {}).pop(key, None)
            if is_moved:
                return
            self._dropped.add(key)
            self.forgotten.add((source.topic, source.source_id))
            return
        self.by_topic.setdefault(source.topic, {})[key] = RecordedState(source, state)
        if state.recorded is not None and key in self._dropped:
            self._dropped.remove(key)
            self.reborn.setdefault((source.topic, source.source_id), []).append(state.base)

    def sources(self) -> set[tuple[str, str]]:
        """(topic, source) of all states."""
        return {(topic, one.source.source_id) for topic, found in self.by_topic.items() for one in found.values()}

    def expected(self, topic: str, topic_id: bytes) -> dict[int, ExpectedSources]:
        """The sources of a topic, by the partition that their state names."""
        reborn = {name: bases for (of, name), bases in self.reborn.items() if of == topic}
        found: dict[int, ExpectedSources] = defaultdict(lambda: ExpectedSources({}, reborn))
        for one in self.by_topic.get(topic, {}).values():
            if one.state.topic_id == topic_id:
                found[one.state.partition].bases[one.source.source_id] = one.state.base
        return found


def compare_topics(
    topics: Mapping[str, TopicMetadata],
    logs: Mapping[tuple[str, int], PartitionLog],
    states: SourceStates,
    existing: Collection[str],
    expired_ms: int,
    findings: Findings,
) -> None:
    """Compares all audited topics. ``existing``: every topic of the cluster, read after the states."""
    known = states.by_topic
    for topic, view in topics.items():
        own = {p.partition: logs[topic, p.partition] for p in view.partitions}
        forgotten = {source_id for name, source_id in states.forgotten if name == topic}
        TopicAgreement(topic, own, forgotten, expired_ms, findings).compare(view.id, known.get(topic, {}).values())
    for topic in sorted(topic for topic in known.keys() - set(existing) if known[topic]):
        recorded = sum(one.state.recorded is not None for one in known[topic].values())
        detail = f"the topic does not exist any more; chunks of {recorded} sources were recorded in it"
        findings.add(Finding("topic-gone", topic, detail, count=recorded, refutes=False))


@dataclass(slots=True)
class TopicAgreement:
    """``logs``: all partitions of the topic, read up to their ends. ``forgotten``: sources that were deleted or
    expired, as far as Kafka still has their tombstones; sources silent since ``expired_ms`` may have expired, too.
    """

    name: str
    logs: Mapping[int, PartitionLog]
    forgotten: Collection[str]
    expired_ms: int
    findings: Findings

    def compare(self, topic_id: bytes, known: Iterable[RecordedState]) -> None:
        states: dict[str, list[RecordedState]] = {}
        for one in known:
            if one.state.topic_id == topic_id:
                states.setdefault(one.source.source_id, []).append(one)
            else:
                detail = f"the state belongs to an older topic of this name, up to seqno {one.state.recorded}"
                self._add("state-of-older-topic", None, one.source.source_id, detail, refutes=False)
        chains: dict[str, dict[int, Chain]] = {}
        for partition, log in self.logs.items():
            for source_id, chain in log.chains.items():
                chains.setdefault(source_id, {})[partition] = chain
        for source_id in chains.keys() | states.keys():
            self._source(source_id, chains.get(source_id, {}), states.get(source_id, []))

    def _source(self, source_id: str, chains: dict[int, Chain], known: list[RecordedState]) -> None:
        pinned: dict[int, list[StoredState]] = {}
        for one in known:
            pinned.setdefault(one.state.partition, []).append(one.state)
        if len(known) > 1:
            keys = ", ".join(sorted(repr(one.source.partition_key or "none") for one in known))
            detail = f"written under the partition keys {keys}"
            self._add("source-under-two-keys", None, source_id, detail, refutes=False)
        if len(chains) > 1 and not chains.keys() <= pinned.keys():
            places = ", ".join(f"{p} (offsets {c.first_offset} to {c.last_offset})" for p, c in sorted(chains.items()))
            self._add("source-in-two-partitions", None, source_id, f"it has chunks in the partitions {places}")
        elif known and len(chains) == 1 and not chains.keys() <= pinned.keys():
            [(partition, chain)] = chains.items()
            offsets = f"offsets {chain.first_offset} to {chain.last_offset}"
            detail = f"its chunks ({offsets}) belong to partition {min(pinned)}"
            self._add("source-in-wrong-partition", partition, source_id, detail)
            return
        for partition, chain in {} if known else chains.items():
            if chain.settled is None:
                continue  # its first chunk came after the states were read
            if source_id in self.forgotten or chain.last_ms < self.expired_ms:
                self._add("state-forgotten", partition, source_id, _FORGOTTEN, refutes=False)
            else:
                detail = f"the log has chunks up to seqno {chain.last}, but the source has no state"
                self._add("state-missing", partition, source_id, detail)
        for partition, states in pinned.items():
            if source_id in self.forgotten and all(state.recorded is None for state in states):
                self._add("state-forgotten", partition, source_id, _FORGOTTEN, refutes=False)
            else:
                self._pinned(partition, source_id, chains.get(partition), states)

    def _pinned(self, partition: int, source_id: str, chain: Chain | None, states: list[StoredState]) -> None:
        """``states``: those that name this partition for the source (several only under several keys)."""
        recorded = max((state.recorded for state in states if state.recorded is not None), default=None)
        log = self.logs.get(partition)
        is_cut = log is not None and log.is_cut
        if chain is None:
            if recorded is not None and is_cut:
                detail = f"recorded up to seqno {recorded}; all was removed by retention, so it cannot be compared"
                self._add("removed-by-retention", partition, source_id, detail, refutes=False)
            elif recorded is not None:
                detail = f"recorded up to seqno {recorded}, but the log has no chunk of it: acknowledged and lost"
                self._add("state-ahead", partition, source_id, detail)
            return
        # Whether the source had this state at some time between the fence and the end.
        is_reached = recorded == chain.settled or recorded in chain.later
        is_older = is_cut and chain.settled is None and recorded is not None and recorded < chain.first
        if recorded is not None and recorded > chain.last:
            detail = f"recorded up to seqno {recorded}, but the log ends with {chain.last}: acknowledged and lost"
            self._add("state-ahead", partition, source_id, detail)
        elif not (is_reached or is_older):
            detail = f"the log ends with seqno {chain.last}, the state with {recorded}: committed in part"
            self._add("state-behind", partition, source_id, detail)
        base, is_whole = states[0].base, is_cut or chain.head_seen or states[0].base == chain.base
        if len(states) == 1 and recorded is not None and not is_whole:
            detail = f"the first chunk in the log follows {chain.base}, the first one recorded followed {base}"
            self._add("head-missing", partition, source_id, detail)

    def _add(self, kind: str, partition: int | None, source_id: str, detail: str, refutes: bool = True) -> None:
        where = self.name if partition is None else f"{self.name}-{partition}"
        self.findings.add(Finding(kind, where, detail, source_id, refutes=refutes))
