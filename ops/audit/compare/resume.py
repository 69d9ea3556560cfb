"""Resumes from an earlier audit's proof of a partition, and makes the proof for the next one. Pure.

A proof is valid as long as the log is the same: the topic has its id, the log reaches at least as far, and the last
record that was read is still that record (or retention has removed it). Otherwise the old proof is retained, and each
audit reports the change until a full one reads everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from logferry.gateway.contract.names import TopicPartition
from logferry.ops.audit.compare.proven_file import MAX_FINDINGS, ProvenPartition
from logferry.ops.audit.digests.findings import Finding, Findings
from logferry.ops.audit.log.partition import PartitionLog


@dataclass
class Resumed:
    """``proven``: None if no audit read the partition before. ``is_recreated``: the proof is of an older topic."""

    topic_id: str
    proven: ProvenPartition | None = None
    is_recreated: bool = False


def resume(log: PartitionLog, topic_id: str, proven: ProvenPartition | None) -> Resumed:
    """Gives the log its proof. Call it before the log is read."""
    if proven is None or proven.topic_id != topic_id:
        return Resumed(topic_id, None, proven is not None)
    log.chains_from, log.reached, log.tail, log.chains = proven.end, proven.end, proven.tail, proven.chains
    log.known = frozenset(proven.chains)
    for source_id, chain in proven.chains.items():
        chain.settle_for_next(log.expected.reborn.get(source_id) if log.is_own else None)
    for finding in proven.findings:
        if finding.last is None or finding.last >= log.span.start:
            log.found.append(finding)
            log.findings.add(finding)
    if log.span.end < proven.end:
        detail = f"an earlier audit read it up to {proven.end}, now it ends at {log.span.end}: it was truncated"
        log.findings.add(Finding("log-cut-back", log.where, detail, None, log.span.end, proven.end - 1))
        log.is_rewritten, log.tail = True, None
    return Resumed(topic_id, proven)


def report_lost_topics(
    prefix: str,
    before: Collection[TopicPartition],
    topics: Collection[str],
    resumed: Mapping[TopicPartition, Resumed],
    findings: Findings,
) -> None:
    """Reports topics that were deleted or recreated since the last audit. ``prefix``: of where they are."""
    recreated = {topic for (topic, _), one in resumed.items() if one.is_recreated}
    deleted = {topic for topic, _ in before if topic not in topics}
    for topic in sorted(deleted | recreated):
        is_recreated = topic in recreated
        change = "it was deleted and recreated" if is_recreated else "it was deleted"
        detail = f"{change} since the last audit: the proof of its records is lost"
        kind = "topic-recreated" if is_recreated else "topic-deleted"
        findings.add(Finding(kind, prefix + topic, detail))


def proven_partitions(
    logs: Mapping[TopicPartition, PartitionLog],
    resumed: Mapping[TopicPartition, Resumed],
    sources: Collection[tuple[str, str]],
) -> dict[TopicPartition, ProvenPartition]:
    """``sources``: (topic, source) of all states. The chain of any other source is dropped with its last record."""
    found = {}
    for place, log in logs.items():
        before = resumed[place]
        if log.is_rewritten and before.proven is not None:
            found[place] = before.proven
            continue
        chains = {
            source_id: chain
            for source_id, chain in log.chains.items()
            if chain.last_offset >= log.span.start or (log.topic, source_id) in sources
        }
        findings = log.found[:MAX_FINDINGS]
        if len(log.found) > MAX_FINDINGS:
            findings.append(_rest(log, log.found[MAX_FINDINGS:]))
        tail = log.last or (before.proven.tail if before.proven else None)
        found[place] = ProvenPartition(before.topic_id, log.reached, tail, findings, chains)
    return found


def _rest(log: PartitionLog, rest: list[Finding]) -> Finding:
    last = max((finding.last or 0 for finding in rest), default=0)
    refutes = any(finding.refutes for finding in rest)
    detail = f"earlier audits found {len(rest)} more; a full audit lists them"
    return Finding("found-earlier", log.where, detail, None, rest[0].first, last, len(rest), refutes)
