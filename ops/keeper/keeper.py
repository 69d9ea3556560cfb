"""The keeper: looks, says what is wrong, plans, and carries the plan out within its bounds.

Invariants:

* Without ``act`` in the configuration nothing in Kafka is changed: no topic is created, no group is joined.
* It acts by a look that is not older than `_FRESH_S`, in the order: ends of moves, deletion, throttles, moves, leaders.
* While it is paused nothing begins, and what it had begun is cancelled.
* Where another tool moves replicas between brokers, the keeper begins no move.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from aiokafka import errors
from logferry.gateway import log
from logferry.gateway.kafka.client import EARLIEST, LATEST, KafkaClient
from logferry.ops.keeper.cluster_admin import ClusterAdmin
from logferry.ops.keeper.config import KeeperConfig
from logferry.ops.keeper.election import Election
from logferry.ops.keeper.journal import TAKE_OVER_S, Journal, NotActing
from logferry.ops.keeper.planning import keeper_state
from logferry.ops.keeper.planning.cluster_view import ClusterView, DirId
from logferry.ops.keeper.planning.deletion_plan import (
    AGES_S,
    Candidate,
    DeletedRange,
    DeletionLimits,
    DeletionPlan,
    needs_deletion,
    plan_deletion,
)
from logferry.ops.keeper.planning.keeper_state import KeeperState
from logferry.ops.keeper.planning.move_plan import Move, MoveLimits, MovePlan, elections, plan_moves, startable
from logferry.ops.keeper.planning.watchdog import ClusterFinding, Growth, KnownFindings, Thresholds, watch
from logferry.ops.keeper.readers import Readers

_TROUBLE: Final = (errors.KafkaError, OSError, TimeoutError)
_FRESH_S: Final = 30.0
_RECENT: Final = 100
# After an act that failed, and between two elections.
_REST_S: Final = 30.0
_GIVE_UP_S: Final = 2.0
_TERM: Final = "keeper"


class Keeper:
    """``view``, ``plan``, ``deletions``: of the last look. ``recent``: the newest records of the log."""

    def __init__(self, config: KeeperConfig, url: str, kafka: KafkaClient) -> None:
        self.config, self.url, self._kafka = config, url, kafka
        self._cluster = ClusterAdmin(kafka, config.watch.answer_s)
        self._readers = Readers(kafka, config)
        self.election = Election(config, url, kafka) if config.act else None
        self._journal = Journal(kafka, config.log_topic, self.may_act)
        self.retired = {DirId(one.broker, one.dir): "retired by the configuration" for one in config.retire}
        moves, deletion = config.moves, config.deletion
        self.move_limits = MoveLimits(
            moves.fill_percent,
            moves.balance_percent,
            moves.bytes_at_once,
            moves.partitions_at_once,
            moves.balance_dirs,
            moves.balance_brokers,
        )
        self.deletion_limits = DeletionLimits(
            deletion.below_free_percent,
            deletion.until_free_percent,
            deletion.last_free_percent,
            deletion.bytes_at_once,
        )
        self._thresholds = Thresholds(deletion.below_free_percent, config.watch.full_within_s)
        self.growth = Growth(config.watch.growth_s)
        self.findings = KnownFindings()
        self.view: ClusterView | None = None
        self.plan = MovePlan()
        self.deletions: list[DeletionPlan] = []
        self._unknown: dict[str, str] = {}
        self.state = KeeperState()
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.error: str | None = "it has not looked yet"
        self.looked_ms = 0
        self._term = -1
        self._acts_from_s = 0.0
        self._rest_until_s: dict[str, float] = {}
        self.turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self.counts: dict[str, int] = {}
        self.bytes_deleted = 0

    def may_act(self) -> bool:
        return self.election is not None and self.election.acts

    # ---- its life ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        if self.election is not None:
            await self._journal.create(self.config.accept_weak_kafka, self.config.log_retention_days)
            await self.election.start()
        while True:
            if self.election is not None:
                self.election.renew()
            async with self.turn:
                await self._look()
            self._wake.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.watch.every_s):
                    await self._wake.wait()

    async def stop(self) -> None:
        """Others may act at once."""
        if self._journal.is_open and self.may_act():
            with suppress(NotActing):
                await self._record({"kind": keeper_state.LEFT})
        if self.election is not None:
            with suppress(*_TROUBLE):
                await self.election.stop()
        await self._journal.close()

    async def _look(self) -> None:
        try:
            view = await self._cluster.look()
            self.growth.add(view)
        except _TROUBLE as error:
            if self.error is None or not self.looked_ms:
                log.event("keeper_look_failed", error=repr(error))
            self.error = repr(error)
            return
        self.view, self.error, self.looked_ms = view, None, int(time.time() * 1000)
        self.plan = plan_moves(view, self.move_limits, self.retired, self._may_balance)
        now_ms = await self._plan_deletions(view)
        self._say(view)
        if self.election is not None and self.election.acts:
            try:
                await self._take_turn(view, now_ms)
            except NotActing as why:
                log.event("keeper_fenced", why=str(why))
                self._term = -1

    async def _plan_deletions(self, view: ClusterView) -> int:
        """Returns the controller's time, 0 where it is not known: then nothing is deleted."""
        self.deletions, self._unknown = [], {}
        try:
            now_ms = await self._cluster.controller_ms()
            for place in self._low_dirs(view, now_ms):
                self.deletions.append(await self._deletion(view, place, now_ms))
        except _TROUBLE as error:
            self._unknown["Kafka"] = f"offsets or the time are not known: {error!r}"
            return 0
        return now_ms

    def _may_balance(self, topic: str) -> bool:
        return not topic.startswith("__") and not self.config.is_protected(topic)

    def _say(self, view: ClusterView) -> None:
        found = watch(view, self.growth, self.retired, self._thresholds)
        found += [ClusterFinding("cannot-move", what, why) for what, why in self.plan.blocked.items()]
        found += [ClusterFinding("reader-unknown", name, why) for name, why in self._unknown.items()]
        for deletion in self.deletions:
            if deletion.missing_bytes:
                held = f"; held by {', '.join(deletion.held_by)}" if deletion.held_by else ""
                why = f"{deletion.why}; {deletion.missing_bytes} bytes more are needed than may be deleted{held}"
                found.append(ClusterFinding("cannot-delete", str(deletion.place), why))
        new, over = self.findings.update(found, self.looked_ms)
        for one in new:
            log.event("keeper_finding", kind=one.kind, what=one.what, why=one.why)
        for one in over:
            log.event("keeper_finding_over", kind=one.kind, what=one.what, for_ms=self.looked_ms - one.since_ms)

    # ---- forced deletion ---------------------------------------------------------------------------------------------

    def _low_dirs(self, view: ClusterView, now_ms: int) -> list[DirId]:
        limits, state = self.deletion_limits, self.state
        return [d for d in view.dirs if needs_deletion(view, d, state.pending_bytes(d, now_ms), limits)]

    async def _deletion(self, view: ClusterView, place: DirId, now_ms: int) -> DeletionPlan:
        full_in_s = self.growth.full_in_s(view, place)
        candidates = await self._candidates(view, place, now_ms, full_in_s)
        pending = self.state.pending_bytes(place, now_ms)
        return plan_deletion(view, place, candidates, pending, self.deletion_limits, full_in_s)

    async def _candidates(
        self, view: ClusterView, place: DirId, now_ms: int, full_in_s: float | None
    ) -> list[Candidate]:
        wanted = {}
        for replica in view.in_dir(place):
            topic, partition = replica.tp[0], view.partitions.get(replica.tp)
            policy, settings = self.config.policy(topic), view.settings.get(topic)
            if policy is None or settings is None or replica.is_future or partition is None:
                continue
            if settings["cleanup.policy"] == "delete" and view.answers(partition.leader):
                wanted[replica.tp] = (policy, replica.size_bytes)
        if not wanted:
            return []
        tps, ask = list(wanted), self._kafka.offsets
        starts = await ask(tps, EARLIEST, _GIVE_UP_S)
        ends = await ask(tps, LATEST, _GIVE_UP_S)
        ages = [await ask(tps, now_ms - int(1000 * age_s), _GIVE_UP_S) for age_s in AGES_S]
        needs = await self._readers.needs(view.ids)
        self._unknown |= needs.unknown
        found = []
        for tp, (policy, size) in wanted.items():
            if tp not in starts or tp not in ends:
                continue
            start, end = starts[tp], ends[tp]
            # -1: no record is so young, all are older.
            rungs = tuple(end if rung.get(tp, -1) < 0 else max(start, min(end, rung[tp])) for rung in ages)
            expires = await self._expires(view, tp, now_ms, full_in_s, end)
            found.append(Candidate(tp, policy.priority, policy.keep_s, size, start, end, rungs, needs.of(tp), expires))
        return found

    async def _expires(
        self, view: ClusterView, tp: tuple[str, int], now_ms: int, full_in_s: float | None, end: int
    ) -> int:
        """The offset below which retention will have removed the records by the time at which the disk is full."""
        retention_ms = int(view.settings[tp[0]].get("retention.ms") or -1)
        if full_in_s is None or retention_ms < 0:
            return 0
        found = await self._kafka.offsets([tp], now_ms - retention_ms + int(1000 * full_in_s), _GIVE_UP_S)
        return end if found.get(tp, -1) < 0 else found[tp]

    # ---- acts --------------------------------------------------------------------------------------------------------

    async def _take_turn(self, view: ClusterView, now_ms: int) -> None:
        if self.election is None or not await self._has_taken_over(self.election):
            return
        if time.monotonic() - view.at_s > _FRESH_S:
            return
        for name, how in keeper_state.ended_moves(self.state, view).items():
            await self._record({"kind": keeper_state.MOVE_ENDED, "replica": name, "how": how})
        if self.state.paused is not None:
            await self._cancel_moves(view)
            return
        for deletion in self.deletions if now_ms else ():
            for one in deletion.ranges:
                if not self._rests(keeper_state.DELETE):
                    await self._delete(view, deletion, one, now_ms)
        is_foreign = any(
            p.adding and not any(move.tp == p.tp for move in self.state.moves.values())
            for p in view.partitions.values()
        )
        rests = is_foreign or self._rests(keeper_state.MOVE) or self._rests(keeper_state.THROTTLE)
        begun = [] if rests else startable(view, self.plan, self.move_limits)
        busy = {move.tp for move in self.state.moves.values()}
        begun = [move for move in begun if move.tp not in busy]
        # No move begins unthrottled.
        for move in begun if await self._throttle(view, [*self.state.moves.values(), *begun]) else ():
            await self._move(view, move)
        if not self.config.moves.preferred_leaders or self._rests(keeper_state.ELECT):
            return
        if led := elections(view, self.retired):
            self._rest_until_s[keeper_state.ELECT] = time.monotonic() + _REST_S
            await self._try({"kind": keeper_state.ELECT, "partitions": led}, lambda: self._cluster.elect(led))

    def _rests(self, kind: str) -> bool:
        """Whether an act of this kind failed a moment ago."""
        return time.monotonic() < self._rest_until_s.get(kind, 0.0)

    async def _has_taken_over(self, election: Election) -> bool:
        if self._term != election.terms or not self._journal.is_open:
            # Fenced, then read: nothing is written behind what was read.
            term = election.terms
            records = await self._opened()
            self.state = keeper_state.replayed(records)
            self.recent.clear()
            self.recent.extend(records[-_RECENT:])
            alone = not records or records[-1]["kind"] == keeper_state.LEFT
            await self._record({"kind": keeper_state.BEGAN, "state": self.state.snapshot()})
            self._acts_from_s = time.monotonic() + (0.0 if alone else TAKE_OVER_S)
            self._term = term
            # The plan at hand was made without the state.
            self._wake.set()
            return False
        return time.monotonic() >= self._acts_from_s

    async def _opened(self) -> list[dict[str, Any]]:
        try:
            return await self._journal.open()
        except _TROUBLE as error:
            raise NotActing(f"the log of acts cannot be opened: {error!r}") from None

    def _stamped(self, record: dict[str, Any]) -> dict[str, Any]:
        return {"at_ms": int(time.time() * 1000), _TERM: self.url, **record}

    async def _record(self, record: dict[str, Any]) -> None:
        stamped = self._stamped(record)
        await self._journal.append(stamped)
        self._took(stamped)

    def _took(self, record: dict[str, Any]) -> None:
        self.state.apply(record)
        self.recent.append(record)
        kind = record["kind"]
        self.counts[kind] = self.counts.get(kind, 0) + 1
        facts = {key: value for key, value in record.items() if key not in ("state", "kind", "at_ms", _TERM)}
        log.event("keeper_act_failed" if kind == keeper_state.FAILED else "keeper_act", kind=kind, **facts)

    async def _try(self, record: dict[str, Any], act: Callable[[], Awaitable[Any]]) -> Any:
        """Writes the record, acts, and returns the answer; None where Kafka refused, which is recorded."""
        stamped = self._stamped(record)

        async def begin() -> Any:
            self._took(stamped)
            return await act()

        try:
            return await self._journal.carry_out(stamped, begin)
        except _TROUBLE as error:
            self._rest_until_s[record["kind"]] = time.monotonic() + _REST_S
            await self._record({"kind": keeper_state.FAILED, "act": record["kind"], "error": repr(error)})
            return None

    async def _delete(self, view: ClusterView, plan: DeletionPlan, one: DeletedRange, now_ms: int) -> None:
        partition = view.partitions[one.tp]
        pending = keeper_state.pending_of(view, one.tp, one.size_bytes, now_ms, self._cluster.check_s)
        record = {
            "kind": keeper_state.DELETE,
            "dir": str(plan.place),
            "why": plan.why,
            "topic": one.tp[0],
            "partition": one.tp[1],
            "from": one.start,
            "before": one.before,
            "bytes": one.size_bytes,
            "still_needed_by": one.against,
            "seen": _seen_dir(view, plan.place),
            "pending": [keeper_state.pending_document(each) for each in pending],
        }
        low = await self._try(record, lambda: self._cluster.delete_before(partition.leader, one.tp, one.before))
        if low is not None:
            self.bytes_deleted += one.size_bytes
            done = {"kind": keeper_state.DELETED, "topic": one.tp[0], "partition": one.tp[1], "first_offset": low}
            await self._record(done)

    async def _move(self, view: ClusterView, move: Move) -> None:
        partition = view.partitions[move.tp]
        seen = {
            "leader": partition.leader,
            "isr": partition.isr,
            "target": _seen_dir(view, move.target),
            "source": _seen_dir(view, move.source),
        }
        record = {"kind": keeper_state.MOVE, "move": keeper_state.move_document(move), "seen": seen}
        await self._try(record, lambda: self._cluster.start_move(move))

    async def _cancel_moves(self, view: ClusterView) -> None:
        for name, move in list(self.state.moves.items()):
            with suppress(*_TROUBLE):
                await self._cluster.cancel_move(move)
                await self._record({"kind": keeper_state.MOVE_ENDED, "replica": name, "how": "cancelled"})
        await self._throttle(view, list(self.state.moves.values()))

    async def _throttle(self, view: ClusterView, moves: list[Move]) -> bool:
        """Sets the throttles of these moves, and removes those of others. False: Kafka refused. Raises NotActing."""
        topics, brokers = keeper_state.wanted_throttles(moves, self.config.moves.throttle_bytes_per_s)
        # A broker that is silent keeps what it has, and gets the rest when it answers.
        silent = {broker for broker in {*brokers, *self.state.brokers} if not view.answers(int(broker))}
        brokers = {name: settings for name, settings in brokers.items() if name not in silent}
        brokers |= {name: settings for name, settings in self.state.brokers.items() if name in silent}
        of_topics = keeper_state.changes(self.state.topics, topics)
        of_brokers = keeper_state.changes(self.state.brokers, brokers)
        if not of_topics and not of_brokers:
            return True

        async def change() -> bool:
            for broker, settings in of_brokers.items():
                await self._cluster.set_broker(int(broker), settings)
            for topic, settings in of_topics.items():
                await self._cluster.set_topic(topic, settings)
            return True

        before = (self.state.topics, self.state.brokers)
        record = {"kind": keeper_state.THROTTLE, "topics": topics, "brokers": brokers}
        if await self._try(record, change) is None:
            # It is tried again.
            self.state.topics, self.state.brokers = before
            return False
        return True

    # ---- the operator ------------------------------------------------------------------------------------------------

    async def pause(self, why: str | None) -> None:
        """Pauses, or resumes where ``why`` is None. Raises NotActing where this keeper does not act."""
        async with self.turn:
            if self.election is None or self._term != self.election.terms:
                raise NotActing("this keeper does not act")
            await self._record({"kind": keeper_state.RESUMED if why is None else keeper_state.PAUSED, "why": why})
            self._wake.set()


def _seen_dir(view: ClusterView, place: DirId) -> dict[str, Any] | None:
    state = view.dirs.get(place)
    return None if state is None else {"total": state.total_bytes, "usable": state.usable_bytes, "error": state.error}
