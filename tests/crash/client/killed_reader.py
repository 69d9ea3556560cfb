"""A reader as a user would write it, to be killed at any instant. Arguments: MODE STORE CONSUMER TOPIC URL…

It keeps what it reads in an SQLite file. ``after``: it stores its output and commits then, so after a break chunks may
come and be stored again. ``beside``: it stores the position of each partition in the same transaction as the output
and drops what lies below; it commits now and then only, to spare itself a long way back.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import random
import sqlite3
import sys
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_FLUSH_CHUNKS = 40
_COMMIT_EVERY = 6
SCHEMA = """
create table if not exists output (reader int, topic text, part int, at int, source text, seqno int, digest blob);
create table if not exists positions (topic text, part int, at int, primary key (topic, part));
create table if not exists dropped (chunks int);
"""

Frame = dict[str, Any]
Partition = tuple[str, int]


class Reader:
    def __init__(self, mode: str, store: str, consumer: str, topic: str, urls: list[str]) -> None:
        self._beside = mode == "beside"
        self._consumer, self._topic, self._urls = consumer, topic, urls
        self._store = sqlite3.connect(store, timeout=30, isolation_level=None)
        self._store.executescript(SCHEMA)
        self._session, self._generation = "", -1
        self._waiting: list[Frame] = []
        self._next: dict[Partition, int] = {}
        self._flushes = 0

    def read(self) -> None:
        """One session, until it breaks or ends."""
        self._waiting, self._next = [], {}
        link = self._link()
        try:
            path = f"/v1/consumers/{self._consumer}/stream?topic={self._topic}"
            link.request("GET", path, headers={"Accept": "application/x-ndjson"})
            answer = link.getresponse()
            while answer.status == 200 and (line := answer.readline()):
                self._take(json.loads(line))
        finally:
            link.close()

    def _take(self, frame: Frame) -> None:
        kind = frame["frame"]
        if kind == "session":
            self._session = frame["session"]
        elif kind == "assigned":
            self._generation = frame["generation"]
        elif kind == "chunk":
            self._waiting.append(frame)
            if len(self._waiting) >= _FLUSH_CHUNKS:
                self._flush()
        elif kind == "caught_up":
            self._flush()
            if not self._beside:
                self._commit({(p["topic"], p["partition"]): p["offset"] for p in frame["partitions"]})
        elif kind == "revoked":
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        chunks, self._waiting = self._waiting, []
        self._store.execute("begin immediate")
        kept = [chunk for chunk in chunks if not self._beside or self._is_new(chunk)]
        rows = [
            (os.getpid(), c["topic"], c["partition"], c["offset"], c["source_id"], c["seqno"], _digest(c)) for c in kept
        ]
        self._store.executemany("insert into output values (?, ?, ?, ?, ?, ?, ?)", rows)
        self._store.execute("insert into dropped values (?)", (len(chunks) - len(kept),))
        self._store.execute("commit")
        for chunk in chunks:
            self._next[chunk["topic"], chunk["partition"]] = chunk["offset"] + 1
        self._flushes += 1
        if not self._beside or self._flushes % _COMMIT_EVERY == 0:
            self._commit(self._next)
            self._next = {}

    def _is_new(self, chunk: Frame) -> bool:
        """Whether it lies at or above the stored position, which moves past it."""
        topic, number, offset = chunk["topic"], chunk["partition"], chunk["offset"]
        found = self._store.execute("select at from positions where topic = ? and part = ?", (topic, number)).fetchone()
        if found is not None and offset < found[0]:
            return False
        self._store.execute("insert or replace into positions values (?, ?, ?)", (topic, number, offset + 1))
        return True

    def _commit(self, positions: dict[Partition, int]) -> None:
        """Through any worker. A rejected commit does no harm: its chunks come again, to one of the readers."""
        body = {
            "generation": self._generation,
            "positions": [{"topic": t, "partition": n, "offset": at} for (t, n), at in positions.items()],
        }
        link = self._link()
        try:
            link.request("POST", f"/v1/consumers/{self._consumer}/sessions/{self._session}/commit", json.dumps(body))
            answer = link.getresponse()
            text = answer.read().decode()
            if answer.status not in (200, 409, 500, 503):
                raise SystemExit(f"a commit was answered {answer.status}: {text}")
        except (OSError, http.client.HTTPException):
            return
        finally:
            link.close()

    def _link(self) -> http.client.HTTPConnection:
        place = urlsplit(random.choice(self._urls)).netloc
        return http.client.HTTPConnection(place, timeout=30)


def _digest(chunk: Frame) -> bytes:
    """As the checker makes it of what is stored. The load is random bytes, so it comes in base64."""
    data = base64.b64decode(chunk["data_base64"]) if "data_base64" in chunk else chunk["data"].encode()
    return hashlib.blake2b(data, digest_size=12).digest()


def main(arguments: list[str]) -> None:
    reader = Reader(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4:])
    while True:
        with suppress(OSError, http.client.HTTPException):
            reader.read()
        time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1:])
