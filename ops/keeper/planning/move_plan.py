"""Which replicas to move where: out of directories that failed or are retired, and for balance. Pure.

Invariants of every move:

* Its target works, is not retired, belongs to a broker that answers, and is filled to the limit at most.
* The partition has as many replicas after it as before, on different brokers, in as many racks or more.
* It leaves at least min.insync.replicas in sync: replicas that stay and are in sync, and those that are added, which
  Kafka takes into the new set only once they are in sync.
* For balance alone nothing moves while the cluster is not calm, nor a partition whose replicas are not all in sync.

The plan is made again at each look, from what Kafka shows, so nothing is lost where it was stopped: a replica that is
being moved counts where it will be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from logferry.gateway.contract.names import TopicPartition
from logferry.ops.keeper.planning.cluster_view import ClusterView, DirId, DirState, PartitionState, ReplicaState

MoveKind = Literal["dir", "broker"]
# So many moves of a plan are shown; it is made again before they are done.
_MOST: Final = 1000


class Move(NamedTuple):
    """``dir``: between two directories of a broker. ``broker``: ``after`` are the partition's replicas then."""

    kind: MoveKind
    tp: TopicPartition
    source: DirId
    target: DirId
    size_bytes: int
    why: str
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def key(self) -> tuple[TopicPartition, int]:
        return self.tp, self.target.broker


class MoveLimits(NamedTuple):
    fill_percent: float
    balance_percent: float
    bytes_at_once: int
    partitions_at_once: int
    balances_dirs: bool = False
    balances_brokers: bool = False


@dataclass(slots=True)
class MovePlan:
    """``moves``: all of them, in order. ``blocked``: what cannot be moved, by partition, and the way on."""

    moves: list[Move] = field(default_factory=list)
    blocked: dict[str, str] = field(default_factory=dict)


def plan_moves(
    view: ClusterView,
    limits: MoveLimits,
    retired: Mapping[DirId, str],
    may_balance: Callable[[str], bool] = lambda topic: True,
) -> MovePlan:
    """``retired``: directories to leave, with the reason; those that failed need not be among them."""
    planner = _Planner(view, limits, retired, may_balance)
    planner.evacuate()
    if view.is_calm and not planner.found.moves:
        if limits.balances_dirs:
            planner.balance_dirs()
        if limits.balances_brokers:
            planner.balance_brokers()
    return planner.found


def startable(view: ClusterView, plan: MovePlan, limits: MoveLimits) -> list[Move]:
    """The moves to start now, beside those that are under way, whoever started them."""
    adding = [p for p in view.partitions.values() if p.adding]
    moving = len(adding) + len(view.futures)
    moving_bytes = sum(view.sizes.get(p.tp, 0) for p in adding) + sum(view.sizes[tp] for tp, _ in view.futures)
    found: list[Move] = []
    for move in plan.moves:
        is_small = moving_bytes + move.size_bytes <= limits.bytes_at_once
        if moving >= limits.partitions_at_once or not (is_small or moving == 0):
            break
        found.append(move)
        moving, moving_bytes = moving + 1, moving_bytes + move.size_bytes
    return found


def elections(view: ClusterView, retired: Mapping[DirId, str]) -> list[TopicPartition]:
    """The partitions whose preferred replica is in sync and does not lead. None while the cluster is not calm."""
    if not view.is_calm:
        return []
    found = []
    for partition in view.partitions.values():
        first = partition.replicas[0]
        place = view.by_broker.get((partition.tp, first))
        fits = first in partition.isr and place is not None and place.dir not in retired
        if partition.leader != first and fits and not partition.adding:
            found.append(partition.tp)
    return found


class _Planner:
    """``used``: bytes of each directory once everything that is under way or planned is done."""

    def __init__(
        self,
        view: ClusterView,
        limits: MoveLimits,
        retired: Mapping[DirId, str],
        may_balance: Callable[[str], bool],
    ) -> None:
        self.view, self.limits, self.may_balance = view, limits, may_balance
        self.retired = {**retired, **{d.id: "it failed" for d in view.dirs.values() if d.error}}
        self.found = MovePlan()
        self.used = {place: state.used_bytes for place, state in view.dirs.items()}
        # A partition moves once in a plan.
        self.busy = {p.tp for p in view.partitions.values() if p.adding or p.removing}
        for (tp, broker), future in view.futures.items():
            self.busy.add(tp)
            self.used[future.dir] += view.sizes[tp] - future.size_bytes
            if (present := view.by_broker.get((tp, broker))) is not None:
                self.used[present.dir] -= present.size_bytes
        for partition in view.partitions.values():
            for broker in partition.adding:
                if (added := view.by_broker.get((partition.tp, broker))) is not None:
                    self.used[added.dir] += view.sizes[partition.tp] - added.size_bytes

    # ---- out of a directory ------------------------------------------------------------------------------------------

    def evacuate(self) -> None:
        for partition in sorted(self.view.partitions.values(), key=lambda p: (len(p.isr) - p.min_in_sync, p.tp)):
            if partition.tp in self.busy:
                continue
            for broker in partition.replicas:
                replica = self.view.by_broker.get((partition.tp, broker))
                if replica is not None and replica.dir in self.retired:
                    self._leave(partition, replica)
                elif self.view.is_lost(partition.tp, broker):
                    failed = self.view.failed_dirs(broker)[0]
                    self._to_other_broker(partition, failed, self.view.sizes.get(partition.tp, 0))
                if partition.tp in self.busy:
                    break

    def _leave(self, partition: PartitionState, replica: ReplicaState) -> None:
        """A directory of the same broker is better: nothing crosses the network, and the replicas in sync stay."""
        size, broker = replica.size_bytes, replica.dir.broker
        if partition.leader < 0:
            self.found.blocked[partition.name] = f"{replica.dir}: it has no leader: start the brokers of its replicas"
        elif self.view.answers(broker) and (target := self._best_dir(broker, size)) is not None:
            why = f"{replica.dir}: {self.retired[replica.dir]}"
            self._add(Move("dir", partition.tp, replica.dir, target, size, why, partition.replicas, partition.replicas))
        else:
            self._to_other_broker(partition, replica.dir, size)

    def _to_other_broker(self, partition: PartitionState, source: DirId, size: int) -> None:
        why = f"{source}: {self.retired[source]}"
        options = self._other_brokers(partition, source.broker, size)
        if not options:
            text = "no other broker that answers has room for it, in as many racks: add a broker or a directory"
            self.found.blocked[partition.name] = f"{why}; {text}"
            return
        target = min(options, key=lambda place: (self._share(place), place))
        after = tuple(target.broker if broker == source.broker else broker for broker in partition.replicas)
        if not keeps_min_in_sync(partition, after):
            self.found.blocked[partition.name] = f"{why}; too few of its replicas are in sync: start their brokers"
            return
        self._add(Move("broker", partition.tp, source, target, size, why, partition.replicas, after))

    # ---- balance -----------------------------------------------------------------------------------------------------

    def balance_dirs(self) -> None:
        for broker in sorted(self.view.brokers):
            self._level([[place] for place in self._dirs_of(broker)], "dir")

    def balance_brokers(self) -> None:
        groups = [self._dirs_of(broker) for broker in sorted(self.view.brokers)]
        self._level([group for group in groups if group], "broker")

    def _level(self, groups: list[list[DirId]], kind: MoveKind) -> None:
        """Moves from the fullest group to the emptiest, while the difference is over the limit and a move lessens it.

        A replica of at most half of the difference is moved, so the order of the two never turns.
        """
        while len(groups) > 1 and len(self.found.moves) < _MOST:
            groups.sort(key=lambda group: (self._group_share(group), group))
            low, high = groups[0], groups[-1]
            difference = self._group_share(high) - self._group_share(low)
            if 100 * difference <= self.limits.balance_percent:
                return
            most = difference / 2 * min(self._total(low), self._total(high))
            move = self._levelling(high, low, most, kind, f"balance: {100 * difference:.0f} % fuller")
            if move is None:
                return
            self._add(move)

    def _levelling(self, high: list[DirId], low: list[DirId], most: float, kind: MoveKind, why: str) -> Move | None:
        for replica in sorted(self._candidates(high), key=lambda r: (-r.size_bytes, r.tp)):
            partition, size = self.view.partitions[replica.tp], replica.size_bytes
            if not 0 < size <= most:
                continue
            if kind == "dir":
                target, after = self._best_dir(low[0].broker, size, low), partition.replicas
            else:
                options = self._other_brokers(partition, replica.dir.broker, size, {low[0].broker})
                target = min(options, key=lambda place: (self._share(place), place), default=None)
                if target is None:
                    continue
                after = tuple(target.broker if b == replica.dir.broker else b for b in partition.replicas)
            if target is not None and keeps_min_in_sync(partition, after):
                return Move(kind, replica.tp, replica.dir, target, size, why, partition.replicas, after)
        return None

    def _candidates(self, places: Sequence[DirId]) -> Iterator[ReplicaState]:
        for replica in self.view.replicas:
            partition = self.view.partitions.get(replica.tp)
            if replica.dir not in places or replica.is_future or partition is None or not partition.is_whole:
                continue
            if replica.tp not in self.busy and self.may_balance(replica.tp[0]):
                yield replica

    # ---- targets -----------------------------------------------------------------------------------------------------

    def _dirs_of(self, broker: int) -> list[DirId]:
        return sorted(
            place
            for place, state in self.view.dirs.items()
            if place.broker == broker and place not in self.retired and state.total_bytes > 0
        )

    def _best_dir(self, broker: int, size: int, among: Sequence[DirId] | None = None) -> DirId | None:
        """The directory of the broker with the most room in proportion, if the replica fits there."""
        places = self._dirs_of(broker) if among is None else among
        fitting = [place for place in places if self._has_room(self.view.dirs[place], size)]
        return min(fitting, key=lambda place: (self._share(place), place), default=None)

    def _has_room(self, state: DirState, size: int) -> bool:
        return self.used[state.id] + size <= state.total_bytes * self.limits.fill_percent / 100

    def _other_brokers(
        self, partition: PartitionState, leaving: int, size: int, among: set[int] | None = None
    ) -> list[DirId]:
        """The best directory of each broker that may take the place of ``leaving``."""
        stay = [broker for broker in partition.replicas if broker != leaving]
        racks = len({self._rack(broker) for broker in partition.replicas})
        found = []
        for broker in sorted(self.view.brokers) if among is None else sorted(among):
            if broker in partition.replicas:
                continue
            # Only brokers that answer have directories in a look.
            target = self._best_dir(broker, size)
            if target is not None and len({self._rack(b) for b in (*stay, broker)}) >= racks:
                found.append(target)
        return found

    def _rack(self, broker: int) -> str:
        known = self.view.brokers.get(broker)
        return known.rack if known else ""

    def _share(self, place: DirId) -> float:
        return self.used[place] / self.view.dirs[place].total_bytes

    def _total(self, group: Sequence[DirId]) -> int:
        return sum(self.view.dirs[place].total_bytes for place in group)

    def _group_share(self, group: Sequence[DirId]) -> float:
        return sum(self.used[place] for place in group) / self._total(group)

    def _add(self, move: Move) -> None:
        self.busy.add(move.tp)
        self.used[move.target] += move.size_bytes
        if move.source in self.used:
            self.used[move.source] -= move.size_bytes
        if len(self.found.moves) < _MOST:
            self.found.moves.append(move)


def keeps_min_in_sync(partition: PartitionState, after: Sequence[int]) -> bool:
    """Whether enough replicas are in sync once the partition has these: added ones are in sync before Kafka changes."""
    stay = sum(broker in partition.isr for broker in after if broker in partition.replicas)
    added = sum(broker not in partition.replicas for broker in after)
    # One that stays holds what is acknowledged: the added ones read it from there.
    return partition.leader >= 0 and bool(partition.isr) and stay + added >= partition.min_in_sync
