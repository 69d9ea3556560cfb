"""``logferry topics``: lists, creates and grows topics through a gateway."""

from __future__ import annotations

import argparse
import json
import urllib.parse
from typing import Any

from logferry.ops.cli.gateway_client import GatewayClient, RequestRefused, add_gateway_options, token_of
from logferry.ops.cli.options import command_parser, parse_with_file
from logferry.ops.cli.problems import CommandError

_EXAMPLE = """examples:
  logferry topics
  logferry topics create nginx --partitions 4
  logferry topics grow nginx --partitions 8 --url https://gw1.example:8080 --token-file admin.token --ca-file ca.pem

Exit status: 0 done, 1 refused (the topic has another number of partitions, or the token lacks the right),
2 wrong use, 3 no gateway answers.
"""


def main(argv: list[str]) -> int:
    """0 done. Raises CommandError, whose exit status is 1 (refused), 2 (wrong use) or 3 (no gateway answers)."""
    args = _arguments(argv)
    gateway = GatewayClient(args.url, token_of(args), args.ca_file)
    if args.action == "create":
        print(_create(gateway, args.topic, args.partitions, args.retention_ms))
    elif args.action == "grow":
        print(_grow(gateway, args.topic, args.partitions))
    else:
        listed = gateway.request("GET", "/v1/topics")["topics"]
        print(json.dumps(listed) if args.json else _table(listed))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    description = "Lists the topics, creates a topic, or adds partitions to one."
    parser = command_parser("topics", "[list | create T | grow T] [OPTION ...]", description, _EXAMPLE)
    parser.add_argument(
        "action", nargs="?", choices=("list", "create", "grow"), default="list", help="action (default: list)"
    )
    parser.add_argument("topic", nargs="?", metavar="T", help="name of the topic without its data centre")
    option = parser.add_argument
    options = [
        option("--partitions", type=int, metavar="N", help="number of partitions that the topic gets"),
        option("--retention-ms", type=int, metavar="MS", help="create: retention in milliseconds; -1: no limit"),
        *add_gateway_options(parser),
        option("--json", action="store_true", help="print the list as JSON"),
    ]
    args = parse_with_file("topics", parser, options, argv)
    if args.action == "list":
        if args.topic is not None:
            parser.error("list does not take a topic")
    elif args.topic is None or args.partitions is None:
        parser.error(f"{args.action} requires a topic and --partitions N")
    elif args.partitions < 1:
        parser.error("--partitions must be at least 1")
    if args.action != "create" and args.retention_ms is not None:
        parser.error("--retention-ms applies to create only")
    return args


def _create(gateway: GatewayClient, topic: str, partitions: int, retention_ms: int | None) -> str:
    """Creates the topic. Repeating it with the same number of partitions is no error."""
    try:
        present = gateway.request("GET", _path(topic))
    except RequestRefused as refused:
        if refused.kind != "unknown-topic":
            raise
    else:
        if present["partitions"] != partitions:
            raise CommandError(
                f"{present['topic']} already has {present['partitions']} partitions;"
                f" to add some: logferry topics grow {topic} --partitions {partitions}"
            )
        return f"{present['topic']} already exists with {partitions} partitions"
    wanted = {"partitions": partitions} | ({} if retention_ms is None else {"retention_ms": retention_ms})
    made = gateway.request("PUT", _path(topic), wanted)
    return f"{made['topic']} created with {made['partitions']} partitions"


def _grow(gateway: GatewayClient, topic: str, partitions: int) -> str:
    before = gateway.request("GET", _path(topic))["partitions"]
    grown = gateway.request("PUT", _path(topic), {"partitions": partitions})
    return f"{grown['topic']} has {grown['partitions']} partitions (before: {before})"


def _path(topic: str) -> str:
    return f"/v1/topics/{urllib.parse.quote(topic, safe='')}"


def _table(topics: list[dict[str, Any]]) -> str:
    """One line per topic: name, partitions, number of offsets, retention."""
    if not topics:
        return "no topics; create one: logferry topics create NAME --partitions 4"
    rows = [("TOPIC", "PARTITIONS", "OFFSETS", "RETENTION")]
    for topic in topics:
        offsets = sum((part["next"] or 0) - (part["first"] or 0) for part in topic["offsets"])
        rows.append((topic["topic"], str(topic["partitions"]), str(offsets), _duration(topic["retention_ms"])))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:<{width}}  {count:>10}  {offsets:>12}  {kept:>9}" for name, count, offsets, kept in rows)


def _duration(ms: int) -> str:
    if ms < 0:
        return "no limit"
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size and ms % size == 0:
            return f"{ms // size} {unit}"
    return f"{ms} ms"
