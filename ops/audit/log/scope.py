"""What is to be audited: which topics of which data centre, and where their states are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from logferry.gateway.kafka.metadata_request import TopicView
from logferry.ops.cli.problems import WrongUse

Views = Mapping[str, TopicView]


def only_dc(views: Views, prefix: str) -> str:
    """The data centre whose gateway keeps its states in this cluster. Raises WrongUse unless there is exactly one.

    A mirror brings the states of other gateways along; its own state topic names the data centre that it works for.
    """
    begin, end = f"{prefix}.gateway.", ".state"
    found = _named(views, begin, end)
    mirrored_to = [dc for dc in _named(views, f"{prefix}.mirror.", end) if dc in found]
    if len(found) > 1 and len(mirrored_to) == 1:
        return mirrored_to[0]
    if len(found) == 1:
        return found[0]
    if not found:
        raise WrongUse(f"this Kafka has no state topic {begin}<dc>{end}: no gateway ever ran on it")
    raise WrongUse(f"this Kafka serves the gateways of {', '.join(found)}: say which one by --dc")


def _named(views: Views, begin: str, end: str) -> list[str]:
    return sorted(name[len(begin) : -len(end)] for name in views if name.startswith(begin) and name.endswith(end))


def state_topic_of(views: Views, dc: str, prefix: str) -> TopicView:
    name = f"{prefix}.gateway.{dc}.state"
    if name not in views:
        raise WrongUse(f"there is no state topic {name}: no gateway of {dc} ever ran on this Kafka")
    return views[name]


def audited_topics(views: Views, dc: str, wanted: Sequence[str]) -> dict[str, TopicView]:
    """By full name, sorted. ``wanted``: as writers name them, or full names; none: all of the data centre."""
    begin = f"{dc}."
    if not wanted:
        found = sorted(name for name in views if name.startswith(begin))
        if not found:
            raise WrongUse(f"there are no topics of {dc} in this Kafka: nothing to audit")
        return {name: views[name] for name in found}
    names = sorted({topic if topic.startswith(begin) else begin + topic for topic in wanted})
    missing = [name for name in names if name not in views]
    if missing:
        raise WrongUse(f"there is no topic {', '.join(missing)} in this Kafka")
    return {name: views[name] for name in names}
