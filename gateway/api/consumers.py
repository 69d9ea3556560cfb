"""The routes about consumers: read sessions, commits, positions. A consumer is a consumer group in Kafka.

Reading a topic, and setting a consumer's positions in it, need the right to read it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from aiohttp import web
from aiokafka.errors import UnknownTopicOrPartitionError
from logferry.gateway.access.rights import ConsumerAct
from logferry.gateway.api.forwarding import REDIRECT, Forwarding
from logferry.gateway.api.schemas import CommitBody, PositionsBody, PositionSetting
from logferry.gateway.config import Config
from logferry.gateway.contract.names import Cursor, Malformed, TopicPartition, split_topic
from logferry.gateway.errors import Problem
from logferry.gateway.http.admission import LISTS_BYTES, Admission, computed
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.request import flag
from logferry.gateway.http.router import FORWARDED, Call, Routes, json_response
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.kafka.consumer_groups import CommitRefused, ConsumerGroups
from logferry.gateway.kafka.types import NO_MEMBER
from logferry.gateway.reading import consumer_offsets, formats
from logferry.gateway.reading.assignment import Subscription, unknown_topic
from logferry.gateway.reading.registry import SessionRegistry, ended, worker_of
from logferry.gateway.topics.copies import OffsetTranslation

_CONSUMER: Final = re.compile(r"[a-zA-Z0-9._-]{1,200}\Z")
_PATTERN: Final = re.compile(r"[a-zA-Z0-9._*?\[\]!-]{1,256}\Z")
_MAX_TOPICS: Final = 100
# The groups of gateways and mirrors, whatever the prefix of this one.
_OWN: Final = "logferry."
# The work to compare one topic with one pattern, and to check one position, as that of so many bytes.
_FIT_BYTES: Final = 10
_POSITION_BYTES: Final = 50

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ConsumersApi:
    config: Config
    kafka: KafkaClient
    forwarding: Forwarding
    admission: Admission
    readers: SessionRegistry
    url: str
    gate: Gate
    translation: OffsetTranslation

    def add_to(self, routes: Routes) -> None:
        consumer = "/v1/consumers/{consumer}"
        routes.add("GET", "/v1/consumers", "consumers", self.list, Right.KNOWN)
        routes.add("GET", consumer + "/stream", "stream", self.stream, Right.KNOWN, lists=("topic", "cursor"))
        routes.add("POST", consumer + "/sessions/{session}/commit", "commit", self.commit, Right.KNOWN)
        routes.add("GET", consumer + "/offsets", "offsets", self.offsets, Right.KNOWN, lists=("topic",))
        routes.add("PUT", consumer + "/offsets", "put_offsets", self.put_offsets, Right.KNOWN)

    async def stream(self, call: Call) -> web.StreamResponse:
        consumer = self._consumer(call, "commit")
        if call.lists["cursor"]:
            self._check_act(call, consumer, "reset")
        filters = {name[5:]: call.query[name] for name in call.query if name.startswith("attr.")}
        call.knows_only("from", "source_prefix", *(f"attr.{name}" for name in filters))
        start = call.query.get("from", "earliest")
        if start not in ("earliest", "latest"):
            raise Malformed(f"from: {start[:40]!r} is neither earliest nor latest")
        encoding = formats.encoding(call.request.headers.get("Accept", ""))
        topics, patterns = self._topics(call)
        if not topics and not patterns:
            raise Malformed("topic: is missing from the query")
        positions: dict[TopicPartition, Cursor] = {}
        for cursor in map(Cursor.parse, call.lists["cursor"]):
            self._add(call, positions, (cursor.topic, cursor.partition), cursor)
        cursors = positions.values()  # the start of the session, whatever is committed
        self.readers.check_room(call.caller.name)
        prefix = call.query.get("source_prefix", "")
        wanted = Subscription(consumer, topics, patterns, self._may_read(call, consumer), prefix, filters)
        existing = await self.readers.topics()
        found = await computed(_FIT_BYTES * len(existing) * len(patterns), wanted.among, existing)
        if topics - found:
            raise unknown_topic(min(topics - found))
        await consumer_offsets.check_members(self.kafka, consumer)
        strange = [cursor for cursor in cursors if cursor.topic not in found]
        if strange:
            raise Malformed(f"cursor: {strange[0]} belongs to a topic that this session does not read")
        if cursors:
            here = await self.translation.of_cursors(cursors)
            settings = [consumer_offsets.RequestedPosition(partition, offset) for partition, offset in here.items()]
            await self._set(consumer, await consumer_offsets.resolved(self.kafka, settings))
        if start == "latest":
            await consumer_offsets.start_at_latest(self.kafka, consumer, found)
        return await self.readers.stream(call.request, wanted, encoding, call.caller.name)

    async def commit(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        consumer, session_id = self._consumer(call, "commit"), call.second("session")
        worker = worker_of(session_id)
        if worker != self.url:
            return await self._elsewhere(call, session_id, worker)
        body = await self.admission.document(call.request, CommitBody, LISTS_BYTES)
        offsets = await computed(_POSITION_BYTES * len(body.positions), self._committed, call, body)
        session = self.readers.find(session_id, consumer)
        try:
            await session.commit(body.generation, offsets)
        except UnknownTopicOrPartitionError as error:
            raise unknown_topic(str(error)) from None
        committed = {"positions": formats.positions(offsets), "cursors": await self.translation.cursors_of(offsets)}
        return json_response({"consumer": consumer, "generation": body.generation, **committed})

    async def offsets(self, call: Call) -> web.StreamResponse:
        call.knows_only("records_only")
        reads = not flag(call.query, "records_only")
        consumer = self._consumer(call, "read")
        topics, patterns = self._topics(call)
        if patterns:
            raise Malformed("topic: patterns are not allowed here; omit topic to get all topics with a position")
        if topics:
            missing = topics - (await self.kafka.describe(sorted(topics))).topics.keys()
            if missing:
                raise unknown_topic(min(missing))
        groups = ConsumerGroups(self.kafka)
        view = await groups.view(consumer)
        committed = await groups.committed(consumer)
        if topics:
            committed = {partition: offset for partition, offset in committed.items() if partition[0] in topics}
        positions = await consumer_offsets.lags(
            self.kafka, committed, topics, self._may_read(call, consumer, "read"), reads=reads
        )
        return json_response(
            {"consumer": consumer, "state": view.state, "members": view.members, "positions": positions}
        )

    async def list(self, call: Call) -> web.StreamResponse:
        """The consumers that the caller may use, with a position in a topic that it may read."""
        call.knows_only()
        self._check_reads(call)

        def may_use(group: str) -> bool:
            is_one = _CONSUMER.match(group) is not None and self._owner(group) is None
            return is_one and call.caller.may_use(group, "read")

        dcs = self.config.known_dcs
        found, is_complete = await consumer_offsets.summaries(
            self.kafka, may_use, lambda topic: topic.partition(".")[0] in dcs and call.caller.may_read(topic)
        )
        return json_response({"consumers": found, "complete": is_complete})

    async def put_offsets(self, call: Call) -> web.StreamResponse:
        """Sets positions while the consumer has no live sessions, which would not notice the change."""
        call.knows_only("dry_run")
        is_dry = flag(call.query, "dry_run")
        consumer = self._consumer(call, "reset")
        body = await self.admission.document(call.request, PositionsBody, LISTS_BYTES)
        if body.positions is None:
            settings, cursors = await self._whole_topic(call, body), dict[TopicPartition, Cursor]()
        else:
            work_bytes = _POSITION_BYTES * len(body.positions)
            settings, cursors = await computed(work_bytes, self._requested, call, body.positions)
        for partition, offset in (await self.translation.of_cursors(cursors.values())).items():
            self._add(call, settings, partition, consumer_offsets.RequestedPosition(partition, offset))
        offsets = await consumer_offsets.resolved(self.kafka, settings.values())
        call.facts.update(is_dry=is_dry, positions=len(offsets), topics=sorted({topic for topic, _ in offsets})[:10])
        await consumer_offsets.check_members(self.kafka, consumer)
        if not is_dry:
            await self._set(consumer, offsets)
        return json_response({"consumer": consumer, "positions": formats.positions(offsets)})

    async def _set(self, consumer: str, offsets: dict[TopicPartition, int]) -> None:
        groups = ConsumerGroups(self.kafka)
        try:
            await groups.commit(consumer, NO_MEMBER, offsets)
        except UnknownTopicOrPartitionError as error:
            raise unknown_topic(str(error)) from None
        except CommitRefused:
            members = (await groups.view(consumer)).members
            detail = f"{consumer} has {members} live members, which would not notice the change; end them first"
            raise Problem("conflict", detail, members=members) from None

    # ---- input ------------------------------------------------------------------------------------------------

    def _consumer(self, call: Call, act: ConsumerAct) -> str:
        """The consumer of the path. Raises Malformed, and Problem ``conflict`` for a group of logferry's own.

        Raises Problem ``forbidden`` where the caller may not do this with it.
        """
        self._check_reads(call)
        consumer = call.first("consumer")
        if not _CONSUMER.match(consumer):
            raise Malformed(f"consumer: {consumer[:200]!r} is not 1 to 200 of a-z A-Z 0-9 . _ -")
        own = self._owner(consumer)
        if own is not None:
            raise Problem("conflict", f"names that begin with {own} are reserved for the groups of logferry itself")
        self._check_act(call, consumer, act)
        return consumer

    def _check_act(self, call: Call, consumer: str, act: ConsumerAct) -> None:
        if not call.caller.may_use(consumer, act):
            what = {"read": "see", "commit": "use", "reset": "set positions of"}[act]
            raise Problem("forbidden", f"the token {call.caller.name} does not have the right to {what} {consumer}")

    def _owner(self, consumer: str) -> str | None:
        """The reserved beginning of the name of a group of logferry's own; None: it is none."""
        return next((own for own in (f"{self.config.prefix}.", _OWN) if consumer.startswith(own)), None)

    def _check_reads(self, call: Call) -> None:
        if call.caller.read.is_nothing:
            raise Problem("forbidden", f"the token {call.caller.name} does not have the right to read anything")

    def _may_read(self, call: Call, consumer: str, act: ConsumerAct = "commit") -> consumer_offsets.MayRead:
        """Whether the caller may read a topic, as the consumer, at the time of the call: sessions live long."""
        dcs, gate, caller = self.config.known_dcs, self.gate, call.caller

        def may_read(name: str) -> bool:
            present = gate.present(caller)
            return name.partition(".")[0] in dcs and present.may_read(name) and present.may_use(consumer, act)

        return may_read

    def _topics(self, call: Call) -> tuple[frozenset[str], tuple[str, ...]]:
        """The topics and the patterns of the query. Raises Malformed, and Problem ``forbidden``."""
        texts = call.lists["topic"]
        if len(texts) > _MAX_TOPICS:
            raise Malformed(f"topic: is given {len(texts)} times, allowed are {_MAX_TOPICS}")
        patterns = tuple(text for text in texts if any(sign in text for sign in "*?["))
        for pattern in patterns:
            if not _PATTERN.match(pattern):
                raise Malformed(f"topic: {pattern[:200]!r} is not a pattern of a-z A-Z 0-9 . _ - * ? [ ] !")
        topics = frozenset(texts) - set(patterns)
        for topic in topics:
            self._check(call, topic)
        return topics, patterns

    def _check(self, call: Call, topic: str) -> None:
        dc, _ = split_topic(topic)
        if dc not in self.config.known_dcs:
            raise unknown_topic(topic)
        if not call.caller.may_read(topic):
            raise Problem("forbidden", f"the token {call.caller.name} does not have the right to read {topic}")

    def _add(self, call: Call, found: dict[TopicPartition, _T], partition: TopicPartition, value: _T) -> None:
        self._check(call, partition[0])
        if partition in found:
            raise Malformed(f"{partition[0]}, partition {partition[1]} is given more than once")
        found[partition] = value

    def _committed(self, call: Call, body: CommitBody) -> dict[TopicPartition, int]:
        offsets: dict[TopicPartition, int] = {}
        for position in body.positions:
            self._add(call, offsets, (position.topic, position.partition), position.offset)
        return offsets

    def _requested(
        self, call: Call, positions: Iterable[PositionSetting]
    ) -> tuple[dict[TopicPartition, consumer_offsets.RequestedPosition], dict[TopicPartition, Cursor]]:
        settings: dict[TopicPartition, consumer_offsets.RequestedPosition] = {}
        cursors: dict[TopicPartition, Cursor] = {}
        for wanted in positions:
            if wanted.cursor is not None:
                cursor = Cursor.parse(wanted.cursor)
                self._add(call, cursors, (cursor.topic, cursor.partition), cursor)
                continue
            partition = (wanted.topic or "", wanted.partition or 0)
            position = consumer_offsets.RequestedPosition(partition, wanted.offset, wanted.time_ms)
            self._add(call, settings, partition, position)
        return settings, cursors

    async def _whole_topic(
        self, call: Call, body: PositionsBody
    ) -> dict[TopicPartition, consumer_offsets.RequestedPosition]:
        topic = body.topic or ""
        self._check(call, topic)
        views = (await self.kafka.describe([topic])).topics
        if topic not in views:
            raise unknown_topic(topic)
        start, time_ms = (None, body.to) if isinstance(body.to, int) else (body.to, None)
        partitions = [(topic, number) for number in range(len(views[topic].partitions))]
        return {tp: consumer_offsets.RequestedPosition(tp, start, time_ms) for tp in partitions}

    async def _elsewhere(self, call: Call, session_id: str, worker: str | None) -> web.StreamResponse:
        """The session lives in another worker, if that one is alive. Never handed on twice."""
        if worker is None or FORWARDED in call.request.headers:
            raise ended(session_id)
        members = await self.kafka.group_assignment(self.config.group, self.config.state_topic)
        if members is None:
            raise Problem("not-owner-yet", "the workers are changing; it is not known yet whether the session is alive")
        if worker not in members:
            raise ended(session_id)
        self.forwarding.check_worker(worker)
        if call.request.headers.get(REDIRECT) == "1":
            return web.Response(status=307, headers={"Location": worker + call.request.raw_path})
        return await self.forwarding.forward(call.request, worker, "the worker of the session")
