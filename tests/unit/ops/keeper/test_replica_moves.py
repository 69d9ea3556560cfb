"""The keeper's moves: each invariant of its plan for random clusters, and the choices by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from logferry.ops.keeper.planning.cluster_view import ClusterView, DirId, ReplicaState
from logferry.ops.keeper.planning.move_plan import Move, MoveLimits, elections, plan_moves, startable

from tests.support.keeper import after, clusters, view_of

LIMITS = MoveLimits(80, 10, 1 << 40, 4, balances_dirs=True, balances_brokers=True)


def ways(moves: list[Move]) -> list[tuple[str, str, str]]:
    return [(move.tp[0], str(move.source), str(move.target)) for move in moves]


@given(clusters(), st.data())
def test_no_move_breaks_an_invariant(view: ClusterView, data: Any) -> None:
    retired = dict.fromkeys(data.draw(st.lists(st.sampled_from(list(view.dirs) or [DirId(9, "/")]))), "retired")
    plan = plan_moves(view, LIMITS, retired)
    now = view
    for move in plan.moves:
        partition = now.partitions[move.tp]
        assert move.target not in retired
        assert view.dirs[move.target].error == 0
        assert view.answers(move.target.broker)
        assert len(set(move.after)) == len(partition.replicas)
        racks = [{view.brokers[b].rack for b in brokers} for brokers in (partition.replicas, move.after)]
        assert len(racks[1]) >= len(racks[0])
        now = after(now, [move])
        then = now.partitions[move.tp]
        assert len(then.isr) >= min(then.min_in_sync, len(partition.isr))
        assert then.isr
        assert then.leader >= 0
        if move.kind == "broker":
            assert len(then.isr) >= then.min_in_sync
        target = now.dirs[move.target]
        assert target.used_bytes <= 0.8 * target.total_bytes
    assert len({move.tp for move in plan.moves}) == len(plan.moves)


@given(clusters())
def test_balance_ends_and_turns_nothing_round(view: ClusterView) -> None:
    """A second plan from where the first one leads has fewer moves, until none is left."""
    for _ in range(30):
        plan = plan_moves(view, LIMITS, {})
        if not plan.moves:
            return
        view = after(view, plan.moves)
    raise AssertionError(ways(plan.moves))


@given(clusters())
def test_a_cluster_that_is_not_calm_is_not_balanced(view: ClusterView) -> None:
    if not view.is_calm:
        assert all("balance" not in move.why for move in plan_moves(view, LIMITS, {}).moves)


def test_a_retired_directory_is_left_within_its_broker() -> None:
    view = view_of({"1:/a": 1000, "1:/b": 1000, "2:/a": 1000}, {"x": [("1:/a", 100)], "y": [("1:/b", 50)]})
    plan = plan_moves(view, LIMITS, {DirId(1, "/a"): "retired"})
    assert ways(plan.moves) == [("x", "1:/a", "1:/b")]
    assert plan.moves[0].kind == "dir"


def test_where_the_broker_has_no_room_another_one_takes_it() -> None:
    view = view_of({"1:/a": 1000, "1:/b": 1000, "2:/a": 1000}, {"x": [("1:/a", 100)], "y": [("1:/b", 750)]})
    plan = plan_moves(view, LIMITS, {DirId(1, "/a"): "retired"})
    assert ways(plan.moves) == [("x", "1:/a", "2:/a")]
    assert (plan.moves[0].before, plan.moves[0].after) == ((1,), (2,))


def test_replicas_of_a_failed_directory_are_made_elsewhere() -> None:
    view = view_of(
        {"1:/a": 1000, "1:/b": 1000, "2:/a": 1000, "3:/a": 1000},
        {"x": [("1:/a", 100), ("2:/a", 100)]},
        failed=["1:/a"],
    )
    plan = plan_moves(view, LIMITS, {})
    assert ways(plan.moves) == [("x", "1:/a", "3:/a")]
    assert plan.moves[0].after == (3, 2)


def test_what_cannot_be_moved_is_named_with_its_way_on() -> None:
    view = view_of({"1:/a": 1000, "2:/a": 1000}, {"x": [("1:/a", 100), ("2:/a", 100)]}, failed=["1:/a"])
    plan = plan_moves(view, LIMITS, {})
    assert plan.moves == []
    assert "add a broker or a directory" in plan.blocked["x-0"]


def test_a_partition_that_only_the_failed_directory_had_is_not_moved() -> None:
    """A new replica would be empty: records that the disk may still hold would be given up."""
    view = view_of({"1:/a": 1000, "2:/a": 1000}, {"x": [("1:/a", 100)]}, failed=["1:/a"])
    plan = plan_moves(view, LIMITS, {})
    assert plan.moves == []
    assert "too few of its replicas are in sync" in plan.blocked["x-0"]


def test_partitions_with_the_fewest_in_sync_come_first() -> None:
    dirs = {"1:/a": 1000, "2:/a": 1000, "3:/a": 1000, "4:/a": 1000}
    both = {"a": [("1:/a", 9), ("2:/a", 9), ("3:/a", 9)], "b": [("1:/a", 9), ("2:/a", 9), ("3:/a", 9)]}
    view = view_of(dirs, both, failed=["1:/a"], isr={"a": [2, 3], "b": [2]}, min_in_sync=1)
    assert [move.tp[0] for move in plan_moves(view, LIMITS, {}).moves] == ["b", "a"]


def test_the_fullest_gives_to_the_emptiest() -> None:
    view = view_of({"1:/a": 1000, "1:/b": 1000}, {"x": [("1:/a", 100)], "y": [("1:/a", 200)], "z": [("1:/a", 300)]})
    assert ways(plan_moves(view, LIMITS, {}).moves) == [("z", "1:/a", "1:/b")]


def test_bounds_of_what_moves_at_once() -> None:
    sizes = {f"t{n}": [("1:/a", 100)] for n in range(6)}
    view = view_of({"1:/a": 1000, "1:/b": 1000}, sizes)
    plan = plan_moves(view, LIMITS, {DirId(1, "/a"): "retired"})
    assert len(plan.moves) == 6
    assert len(startable(view, plan, LIMITS)) == 4
    assert len(startable(view, plan, LIMITS._replace(bytes_at_once=250))) == 2
    # A replica that is larger than the bound moves alone.
    assert len(startable(view, plan, LIMITS._replace(bytes_at_once=50))) == 1
    copied = ReplicaState(("t0", 0), DirId(1, "/b"), 10, 90, True)
    assert len(startable(replace(view, replicas=[*view.replicas, copied]), plan, LIMITS)) == 3


def test_a_replica_that_is_being_moved_counts_where_it_will_be_and_is_not_planned_again() -> None:
    view = view_of({"1:/a": 1000, "1:/b": 1000}, {"x": [("1:/a", 100)]})
    moving = replace(view, replicas=[*view.replicas, ReplicaState(("x", 0), DirId(1, "/b"), 10, 90, True)])
    assert plan_moves(moving, LIMITS, {DirId(1, "/a"): "retired"}).moves == []


def test_preferred_leaders_are_elected_where_they_are_in_sync() -> None:
    dirs = {"1:/a": 1000, "2:/a": 1000}
    view = view_of(dirs, {"x": [("1:/a", 9), ("2:/a", 9)]}, isr={"x": [2, 1]})
    assert elections(view, {}) == [("x", 0)]
    assert elections(view, {DirId(1, "/a"): "retired"}) == []
    assert elections(view_of(dirs, {"x": [("1:/a", 9), ("2:/a", 9)]}, isr={"x": [2]}), {}) == []
    assert elections(view_of(dirs, {"x": [("1:/a", 9), ("2:/a", 9)]}), {}) == []
