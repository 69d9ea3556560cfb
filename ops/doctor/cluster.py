"""Checks of a Kafka: versions, settings, rights and time, as far as Kafka answers. No topic of ours is created.

Kafka does not say whether a transactional id may be written: only `Describe` on it is checked.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

from aiokafka import errors
from logferry.gateway.config import Config, ConfigError, ServiceConfig
from logferry.gateway.errors import WeakKafka
from logferry.gateway.kafka.client import KafkaClient, raise_for
from logferry.gateway.kafka.error_codes import TOPIC_AUTHORIZATION_FAILED
from logferry.gateway.kafka.requests import (
    DescribeQuorumRequest,
    FlexibleRequest,
    MetadataRequest,
    read_answer,
    read_controller_ms,
    read_operations,
)
from logferry.gateway.service.preflight import broker_risks, check_abilities, check_state, connect_to_kafka
from logferry.gateway.tls import kafka_options
from logferry.gateway.topics.health import weakness
from logferry.gateway.topics.present_lanes import PresentLanes
from logferry.mirror.config import MirrorConfig
from logferry.ops.doctor.host import clock
from logferry.ops.doctor.role import Check, Cluster, Role, State, TopicRights

_CONNECT_S: Final = 10.0
_DAY_MS: Final = 86_400_000
# Kafka's numbers of operations.
_OPERATIONS: Final = {
    "READ": 3,
    "WRITE": 4,
    "DELETE": 6,
    "ALTER": 7,
    "DESCRIBE": 8,
    "DESCRIBE_CONFIGS": 10,
    "ALTER_CONFIGS": 11,
}
_LOG: Final = "__transaction_state"


class DescribeClusterRequest(
    FlexibleRequest,
    key=60,
    version=0,
    asked="include_authorized_operations:bool",
    answered="throttle_time_ms:int32 error_code:int16 error_message:text cluster_id:text controller_id:int32 "
    "brokers[node_id:int32 host:text port:int32 rack:text] authorized_operations:int32",
):
    """Asks what the caller may do with the cluster (KIP-700)."""

    def __init__(self) -> None:
        super().__init__(True)


class DescribeGroupRequest(
    FlexibleRequest,
    key=15,
    version=5,
    asked="groups:texts include_authorized_operations:bool",
    answered="throttle_time_ms:int32 groups[error_code:int16 group:text state:text protocol_type:text protocol:text "
    "members[member:text instance:text client:text host:text metadata:bytes assignment:bytes] "
    "authorized_operations:int32]",
):
    """Asks what the caller may do with a group (KIP-430)."""

    def __init__(self, group: str) -> None:
        super().__init__([group], True)


async def check_cluster(role: Role, cluster: Cluster) -> AsyncIterator[Check]:
    """Everything that is asked over Kafka's protocol. A question that fails is a finding, and the next one is asked."""
    subject = f"{role.name}: {cluster.label}"
    try:
        kafka = KafkaClient(kafka_options(cluster.kafka), f"logferry-doctor-{role.name}")
    except ConfigError as error:
        yield Check("files", subject, State.WRONG, str(error), "correct the file")
        return
    try:
        await connect_to_kafka(kafka, _CONNECT_S)
        yield Check(
            "Kafka", subject, State.OK, "connected and logged in" * cluster.kafka.is_authenticated or "connected"
        )
        for part in (_versions, _brokers, _topics, _log_topic, _rights_on_topics, _other_rights, _time):
            try:
                async for check in part(subject, cluster, kafka):
                    yield check
            except (errors.KafkaError, OSError, TimeoutError) as error:
                name = part.__name__.strip("_").replace("_", " ")
                yield Check("Kafka", subject, State.WRONG, f"{name}: {error!r}", "look at the brokers' log; try again")
    except errors.KafkaError as error:
        yield Check("Kafka", subject, State.WRONG, str(error), "check bootstrap_servers, the user and its password")
    finally:
        await kafka.close()


async def _versions(subject: str, cluster: Cluster, kafka: KafkaClient) -> AsyncIterator[Check]:
    brokers = await kafka.abilities()
    try:
        check_abilities(brokers)
    except WeakKafka as error:
        yield Check("versions", subject, State.WRONG, str(error), "upgrade Kafka")
    else:
        yield Check("versions", subject, State.OK, f"{len(brokers)} brokers of Kafka 4.1 or newer")


async def _brokers(subject: str, cluster: Cluster, kafka: KafkaClient) -> AsyncIterator[Check]:
    if not isinstance(cluster.service, ServiceConfig):
        return
    try:
        risks = broker_risks(await kafka.broker_settings(), cluster.service.accept_weak_kafka)
    except WeakKafka as error:
        yield Check("Kafka", subject, State.WRONG, str(error), "set it on the brokers")
    except errors.ClusterAuthorizationFailedError:
        text = "the brokers' settings may not be read (DescribeConfigs on the cluster)"
        yield Check("Kafka", subject, State.WARNING, text, "grant it, or compare them with the page on Kafka")
    else:
        for risk in risks:
            yield Check("Kafka", subject, State.WARNING, *_text_and_remedy(risk))


def _text_and_remedy(risk: str) -> tuple[str, str]:
    text, _, remedy = risk.rpartition(": ")
    return text, remedy


# ---- topics ------------------------------------------------------------------------------------------------------


async def _topics(subject: str, cluster: Cluster, kafka: KafkaClient) -> AsyncIterator[Check]:
    """What writing services need of their topics, and what all readers need of data topics."""
    view = await kafka.describe()
    data = [name for name in sorted(view.topics) if not name.startswith("_") and _is_data(name, cluster)]
    settings = await _readable_settings(kafka, [*data, *_own(cluster, view.topics)])
    for name in data:
        found = settings[name]
        if isinstance(found, Exception):
            continue  # the check of rights names it
        yield _data_topic(subject, name, found)
    service = cluster.service
    if service is None:
        return
    if service.state_topic not in view.topics:
        text = f"{service.state_topic} is not there, or may not be described: the first start creates it"
        yield Check("Kafka", subject, State.WARNING, text, "nothing before the first start; else grant Describe")
    accepted = service.accept_weak_kafka
    count = await PresentLanes(kafka, service).read() if isinstance(service, Config | MirrorConfig) else None
    for name in (*_own(cluster, view.topics), *(name for name in data if name.startswith(cluster.durable or "\n"))):
        found = settings[name]
        if isinstance(found, Exception):
            continue
        try:
            if name == service.state_topic:
                check_state(service, view.topics[name], count, dict(found))
        except (WeakKafka, ConfigError) as error:
            yield Check("Kafka", subject, State.WRONG, str(error), "set these on the topic, or correct the setting")
        weak = weakness(view.topics[name], found, accepted)
        if weak is not None:
            yield Check("Kafka", subject, State.WRONG, *weak.split(". ", 1))
        leaderless = [p.partition for p in view.topics[name].partitions if p.leader < 0]
        if leaderless:
            text = f"{name} has partitions without a leader: {', '.join(map(str, leaderless[:10]))}"
            yield Check("Kafka", subject, State.WRONG, text, "start their brokers")


async def _log_topic(subject: str, cluster: Cluster, kafka: KafkaClient) -> AsyncIterator[Check]:
    """Of the keeper: records that stand for acts are not lost."""
    name = cluster.log
    if name is None:
        return
    present = (await kafka.describe([name])).topics.get(name)
    if present is None:
        text = f"{name} is not there, or may not be described: the first start creates it"
        yield Check("Kafka", subject, State.WARNING, text, "nothing before the first start; else grant Describe")
        return
    settings = (await kafka.configs([name]))[name]
    yield _data_topic(subject, name, settings)
    if len(present.partitions) != 1:
        text = f"{name} has {len(present.partitions)} partitions, and only the first one is read"
        yield Check("Kafka", subject, State.WRONG, text, "move it away while no keeper runs, so that one is created")
    weak = weakness(present, settings, cluster.accepted)
    if weak is not None:
        yield Check("Kafka", subject, State.WRONG, *weak.split(". ", 1))
    if any(p.leader < 0 for p in present.partitions):
        yield Check("Kafka", subject, State.WRONG, f"{name} has no leader: nobody acts", "start its brokers")


def _own(cluster: Cluster, present: Mapping[str, Any]) -> list[str]:
    if cluster.service is None:
        return []
    return [name for name in (cluster.service.state_topic, _LOG) if name in present]


def _is_data(name: str, cluster: Cluster) -> bool:
    return any(need.is_prefix and need.takes(name) for need in cluster.needs)


async def _readable_settings(kafka: KafkaClient, names: list[str]) -> dict[str, dict[str, str] | Exception]:
    found: dict[str, dict[str, str] | Exception] = {}
    for name in names:
        try:
            found[name] = (await kafka.configs([name]))[name]
        except errors.KafkaError as error:
            found[name] = error
    return found


def _data_topic(subject: str, name: str, settings: Mapping[str, str]) -> Check:
    if "compact" in settings["cleanup.policy"]:
        text = f"{name}: cleanup.policy={settings['cleanup.policy']}: Kafka would remove records"
        return Check("Kafka", subject, State.WRONG, text, "set cleanup.policy=delete on the topic")
    kept_ms = int(settings["retention.ms"])
    if 0 <= kept_ms < _DAY_MS:
        text = f"{name}: retention.ms={kept_ms}: an outage of {kept_ms / 3_600_000:.1f} h loses records"
        return Check("Kafka", subject, State.WARNING, text, "retain longer than the longest outage of a reader")
    return Check("Kafka", subject, State.OK, f"{name}: cleanup and retention")


# ---- rights ------------------------------------------------------------------------------------------------------


async def _rights_on_topics(subject: str, cluster: Cluster, kafka: KafkaClient) -> AsyncIterator[Check]:
    node = kafka.brokers()[0][0]
    allowed = await read_answer(await kafka.send(node, MetadataRequest(None, True)), read_operations)
    # Only of a topic that is named Kafka says whether it is hidden or not there.
    named = await kafka.describe([need.name for need in cluster.needs if need.is_one])
    hidden = {name: 0 for name, code in named.errors.items() if code == TOPIC_AUTHORIZATION_FAILED}
    for need in cluster.needs:
        seen = {name: bits for name, bits in {**hidden, **allowed}.items() if need.takes(name)}
        if not seen and need.may_lack:
            yield Check("rights", subject, State.OK, f"{need.name} is not there yet")
        elif not seen:
            what = f"no topic {need.name}{'*' * (need.is_prefix and '*' not in need.name)} is visible"
            remedy = "nothing if none exists yet; else grant Describe"
            yield Check("rights", subject, State.WARNING, what, remedy)
        for check in _missing(subject, need, seen):
            yield check


def _missing(subject: str, need: TopicRights, seen: Mapping[str, int]) -> Iterator[Check]:
    for name, bits in sorted(seen.items()):
        lacks = [one for one in need.operations if not bits >> _OPERATIONS[one] & 1]
        if lacks:
            yield Check(
                "rights", subject, State.WRONG, f"{name}: no {', '.join(lacks)}", _grant("--topic", name, lacks)
            )
        optional = [one for one in need.optional if not bits >> _OPERATIONS[one] & 1]
        if optional:
            text = f"{name}: no {', '.join(optional)} ({need.why})"
            yield Check("rights", subject, State.WARNING, text, _grant("--topic", name, optional))
        if not lacks and not optional:
            yield Check("rights", subject, State.OK, f"{name}: {', '.join(need.operations)}")


async def _other_rights(subject: str, cluster: Cluster, kafka: KafkaClient) -> AsyncIterator[Check]:
    """On the cluster, the group of the workers, and the transactional ids of the lanes."""
    if cluster.reads_time or cluster.operations:
        answer = await kafka.send(kafka.brokers()[0][0], DescribeClusterRequest())
        raise_for(answer.error_code, answer.error_message or "DescribeCluster")
        for check in _on_cluster(subject, cluster, answer.authorized_operations):
            yield check
    if cluster.group is not None:
        yield await _group(subject, cluster.group, kafka, "READ")
    for asked in cluster.asked_groups:
        yield await _group(subject, asked, kafka, "DESCRIBE")
    ids = [] if cluster.service is None else [cluster.service.lane(0).transactional_id]
    for name in [*ids, *([] if cluster.transactional_id is None else [cluster.transactional_id])]:
        try:
            await kafka.find_transaction_coordinator(name)
        except errors.TransactionalIdAuthorizationFailed:
            prefix, lane, _ = name.rpartition("lane-")
            remedy = _grant("--transactional-id", prefix or name, ["DESCRIBE", "WRITE"], " prefixed" * bool(lane))
            yield Check("rights", subject, State.WRONG, f"transactional id {name}: no DESCRIBE", remedy)
        else:
            yield Check("rights", subject, State.OK, f"transactional id {name}: DESCRIBE")


def _on_cluster(subject: str, cluster: Cluster, allowed: int) -> Iterator[Check]:
    may = {name for name, bit in _OPERATIONS.items() if allowed >> bit & 1}
    if cluster.reads_time and "DESCRIBE" not in may:
        text = "no DESCRIBE on the cluster: the brokers' time is unknown, and no source expires"
        if cluster.operations:
            text = "no DESCRIBE on the cluster: disks and the brokers' time are unknown"
        yield Check("rights", subject, State.WRONG, text, _grant("--cluster", "", ["DESCRIBE"]))
    elif cluster.reads_time:
        yield Check("rights", subject, State.OK, "cluster: DESCRIBE")
    lacks = [name for name in cluster.operations if name not in may and name != "DESCRIBE"]
    if lacks:
        text = f"cluster: no {', '.join(lacks)}"
        yield Check("rights", subject, State.WRONG, text, _grant("--cluster", "", lacks))
    elif cluster.operations:
        yield Check("rights", subject, State.OK, f"cluster: {', '.join(cluster.operations)}")


async def _group(subject: str, name: str, kafka: KafkaClient, operation: str) -> Check:
    async def ask(send: Any) -> Any:
        [group] = (await send(DescribeGroupRequest(name))).groups
        raise_for(group[0], name)
        return group

    remedy = _grant("--group", name, [operation])
    try:
        group = await kafka.with_coordinator(name, ask)
    except errors.GroupAuthorizationFailedError:
        return Check("rights", subject, State.WRONG, f"group {name}: no {operation}", remedy)
    except errors.GroupIdNotFound:
        return Check("rights", subject, State.OK, f"group {name} is not there yet")
    if not group[-2] >> _OPERATIONS[operation] & 1:
        return Check("rights", subject, State.WRONG, f"group {name}: no {operation}", remedy)
    return Check("rights", subject, State.OK, f"group {name}: {operation}")


def _grant(kind: str, name: str, operations: list[str], pattern: str = "") -> str:
    wanted = " ".join(f"--operation {_camel(one)}" for one in operations)
    more = " --resource-pattern-type prefixed" if pattern else ""
    return f"kafka-acls.sh --add --allow-principal User:… {kind} {name}".rstrip() + f"{more} {wanted}"


def _camel(operation: str) -> str:
    return operation.title().replace("_", "")


# ---- time --------------------------------------------------------------------------------------------------------


async def _time(subject: str, cluster: Cluster, kafka: KafkaClient) -> AsyncIterator[Check]:
    began_s = time.time()
    code, controller_ms = read_controller_ms(await kafka.send(kafka.brokers()[0][0], DescribeQuorumRequest()))
    if code == errors.ClusterAuthorizationFailedError.errno:
        if cluster.reads_time:
            text = "the controllers' time may not be asked (Describe on the cluster)"
            yield Check("clocks", subject, State.WRONG, text, _grant("--cluster", "", ["DESCRIBE"]))
        return
    raise_for(code, "DescribeQuorum")
    yield clock(subject, (began_s + time.time()) / 2 - controller_ms / 1000)
