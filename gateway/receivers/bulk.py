"""Elasticsearch's ``_bulk`` body: pairs of lines, an action and its document. Pure.

Documents are not parsed: a document is recorded as it came, one line. Of an action only the index and the id count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from logferry.gateway.contract.names import Malformed
from logferry.gateway.receiver_settings import Rules, topic_for

_ACTIONS: Final = ("index", "create", "update", "delete")
_TAKEN: Final = ("index", "create")
_CREATED: Final = (
    '", "status": 201, "_version": 1, "result": "created", "_shards": {"total": 1, "successful": 1, "failed": 0}}}'
)
_LONGEST_ACTION: Final = 4096
# What nearly all agents send: one action, an index, maybe an id, nothing else.
_PLAIN: Final = re.compile(
    rb'\s*\{\s*"(index|create)"\s*:\s*\{\s*(?:"_index"\s*:\s*"([^"\\\x00-\x1f]*)"\s*)?\}\s*\}\s*\Z'
)


@dataclass(slots=True)
class BulkItem:
    """The answer to one action. ``topic``: where its line goes; None: it was refused, with ``kind`` and ``reason``."""

    action: str
    index: str
    status: int = 201
    kind: str = ""
    reason: str = ""
    topic: str | None = None


@dataclass(slots=True)
class Bulk:
    """The items in their order, and of each topic the lines, with their items.

    ``ids``: the digest of a topic's documents, where each of them has an id.
    """

    items: list[BulkItem] = field(default_factory=list)
    lines: dict[str, list[tuple[BulkItem, bytes]]] = field(default_factory=dict)
    ids: dict[str, Any] = field(default_factory=dict)

    def key(self, topic: str) -> str | None:
        """The key of a topic's part: the same documents under the same ids; None: one has no id."""
        digest = self.ids.get(topic)
        return None if digest is None else f"_id {digest.hexdigest()}"

    def has_recorded(self, failed: Collection[str]) -> bool:
        """Whether a line is recorded, where the appends to these topics failed."""
        return any(item.topic is not None and item.topic not in failed for item in self.items)

    def fitting(self, topic: str, limit: int) -> list[bytes]:
        """The lines of the topic with at most so many bytes and a newline; the items of the others are refused."""
        found = list[bytes]()
        for item, line in self.lines[topic]:
            if len(line) < limit:
                found.append(line)
                continue
            item.topic, item.status, item.kind = None, 413, "document_too_large"
            item.reason = f"the document has {len(line)} bytes; the limit is {limit - 1}"
        return found


def parse_bulk(body: bytes, default_index: str | None, rules: Rules, limit: int) -> Bulk:
    """Raises Malformed for what makes the rest unreadable: the whole request is refused then, as Elasticsearch does.

    ``limit``: of items in a request.
    """
    found, topics = Bulk(), dict[str, str | None]()
    at = 0
    while at < len(body):
        end = body.find(b"\n", at)
        end = len(body) if end < 0 else end
        line, at = body[at:end], end + 1
        if not line.strip():
            continue
        if len(found.items) >= limit:
            raise Malformed(f"_bulk: more than {limit} actions in one request")
        action, index, doc_id = _action(line, len(found.items))
        index = index or default_index or ""
        item = BulkItem(action, index)
        found.items.append(item)
        document = b""
        if action != "delete":
            if at >= len(body):
                raise Malformed(f"_bulk: action {len(found.items) - 1} has no document")
            end = body.find(b"\n", at)
            end = len(body) if end < 0 else end
            document, at = body[at:end].strip(), end + 1
        if index not in topics:
            topics[index] = topic_for(rules, index) if index else None
        _decide(item, document, topics[index])
        if item.topic is None:
            continue
        found.lines.setdefault(item.topic, []).append((item, document))
        if len(found.lines[item.topic]) == 1 and doc_id is not None:
            found.ids[item.topic] = blake2b(digest_size=16)
        if doc_id is None:
            found.ids.pop(item.topic, None)
        elif item.topic in found.ids:
            found.ids[item.topic].update(f"{index}\0{doc_id}\0".encode(errors="surrogatepass") + document)
    if not found.items:
        raise Malformed("_bulk: the request body is empty")
    return found


def _action(line: bytes, number: int) -> tuple[str, str | None, str | None]:
    """Action, index and id of an action line."""
    if len(line) > _LONGEST_ACTION:
        raise Malformed(f"_bulk: action {number} has {len(line)} bytes; the limit is {_LONGEST_ACTION}")
    plain = _PLAIN.match(line)
    if plain is not None:
        index = plain[2]
        return plain[1].decode(), None if index is None else _text(index, number), None
    try:
        read = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"_bulk: action {number} is not JSON: {error}") from None
    action = next(iter(read), "") if isinstance(read, dict) and len(read) == 1 else ""
    meta = read[action] if action else None
    if action not in _ACTIONS or not isinstance(meta, dict):
        raise Malformed(f"_bulk: action {number} is not one of {', '.join(_ACTIONS)} with its metadata")
    index, doc_id = meta.get("_index"), meta.get("_id")
    if not isinstance(index, str | None) or not isinstance(doc_id, str | int | None):
        raise Malformed(f"_bulk: action {number}: _index or _id is not text")
    return action, index, None if doc_id is None else str(doc_id)


def _text(raw: bytes, number: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise Malformed(f"_bulk: action {number}: _index is not UTF-8") from None


def _decide(item: BulkItem, document: bytes, topic: str | None) -> None:
    if item.action not in _TAKEN:
        item.status, item.kind = 400, "illegal_argument_exception"
        item.reason = f"{item.action} is not taken here: logs are only added"
    elif topic is None:
        item.status, item.kind = 404, "index_not_found_exception"
        item.reason = f"no rule of receivers.elasticsearch gives the index [{item.index[:200]}] a topic"
    elif not (document.startswith(b"{") and document.endswith(b"}")):
        item.status, item.kind = 400, "document_parsing_exception"
        item.reason = "the document is not a JSON object on one line"
    else:
        item.topic = topic


def answer_of(items: list[BulkItem], refused: dict[str, tuple[int, str, str]], took_ms: int) -> bytes:
    """The response to a bulk request. ``refused``: of the topics that failed, the status, the kind and the reason."""
    errors, parts, heads = False, list[str](), dict[tuple[str, str], str]()
    for number, item in enumerate(items):
        if item.topic in refused:
            item.status, item.kind, item.reason = refused[item.topic]
        if item.status == 201:
            head = heads.get((item.action, item.index))
            if head is None:
                head = heads[item.action, item.index] = (
                    f'{{"{item.action}": {{"_index": {json.dumps(item.index)}, "_id": "'
                )
            parts.append(f"{head}{number}{_CREATED}")
            continue
        errors = True
        error = {"type": item.kind, "reason": item.reason}
        result = {"_index": item.index, "_id": str(number), "status": item.status, "error": error}
        parts.append(json.dumps({item.action: result}))
    return f'{{"took": {took_ms}, "errors": {str(errors).lower()}, "items": [{", ".join(parts)}]}}'.encode()
