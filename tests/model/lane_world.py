"""A world around the pure part of a lane: a log, two workers that may both believe they own it, clients, a network.

The workers do with `Draft`, `SourceTable` and `resolve` what the lane does; all that can go wrong between them and
the log is a step that a test may take at any moment. The reference is a list for each incarnation of the topic.
`Violated` is raised at the first step after which the promise does not hold; see `Log.append` and `World.answer`.

The clients keep the documented rules: with ``prev`` up to three requests in flight, and that only after the first
acknowledgement; without it one, or several that reach one worker together and in order; the same chunk again after
"retry" and "unknown"; after a restart a new session, which says where to go on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from logferry.gateway import transaction
from logferry.gateway.contract import Chunk
from logferry.gateway.sources import Refusal, Source, SourceTable
from logferry.gateway.transaction import Draft, OpenSession, Outcome, SessionOpened, TopicFacts, Write, Written

TOPIC = "dc1.t"
WINDOW = 3


class Violated(AssertionError):
    """The promise does not hold."""


@dataclass(eq=False)
class Attempt:
    """One request on its way, without chunks the opening of a session.

    ``opening``: the request that opened its session; ``since``: the topic's incarnation when it was sent.
    """

    client: Client
    opening: Attempt | None
    session: int | None
    chunks: list[Chunk]
    since: int
    answer: str | None = None
    heard: bool = True  # does the client still wait?
    appended: bool = False


@dataclass
class Log:
    """What Kafka holds. ``incarnations``: of the topic, each a list of (source, partition, chunk).

    ``openings``: the newest session of a source in an incarnation; ``late``: a commit that is still on the wire.
    """

    facts: TopicFacts = field(default_factory=lambda: TopicFacts(TOPIC, b"%16d" % 0, 2, 1 << 20))
    incarnations: list[list[tuple[Source, int, Chunk]]] = field(default_factory=lambda: [[]])
    states: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    epoch: int = 0
    openings: dict[tuple[int, Source], Attempt] = field(default_factory=dict)
    late: tuple[Draft, list[tuple[Attempt, Outcome]]] | None = None

    def fences(self, epoch: int) -> bool:
        """Is a newer producer of the lane there?"""
        return epoch != self.epoch

    def append(self, draft: Draft, in_flight: list[tuple[Attempt, Outcome]]) -> None:
        """Commits. In the log each chunk is once, in order, its chain whole, on the partition of its key."""
        log = self.incarnations[-1]
        for attempt, outcome in in_flight:
            source = attempt.client.source
            if isinstance(outcome, SessionOpened):
                self.openings[len(self.incarnations), source] = attempt
            if not isinstance(outcome, Written) or not outcome.written:
                continue
            if attempt.answer not in (None, "unknown") or attempt.appended:
                raise Violated(f"recorded after it was answered {attempt.answer}: {attempt.chunks}")
            if attempt.opening is not self.openings.get((len(self.incarnations), source), attempt.opening):
                raise Violated(
                    f"recorded though a newer session was open: {attempt.chunks} of session {attempt.session}"
                )
            attempt.appended = True
            for chunk in attempt.chunks[outcome.duplicates :]:
                self._check(attempt.client, outcome.state.partition, chunk)
                log.append((source, outcome.state.partition, chunk))
        self.states.extend(draft.states.items())

    def _check(self, client: Client, partition: int, chunk: Chunk) -> None:
        for other, pinned, before in reversed(self.incarnations[-1]):
            if other.key == client.source.key and pinned != partition:
                raise Violated(f"{client.source} on {partition}, {other} on {pinned}: one key, two partitions")
            if other == client.source:
                if before.seqno >= chunk.seqno:
                    raise Violated(f"{chunk} follows {before}: doubled or out of order")
                if client.is_chained and chunk.prev != before.seqno:
                    raise Violated(f"{chunk} follows {before}: the chain is broken")
                return

    def holds(self, source: Source, since: int, seqno: int, chunk: Chunk | None = None) -> bool:
        """Is it in an incarnation that existed since then?"""
        return any(
            owner == source and (recorded.seqno == seqno if chunk is None else recorded == chunk)
            for incarnation in self.incarnations[since:]
            for owner, _, recorded in incarnation
        )


class Worker:
    """One worker's lane: what `lane.Lane` does with requests, without waiting for anything."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.table, self.epoch, self.facts = SourceTable(), -1, world.log.facts
        self.is_closed, self.is_open = True, False
        self.queue: deque[Attempt] = deque()
        self.draft: Draft | None = None
        self.in_flight: list[tuple[Attempt, Outcome]] = []

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
            state = self.table.get(attempt.client.source, self._request(attempt).topic.id)
            match transaction.resolve(outcome, state):
                case True:
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
        draft = Draft(self.table, self.world.tick())
        while self.queue and count:
            count -= 1
            attempt = self.queue.popleft()
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
        self.draft = None if draft.is_empty() else draft

    def finish(self, how: str) -> None:
        """Ends the transaction: ``commit``, ``answer-lost``, ``commit-lost``, ``commit-late`` or ``failed``."""
        draft, log = self.draft, self.world.log
        if draft is None:
            return
        self.draft = None
        if how == "failed" or draft.changed_topic({TOPIC: log.facts.id}) is not None:
            self.facts, self.is_open = log.facts, False
            for attempt, _ in self.in_flight:
                self.world.answer(attempt, "fail")
            self.in_flight.clear()
            self._fail_queued(draft)
            return
        fenced = log.fences(self.epoch)
        if not fenced and how == "commit-late":
            log.late = draft, list(self.in_flight)
        if not fenced and how in ("commit", "answer-lost"):
            log.append(draft, self.in_flight)
        if fenced or how != "commit":
            self.is_open = False
            self._fail_queued(draft)
            return
        for key, raw in draft.states.items():
            self.table.apply(key, raw)
        for attempt, outcome in self.in_flight:
            self.world.answer(attempt, "fail" if isinstance(outcome, Refusal) else "ok", outcome)
        self.in_flight.clear()

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
                    self.world.log.late = self.draft, list(self.in_flight)
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

    def _request(self, attempt: Attempt) -> Write | OpenSession:
        source = attempt.client.source
        facts = self.world.facts_at_delivery[attempt]
        if not attempt.chunks:
            return OpenSession(facts, source)
        return Write(facts, source, attempt.session, attempt.chunks, 1)


@dataclass(eq=False)
class Client:
    """One source and who writes it. ``plan``: each cuts its chunks in its own way."""

    world: World
    source: Source
    is_chained: bool = False
    has_sessions: bool = False
    in_bursts: bool = False
    plan: int = 0
    session: int | None = None
    opening: Attempt | None = None
    position: int = 0
    has_ack: bool = False
    todo: list[Chunk] = field(default_factory=list)
    flying: list[Attempt] = field(default_factory=list)

    def send(self, count: int) -> list[Attempt]:
        """The next requests by the rules; none when the rules say to wait."""
        if self.has_sessions and self.session is None:
            return [] if self.flying else [self._attempt([])]
        room = (WINDOW if self.is_chained and self.has_ack else 1) - len(self.flying)
        if room < 1:
            return []
        while len(self.todo) < count:
            prev, self.position = self.position, self.position + 1 + (self.position + self.plan) % 3
            data = b"%d" % self.plan
            self.todo.append(Chunk(self.position, prev if self.is_chained else None, 1, {}, data))
        chunks, self.todo = self.todo[:count], self.todo[count:]
        if self.in_bursts:
            return [self._attempt([chunk]) for chunk in chunks]
        return [self._attempt(chunks)]

    def _attempt(self, chunks: list[Chunk]) -> Attempt:
        attempt = Attempt(self, self.opening, self.session, chunks, len(self.world.log.incarnations) - 1)
        self.flying.append(attempt)
        return attempt

    def hears(self, attempt: Attempt, answer: str, outcome: Outcome | None = None) -> None:
        if attempt not in self.flying:
            return
        self.flying.remove(attempt)
        if answer == "ok" and isinstance(outcome, SessionOpened):
            self.restart(outcome.state.session, attempt)
            self.todo, self.position, self.has_ack = [], outcome.state.recorded or 0, False
        elif answer == "ok":
            self.has_ack = True
        elif isinstance(outcome, Refusal) and outcome.kind == "superseded":
            self.restart()
        else:
            # What lies before the base can't be recorded any more: the source goes on without it.
            lost = outcome.recorded or 0 if isinstance(outcome, Refusal) and outcome.kind == "gap" else 0
            again = [chunk for chunk in attempt.chunks if chunk.seqno > lost]
            self.todo = sorted(self.todo + again, key=lambda chunk: chunk.seqno)

    def restart(self, session: int | None = None, opening: Attempt | None = None) -> None:
        """Begins anew, without a session or with one; answers to what is under way are not heard."""
        self.session, self.opening = session, opening
        self.plan += 1
        self.flying.clear()


class World:
    """Everything, and the steps that may be taken in any order. Each choice is a number, taken modulo what there is."""

    def __init__(self, clients: list[int]) -> None:
        self.now_ms = 1000
        self.log = Log()
        self.facts_at_delivery: dict[Attempt, TopicFacts] = {}
        self.network: list[list[Attempt]] = []
        self.workers = [Worker(self), Worker(self)]
        everybody = [
            Client(self, Source(TOPIC, None, "chained"), is_chained=True),
            Client(self, Source(TOPIC, None, "sessions"), is_chained=True, has_sessions=True),
            Client(self, Source(TOPIC, "single", "one"), is_chained=False),
            Client(self, Source(TOPIC, None, "single"), in_bursts=True),
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
        self.workers[a % 2].finish(("failed", "answer-lost", "commit-lost", "commit-late")[b % 4])

    def late_commit(self, a: int, b: int) -> None:
        """A commit that was on the wire arrives: no fence came before it."""
        if self.log.late is not None:
            (draft, in_flight), self.log.late = self.log.late, None
            if draft.changed_topic({TOPIC: self.log.facts.id}) is None:
                self.log.append(draft, in_flight)

    def open(self, a: int, b: int) -> None:
        """A worker takes the lane, or takes it back, whatever the other one believes."""
        self.workers[a % 2].open()

    def give_away(self, a: int, b: int) -> None:
        self.workers[a % 2].give_away(is_killed=b % 2 == 1)

    def expire(self, a: int, b: int) -> None:
        self.workers[a % 2].expire()

    def learn(self, a: int, b: int) -> None:
        """A worker's cached facts of the topic are renewed."""
        self.workers[a % 2].facts = self.log.facts

    def grow(self, a: int, b: int) -> None:
        self.log.facts = self.log.facts._replace(partitions=min(9, self.log.facts.partitions + 1))

    def recreate(self, a: int, b: int) -> None:
        """The topic is deleted and created anew: everything in it is gone, its states stay."""
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
            for chunk in attempt.chunks:
                if not self.log.holds(source, since, chunk.seqno, chunk):
                    raise Violated(f"acknowledged and lost: {chunk} of {source}")
        named = None
        if isinstance(outcome, Refusal):
            # A worker knows of a topic created anew a few seconds later; what it names then was once recorded.
            named, since = outcome.recorded, 0
        if kind == "ok" and isinstance(outcome, SessionOpened):
            named = outcome.state.recorded
        if named is not None and not self.log.holds(source, since, named):
            raise Violated(f"{named} of {source} was named as recorded, and is not")
        if attempt.heard:
            attempt.client.hears(attempt, kind, outcome)

    def check_replay(self, table: SourceTable) -> None:
        """What a replay finds is what is in the log."""
        for client in self.clients:
            chunks = [chunk for owner, _, chunk in self.log.incarnations[-1] if owner == client.source]
            state = table.get(client.source, self.log.facts.id)
            known = (None, None) if state is None else (state.recorded, state.base)
            found = (chunks[-1].seqno, chunks[0].prev) if chunks else (None, None)
            if known != found:
                raise Violated(f"{client.source}: the state says {known}, the log {found}")
