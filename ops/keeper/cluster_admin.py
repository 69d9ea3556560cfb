"""The cluster over Kafka's protocol: a look at all of it, and the requests of each act.

Every question has a limit of time, and is asked of brokers that answer: one that hangs delays a look by `answer_s`.
An act that is sent twice, or late, does no harm: a reassignment and a move to a directory name their end, Kafka changes
replicas only once the new ones are in sync, and records below an offset are deleted once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import errors
from logferry.gateway.contract.names import TopicPartition
from logferry.gateway.kafka.aiokafka_internals import admin
from logferry.gateway.kafka.client import KafkaClient, raise_for
from logferry.gateway.kafka.requests import (
    AlterConfigsRequest,
    DescribeQuorumRequest,
    MetadataRequest,
    read_answer,
    read_controller_ms,
    read_metadata,
)
from logferry.ops.keeper.admin_requests import (
    TIMEOUT_MS,
    AllBrokersRequest,
    DiskUsageRequest,
    ElectLeadersRequest,
    MoveDirRequest,
    ReassignmentsRequest,
    ReassignRequest,
)
from logferry.ops.keeper.planning.cluster_view import (
    BrokerState,
    ClusterView,
    DirId,
    DirState,
    PartitionState,
    ReplicaState,
)
from logferry.ops.keeper.planning.move_plan import Move

_TOPIC, _BROKER = 2, 4
_SETTINGS_S: Final = 60.0
_CHECK: Final = "log.retention.check.interval.ms"
_OF_TOPICS: Final = ("min.insync.replicas", "cleanup.policy", "retention.ms", "file.delete.delay.ms")
_TROUBLE: Final = (errors.KafkaError, OSError, TimeoutError)
# The request itself waits for five seconds at the broker.
_ACT_S: Final = TIMEOUT_MS / 1000 + 5
# Of a replica that is not made yet: its directory is remembered.
_REPLICA_NOT_AVAILABLE: Final = 9
_NO_REASSIGNMENT: Final = 85
_NOTHING_TO_ELECT: Final = 84


class _Settings(NamedTuple):
    at_s: float
    topics: dict[str, dict[str, str]]
    check_s: float


class ClusterAdmin:
    """``answer_s``: how long a broker may take to answer. ``check_s``: how often brokers look for old segments."""

    def __init__(self, kafka: KafkaClient, answer_s: float) -> None:
        self._kafka, self._answer_s = kafka, answer_s
        self._answering: list[int] = []
        self._settings = _Settings(-_SETTINGS_S, {}, 300.0)

    @property
    def check_s(self) -> float:
        return self._settings.check_s

    # ---- a look ------------------------------------------------------------------------------------------------------

    async def look(self) -> ClusterView:
        """Raises KafkaError or TimeoutError where no broker answers."""
        registered = (await self.ask_any(AllBrokersRequest())).brokers
        # Before and after: one that ends or begins in between is still under way in this look.
        moving = await self._reassignments()
        known = await read_answer(await self.ask_any(MetadataRequest(None)), read_metadata)
        moving |= await self._reassignments()
        places = {node: (f"{host}:{port}", rack or "", fenced) for node, host, port, rack, fenced, _ in registered}
        asked = await asyncio.gather(*(self._disks(node, *place) for node, place in places.items()))
        brokers = {state.id: state for state, _, _ in asked}
        self._answering = [node for node, state in brokers.items() if state.silent is None]
        dirs = {state.id: state for _, found, _ in asked for state in found}
        replicas = [replica for _, _, found in asked for replica in found]
        topics = await self._topic_settings(list(known.topics))
        partitions = {}
        for topic in known.topics.values():
            least = int(topics.get(topic.name, {}).get("min.insync.replicas") or 1)
            for p in topic.partitions:
                tp = (topic.name, p.partition)
                partitions[tp] = PartitionState(tp, p.leader, p.replicas, p.isr, least, *moving.get(tp, ((), ())))
                for broker in p.replicas:
                    brokers.setdefault(broker, BrokerState(broker, "unknown address", "", "it is not registered"))
        ids = {topic.name: topic.id for topic in known.topics.values()}
        return ClusterView(time.monotonic(), brokers, dirs, replicas, partitions, topics, ids)

    async def _disks(
        self, node: int, address: str, rack: str, is_fenced: bool
    ) -> tuple[BrokerState, list[DirState], list[ReplicaState]]:
        try:
            if is_fenced:
                raise errors.NodeNotReadyError("the controller does not hear of it")
            answer = await self._ask(node, DiskUsageRequest())
            raise_for(answer.error_code, address)
        except errors.ClusterAuthorizationFailedError:
            raise
        except _TROUBLE as error:
            why = "the controller does not hear of it" if is_fenced else f"no answer in {self._answer_s:g} s"
            if not is_fenced and not isinstance(error, TimeoutError):
                why = str(error) or type(error).__name__
            return BrokerState(node, address, rack, f"{why}; {await _probe(address, self._answer_s)}"), [], []
        dirs, replicas = [], []
        for code, path, topics, total, usable, _ in answer.dirs:
            place = DirId(node, path)
            dirs.append(DirState(place, code, total, usable))
            for topic, found, _ in topics:
                replicas += [ReplicaState((topic, n), place, size, lag, future) for n, size, lag, future, _ in found]
        return BrokerState(node, address, rack), dirs, replicas

    async def _topic_settings(self, topics: list[str]) -> dict[str, dict[str, str]]:
        known, now = self._settings, time.monotonic()
        missing = topics if now - known.at_s > _SETTINGS_S else [name for name in topics if name not in known.topics]
        if missing:
            found = await self._configs([(_TOPIC, name, list(_OF_TOPICS)) for name in missing])
            check_s = known.check_s
            if self._answering:
                node = str(self._answering[0])
                broker = await self._configs([(_BROKER, node, [_CHECK])], self._answering[0])
                check_s = int(broker.get(node, {}).get(_CHECK) or 300_000) / 1000
            at_s = now if len(missing) == len(topics) else known.at_s
            self._settings = _Settings(at_s, {**known.topics, **found}, check_s)
        return {name: self._settings.topics[name] for name in topics if name in self._settings.topics}

    async def _configs(self, wanted: list[Any], node: int | None = None) -> dict[str, dict[str, str]]:
        """A topic that is gone meanwhile is missing."""
        request = admin.DescribeConfigsRequest(wanted)
        answer = await (self.ask_any(request) if node is None else self._ask(node, request))
        return {
            name: {entry[0]: entry[1] or "" for entry in entries}
            for code, _message, _type, name, entries in answer.resources
            if not code
        }

    async def _reassignments(self) -> dict[TopicPartition, tuple[tuple[int, ...], tuple[int, ...]]]:
        answer = await self.ask_any(ReassignmentsRequest())
        raise_for(answer.error_code, "reassignments")
        return {
            (topic, number): (tuple(adding), tuple(removing))
            for topic, partitions, _ in answer.topics
            for number, _replicas, adding, removing, _ in partitions
        }

    async def controller_ms(self) -> int:
        """Unix time by the active controller, in ms. Raises KafkaError."""
        code, now_ms = read_controller_ms(await self.ask_any(DescribeQuorumRequest()))
        raise_for(code, "the time of the controller")
        return now_ms

    # ---- acts --------------------------------------------------------------------------------------------------------

    async def start_move(self, move: Move) -> None:
        """Returns when Kafka has taken it. Raises KafkaError: then nothing has begun, or it is not known."""
        topic, number = move.tp
        answer = await self._ask(move.target.broker, MoveDirRequest(move.target.path, [move.tp]), _ACT_S)
        code = answer.topics[0][1][0][1]
        if move.kind == "dir" or code != _REPLICA_NOT_AVAILABLE:
            raise_for(code, f"{topic}-{number} to {move.target}")
        if move.kind == "broker":
            await self._reassign({move.tp: move.after})

    async def cancel_move(self, move: Move) -> None:
        """The partition stays where it was. Of a move that is done, nothing happens. Raises KafkaError."""
        if move.kind == "dir":
            await self._ask(move.source.broker, MoveDirRequest(move.source.path, [move.tp]), _ACT_S)
        else:
            await self._reassign({move.tp: None})

    async def _reassign(self, targets: Mapping[TopicPartition, Sequence[int] | None]) -> None:
        answer = await self.ask_any(ReassignRequest(targets), _ACT_S)
        raise_for(answer.error_code, answer.error_message or "reassignment")
        for topic, partitions, _ in answer.topics:
            for number, code, message, _ in partitions:
                if code != _NO_REASSIGNMENT:
                    raise_for(code, message or f"{topic}-{number}")

    async def set_topic(self, topic: str, settings: Mapping[str, str | None]) -> None:
        await self._alter(AlterConfigsRequest(topic, settings))

    async def set_broker(self, broker: int, settings: Mapping[str, str | None]) -> None:
        """Asks that broker: Kafka refuses it elsewhere."""
        await self._alter(AlterConfigsRequest(str(broker), settings, _BROKER), broker)

    async def _alter(self, request: AlterConfigsRequest, node: int | None = None) -> None:
        answer = await (self.ask_any(request, _ACT_S) if node is None else self._ask(node, request, _ACT_S))
        for code, message, _type, name, _ in answer.responses:
            if code != errors.UnknownTopicOrPartitionError.errno:
                raise_for(code, message or name)

    async def elect(self, partitions: Iterable[TopicPartition]) -> None:
        answer = await self.ask_any(ElectLeadersRequest(partitions), _ACT_S)
        raise_for(answer.error_code, "election of leaders")
        for topic, found, _ in answer.topics:
            for number, code, message, _ in found:
                if code != _NOTHING_TO_ELECT:
                    raise_for(code, message or f"{topic}-{number}")

    async def delete_before(self, leader: int, tp: TopicPartition, offset: int) -> int:
        """The partition's first offset then. Raises KafkaError; a time-out of a replica says that it comes later."""
        topic, number = tp
        answer = await self._ask(leader, admin.DeleteRecordsRequest([(topic, [(number, offset)])], TIMEOUT_MS), _ACT_S)
        _number, low, code = answer.topics[0][1][0][:3]
        raise_for(code, f"{topic}-{number}")
        return int(low)

    # ---- questions ---------------------------------------------------------------------------------------------------

    async def _ask(self, node: int, request: Any, limit_s: float | None = None) -> Any:
        async with asyncio.timeout(limit_s or self._answer_s):
            return await self._kafka.send(node, request)

    async def ask_any(self, request: Any, limit_s: float | None = None) -> Any:
        """The answer of the first broker that gives one, those first that answered at the last look."""
        nodes = [node for node, _, _ in self._kafka.brokers()]
        last: BaseException = errors.KafkaConnectionError("no broker is known")
        for node in sorted(nodes, key=lambda node: (node not in self._answering, node)):
            try:
                return await self._ask(node, request, limit_s)
            except _TROUBLE as error:
                last = error
        raise last


async def _probe(address: str, limit_s: float) -> str:
    """What its port says about a broker that gives no answer."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, int(port))
        writer.transport.abort()
    except ConnectionRefusedError:
        return "no process listens on its port"
    except TimeoutError:
        return "its host does not answer"
    except OSError as error:
        return str(error)
    return "its port takes connections"
