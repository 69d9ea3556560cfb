"""Clusters as the keeper sees them, made by hand or at random, and what becomes of them when moves are done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from logferry.ops.keeper.planning.cluster_view import (
    BrokerState,
    ClusterView,
    DirId,
    DirState,
    PartitionState,
    ReplicaState,
)
from logferry.ops.keeper.planning.move_plan import Move

SIZE = 1000
FAILED = 56


def view_of(
    dirs: Mapping[str, int],
    partitions: Mapping[str, Sequence[tuple[str, int]]],
    *,
    isr: Mapping[str, Sequence[int]] | None = None,
    min_in_sync: int = 1,
    silent: Sequence[int] = (),
    failed: Sequence[str] = (),
    racks: Mapping[int, str] | None = None,
) -> ClusterView:
    """``dirs``: ``1:/a`` → total bytes. ``partitions``: name → the directory and size of each replica.

    A replica in a failed directory is one that no broker reports.
    """
    places = {text: DirId(int(text.partition(":")[0]), text.partition(":")[2]) for text in dirs}
    found, states, used = [], {}, dict.fromkeys(places.values(), 0)
    for name, replicas in partitions.items():
        tp = (name, 0)
        brokers = tuple(places[where].broker for where, _ in replicas)
        lost = {places[where].broker for where, _ in replicas if where in failed}
        present = [b for b in brokers if b not in lost and b not in silent]
        in_sync = tuple((isr or {}).get(name, present))
        states[tp] = PartitionState(tp, in_sync[0] if in_sync else -1, brokers, in_sync, min_in_sync)
        for where, size in replicas:
            if where not in failed and places[where].broker not in silent:
                found.append(ReplicaState(tp, places[where], size, 0, False))
                used[places[where]] += size
    brokers_of = {place.broker for place in places.values()}
    return ClusterView(
        0.0,
        {
            b: BrokerState(b, f"h{b}:9092", (racks or {}).get(b, ""), "no answer" if b in silent else None)
            for b in brokers_of
        },
        {
            place: DirState(place, FAILED if text in failed else 0, dirs[text], dirs[text] - used[place])
            for text, place in places.items()
            if place.broker not in silent
        },
        found,
        states,
    )


def after(view: ClusterView, moves: Sequence[Move]) -> ClusterView:
    """The cluster once the moves are done, as Kafka does them."""
    replicas, partitions, dirs = list(view.replicas), dict(view.partitions), dict(view.dirs)
    for move in moves:
        gone = [r for r in replicas if r.tp == move.tp and r.dir == move.source]
        replicas = [r for r in replicas if r not in gone]
        replicas.append(ReplicaState(move.tp, move.target, move.size_bytes, 0, False))
        old = partitions[move.tp]
        added = tuple(b for b in move.after if b not in old.replicas)
        isr = tuple(b for b in (*old.isr, *added) if b in move.after)
        leader = old.leader if old.leader in isr else (isr[0] if isr else -1)
        partitions[move.tp] = old._replace(replicas=move.after, isr=isr, leader=leader)
        target = dirs[move.target]
        dirs[move.target] = target._replace(usable_bytes=target.usable_bytes - move.size_bytes)
        if move.source in dirs and gone:
            source = dirs[move.source]
            dirs[move.source] = source._replace(usable_bytes=source.usable_bytes + gone[0].size_bytes)
    return replace(view, replicas=replicas, partitions=partitions, dirs=dirs)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterView:
    """Two to five brokers with one to three directories each, in racks or not, some of them failed or silent."""
    brokers = draw(st.integers(2, 5))
    names = [f"{b}:/{d}" for b in range(1, brokers + 1) for d in range(draw(st.integers(1, 3)))]
    by_broker = {b: [name for name in names if name.startswith(f"{b}:")] for b in range(1, brokers + 1)}
    partitions = {}
    for number in range(draw(st.integers(1, 12))):
        chosen = draw(st.permutations(list(by_broker)))[: draw(st.integers(1, min(3, brokers)))]
        size = draw(st.integers(0, SIZE // 10))
        partitions[f"t{number}"] = [(draw(st.sampled_from(by_broker[b])), size) for b in chosen]
    failed = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    silent = draw(st.lists(st.integers(1, brokers), max_size=1))
    isr = {}
    for name, replicas in partitions.items():
        able = [
            int(where.partition(":")[0])
            for where, _ in replicas
            if where not in failed and int(where.partition(":")[0]) not in silent
        ]
        isr[name] = able[: draw(st.integers(0, len(able)))] if draw(st.booleans()) else able
    racks = {b: draw(st.sampled_from("abc")) for b in by_broker} if draw(st.booleans()) else {}
    dirs = {name: draw(st.sampled_from((SIZE, 2 * SIZE))) for name in names}
    least = draw(st.integers(1, 2))
    return view_of(dirs, partitions, isr=isr, min_in_sync=least, silent=silent, failed=failed, racks=racks)
