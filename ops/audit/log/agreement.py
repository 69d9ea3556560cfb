"""Whether the log and the states of one topic's sources agree. Pure.

A lane writes chunks and the state of their source in one transaction, so the recorded seqno of each source is the
last one in the log. A state above the log: acknowledged chunks are not there. A log above the state: a transaction
was committed in part, and the source's next chunk may be recorded twice.

The log may go on while it is audited; the order of looking makes the comparison exact nevertheless. First the end
of each partition (the fence), then the states, then the partitions' ends again: what lies below the fence was
decided before the states were read, and whatever a state speaks of lies below the later end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from logferry.gateway.lanes.dedup import SourceState
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.log.chain import Chain
from logferry.ops.audit.log.partition import PartitionLog
from logferry.ops.audit.states import Known

_FORGOTTEN: Final = "the gateway was told to forget it, or it was silent for too long: only its log could be judged"


@dataclass(slots=True)
class _Topic:
    name: str
    logs: Mapping[int, PartitionLog]
    expired_ms: int
    findings: Findings

    def add(self, kind: str, partition: int | None, source_id: str, detail: str, refutes: bool = True) -> None:
        where = self.name if partition is None else f"{self.name}-{partition}"
        self.findings.add(Finding(kind, where, detail, source_id, refutes=refutes))


def compare(
    name: str,
    topic_id: bytes,
    logs: Mapping[int, PartitionLog],
    known: Iterable[Known],
    forgotten: Iterable[str],
    expired_ms: int,
    findings: Findings,
) -> None:
    """``logs``: all partitions of the topic, read up to their ends. ``forgotten``: sources that were forgotten on
    purpose or expired, as far as Kafka still knows; those silent since ``expired_ms`` may have been, too.
    """
    topic = _Topic(name, logs, expired_ms, findings)
    states: dict[str, list[Known]] = {}
    for one in known:
        if one.state.topic_id == topic_id:
            states.setdefault(one.source.source_id, []).append(one)
        else:
            detail = f"it speaks of an older topic of this name, up to seqno {one.state.recorded}"
            topic.add("state-of-older-topic", None, one.source.source_id, detail, refutes=False)
    chains: dict[str, dict[int, Chain]] = {}
    for partition, log in logs.items():
        for source_id, chain in log.chains.items():
            chains.setdefault(source_id, {})[partition] = chain
    dropped = set(forgotten)
    for source_id in chains.keys() | states.keys():
        _source(topic, source_id, chains.get(source_id, {}), states.get(source_id, []), source_id in dropped)


def _source(topic: _Topic, source_id: str, chains: dict[int, Chain], known: list[Known], forgotten: bool) -> None:
    pinned: dict[int, list[SourceState]] = {}
    for one in known:
        pinned.setdefault(one.state.partition, []).append(one.state)
    if len(known) > 1:
        keys = ", ".join(sorted(repr(one.source.partition_key or "none") for one in known))
        topic.add("source-under-two-keys", None, source_id, f"written under the partition keys {keys}", refutes=False)
    if len(chains) > 1 and not chains.keys() <= pinned.keys():
        places = ", ".join(f"{p} (offsets {c.first_offset} to {c.last_offset})" for p, c in sorted(chains.items()))
        topic.add("source-in-two-partitions", None, source_id, f"it has chunks in the partitions {places}")
    elif known and len(chains) == 1 and not chains.keys() <= pinned.keys():
        (partition, chain), pins = next(iter(chains.items())), sorted(pinned)
        detail = f"its chunks (offsets {chain.first_offset} to {chain.last_offset}) belong into partition {pins[0]}"
        topic.add("source-in-wrong-partition", partition, source_id, detail)
        return
    if not known:
        for partition, chain in chains.items():
            _without_state(topic, partition, source_id, chain, forgotten)
    for partition, states in pinned.items():
        if forgotten and all(state.recorded is None for state in states):
            topic.add("state-forgotten", partition, source_id, _FORGOTTEN, refutes=False)
        else:
            _pinned(topic, partition, source_id, chains.get(partition), states)


def _without_state(topic: _Topic, partition: int, source_id: str, chain: Chain, forgotten: bool) -> None:
    if chain.settled is None:
        return  # its first chunk came after the states were read
    if forgotten or chain.last_ms < topic.expired_ms:
        topic.add("state-forgotten", partition, source_id, _FORGOTTEN, refutes=False)
    else:
        detail = f"the log has chunks up to seqno {chain.last}, and there is no state of the source"
        topic.add("state-missing", partition, source_id, detail)


def _pinned(topic: _Topic, partition: int, source_id: str, chain: Chain | None, states: list[SourceState]) -> None:
    """The states that say: this source is in this partition (several only under several keys)."""
    recorded = max((state.recorded for state in states if state.recorded is not None), default=None)
    log = topic.logs.get(partition)
    is_cut = log is not None and log.is_cut
    if chain is None:
        if recorded is None:
            return
        if is_cut:
            detail = f"recorded up to seqno {recorded}; all of it was removed by retention, so it cannot be compared"
            topic.add("removed-by-retention", partition, source_id, detail, refutes=False)
        else:
            detail = f"recorded up to seqno {recorded}, but the log has nothing of it: acknowledged and lost"
            topic.add("state-ahead", partition, source_id, detail)
        return
    if recorded is not None and recorded > chain.last:
        detail = f"recorded up to seqno {recorded}, but the log ends with {chain.last}: acknowledged and lost"
        topic.add("state-ahead", partition, source_id, detail)
    elif not _is_reached(chain, recorded, is_cut):
        detail = f"the log goes up to seqno {chain.last}, the state only to {recorded}: committed in part"
        topic.add("state-behind", partition, source_id, detail)
    is_whole = is_cut or chain.head_seen or states[0].base == chain.base
    if len(states) == 1 and recorded is not None and not is_whole:
        detail = f"the first chunk in the log follows {chain.base}, the first one recorded followed {states[0].base}"
        topic.add("head-missing", partition, source_id, detail)


def _is_reached(chain: Chain, recorded: int | None, is_cut: bool) -> bool:
    """Whether the state is one that the source had between the fence and the end."""
    if recorded == chain.settled or recorded in chain.later:
        return True
    return is_cut and chain.settled is None and recorded is not None and recorded < chain.first
