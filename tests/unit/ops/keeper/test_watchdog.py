"""What the watchdog says, why, and since when; growth; the keeper's state by its log; and its settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from logferry.gateway.config import ConfigError
from logferry.ops.keeper.command import plan_lines
from logferry.ops.keeper.config import KeeperConfig, load
from logferry.ops.keeper.planning import keeper_state
from logferry.ops.keeper.planning.cluster_view import ClusterView, DirId, ReplicaState
from logferry.ops.keeper.planning.move_plan import Move, MoveLimits, plan_moves
from logferry.ops.keeper.planning.watchdog import Growth, KnownFindings, Thresholds, watch

from tests.support.keeper import after, clusters, view_of

LIMITS = Thresholds(10, 3600)
DIRS = {"1:/a": 1000, "2:/a": 1000, "3:/a": 1000}
BOTH = {"x": [("1:/a", 100), ("2:/a", 100)]}


def seen(view: ClusterView, growth: Growth | None = None, retired: dict[DirId, str] | None = None) -> dict[str, str]:
    found = watch(view, growth or Growth(60), retired or {}, LIMITS)
    return {f"{one.kind} {one.what}": one.why for one in found}


def test_nothing_to_say() -> None:
    assert seen(view_of(DIRS, BOTH)) == {}


def test_a_silent_broker_is_the_reason_of_what_its_partitions_lack() -> None:
    assert seen(view_of(DIRS, BOTH, silent=[1], min_in_sync=2)) == {
        "broker-silent broker 1": "h1:9092: no answer",
        "under-min-isr x-0": "1 in sync, min.insync.replicas is 2; replica 1: its broker is silent: no answer",
    }
    assert seen(view_of(DIRS, {"x": [("1:/a", 1)]}, silent=[1]))["leaderless x-0"] == (
        "replica 1: its broker is silent: no answer"
    )


def test_a_failed_directory_with_the_replicas_that_are_lost() -> None:
    assert seen(view_of({**DIRS, "1:/b": 1000}, BOTH, failed=["1:/a"])) == {
        "dir-failed 1:/a": "Kafka's error 56; 1 replicas are lost with it",
        "under-replicated x-0": "replica 1: its directory failed",
    }


def test_a_replica_that_lags() -> None:
    view = view_of(DIRS, BOTH, isr={"x": [2]})
    view = replace(view, replicas=[r._replace(lag=7) if r.dir.broker == 1 else r for r in view.replicas])
    assert seen(view) == {"under-replicated x-0": "replica 1: 7 records behind"}


def test_growth_says_when_a_directory_will_be_full() -> None:
    growth = Growth(100)
    for second in range(0, 50, 10):
        view = replace(view_of(DIRS, {"x": [("1:/a", 400 + 2 * second)]}), at_s=float(second))
        growth.add(view)
    assert growth.rate(DirId(1, "/a")) == pytest.approx(2)
    assert growth.full_in_s(view, DirId(1, "/a")) == pytest.approx(260)
    assert growth.full_in_s(view, DirId(2, "/a")) is None
    assert seen(view, growth) == {"dir-fills 1:/a": "full in 260 s at 2 bytes/s; 520 bytes are free"}
    assert "dir-low 1:/a" in seen(view_of(DIRS, {"x": [("1:/a", 950)]}))


def test_a_finding_begins_once_and_ends() -> None:
    known = KnownFindings()
    broken, whole = view_of(DIRS, BOTH, silent=[1]), view_of(DIRS, BOTH)
    new, over = known.update(watch(broken, Growth(1), {}, LIMITS), 10)
    assert ([one.kind for one in new], over) == (["broker-silent", "under-replicated"], [])
    assert known.update(watch(broken, Growth(1), {}, LIMITS), 20) == ([], [])
    assert {one.since_ms for one in known.present.values()} == {10}
    assert len(known.update(watch(whole, Growth(1), {}, LIMITS), 30)[1]) == 2


# ---- the state ---------------------------------------------------------------------------------------------------


def record(kind: str, **facts: Any) -> dict[str, Any]:
    """As it is read from the log."""
    found: dict[str, Any] = json.loads(json.dumps({"kind": kind, **facts}))
    return found


def started(move: Move) -> dict[str, Any]:
    return record(keeper_state.MOVE, move=keeper_state.move_document(move), seen={})


@given(clusters())
def test_the_state_is_what_the_log_says_and_so_is_its_sum(view: ClusterView) -> None:
    """A keeper that takes over continues with what another one began."""
    moves = plan_moves(view, MoveLimits(80, 10, 1, 1, True, True), {}).moves
    topics, brokers = keeper_state.wanted_throttles(moves, 5)
    log = [record(keeper_state.THROTTLE, topics=topics, brokers=brokers), *map(started, moves)]
    state = keeper_state.replayed(log)
    assert list(state.moves.values()) == moves
    assert (state.topics, state.brokers) == (topics, brokers)
    assert keeper_state.replayed([record(keeper_state.BEGAN, state=state.snapshot())]) == state
    ended = keeper_state.ended_moves(state, after(view, moves))
    assert set(ended.values()) <= {"done"}
    gone = keeper_state.ended_moves(state, view)
    assert set(gone.values()) <= {"gone"}
    for name in ended:
        state.apply(record(keeper_state.MOVE_ENDED, replica=name, how="done"))
    assert not state.moves


def test_a_move_that_lasts_is_not_over() -> None:
    view = view_of({"1:/a": 1000, "1:/b": 1000, "2:/a": 1000}, {"x": [("1:/a", 100)]})
    near = Move("dir", ("x", 0), DirId(1, "/a"), DirId(1, "/b"), 100, "", (1,), (1,))
    copying = replace(view, replicas=[*view.replicas, ReplicaState(("x", 0), DirId(1, "/b"), 10, 90, True)])
    assert keeper_state.ended_moves(keeper_state.replayed([started(near)]), copying) == {}
    far = Move("broker", ("x", 0), DirId(1, "/a"), DirId(2, "/a"), 100, "", (1,), (2,))
    adding = {tp: p._replace(replicas=(2, 1), adding=(2,), removing=(1,)) for tp, p in view.partitions.items()}
    assert keeper_state.ended_moves(keeper_state.replayed([started(far)]), replace(view, partitions=adding)) == {}


def test_throttles_list_the_replicas_that_move_and_are_removed_with_the_last_move() -> None:
    far = Move("broker", ("x", 3), DirId(1, "/a"), DirId(3, "/a"), 100, "", (1, 2), (3, 2))
    topics, brokers = keeper_state.wanted_throttles([far], 7)
    assert topics == {
        "x": {"leader.replication.throttled.replicas": "3:1,3:2", "follower.replication.throttled.replicas": "3:3"}
    }
    assert set(brokers) == {"1", "2", "3"}
    removed = keeper_state.changes(topics, {})
    assert removed == {"x": dict.fromkeys(topics["x"], None)}
    assert keeper_state.changes({}, {}) == {}


def test_pauses_outlive_the_keeper() -> None:
    log = [record(keeper_state.PAUSED, why="disk 2"), record("of a newer version")]
    assert keeper_state.replayed(log).paused == "disk 2"
    assert keeper_state.replayed([*log, record(keeper_state.RESUMED, why=None)]).paused is None


# ---- settings ----------------------------------------------------------------------------------------------------

BASE = {"dc": "dc1", "kafka": {"bootstrap_servers": "k:9092"}}


def test_by_default_nothing_is_changed_and_no_topic_may_lose_records() -> None:
    config = KeeperConfig.model_validate(BASE)
    assert not config.act
    assert config.policy("dc1.nginx") is None
    assert (config.log_topic, config.deletion.last_free_percent) == ("logferry.keeper.dc1.log", 0)


def test_own_and_protected_topics_have_no_policy() -> None:
    policies = [{"topics": ["debug-*"], "priority": 1}, {"topics": ["*"]}]
    config = KeeperConfig.model_validate({**BASE, "protected_topics": ["bill"], "deletion": {"policies": policies}})
    assert [config.policy(name) is None for name in ("__x", "logferry.keeper.dc1.log", "dc1.bill")] == [True] * 3
    found = config.policy("dc1.debug-a")
    assert found is not None
    assert found.priority == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"workers": 2}, "a keeper is one process"),
        ({"deletion": {"below_free_percent": 20}}, "last_free_percent ≤ below_free_percent ≤ until_free_percent"),
        ({"readers": [{"topics": ["*"]}]}, "give one of consumer, mirror, table and deliver"),
        ({"dry_run": True}, "dry_run: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_setting_is_named(more: dict[str, Any], why: str, tmp_path: Path) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in more.items() if not isinstance(value, dict | list)]
    for key, value in more.items():
        if isinstance(value, dict):
            lines += [f"{key}.{name} = {json.dumps(one)}" for name, one in value.items()]
        elif isinstance(value, list):
            lines += [f"[[{key}]]", *(f"{name} = {json.dumps(one)}" for name, one in value[0].items())]
    file = tmp_path / "keeper.toml"
    file.write_text('dc = "dc1"\nkafka.bootstrap_servers = "k:9092"\n' + "\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        load(file)


def test_the_plan_as_text_names_each_move_and_each_range() -> None:
    move = {"tp": ["x", 3], "source": [1, "/a"], "target": [1, "/b"], "size_bytes": 5000, "why": "retired"}
    part = {"tp": ["y", 0], "start": 5, "before": 9, "size_bytes": 2000, "against": ["consumer c"]}
    deletion = {"dir": "1:/a", "why": "5 % are free", "ranges": [part], "missing_bytes": 0, "held_by": []}
    found = {
        "acts": False,
        "paused": None,
        "acting": None,
        "url": "u",
        "under_way": [],
        "blocked": {"z-0": "why"},
        "moves": [move],
        "moves_total": 1,
        "moves_bytes": 5000,
        "deletions": [deletion],
    }
    assert list(plan_lines(found)) == [
        "shows what it would do (act = false); 1 moves of 5.0 kB are planned",
        "  planned: x-3, 5.0 kB, 1:/a -> 1:/b (retired)",
        "  cannot move: z-0: why",
        "  delete in 1:/a: 5 % are free",
        "    y-0: offsets 5 to 8, about 2.0 kB, although consumer c still needs some",
    ]
