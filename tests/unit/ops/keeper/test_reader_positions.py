"""What a mirror elsewhere and a table still need, by what they say themselves; what is not known is needed."""

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
from logferry.gateway.contract.names import printed_topic_id
from logferry.loaders.planning.ledger_entry import TablePaths
from logferry.loaders.planning.plan import Range
from logferry.loaders.storage.ledger import APP, Ledger, new_entry
from logferry.ops.cli.problems import CommandError
from logferry.ops.keeper.config import KeeperConfig
from logferry.ops.keeper.readers import Needs, _loaded, _mirrored

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
