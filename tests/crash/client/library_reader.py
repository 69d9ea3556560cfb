"""A program on the library's reader, to be killed at any instant. Arguments: MODE STORE TOPIC URL…

It keeps its output and, in the same transaction, the reader's position; started again it continues from there.
``chunks`` and ``lines`` read without a consumer, ``consumer`` shares the partitions and commits now and then.
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import suppress

from logferry.client import Chunk, Line, Reader, Superseded

_COMMIT_EVERY = 20
SCHEMA = """
create table if not exists output (part int, at int, source text, seqno int, line int, data blob, digest blob);
create table if not exists position (one int primary key, text text);
"""


def main(arguments: list[str]) -> None:
    mode, file, topic, *urls = arguments
    store = sqlite3.connect(file, timeout=30, isolation_level=None)
    store.execute("pragma journal_mode = wal")
    store.execute("pragma synchronous = off")  # the process is killed, not the machine
    store.executescript(SCHEMA)
    found = store.execute("select text from position").fetchone()
    consumer = "library-crash" if mode == "consumer" else None
    with Reader(urls, topic, consumer=consumer, start=found[0] if found else "earliest") as reader:
        items: Iterator[Chunk | Line] = reader.lines() if mode == "lines" else reader
        for number, item in enumerate(items, start=1):
            store.execute("begin")
            store.execute("insert into output values (?, ?, ?, ?, ?, ?, ?)", _row(item))
            store.execute("insert or replace into position values (1, ?)", (str(reader.position),))
            store.execute("commit")
            if consumer and number % _COMMIT_EVERY == 0:
                with suppress(Superseded):
                    reader.commit()


def _row(item: Chunk | Line) -> tuple[object, ...]:
    chunk = item.chunk if isinstance(item, Line) else item
    line = item.number if isinstance(item, Line) else -1
    data = item.data if isinstance(item, Line) else b""
    digest = hashlib.blake2b(chunk.data, digest_size=12).digest()
    return chunk.partition, chunk.offset, chunk.source_id, chunk.seqno, line, data, digest


if __name__ == "__main__":
    main(sys.argv[1:])
