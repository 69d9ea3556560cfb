"""``logferry topics``: lists, creates and grows topics, through a gateway's HTTP interface."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from logferry.ops.config import Defaults
from logferry.ops.problems import Problem, Unavailable, WrongUse

_TIMEOUT_S = 60

_EXAMPLE = """examples:
  logferry topics
  logferry topics create nginx --partitions 4
  logferry topics grow nginx --partitions 8 --url http://127.0.0.1:8080

Exit status: 0 done, 1 it exists with another number or cannot get fewer partitions, 2 wrong use, 3 no gateway.
"""


class _Refused(Problem):
    """The gateway said no: its problem document."""

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        self.kind = str(document.get("type", "")).rpartition("/")[2]
        super().__init__(str(document.get("detail") or document.get("title") or f"the gateway answered {status}"))
        if status == http.client.BAD_REQUEST:
            self.exit_status = WrongUse.exit_status
        elif status >= http.client.INTERNAL_SERVER_ERROR:
            self.exit_status = Unavailable.exit_status


def main(argv: list[str]) -> int:
    """0 done. Raises Problem: the answer is no (1), wrong use (2), no gateway there (3)."""
    args = _arguments(argv)
    gateway = _Gateway(args.url)
    if args.action == "create":
        print(_create(gateway, args.topic, args.partitions, args.retention_ms))
    elif args.action == "grow":
        print(_grow(gateway, args.topic, args.partitions))
    else:
        listed = gateway.ask("GET", "")["topics"]
        print(json.dumps(listed) if args.json else _table(listed))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="logferry topics",
        description="Lists the topics, creates one, or gives one more partitions.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=("list", "create", "grow"), default="list")
    parser.add_argument("topic", nargs="?", metavar="T", help="its name without the data centre")
    option = parser.add_argument
    options = [
        option("--partitions", type=int, metavar="N", help="how many it shall have"),
        option("--retention-ms", type=int, metavar="MS", help="create: how long it keeps chunks; -1 for ever"),
        option("--url", default="http://127.0.0.1:8080", help="any gateway worker (default: %(default)s)"),
        option("--json", action="store_true", help="list as JSON"),
    ]
    Defaults("topics").add_to(parser, options, argv)
    args = parser.parse_args(argv)
    if args.action == "list":
        if args.topic is not None:
            parser.error("list takes no topic")
    elif args.topic is None or args.partitions is None:
        parser.error(f"{args.action} needs a topic and --partitions N")
    elif args.partitions < 1:
        parser.error("--partitions: at least 1")
    if args.action != "create" and args.retention_ms is not None:
        parser.error("--retention-ms goes with create")
    return args


def _create(gateway: _Gateway, topic: str, partitions: int, retention_ms: int | None) -> str:
    """Creates it; again with the same number of partitions is no error."""
    try:
        present = gateway.ask("GET", topic)
    except _Refused as refused:
        if refused.kind != "unknown-topic":
            raise
    else:
        if present["partitions"] != partitions:
            raise Problem(
                f"{present['topic']} exists with {present['partitions']} partitions;"
                f" for more: logferry topics grow {topic} --partitions {partitions}"
            )
        return f"{present['topic']} exists, {partitions} partitions"
    wanted = {"partitions": partitions} | ({} if retention_ms is None else {"retention_ms": retention_ms})
    made = gateway.ask("PUT", topic, wanted)
    return f"{made['topic']} created, {made['partitions']} partitions"


def _grow(gateway: _Gateway, topic: str, partitions: int) -> str:
    before = gateway.ask("GET", topic)["partitions"]
    grown = gateway.ask("PUT", topic, {"partitions": partitions})
    return f"{grown['topic']} has {grown['partitions']} partitions (before: {before})"


def _table(topics: list[dict[str, Any]]) -> str:
    """One line a topic: name, partitions, chunks' offsets in it, retention."""
    if not topics:
        return "no topics yet; create one: logferry topics create NAME --partitions 4"
    rows = [("TOPIC", "PARTITIONS", "OFFSETS", "RETENTION")]
    for topic in topics:
        offsets = sum(part["next"] - part["first"] for part in topic["offsets"])
        rows.append((topic["topic"], str(topic["partitions"]), str(offsets), _duration(topic["retention_ms"])))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:<{width}}  {count:>10}  {offsets:>12}  {kept:>9}" for name, count, offsets, kept in rows)


def _duration(ms: int) -> str:
    if ms < 0:
        return "for ever"
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size and ms % size == 0:
            return f"{ms // size} {unit}"
    return f"{ms} ms"


class _Gateway:
    """The topics part of a gateway's interface."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WrongUse(f"--url: {url!r} is not like http://127.0.0.1:8080")
        self._url = url.rstrip("/")

    def ask(self, method: str, topic: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        path = f"/v1/topics/{urllib.parse.quote(topic, safe='')}" if topic else "/v1/topics"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return self._document(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                raise _Refused(error.code, self._document(error.read())) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise Unavailable(f"no gateway answers at {self._url}: {reason}; is it running? (logferry up)") from None

    def _document(self, raw: bytes) -> dict[str, Any]:
        try:
            document = json.loads(raw)
        except ValueError:
            document = None
        if not isinstance(document, dict):
            raise Unavailable(f"what answers at {self._url} is not a gateway")
        return document


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
