"""A world around the pure part of a lane: a log, two workers that may both believe they own it, clients, a network.

The workers do with `Draft`, `SourceTable` and `resolve` what the lane does; all that can go wrong between them and
the log is a step that a test may take at any moment. The reference is a list for each incarnation of the topic.
`Violated` is raised at the first step after which the promise does not hold; see `Log.append` and `World.answer`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import Heartbeat, SourceIdentity
from logferry.gateway.kafka.transactional_producer import NotCommitted
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes import resolution
from logferry.gateway.lanes.dedup import Refusal, SourceTable
from logferry.gateway.lanes.group_commit import PendingRequests
from logferry.gateway.lanes.transaction import (
    AppendChunks,
    Draft,
    ForgetOutcome,
    ForgetSource,
    OpenSession,
    Outcome,
    RecordHeartbeat,
    Request,
    SessionOutcome,
    WriteChunks,
    WriteOutcome,
)

from tests.model.lane_clients import REPEAT_MS, TOPIC, Attempt, Client, Log, Violated, placed

RETENTION_MS = 20
# No session lapses: its silence is not what is examined here.
_LAPSE_MS = 1 << 40
_STOLEN = Chunk(10_000, None, 1, {}, b"of another token")
_OUTSIDE = Chunk(10_000, None, 1, {}, b"without the number")


class Worker:
    """One worker's lane: what `lane.Lane` does with requests, without waiting for anything."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.table, self.epoch, self.facts = SourceTable(), -1, world.log.facts
        self.is_closed, self.is_open = True, False
        self.queue: deque[Attempt] = deque()
        self.draft: Draft | None = None
        self.in_flight: list[tuple[Attempt, Outcome]] = []
        self.expired: list[bytes] = []

    def submit(self, attempt: Attempt) -> None:
        self.world.facts_at_delivery[attempt] = self.facts
        if self.is_closed:
            self.world.answer(attempt, "fail")
        else:
            self.queue.append(attempt)

    def open(self) -> None:
        """Fence, replay, and only then say what happened to what was under way."""
        if self.draft is not None:
            return
        log = self.world.log
        log.epoch += 1
        log.late = None
        self.epoch, self.is_closed, self.is_open = log.epoch, False, True
        self.table = SourceTable()
        for key, raw in log.states:
            self.table.apply(key, raw)
        self.world.check_replay(self.table)
        for attempt, outcome in self.in_flight:
            request, receipt = self._request(attempt), None
            if isinstance(request, AppendChunks) and request.receipt_key is not None:
                receipt = self.table.receipts.get(request.receipt_key)
            state = self.table.get(attempt.client.source, request.topic.id)
            match resolution.resolve(outcome, state, receipt):
                case True:
                    if receipt is not None and isinstance(outcome, WriteOutcome):
                        outcome = replace(outcome, receipt=receipt)
                    self.world.answer(attempt, "ok", outcome)
                case False:
                    self.world.answer(attempt, "fail")
                case None:
                    self.world.answer(attempt, "unknown")
        self.in_flight.clear()

    def gather(self, count: int) -> None:
        """Drafts up to so many requests; what need not wait is answered at once."""
        if not self.is_open or self.draft is not None:
            return
        draft = Draft(self.table, self.world.tick(), session_lapse_ms=_LAPSE_MS)
        self.world.transactions += 1
        draft.number, draft.repeat_window_ms = self.world.transactions, REPEAT_MS
        self.expired = []
        while self.queue and count:
            count -= 1
            attempt = self.queue.popleft()
            if attempt.kind == "outside" and not self._is_used(attempt.client.source):
                self.world.answer(attempt, "fail")
                continue
            request = self._request(attempt)
            outcome, must_wait = draft.add(request)
            if must_wait:
                self.in_flight.append((attempt, outcome))
            elif isinstance(outcome, Refusal):
                self.world.answer(attempt, "fail", outcome)
            elif request.topic.id == self.world.log.facts.id:
                self.world.answer(attempt, "ok", outcome)
            else:
                self.facts = self.world.log.facts
                self.world.answer(attempt, "fail")
        if self.world.expires:
            for key in self.table.state_keys():
                if key not in draft.states:
                    draft.expire(key, self.world.now_ms - RETENTION_MS)
                    self.expired += [key] if key in draft.states else []
            draft.expire_receipts(2)
        self.draft = None if draft.is_empty() else draft

    def _is_used(self, source: SourceIdentity) -> bool:
        """Where it is not, whoever comes without the session's number is as good as its opener: who would notice?"""
        log = self.world.log
        ended = (SessionOutcome, ForgetOutcome)
        is_ended = any(one.client.source == source and isinstance(outcome, ended) for one, outcome in self.in_flight)
        return (len(log.incarnations), source) in log.used and not is_ended

    def finish(self, how: str) -> None:
        """Ends the transaction: ``commit``, ``answer-lost``, ``commit-lost``, ``commit-late``, ``failed`` or

        ``unavailable``: one of its partitions takes nothing, and what does not need it is queued again.
        """
        draft, log = self.draft, self.world.log
        if draft is None:
            return
        self.draft = None
        if how == "unavailable":
            self._undo(draft)
            return
        if how == "failed" or draft.changed_topic({TOPIC: log.facts.id}) is not None:
            self.facts, self.is_open = log.facts, False
            for attempt, _ in self.in_flight:
                self.world.answer(attempt, "fail")
            self.in_flight.clear()
            self._fail_queued(draft)
            return
        fenced = log.fences(self.epoch)
        if not fenced and how == "commit-late":
            log.late = draft, list(self.in_flight), self.expired
        if not fenced and how in ("commit", "answer-lost"):
            log.append(draft, self.in_flight, self.expired)
        if fenced or how != "commit":
            self.is_open = False
            self._fail_queued(draft)
            return
        for key, raw in draft.states.items():
            self.table.apply(key, raw)
        for attempt, outcome in self.in_flight:
            self.world.answer(attempt, "fail" if isinstance(outcome, Refusal) else "ok", outcome)
        self.in_flight.clear()

    def _undo(self, draft: Draft) -> None:
        """With the requests of `PendingRequests`, which the lane uses."""
        pending, of = PendingRequests(), dict[int, Attempt]()
        loop = asyncio.new_event_loop()
        pending._loop = loop
        for attempt, outcome in self.in_flight:
            pending.add(self._request(attempt), 1)
            taken = pending.take()
            of[id(taken)] = attempt
            pending.hold(taken, outcome)
        for attempt in self.queue:
            pending.add(self._request(attempt), 1)
            of[id(pending._queue[-1])] = attempt
        everybody = [*(taken for taken, _ in pending._in_flight), *pending._queue]
        written = sorted(draft.chunks)
        bad = {written[0]: "it takes nothing"} if written else {}
        pending.undo(draft, NotCommitted("unavailable", unavailable=bad))
        self.in_flight.clear()
        self.queue = deque(of[id(kept)] for kept in pending._queue)
        self.is_open = False
        for one in everybody:
            if one.answer.done():
                one.answer.exception()
                self.world.answer(of[id(one)], "fail")
        loop.close()

    def expire(self) -> None:
        """What waited too long is answered with what is certain."""
        if self.queue:
            first = self.queue.popleft()
            self.world.answer(first, "fail")
            behind = [attempt for attempt in self.queue if attempt.client is first.client]
            self.queue = deque(attempt for attempt in self.queue if attempt.client is not first.client)
            for attempt in behind:
                self.world.answer(attempt, "fail")
        for attempt, _ in self.in_flight:
            self.world.answer(attempt, "unknown")

    def give_away(self, is_killed: bool) -> None:
        """The lane is lost, or the worker killed: then its connections are cut, and a commit may be on the wire."""
        if self.draft is not None:
            if is_killed and self.epoch == self.world.log.epoch:
                if self.draft.changed_topic({TOPIC: self.world.log.facts.id}) is None:
                    self.world.log.late = self.draft, list(self.in_flight), self.expired
            elif not is_killed:
                return
        for attempt, _ in self.in_flight:
            self.world.answer(attempt, "unknown")
        for attempt in self.queue:
            self.world.answer(attempt, "unknown" if is_killed else "fail")
        self.in_flight.clear()
        self.queue.clear()
        self.draft, self.is_open, self.is_closed = None, False, True

    def _fail_queued(self, draft: Draft) -> None:
        for attempt in [one for one in self.queue if draft.touches(one.client.source)]:
            self.queue.remove(attempt)
            self.world.answer(attempt, "fail")

    def _request(self, attempt: Attempt) -> Request:
        source = attempt.client.source
        facts = self.world.facts_at_delivery[attempt]
        if attempt.kind == "forget":
            return ForgetSource(facts, source)
        if attempt.kind == "append":
            digest = b"".join(chunk.data for chunk in attempt.chunks).ljust(16, b"-")[:16]
            return AppendChunks(facts, source, attempt.chunks, 1, digest, attempt.key)
        token = "other" if attempt.kind == "theft" else attempt.client.token
        if attempt.kind == "beat":
            return RecordHeartbeat(facts, source, attempt.session, Heartbeat(self.world.now_ms), token=token)
        if not attempt.chunks:
            return OpenSession(facts, source, token=token)
        return WriteChunks(facts, source, attempt.session, attempt.chunks, 1, token)


class World:
    """Everything, and the steps that may be taken in any order. Each choice is a number, taken modulo what there is."""

    def __init__(self, clients: list[int]) -> None:
        self.now_ms, self.expires, self.transactions = 1000, False, 0
        self.log = Log()
        self.facts_at_delivery: dict[Attempt, TopicFacts] = {}
        self.network: list[list[Attempt]] = []
        self.workers = [Worker(self), Worker(self)]
        everybody = [
            Client(self.log, SourceIdentity(TOPIC, None, "chained"), is_chained=True),
            Client(self.log, SourceIdentity(TOPIC, None, "sessions"), is_chained=True, has_sessions=True, token="own"),
            Client(self.log, SourceIdentity(TOPIC, "single", "one"), is_chained=False),
            Client(self.log, SourceIdentity(TOPIC, None, "single"), in_bursts=True),
            Client(self.log, SourceIdentity(TOPIC, None, "plain"), is_chained=True, appends="plain"),
            Client(self.log, SourceIdentity(TOPIC, "single", "keyed"), is_chained=True, appends="keyed"),
        ]
        self.clients = [everybody[number] for number in clients]
        self.workers[0].open()

    def tick(self) -> int:
        self.now_ms += 1
        return self.now_ms

    # ---- steps ---------------------------------------------------------------------------------------------

    def send(self, a: int, b: int) -> None:
        attempts = self.clients[a % len(self.clients)].send(1 + b % 3)
        if attempts:
            self.network.append(attempts)

    def deliver(self, a: int, b: int) -> None:
        """Requests overtake each other; those of a burst stay together."""
        if self.network:
            for attempt in self.network.pop(a % len(self.network)):
                self.workers[b % 2].submit(attempt)

    def send_and_deliver(self, a: int, b: int) -> None:
        self.send(a, b // 2)
        self.deliver(-1, b)

    def cut(self, a: int, b: int) -> None:
        """A client's connection ends before the answer; the request may arrive later, or never."""
        flying = [attempt for client in self.clients for attempt in client.flying]
        if not flying:
            return
        client = flying[a % len(flying)].client
        for attempt in list(client.flying) if client.in_bursts else [flying[a % len(flying)]]:
            attempt.heard = False
            client.hears(attempt, "unknown")
            if b % 2:
                self.network = [[one for one in group if one is not attempt] for group in self.network]

    def restart_client(self, a: int, b: int) -> None:
        client = self.clients[a % len(self.clients)]
        if client.has_sessions:
            client.restart()

    def gather(self, a: int, b: int) -> None:
        self.workers[a % 2].gather(1 + b % 5)

    def commit(self, a: int, b: int) -> None:
        self.workers[a % 2].finish("commit")

    def gather_and_commit(self, a: int, b: int) -> None:
        self.gather(a, b)
        self.commit(a, b)

    def fail(self, a: int, b: int) -> None:
        self.workers[a % 2].finish(("failed", "answer-lost", "commit-lost", "commit-late", "unavailable")[b % 5])

    def late_commit(self, a: int, b: int) -> None:
        """A commit that was on the wire arrives: no fence came before it."""
        if self.log.late is not None:
            (draft, in_flight, expired), self.log.late = self.log.late, None
            if draft.changed_topic({TOPIC: self.log.facts.id}) is None:
                self.log.append(draft, in_flight, expired)

    def open(self, a: int, b: int) -> None:
        """A worker takes the lane, or takes it back, whatever the other one believes."""
        self.workers[a % 2].open()

    def give_away(self, a: int, b: int) -> None:
        self.workers[a % 2].give_away(is_killed=b % 2 == 1)

    def expire(self, a: int, b: int) -> None:
        self.workers[a % 2].expire()

    def beat(self, a: int, b: int) -> None:
        """A client says that it lives; nobody waits for the answer."""
        self._alone(a, b, "beat")

    def forget(self, a: int, b: int) -> None:
        """An operator forgets a source."""
        self._alone(a, b, "forget")

    def steal(self, a: int, b: int) -> None:
        """Another token's writer: it writes a source that has a session, with its number or without, or opens one."""
        owned = [client for client in self.clients if (len(self.log.incarnations), client.source) in self.log.openings]
        if owned:
            client, since = owned[a % len(owned)], len(self.log.incarnations) - 1
            session, chunks = ((None, [_STOLEN]), (client.session, [_STOLEN]), (None, []))[b // 2 % 3]
            theft = Attempt(client, None, session, chunks, since, heard=False, kind="theft")
            self.workers[b % 2].submit(theft)

    def outside(self, a: int, b: int) -> None:
        """A writer with the source's token, and without the number of its session, which is used."""
        used = [client for client in self.clients if (len(self.log.incarnations), client.source) in self.log.used]
        if used:
            client, since = used[a % len(used)], len(self.log.incarnations) - 1
            attempt = Attempt(client, None, None, [_OUTSIDE], since, heard=False, kind="outside")
            self.workers[b % 2].submit(attempt)

    def _alone(self, a: int, b: int, kind: str) -> None:
        client = self.clients[a % len(self.clients)]
        since = len(self.log.incarnations) - 1
        attempt = Attempt(client, client.opening, client.session, [], since, heard=False, kind=kind)
        self.workers[b % 2].submit(attempt)

    def pass_time(self, a: int, b: int) -> None:
        """Sources that are silent are forgotten from now on."""
        self.expires = True
        self.now_ms += b

    def learn(self, a: int, b: int) -> None:
        """A worker's cached facts of the topic are renewed."""
        self.workers[a % 2].facts = self.log.facts

    def grow(self, a: int, b: int) -> None:
        self.log.facts = self.log.facts._replace(partitions=min(9, self.log.facts.partitions + 1))

    def recreate(self, a: int, b: int) -> None:
        """The topic is deleted and recreated: everything in it is gone, its states stay."""
        number = len(self.log.incarnations)
        if number < 4:
            self.log.incarnations.append([])
            self.log.facts = TopicFacts(TOPIC, b"%16d" % number, 2 + b % 3, 1 << 20)

    # ---- what must hold ------------------------------------------------------------------------------------

    def answer(self, attempt: Attempt, kind: str, outcome: Outcome | None = None) -> None:
        """An answer that lies is a violation, also when nobody hears it."""
        if attempt.answer is not None:
            return
        attempt.answer = kind
        source, since = attempt.client.source, attempt.since
        if kind == "fail" and attempt.appended:
            raise Violated(f"recorded, but answered as not recorded: {attempt.chunks}")
        if kind == "ok":
            chunks = attempt.chunks
            if attempt.kind == "append" and isinstance(outcome, WriteOutcome):
                chunks = placed(attempt, outcome)
            for chunk in chunks:
                if not self.log.holds(source, since, chunk.seqno, chunk):
                    raise Violated(f"acknowledged and lost: {chunk} of {source}")
        named = None
        if isinstance(outcome, Refusal):
            # A worker knows of a recreated topic a few seconds later; what it names then was once recorded.
            named, since = outcome.recorded, 0
        if kind == "ok" and isinstance(outcome, SessionOutcome):
            named = outcome.state.recorded
        if named is not None and not self.log.holds(source, since, named):
            raise Violated(f"{named} of {source} was named as recorded, and is not")
        if attempt.heard:
            attempt.client.hears(attempt, kind, outcome)

    def check_replay(self, table: SourceTable) -> None:
        """What a replay finds is what is in the log."""
        for client in self.clients:
            chunks = [chunk for owner, _, chunk in self.log.living() if owner == client.source]
            state = table.get(client.source, self.log.facts.id)
            known = (None, None) if state is None else (state.recorded, state.base)
            found = (chunks[0].seqno, chunks[-1].prev) if chunks else (None, None)
            if known != found:
                raise Violated(f"{client.source}: the state says {known}, the log {found}")
