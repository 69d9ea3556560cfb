"""``logferry topics``: lists, creates and grows topics, through a gateway's HTTP interface."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.parse
from typing import Any

from logferry.ops.cli import gateway_client as asking
from logferry.ops.cli.gateway_client import Gateway, Refused
from logferry.ops.cli.problems import Problem
from logferry.ops.config import Defaults

_EXAMPLE = """examples:
  logferry topics
  logferry topics create nginx --partitions 4
  logferry topics grow nginx --partitions 8 --url https://gw1.example:8080 --token-file admin.token --ca-file ca.pem

Exit status: 0 done, 1 it exists with another number or cannot get fewer partitions, or the token may not do this,
2 wrong use, 3 no gateway.
"""


def main(argv: list[str]) -> int:
    """0 done. Raises Problem: the answer is no (1), wrong use (2), no gateway there (3)."""
    args = _arguments(argv)
    gateway = Gateway(args.url, asking.token_of(args), asking.ca_file_of(args))
    if args.action == "create":
        print(_create(gateway, args.topic, args.partitions, args.retention_ms))
    elif args.action == "grow":
        print(_grow(gateway, args.topic, args.partitions))
    else:
        listed = gateway.ask("GET", "/v1/topics")["topics"]
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
        *asking.options(parser),
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


def _create(gateway: Gateway, topic: str, partitions: int, retention_ms: int | None) -> str:
    """Creates it; again with the same number of partitions is no error."""
    try:
        present = gateway.ask("GET", _path(topic))
    except Refused as refused:
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
    made = gateway.ask("PUT", _path(topic), wanted)
    return f"{made['topic']} created, {made['partitions']} partitions"


def _grow(gateway: Gateway, topic: str, partitions: int) -> str:
    before = gateway.ask("GET", _path(topic))["partitions"]
    grown = gateway.ask("PUT", _path(topic), {"partitions": partitions})
    return f"{grown['topic']} has {grown['partitions']} partitions (before: {before})"


def _path(topic: str) -> str:
    return f"/v1/topics/{urllib.parse.quote(topic, safe='')}"


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
