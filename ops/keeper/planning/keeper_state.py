"""The keeper's state, as its log says: what it began, what it throttles, whether it is paused. Pure.

The log is the only place where it is kept. A keeper that takes over reads it from the beginning, and writes the sum of
it with its first record, so that old records may go by retention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from logferry.gateway.contract.names import TopicPartition
from logferry.ops.keeper.planning.cluster_view import ClusterView, DirId
from logferry.ops.keeper.planning.move_plan import Move

# Kinds of records. A keeper begins and ends its time; an act is written before it is carried out, its end after it.
BEGAN: Final = "began"
LEFT: Final = "left"
PAUSED: Final = "paused"
RESUMED: Final = "resumed"
MOVE: Final = "move"
MOVE_ENDED: Final = "move-ended"
THROTTLE: Final = "throttle"
ELECT: Final = "elect"
DELETE: Final = "delete"
DELETED: Final = "deleted"
FAILED: Final = "failed"

_RATE: Final = "replication.throttled.rate"
_REPLICAS: Final = "replication.throttled.replicas"
_DIRS: Final = "replica.alter.log.dirs.io.max.bytes.per.second"
_SIDES: Final = ("leader", "follower")
# After the files are removed by Kafka's timer.
_MARGIN_MS: Final = 5000
Settings = dict[str, dict[str, str]]


class PendingDeletion(NamedTuple):
    """Bytes of a directory that are deleted, and whose files Kafka has not removed yet, until ``until_ms``."""

    dir: DirId
    tp: TopicPartition
    size_bytes: int
    until_ms: int


@dataclass(slots=True)
class KeeperState:
    """``topics``, ``brokers``: throttles that the keeper has set, by name. ``paused``: why, None: it is not."""

    paused: str | None = None
    moves: dict[str, Move] = field(default_factory=dict)
    topics: Settings = field(default_factory=dict)
    brokers: Settings = field(default_factory=dict)
    deletions: list[PendingDeletion] = field(default_factory=list)

    def apply(self, record: Mapping[str, Any]) -> None:
        """Takes a record of the log. One of a kind that is not known changes nothing."""
        kind = record.get("kind")
        if kind == BEGAN:
            self.restore(record["state"])
        elif kind in (PAUSED, RESUMED):
            self.paused = record["why"] if kind == PAUSED else None
        elif kind == MOVE:
            move = move_of(record["move"])
            self.moves[name_of(move)] = move
        elif kind == MOVE_ENDED:
            self.moves.pop(record["replica"], None)
        elif kind == THROTTLE:
            self.topics, self.brokers = record["topics"], record["brokers"]
        elif kind == DELETE:
            self.deletions += [_pending(one) for one in record["pending"]]

    def snapshot(self) -> dict[str, Any]:
        return {
            "paused": self.paused,
            "moves": [move_document(move) for move in self.moves.values()],
            "topics": self.topics,
            "brokers": self.brokers,
            "pending": [pending_document(one) for one in self.deletions],
        }

    def restore(self, said: Mapping[str, Any]) -> None:
        moves = map(move_of, said["moves"])
        self.paused, self.moves = said["paused"], {name_of(move): move for move in moves}
        self.topics, self.brokers = said["topics"], said["brokers"]
        self.deletions = [_pending(one) for one in said["pending"]]

    def pending_bytes(self, place: DirId, now_ms: int) -> int:
        self.deletions = [one for one in self.deletions if one.until_ms > now_ms]
        return sum(one.size_bytes for one in self.deletions if one.dir == place)


def replayed(records: Iterable[Mapping[str, Any]]) -> KeeperState:
    state = KeeperState()
    for record in records:
        state.apply(record)
    return state


def ended_moves(state: KeeperState, view: ClusterView) -> dict[str, str]:
    """The moves that are over, by name, and how: ``done``, or ``gone``: Kafka does not know of it, it is planned again.

    A look must lie between the start of a move and this. A broker that does not answer says nothing of its moves.
    """
    found = {}
    for name, move in state.moves.items():
        partition = view.partitions.get(move.tp)
        if partition is None:
            found[name] = "gone"
        elif move.kind == "broker":
            if not partition.adding and not partition.removing:
                found[name] = "done" if move.target.broker in partition.replicas else "gone"
        elif view.answers(move.target.broker) and move.key not in view.futures:
            present = view.by_broker.get(move.key)
            found[name] = "done" if present is not None and present.dir == move.target else "gone"
    return found


def wanted_throttles(moves: Iterable[Move], bytes_per_s: int) -> tuple[Settings, Settings]:
    """The settings of topics and of brokers while these moves are under way; Kafka's own throttles (KIP-73, KIP-113).

    Only the listed replicas are throttled: a follower of another partition, or in sync, is not slowed down.
    """
    listed: dict[str, dict[str, set[str]]] = {}
    brokers: Settings = {}
    for move in moves:
        topic, number = move.tp
        if move.kind == "dir":
            brokers.setdefault(str(move.target.broker), {})[_DIRS] = str(bytes_per_s)
            continue
        sides = listed.setdefault(topic, {side: set() for side in _SIDES})
        sides["leader"] |= {f"{number}:{broker}" for broker in move.before}
        sides["follower"].add(f"{number}:{move.target.broker}")
        for broker in {*move.before, move.target.broker}:
            brokers.setdefault(str(broker), {}).update({f"{side}.{_RATE}": str(bytes_per_s) for side in _SIDES})
    topics = {
        topic: {f"{side}.{_REPLICAS}": ",".join(sorted(found)) for side, found in sides.items()}
        for topic, sides in listed.items()
    }
    return topics, brokers


def changes(before: Settings, after: Settings) -> dict[str, dict[str, str | None]]:
    """What leads from one to the other; None removes a setting. Nothing that was not set before is removed."""
    found: dict[str, dict[str, str | None]] = {}
    for name in {*before, *after}:
        old, new = before.get(name, {}), after.get(name, {})
        differ = {key: new.get(key) for key in {*old, *new} if old.get(key) != new.get(key)}
        if differ:
            found[name] = differ
    return found


def name_of(move: Move) -> str:
    return f"{move.tp[0]}-{move.tp[1]}@{move.target.broker}"


def move_document(move: Move) -> dict[str, Any]:
    return {
        **move._asdict(),
        "tp": list(move.tp),
        "source": list(move.source),
        "target": list(move.target),
        "before": list(move.before),
        "after": list(move.after),
    }


def move_of(said: Mapping[str, Any]) -> Move:
    return Move(
        said["kind"],
        (said["tp"][0], said["tp"][1]),
        DirId(*said["source"]),
        DirId(*said["target"]),
        said["size_bytes"],
        said["why"],
        tuple(said["before"]),
        tuple(said["after"]),
    )


def pending_document(one: PendingDeletion) -> dict[str, Any]:
    return {**one._asdict(), "dir": list(one.dir), "tp": list(one.tp)}


def _pending(said: Mapping[str, Any]) -> PendingDeletion:
    tp = (said["tp"][0], said["tp"][1])
    return PendingDeletion(DirId(*said["dir"]), tp, said["size_bytes"], said["until_ms"])


def pending_of(
    view: ClusterView, tp: TopicPartition, size_bytes: int, now_ms: int, check_s: float
) -> list[PendingDeletion]:
    """What the deletion frees in each directory with a replica, and until when it may take.

    Kafka removes segments below the first offset when it looks for old ones, each ``check_s``, and their files
    `file.delete.delay.ms` later.
    """
    delay_ms = int(view.settings.get(tp[0], {}).get("file.delete.delay.ms") or 60_000)
    until_ms = now_ms + int(1000 * check_s) + delay_ms + _MARGIN_MS
    places = [replica.dir for replica in view.replicas if replica.tp == tp and not replica.is_future]
    return [PendingDeletion(place, tp, size_bytes, until_ms) for place in places]
