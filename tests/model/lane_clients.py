"""The log of the lane's world, and the clients that keep the documented rules.

With ``prev`` up to three requests in flight, and that only after the first acknowledgement; without it one, or several
that reach one worker together and in order; the same chunk again after "retry" and "unknown"; after a restart a new
session, which says where to continue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from logferry.gateway.contract.chunk import Chunk
from logferry.gateway.contract.source_state import SourceIdentity
from logferry.gateway.kafka.types import TopicFacts
from logferry.gateway.lanes.dedup import Refusal
from logferry.gateway.lanes.transaction import (
    Draft,
    ForgetOutcome,
    HeartbeatOutcome,
    Outcome,
    SessionOutcome,
    WriteOutcome,
)

TOPIC = "dc1.t"
WINDOW = 3
# For so long the same key is a duplicate.
REPEAT_MS = 20


class Violated(AssertionError):
    """The promise does not hold."""


@dataclass(eq=False)
class Attempt:
    """One request on its way.

    ``kind``: ``write`` (without chunks the opening of a session), ``beat``, ``forget``, ``theft``: a ``write`` with
    another token than the source's, ``outside``: a ``write`` without the number of the source's session, which is
    used, and with its token, or ``append``: without seqnos, with a ``key`` or not.

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
    kind: str = "write"
    key: str | None = None


@dataclass
class Log:
    """What Kafka holds. ``incarnations``: of the topic, each a list of (source, partition, chunk); no chunk: forgotten.

    ``openings``: the newest session of a source in an incarnation; ``used``: those whose number came with a chunk or
    heartbeat since; ``late``: a commit that is still on the wire. ``keyed``: when a key was recorded in an incarnation.
    """

    facts: TopicFacts = field(default_factory=lambda: TopicFacts(TOPIC, b"%16d" % 0, 2, 1 << 20))
    incarnations: list[list[tuple[SourceIdentity, int, Chunk | None]]] = field(default_factory=lambda: [[]])
    states: list[tuple[bytes, bytes | None]] = field(default_factory=list)
    recorded: list[Attempt] = field(default_factory=list)
    epoch: int = 0
    openings: dict[tuple[int, SourceIdentity], Attempt] = field(default_factory=dict)
    used: set[tuple[int, SourceIdentity]] = field(default_factory=set)
    late: tuple[Draft, list[tuple[Attempt, Outcome]], list[bytes]] | None = None
    keyed: dict[tuple[int, str], int] = field(default_factory=dict)

    def fences(self, epoch: int) -> bool:
        """Is a newer producer of the lane there?"""
        return epoch != self.epoch

    def append(self, draft: Draft, in_flight: list[tuple[Attempt, Outcome]], expired: Iterable[bytes]) -> None:
        """Commits. In the log each chunk is once, in order, its chain whole, on the partition of its key.

        ``expired``: the state keys of sources that the draft forgets by itself.
        """
        log = self.incarnations[-1]
        for attempt, outcome in in_flight:
            source = attempt.client.source
            opened = self.openings.get((len(self.incarnations), source))
            # After the source was forgotten, it may have become the other token's.
            is_stolen = opened is not None and opened.kind == attempt.kind == "theft"
            if attempt.kind == "outside" and isinstance(outcome, WriteOutcome) and outcome.written:
                raise Violated(f"recorded without the number of the session, which is used: {attempt.chunks}")
            if attempt.session is not None and isinstance(outcome, WriteOutcome | HeartbeatOutcome):
                self.used.add((len(self.incarnations), source))
            if isinstance(outcome, SessionOutcome):
                if attempt.kind == "theft" and opened is not None and not is_stolen:
                    raise Violated(f"another token opened a session of {source}, whose session lives")
                self.openings[len(self.incarnations), source] = attempt
                self.used.discard((len(self.incarnations), source))
            if isinstance(outcome, ForgetOutcome):
                self._forget(source)
                attempt.appended = True
            if not isinstance(outcome, WriteOutcome) or not outcome.written:
                continue
            if outcome.receipt is not None:
                self._check_append(attempt, outcome, draft.now_ms)
            if attempt.answer not in (None, "unknown") or attempt.appended:
                raise Violated(f"recorded after it was answered {attempt.answer}: {attempt.chunks}")
            if opened not in (None, attempt.opening) and not is_stolen:
                raise Violated(
                    f"recorded though a newer session was open: {attempt.chunks} of session {attempt.session}"
                )
            attempt.appended = True
            self.recorded.append(attempt)
            for chunk in placed(attempt, outcome):
                self._check(attempt.client, outcome.state.partition, chunk)
                log.append((source, outcome.state.partition, chunk))
        for key in expired:
            self._forget(SourceIdentity.of_state_key(key))
        self.states.extend(draft.states.items())

    def _check_append(self, attempt: Attempt, outcome: WriteOutcome, now_ms: int) -> None:
        """A key is recorded once in its window, and a seqno never again, also after the source was forgotten."""
        if attempt.key is not None:
            before_ms = self.keyed.get((len(self.incarnations), attempt.key))
            if before_ms is not None and now_ms - before_ms <= REPEAT_MS:
                raise Violated(f"the key {attempt.key} is recorded twice, at {before_ms} and {now_ms}")
            self.keyed[len(self.incarnations), attempt.key] = now_ms
        first = placed(attempt, outcome)[0].seqno
        for owner, _, chunk in self.incarnations[-1]:
            if owner == attempt.client.source and chunk is not None and chunk.seqno >= first:
                raise Violated(f"{chunk.seqno} of {owner} is given twice")

    def _forget(self, source: SourceIdentity) -> None:
        """What was recorded of it before counts no more: it may be recorded again, or be answered as not recorded."""
        for attempt in self.recorded:
            if attempt.client.source == source and attempt.kind == "write":
                attempt.appended = False
        self.incarnations[-1].append((source, -1, None))
        self.openings.pop((len(self.incarnations), source), None)
        self.used.discard((len(self.incarnations), source))

    def living(self) -> list[tuple[SourceIdentity, int, Chunk]]:
        """What is recorded of sources since they were forgotten last, in the present topic, the newest first."""
        forgotten, found = set[SourceIdentity](), []
        for source, partition, chunk in reversed(self.incarnations[-1]):
            if chunk is None:
                forgotten.add(source)
            elif source not in forgotten:
                found.append((source, partition, chunk))
        return found

    def _check(self, client: Client, partition: int, chunk: Chunk) -> None:
        for other, pinned, before in self.living():
            if other.key == client.source.key and pinned != partition:
                raise Violated(f"{client.source} on {partition}, {other} on {pinned}: one key, two partitions")
            if other == client.source:
                if before.seqno >= chunk.seqno:
                    raise Violated(f"{chunk} follows {before}: doubled or out of order")
                if client.is_chained and chunk.prev != before.seqno:
                    raise Violated(f"{chunk} follows {before}: the chain is broken")
                return

    def holds(self, source: SourceIdentity, since: int, seqno: int, chunk: Chunk | None = None) -> bool:
        """Is it in an incarnation that existed since then?"""
        return any(
            owner == source
            and recorded is not None
            and (recorded.seqno == seqno if chunk is None else recorded == chunk)
            for incarnation in self.incarnations[since:]
            for owner, _, recorded in incarnation
        )


def placed(attempt: Attempt, outcome: WriteOutcome) -> list[Chunk]:
    """The chunks of the request that were not recorded before, with the seqnos that they were recorded with."""
    if outcome.receipt is None:
        return attempt.chunks[outcome.duplicates :]
    first = outcome.receipt.first_seqno
    assert outcome.receipt.last_seqno == first + len(attempt.chunks) - 1
    return [chunk._replace(seqno=n, prev=n - 1) for n, chunk in enumerate(attempt.chunks, first)]


@dataclass(eq=False)
class Client:
    """One source and who writes it. ``plan``: each cuts its chunks in its own way.

    ``appends``: without seqnos, ``plain`` or ``keyed``: with a key, the same again as long as it is not acknowledged,
    and sometimes after that.
    """

    log: Log
    source: SourceIdentity
    is_chained: bool = False
    has_sessions: bool = False
    in_bursts: bool = False
    token: str | None = None
    appends: str | None = None
    again: list[tuple[str, list[Chunk]]] = field(default_factory=list)
    plan: int = 0
    session: int | None = None
    opening: Attempt | None = None
    position: int = 0
    has_ack: bool = False
    todo: list[Chunk] = field(default_factory=list)
    flying: list[Attempt] = field(default_factory=list)

    def send(self, count: int) -> list[Attempt]:
        """The next requests by the rules; none when the rules say to wait."""
        if self.appends is not None:
            return self._append(count) if len(self.flying) < WINDOW else []
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

    def _append(self, count: int) -> list[Attempt]:
        if self.again and count > 1:
            key, chunks = self.again.pop(0)
        else:
            self.position += 1
            key, chunks = (
                str(self.position),
                [Chunk(0, None, 1, {}, b"%d %d" % (self.position, n)) for n in range(count)],
            )
        attempt = self._attempt(chunks)
        attempt.kind, attempt.key = "append", key if self.appends == "keyed" else None
        return [attempt]

    def _attempt(self, chunks: list[Chunk]) -> Attempt:
        attempt = Attempt(self, self.opening, self.session, chunks, len(self.log.incarnations) - 1)
        self.flying.append(attempt)
        return attempt

    def hears(self, attempt: Attempt, answer: str, outcome: Outcome | None = None) -> None:
        if attempt not in self.flying:
            return
        self.flying.remove(attempt)
        if self.appends is not None:
            if attempt.key is not None and (answer != "ok" or self.position % 3 == 0):
                self.again.append((attempt.key, attempt.chunks))
            return
        if answer == "ok" and isinstance(outcome, SessionOutcome):
            self.restart(outcome.state.session, attempt)
            self.todo, self.position, self.has_ack = [], outcome.state.recorded or 0, False
        elif answer == "ok":
            self.has_ack = True
        elif isinstance(outcome, Refusal) and outcome.kind == "superseded":
            self.restart()
        else:
            # What lies before the base can't be recorded any more: the source continues without it.
            lost = outcome.recorded or 0 if isinstance(outcome, Refusal) and outcome.kind == "gap" else 0
            again = [chunk for chunk in attempt.chunks if chunk.seqno > lost]
            self.todo = sorted(self.todo + again, key=lambda chunk: chunk.seqno)

    def restart(self, session: int | None = None, opening: Attempt | None = None) -> None:
        """Starts again, without a session or with one; answers to what is under way are not heard."""
        self.session, self.opening = session, opening
        self.plan += 1
        self.flying.clear()
