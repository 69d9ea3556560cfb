"""Requests that several tests make of a gateway."""

from __future__ import annotations

from typing import Any

from tests.support.checker import read_back
from tests.support.gateway import Answer, Gateway, source_path


async def write(
    workers: Gateway,
    topic: str,
    source: str,
    query: str,
    data: bytes = b"line\n",
    expect: int | None = 200,
    **options: Any,
) -> Answer:
    path = source_path(topic, source, f"/chunks?{query}")
    return await workers.ask("POST", path, data=data, expect=expect, **options)


async def log_of(workers: Gateway, topic: str) -> list[tuple[str, int, int | None]]:
    """(source, seqno, prev) in the order of partition and offset."""
    stored = await read_back(workers.kafka.bootstrap, f"dc1.{topic}")
    return [(record.source, record.seqno, record.prev) for record in sorted(stored, key=lambda r: r[1:3])]


async def open_session(workers: Gateway, topic: str, source: str, query: str = "", worker: int = 0) -> dict[str, Any]:
    answer = await workers.ask("POST", source_path(topic, source, f"/session{query}"), worker)
    document: dict[str, Any] = answer.document
    return document
