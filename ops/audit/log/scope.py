"""The scope of an audit: the data centre, its topics, and its state topic. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from logferry.gateway.kafka.requests import TopicMetadata
from logferry.ops.cli.problems import UsageError

Views = Mapping[str, TopicMetadata]


def only_dc(views: Views, prefix: str) -> str:
    """The data centre whose gateway stores its states in this cluster. Raises UsageError unless there is exactly one.

    A mirror also copies the states of other gateways; its own state topic names the data centre that it serves.
    """
    begin, end = f"{prefix}.gateway.", ".state"
    found = _named(views, begin, end)
    mirrored_to = [dc for dc in _named(views, f"{prefix}.mirror.", end) if dc in found]
    if len(found) > 1 and len(mirrored_to) == 1:
        return mirrored_to[0]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"this Kafka has no state topic {begin}<dc>{end}; check --bootstrap and the prefix")
    raise UsageError(f"this Kafka serves the gateways of {', '.join(found)}; select one with --dc")


def _named(views: Views, begin: str, end: str) -> list[str]:
    return sorted(name[len(begin) : -len(end)] for name in views if name.startswith(begin) and name.endswith(end))


def state_topic_of(views: Views, dc: str, prefix: str) -> TopicMetadata:
    name = f"{prefix}.gateway.{dc}.state"
    if name not in views:
        raise UsageError(f"this Kafka has no state topic {name}; check --bootstrap, --dc and the prefix")
    return views[name]


def audited_topics(views: Views, dc: str, wanted: Sequence[str]) -> dict[str, TopicMetadata]:
    """By full name, sorted. ``wanted``: as writers name them, or full names; empty: all of the data centre."""
    begin = f"{dc}."
    if not wanted:
        found = sorted(name for name in views if name.startswith(begin))
        if not found:
            raise UsageError(f"this Kafka has no topics of {dc}; check --dc")
        return {name: views[name] for name in found}
    names = sorted({topic if topic.startswith(begin) else begin + topic for topic in wanted})
    missing = [name for name in names if name not in views]
    if missing:
        raise UsageError(f"this Kafka has no topic {', '.join(missing)}; see `logferry topics list`")
    return {name: views[name] for name in names}
