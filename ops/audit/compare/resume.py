"""How an audit goes on from what an earlier one kept of a partition, and what it keeps itself. Pure.

What was proven is trusted as long as the log shows that it is the same: the topic has its id, the log reaches at least
as far, and the last record that was read is still that record (or retention has removed it by now). Where that is not
so, what was kept stays as it was, and each audit says so until one reads everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from logferry.ops.audit.compare.proven_file import KEPT_FINDINGS, KeptPartition, Place
from logferry.ops.audit.digests.findings import Finding
from logferry.ops.audit.log.partition import PartitionLog


@dataclass
class Resumed:
    """``kept``: None where the partition is read for the first time. ``is_anew``: it was kept of an older topic."""

    topic_id: str
    kept: KeptPartition | None = None
    is_anew: bool = False


def resume(log: PartitionLog, topic_id: str, kept: KeptPartition | None) -> Resumed:
    """Gives the log what is known of it. Before anything of it is read."""
    if kept is None or kept.topic_id != topic_id:
        return Resumed(topic_id, None, kept is not None)
    log.chains_from, log.reached, log.tail, log.chains = kept.end, kept.end, kept.tail, kept.chains
    log.known = frozenset(kept.chains)
    for source_id, chain in kept.chains.items():
        chain.go_on(log.expected.reborn.get(source_id) if log.is_own else None)
    for finding in kept.findings:
        if finding.last is None or finding.last >= log.span.start:
            log.found.append(finding)
            log.findings.add(finding)
    if log.span.end < kept.end:
        detail = f"an earlier audit read it up to {kept.end}, now it ends at {log.span.end}: it was cut back"
        log.findings.add(Finding("log-cut-back", log.where, detail, None, log.span.end, kept.end - 1))
        log.is_rewritten, log.tail = True, None
    return Resumed(topic_id, kept)


def kept_partitions(
    logs: Mapping[Place, PartitionLog], resumed: Mapping[Place, Resumed], sources: Collection[tuple[str, str]]
) -> dict[Place, KeptPartition]:
    """``sources``: (topic, source) of which there is a state. Others are forgotten with their last record."""
    found = {}
    for place, log in logs.items():
        before = resumed[place]
        if log.is_rewritten and before.kept is not None:
            found[place] = before.kept
            continue
        chains = {
            source_id: chain
            for source_id, chain in log.chains.items()
            if chain.last_offset >= log.span.start or (log.topic, source_id) in sources
        }
        findings = log.found[:KEPT_FINDINGS]
        if len(log.found) > KEPT_FINDINGS:
            findings.append(_rest(log, log.found[KEPT_FINDINGS:]))
        tail = log.last or (before.kept.tail if before.kept else None)
        found[place] = KeptPartition(before.topic_id, log.reached, tail, findings, chains)
    return found


def _rest(log: PartitionLog, rest: list[Finding]) -> Finding:
    last = max((finding.last or 0 for finding in rest), default=0)
    refutes = any(finding.refutes for finding in rest)
    detail = f"earlier audits found {len(rest)} things more; a full one names them"
    return Finding("found-earlier", log.where, detail, None, rest[0].first, last, len(rest), refutes)
