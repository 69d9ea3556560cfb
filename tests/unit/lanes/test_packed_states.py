"""Packed states against a dictionary; what a source costs in memory, and that what is forgotten costs nothing."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from itertools import islice

import pytest
from logferry.gateway.contract.source_state import FENCE_KEY, SourceIdentity, SourceState
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.source_index import PackedStates

# Those that the packed form gives a meaning of its own are frequent.
BYTES = bytes([0, 0, 0, 0, 1, 97, 98, 99, 252, 253, 254, 255])


def random_keys(rng: random.Random) -> list[bytes]:
    """Many are the beginning or the end of another one."""
    names = ("", "a", "aa", "a/", "é", "~", "a\x7f")
    return [
        SourceIdentity(rng.choice(names), rng.choice((None, *names)), rng.choice(names) + str(rng.randrange(4000)))
        .state_key()
        for _ in range(8000)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_packed_states_are_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    table, model, keys = PackedStates(), dict[bytes, bytes](), random_keys(rng)
    for number in range(24_000):
        key, forgets = rng.choice(keys), rng.random() < (0.2 if number % 12_000 < 6_000 else 0.8)
        state = None if forgets else bytes(rng.choices(BYTES, k=rng.randrange(12)))
        assert table.swap(key, state) == model.get(key), seed
        if state is None:
            model.pop(key, None)
        else:
            model[key] = state
        other = rng.choice(keys)
        assert table.get(other) == model.get(other), seed
        if number % 3_000 == 0:
            found = [*table.items()]
            assert (len(table), len(found), dict(found)) == (len(model), len(model), model), seed
    for key, state in [*model.items()]:
        assert table.swap(key, None) == state, seed
    assert (len(table), [*table.items()], len(table._buckets)) == (0, [], 1)


def test_a_walk_sees_the_states_as_of_its_start() -> None:
    table, before = PackedStates(), {b"s%05d" % number: b"old" for number in range(20_000)}
    for key, state in before.items():
        table.swap(key, state)
    walk = table.items()
    seen = [*islice(walk, 5_000)]
    for number in range(40_000):
        table.swap(b"s%05d" % number, b"new" if number % 3 else None)
    seen += walk
    assert (len(seen), dict(seen)) == (len(before), before)


def test_keys_of_the_state_topic_that_are_none_of_a_source() -> None:
    """Nobody writes such keys; with a value they stop the lane, and one without a value forgets nothing."""
    table, raw = SourceTable(), SourceState(bytes(16), 0, 1, None, 0, 5).encode()
    for name in ("a", "b"):
        table.apply(SourceIdentity("dc1.t", None, name).state_key(), raw)
    keys = table.state_keys()
    for key in (FENCE_KEY, b"", b"s", b"zdc1.t\0a", b"sdc1.t\0a\0b"):
        table.apply(key, None)
        with pytest.raises(ValueError, match="cannot be decoded"):
            table.apply(key, raw)
    for at in range(1, len(raw)):  # as it is packed, from one key into the next one
        key = keys[0] + b"\xfe" + raw[:at] + b"\xff" + keys[1]
        with pytest.raises(UnicodeDecodeError):
            table.apply(key, None)
    assert sorted(table.state_keys()) == sorted(keys)


_MEASURE = r"""
import json, sys
from logferry.gateway.contract.source_state import Heartbeat, SourceState
from logferry.gateway.lanes.dedup import SourceTable
from logferry.gateway.lanes.source_index import SourceOrder
from logferry.gateway.service.memory import resident_bytes, reuse_memory, trimmer

reuse_memory()  # as a service does
COUNT, CHURNED = map(int, sys.argv[1:])
TABLE, TRIM, NOW = SourceTable(), trimmer() or (lambda: None), 1_790_000_000_000

# As of a push-client: a session with a token, and a heartbeat for each chunk.
BEATS = [Heartbeat(NOW + n, NOW - n, n * 700_000, n * 800_000, False) for n in range(1000)]
STATES = [
    SourceState(b"one.topic.s.id..", n % 16, n * 700_000, 0, NOW - n, NOW, beat, "all", True).encode()
    for n, beat in enumerate(BEATS)
]

def key(number):
    name = number % 5000, number // 5000
    return b"sdc1.nginx\0host-%05d.example.net:/var/log/nginx/access.log#%d" % name

def state(number):
    return STATES[number % 1000][:-3] + b"all"  # an object of its own, as of a replay

def list_all():
    order = SourceOrder(TABLE.states)
    for _ in order.settle():
        pass
    return sum(1 for _ in order.walk("dc1.nginx", ""))

def grown():
    TRIM()
    return resident_bytes() - before

before = resident_bytes()
for number in range(COUNT):
    TABLE.apply(key(number), state(number))
found = {"known": grown()}
if CHURNED:
    for number in range(COUNT, COUNT + CHURNED):
        TABLE.apply(key(number), state(number)[:1] + bytes([3]) + state(number)[2:54])  # no session yet
        TABLE.apply(key(number), state(number))
        TABLE.apply(key(number - COUNT), None)
    found["churned"] = grown()
    found["count"] = list_all()
    found["listed"] = grown()
    for number in range(CHURNED, COUNT + CHURNED):
        TABLE.apply(key(number), None)
    found["empty"] = grown()
print(json.dumps(found))
"""


def measured(count: int, churned: int) -> dict[str, int]:
    command = [sys.executable, "-c", _MEASURE, str(count), str(churned)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_memory_of_a_source() -> None:
    """With a session, a token and a heartbeat each; 1 GB for 5 million of them are 200 bytes a source."""
    assert measured(1_000_000, 0)["known"] / 1_000_000 < 190


def check_churn(count: int, churned: int) -> None:
    found = measured(count, churned)
    assert found["count"] == count
    assert found["churned"] < 1.15 * found["known"] + 2e6, found
    assert found["listed"] < 1.15 * found["churned"] + 2e6, found
    assert found["empty"] < 0.1 * found["known"] + 6e6, found


def test_memory_of_what_is_forgotten() -> None:
    check_churn(100_000, 100_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_memory_of_ten_million_sources_that_came_and_went() -> None:
    check_churn(200_000, 10_000_000)
