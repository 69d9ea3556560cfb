"""The routes about subscriptions of `logferry deliver`: made, shown, paused, resumed, replayed and removed here.

Whoever does any of it needs the right to administer each topic of the subscription, and everything for a pattern.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web
from aiokafka.errors import InvalidTopicError, UnknownTopicOrPartitionError
from logferry.gateway import log
from logferry.gateway.access.rights import Caller
from logferry.gateway.config import Config
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.contract.names import Cursor, Malformed, split_topic
from logferry.gateway.errors import LaneUnreadable, Problem
from logferry.gateway.http.admission import LISTS_BYTES, Admission
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.kafka.client import ELECTION_S, LATEST, KafkaClient
from logferry.gateway.lanes.replay import replay_states
from logferry.gateway.reading.assignment import unknown_topic
from logferry.gateway.subscriptions import NAME, PushSubscription, Replay, StoredSubscription
from logferry.gateway.topics.compacted_store import CompactedStore

_SIGNS: Final = "*?["
# Each costs the workers some tasks and connections, for every partition that it delivers.
_MOST: Final = 2000


@dataclass(frozen=True, slots=True)
class SubscriptionsApi:
    config: Config
    kafka: KafkaClient
    admission: Admission
    store: CompactedStore[StoredSubscription]

    def add_to(self, routes: Routes) -> None:
        one = "/v1/subscriptions/{subscription}"
        routes.add("GET", "/v1/subscriptions", "subscriptions", self.list_all, Right.KNOWN)
        routes.add("GET", one, "subscription", self.get, Right.KNOWN)
        routes.add("PUT", one, "put_subscription", self.put, Right.KNOWN)
        routes.add("DELETE", one, "delete_subscription", self.delete, Right.KNOWN)
        routes.add("POST", one + "/pause", "pause_subscription", self.pause, Right.KNOWN)
        routes.add("POST", one + "/resume", "resume_subscription", self.resume, Right.KNOWN)
        routes.add("POST", one + "/replay", "replay_subscription", self.replay, Right.KNOWN)

    async def list_all(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        found = await self.store.refresh()
        seen = {name: stored for name, stored in sorted(found.items()) if self._why_not(call.caller, stored) is None}
        return json_response({"subscriptions": [_described(name, stored) for name, stored in seen.items()]})

    async def get(self, call: Call) -> web.StreamResponse:
        """With what the workers have recorded of each partition."""
        call.knows_only()
        name, stored = await self._known(call)
        return json_response({**_described(name, stored), "partitions": await self._partitions(name, stored)})

    async def put(self, call: Call) -> web.StreamResponse:
        """Makes the subscription or changes it; batches that were begun are ended as they were."""
        call.knows_only()
        name = self._name(call)
        wanted = await self.admission.document(call.request, PushSubscription, LISTS_BYTES)
        call.facts.update(topics=wanted.topics[:10], host=urlsplit(wanted.url).hostname)
        self._check_topics(wanted)
        try:
            wanted.check_dead_letters(self.config.dc)
        except ValueError as error:
            raise Malformed(str(error)) from None
        now_ms = self.kafka.clock.now_ms()
        fresh = StoredSubscription(id=uuid.uuid4().hex, created_ms=now_ms, definition=wanted, owner=call.caller.name)
        self._check_right(call.caller, fresh)
        known = await self.store.refresh()
        if not known:
            await self.store.create()
        stored = known.get(name)
        if stored is None and len(known) >= _MOST:
            raise Problem("conflict", f"there are {len(known)} subscriptions already; remove some")
        if stored is not None:
            self._check_right(call.caller, stored)
            _check_changeable(name, stored)
            if stored.definition.order != wanted.order:
                raise Problem("conflict", "order: cannot change; remove the subscription, or make another one")
            own = {"owner": fresh.owner, "is_configured": False, "left_configuration": False}
            fresh = stored.model_copy(update={"definition": wanted, **own})
        await self._write(name, fresh)
        return json_response(_described(name, fresh), status=201 if stored is None else 200)

    async def delete(self, call: Call) -> web.StreamResponse:
        call.knows_only()
        name, stored = await self._known(call)
        _check_changeable(name, stored)
        await self.store.put(name, None)
        return json_response(_described(name, stored))

    async def pause(self, call: Call) -> web.StreamResponse:
        """Nothing is sent until it is resumed."""
        call.knows_only()
        name, stored = await self._known(call)
        return await self._changed(name, stored.model_copy(update={"is_paused": True}))

    async def resume(self, call: Call) -> web.StreamResponse:
        """Ends a pause, and all stops of its partitions."""
        call.knows_only()
        name, stored = await self._known(call)
        if stored.left_configuration:
            ways = "put it back there and restart a worker, make it by PUT, or remove it"
            raise Problem("conflict", f"{name} left the configuration of deliver: {ways}")
        resumed = {"is_paused": False, "resumed": stored.resumed + 1, "owner": call.caller.name}
        return await self._changed(name, stored.model_copy(update=resumed))

    async def replay(self, call: Call) -> web.StreamResponse:
        """Sets positions: back to deliver again, or forward to skip."""
        call.knows_only()
        name, stored = await self._known(call)
        wanted = await self.admission.document(call.request, Replay)
        if wanted.cursor is not None:
            cursor = Cursor.parse(wanted.cursor)
            wanted = wanted.model_copy(update={"cursor": str(cursor)})
        await self._check_place(stored, *wanted.place)
        if wanted.offset == "latest":
            # A partition that comes later is delivered from its start.
            wanted = wanted.model_copy(update={"offset": None, "time_ms": self.kafka.clock.now_ms()})
        try:
            return await self._changed(name, stored.replayed(wanted))
        except ValueError as error:
            raise Problem("conflict", str(error)) from None

    async def pause_orphans(self, gate: Gate) -> None:
        """Pauses what was ordered by a caller that has lost the right since. Raises KafkaError.

        Otherwise a token that leaked would deliver to its thief after it is removed.
        """
        for name, stored in (await self.store.refresh()).items():
            if stored.owner is None or stored.is_resting:
                continue
            why = self._why_not(gate.entry(stored.owner), stored)
            if why is not None:
                await self._write(name, stored.model_copy(update={"is_paused": True}))
                log.event("subscription_orphaned", subscription=name, owner=stored.owner, why=why)

    async def _check_place(self, stored: StoredSubscription, topic: str | None, partition: int | None) -> None:
        """Raises Problem for a place that the subscription does not deliver: nothing would happen, and nobody know."""
        if topic is None:
            return
        if not any(fnmatchcase(topic, pattern) for pattern in stored.definition.topics):
            raise Malformed(f"topic: {topic!r} is none of the subscription's")
        try:
            count = len((await self.kafka.describe_topic(topic)).partitions)
        except (UnknownTopicOrPartitionError, InvalidTopicError):
            raise unknown_topic(topic) from None
        if partition is not None and partition >= count:
            raise Problem("not-found", f"{topic} has the partitions 0 to {count - 1}")

    # ---- the store --------------------------------------------------------------------------------------------------

    async def _changed(self, name: str, stored: StoredSubscription) -> web.StreamResponse:
        await self._write(name, stored)
        return json_response(_described(name, stored))

    async def _write(self, name: str, stored: StoredSubscription) -> None:
        await self.store.put(name, stored)

    async def _known(self, call: Call) -> tuple[str, StoredSubscription]:
        name = self._name(call)
        stored = (await self.store.refresh()).get(name)
        if stored is None or self._why_not(call.caller, stored) is not None:
            # Whoever may not see it does not learn whether it exists.
            if call.caller.admin.is_nothing:
                raise Problem(
                    "forbidden", f"the token {call.caller.name} does not have the right to administer anything"
                )
            why = self.store.unreadable.get(name)
            raise Problem("not-found", f"there is no subscription {name}" if why is None else f"{name}: {why}")
        return name, stored

    async def _partitions(self, name: str, stored: StoredSubscription) -> list[dict[str, Any]]:
        states = await self._states(name, stored)
        partitions = sorted({(key.topic, key.partition) for key in states})
        there = (await self.kafka.describe(sorted({topic for topic, _ in partitions}))).topics if partitions else {}
        led = [(topic, number) for topic, number in partitions if topic in there]
        ends = await self.kafka.offsets(led, LATEST, ELECTION_S) if led else {}
        return [_unit(key, state, ends) for key, state in sorted(states.items())]

    async def _states(self, name: str, stored: StoredSubscription) -> dict[UnitKey, DeliveryState]:
        topic = f"{self.config.prefix}.deliver.{self.config.dc}.state"
        found: dict[UnitKey, DeliveryState] = {}
        begins = name.encode() + b"\0"

        def apply(raw: bytes, value: bytes | None) -> None:
            if raw.startswith(begins):
                key = UnitKey.decode(raw)
                found.pop(key, None)
                if value is not None and (state := DeliveryState.decode(value)).subscription_id == stored.id:
                    found[key] = state

        try:
            lanes = len((await self.kafka.describe_topic(topic)).partitions)
        except UnknownTopicOrPartitionError:
            return {}
        try:
            for lane in range(lanes):
                await replay_states(self.kafka, topic, lane, apply, command="logferry lanes --deliver")
        except LaneUnreadable as error:
            raise Problem("kafka-unavailable", str(error)) from None
        return found

    # ---- input ------------------------------------------------------------------------------------------------------

    def _name(self, call: Call) -> str:
        name = call.first("subscription")
        if not NAME.match(name):
            raise Malformed(f"subscription: {name[:100]!r} is not 1 to 100 of a-z A-Z 0-9 . _ -")
        return name

    def _check_topics(self, wanted: PushSubscription) -> None:
        for topic in wanted.topics:
            dc, dot, _ = topic.partition(".")
            if not dot:
                raise Malformed(f"topics: {topic!r} is not a full name or a pattern of full names, as *.{topic}")
            if not any(sign in dc for sign in _SIGNS) and dc not in self.config.known_dcs:
                known = ", ".join(sorted(self.config.known_dcs))
                raise Malformed(f"topics: {topic!r}: {dc} is none of the data centres {known}")
            if not any(sign in topic for sign in _SIGNS):
                split_topic(topic)

    def _check_right(self, caller: Caller, stored: StoredSubscription) -> None:
        why = self._why_not(caller, stored)
        if why is not None:
            raise Problem("forbidden", f"the token {caller.name} {why}")

    def _why_not(self, caller: Caller, stored: StoredSubscription) -> str | None:
        """Why the caller may not have to do with the subscription; None: it may.

        A subscription reads: what the caller is denied to read is not delivered by its order, either.
        """
        definition, admin = stored.definition, caller.admin
        for topic in definition.topics:
            if any(sign in topic for sign in _SIGNS):
                if not admin.is_everything:
                    return f"does not have the right to administer everything, which the pattern {topic} takes"
                if caller.read.has_denials:
                    return f"is denied to read some topics, and {topic} is a pattern: name the topics"
            elif not admin.match(topic):
                return f"does not have the right to administer {topic}"
            elif caller.read.denies(topic):
                return f"is denied to read {topic}"
        if definition.dead_letter_topic is not None:
            letters = f"{self.config.dc}.{definition.dead_letter_topic}"
            if not admin.match(letters) or caller.write.denies(letters):
                return f"does not have the right to administer {letters}, or is denied to write it"
        return None


def _check_changeable(name: str, stored: StoredSubscription) -> None:
    if stored.is_configured and not stored.left_configuration:
        raise Problem("conflict", f"{name} stands in the configuration of deliver: change it there")


def _described(name: str, stored: StoredSubscription) -> dict[str, Any]:
    return {
        "name": name,
        **stored.definition.model_dump(),
        "created_ms": stored.created_ms,
        "owner": stored.owner,
        "is_paused": stored.is_paused,
        "is_configured": stored.is_configured,
        "left_configuration": stored.left_configuration,
    }


def _unit(key: UnitKey, state: DeliveryState, ends: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    end = ends.get((key.topic, key.partition))
    return {
        "topic": key.topic,
        "partition": key.partition,
        "shard": key.shard,
        "position": state.position,
        "next": end,
        "lag_records": None if end is None else max(0, end - state.position),
        "epoch": state.epoch,
        "stop": None if state.stop is None else state.stop._asdict(),
        "error": None if state.error is None else state.error._asdict(),
    }
