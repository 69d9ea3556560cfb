"""What mirrors elsewhere, tables and push delivery still need, by what they say; what is not known is needed."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake
from logferry.gateway.contract.delivery_state import DeliveryState, UnitKey
from logferry.gateway.contract.names import printed_topic_id
from logferry.gateway.subscriptions import StoredSubscription
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import APP, Ledger, new_entry
from logferry.ops.cli.problems import CommandError
from logferry.ops.keeper.config import KeeperConfig
from logferry.ops.keeper.delivery_positions import DeliveryNeeds
from logferry.ops.keeper.planning.deletion_plan import AGES_S, Candidate, DeletionLimits, plan_deletion
from logferry.ops.keeper.readers import Needs, _loaded, _mirrored

from tests.support.keeper import SIZE, view_of

TOPIC_ID = bytes(range(16))


@contextmanager
def workers(*documents: dict[str, Any]) -> Iterator[list[str]]:
    """Servers that answer as workers of a mirror; each names all of them."""
    servers = []
    for _ in documents:

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(self.server.document).encode())  # type: ignore[attr-defined]

            def log_message(self, format: str, *args: object) -> None:
                pass

        servers.append(http.server.HTTPServer(("127.0.0.1", 0), Handler))
    urls = [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    for server, url, document in zip(servers, urls, documents, strict=True):
        server.document = {"url": url, "workers": urls, **document}  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield urls
    for server in servers:
        server.shutdown()
        server.server_close()


def partition(number: int, source_next: int | None, dc: str = "dc1") -> dict[str, Any]:
    return {"topic": "dc1.x", "partition": number, "dc": dc, "source_next": source_next}


def test_the_positions_of_all_workers_of_a_mirror() -> None:
    first = {"partitions": [partition(0, 7), partition(3, 9, dc="dc3")]}
    second = {"partitions": [partition(1, 8), partition(2, None)]}
    with workers(first, second) as urls:
        assert _mirrored(urls[0], None, "dc1") == {("dc1.x", 0): 7, ("dc1.x", 1): 8}


def test_a_worker_that_does_not_answer_leaves_all_unknown() -> None:
    with workers({"partitions": []}) as gone:
        pass
    with workers({"partitions": [partition(0, 7)], "workers": gone}) as urls, pytest.raises(CommandError):
        _mirrored(urls[0], None, "dc1")


def test_a_table_needs_what_is_behind_its_ledger(tmp_path: Path) -> None:
    paths = TablePaths.of(tmp_path / "t")
    known = printed_topic_id(TOPIC_ID)
    ranges = [Range("dc1.x", 0, known, 3, 50), Range("dc1.x", 1, known, 0, 60), Range("dc1.y", 0, "older", 0, 70)]
    Ledger(paths.ledger).create()
    Ledger(paths.ledger).put(new_entry(0, "dc1", "lines/1", "run", ranges))
    done = CommitProperties(app_transactions=[Transaction(APP, 0)])
    write_deltalake(str(paths.main), pa.table({"line": ["a"]}), commit_properties=done)
    Ledger(paths.ledger).put(new_entry(1, "dc1", "lines/1", "run", [Range("dc1.x", 0, known, 50, 90)]))
    ids = {"dc1.x": TOPIC_ID, "dc1.y": TOPIC_ID}
    assert _loaded(str(tmp_path / "t"), ids) == {("dc1.x", 0): 50, ("dc1.x", 1): 60}


def test_what_is_not_known_is_needed() -> None:
    readers = [{"topics": ["x"], "consumer": "c"}, {"topics": ["dc1.*"], "mirror": "http://m"}]
    config = KeeperConfig.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "k:9092"}, "readers": readers})
    needs = Needs(config.readers, {"consumer c": {("dc1.x", 0): 5}}, {"mirror http://m": "refused"})
    assert needs.of(("dc1.x", 0)) == {"consumer c": 5, "mirror http://m": None}
    assert needs.of(("dc1.x", 1)) == {"consumer c": None, "mirror http://m": None}
    assert needs.of(("dc1.y", 0)) == {"mirror http://m": None}


# ---- push delivery -----------------------------------------------------------------------------------------------

OTHER_ID = bytes(reversed(TOPIC_ID))


def subscription(*topics: str, **more: Any) -> StoredSubscription:
    definition = {"topics": list(topics), "url": "https://example.org/", **more.pop("definition", {})}
    return StoredSubscription.model_validate({"id": "one", "created_ms": 5, "definition": definition, **more})


def state(position: int, *, of: str = "one", topic_id: bytes = TOPIC_ID, replay: int = 5) -> DeliveryState:
    return DeliveryState(of, topic_id, 1, position, replay=replay)


def deliveries(
    subscriptions: dict[str, StoredSubscription], states: dict[UnitKey, DeliveryState], **unreadable: str
) -> DeliveryNeeds:
    return DeliveryNeeds(subscriptions, states, {"dc1.x": TOPIC_ID, "dc1.y": TOPIC_ID}, unreadable)


X, Y = ("dc1.x", 0), ("dc1.y", 0)


def test_each_subscription_needs_what_is_behind_its_position() -> None:
    known = {"shop": subscription("dc1.x"), "bill": subscription("*.x", "dc1.y")}
    states = {UnitKey("shop", *X): state(7), UnitKey("bill", *X): state(9), UnitKey("bill", *Y): state(3)}
    found = deliveries(known, states)
    assert found.of("*", X) == {"deliver shop": 7, "deliver bill": 9}
    assert found.of("*", Y) == {"deliver bill": 3}
    assert found.of("shop", Y) == {}, "it does not deliver it"
    assert found.of("sh*", X) == {"deliver shop": 7}
    assert found.of("*", ("dc1.x", 1)) == {"deliver shop": None, "deliver bill": None}, "a partition without a state"


def test_the_least_position_of_the_shards_counts() -> None:
    known = {"shop": subscription("dc1.x", definition={"order": "source"})}
    states = {UnitKey("shop", *X, shard): state(20 - shard) for shard in range(4)}
    assert deliveries(known, states).of("*", X) == {"deliver shop": 17}
    del states[UnitKey("shop", *X, 1)]
    assert deliveries(known, states).of("*", X) == {"deliver shop": None}


@pytest.mark.parametrize(
    ("replays", "found", "needed"),
    [
        ([], state(7), 7),
        ([], state(7, of="removed and made again"), None),
        ([], state(7, topic_id=OTHER_ID), None),
        ([{"number": 6, "position": {"offset": "earliest"}}], state(7), None),
        ([{"number": 6, "position": {"offset": "earliest"}}], state(2, replay=6), 2),
        ([{"number": 6, "position": {"topic": "dc1.y", "offset": "earliest"}}], state(7), 7),
    ],
    ids=["known", "another subscription", "another topic", "a replay to come", "a replay", "a replay elsewhere"],
)
def test_a_position_counts_for_the_present_subscription_topic_and_replay(
    replays: list[dict[str, Any]], found: DeliveryState, needed: int | None
) -> None:
    known = {"shop": subscription("dc1.x", replays=replays)}
    assert deliveries(known, {UnitKey("shop", *X): found}).of("shop", X) == {"deliver shop": needed}


def test_a_subscription_that_is_not_known_leaves_its_reader_unknown() -> None:
    found = deliveries({"shop": subscription("dc1.x")}, {}, bill="of a newer version")
    found.check("shop")
    for pattern, why in {"*": "bill: of a newer version", "bill": "bill: of", "stock": "no subscription stock"}.items():
        with pytest.raises(LookupError, match=why):
            found.check(pattern)
    deliveries({}, {}).check("*")


def test_no_record_goes_that_a_subscription_needs_but_below_the_last_threshold() -> None:
    readers = [{"topics": ["*"], "deliver": "*"}]
    config = KeeperConfig.model_validate({"dc": "dc1", "kafka": {"bootstrap_servers": "k:9092"}, "readers": readers})
    known = deliveries({"shop": subscription("dc1.x")}, {UnitKey("shop", *X): state(30)})
    needs = Needs(config.readers, deliveries={"deliver *": known})
    assert needs.of(Y) == {}
    view = view_of({"1:/a": 10 * SIZE}, {"dc1.x": [("1:/a", 9 * SIZE)]})
    [place] = view.dirs

    def planned(needs: Needs, last_free_percent: float) -> list[tuple[int, tuple[str, ...]]]:
        rungs = tuple(100 for _ in AGES_S)
        candidate = Candidate(X, 1, 0.0, 9 * SIZE, 0, 100, rungs, needs.of(X), 0)
        limits = DeletionLimits(40, 90, last_free_percent, 100 * SIZE)
        plan = plan_deletion(view, place, [candidate], 0, limits)
        return [(one.before, one.against) for one in plan.ranges]

    assert planned(needs, 0) == [(30, ())]
    [(before, against)] = planned(needs, 20)
    assert before > 30
    assert against == ("deliver shop",)
    assert planned(Needs(config.readers, unknown={"deliver *": "no topic"}), 0) == []
