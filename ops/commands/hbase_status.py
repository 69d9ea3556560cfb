"""``logferry hbase status``: how far HBase has shipped to each subscription, server by server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from logferry.client.hbase.progress import ServerProgress, pushed, servers_progress
from logferry.client.hbase.zookeeper import Registry


def subscription_status(listed: dict[str, Any], registry: Registry) -> dict[str, Any]:
    """``listed``: the subscription as `logferry hbase list` shows it. Adds servers, regions and problems."""
    servers = servers_progress(registry, listed["name"])
    problems = [f"the state is: {listed['state']}"] if listed["state"] != "active" else []
    if not listed["connectors"]:
        problems.append("no connector runs: HBase keeps the changes; start `logferry hbase subscribe`")
    problems += [f"{one.server}: {one.problem}" for one in servers if one.problem]
    regions = dict(sorted(pushed(registry, listed["name"])))
    return {**listed, "servers": [_server(one) for one in servers], "pushed_seqnos": regions, "problems": problems}


def _server(one: ServerProgress) -> dict[str, Any]:
    queues = [
        {"taken_over_from": queue.of, "wals": [{"wal": wal, "position": at} for wal, at in queue.wals]}
        for queue in one.queues
    ]
    return {**one._asdict(), "queues": queues}


def print_status(found: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"subscriptions": found}, ensure_ascii=False))
        return
    for one in found:
        tables, connectors = " ".join(one["tables"]), " ".join(one["connectors"]) or "none"
        print(f"{one['name']}: {one['state']}; {tables} -> {one['topic']}; connectors: {connectors}")
        for server in one["servers"]:
            print(f"  {server['server']}: {_figures(server)}")
        for problem in one["problems"]:
            print(f"  ! {problem}")
    if not found:
        print("no subscriptions")


def _figures(server: dict[str, Any]) -> str:
    parts = []
    for queue in server["queues"]:
        whose = f" of {queue['taken_over_from']}" if queue["taken_over_from"] else ""
        last = queue["wals"][-1]["position"] if queue["wals"] else 0
        parts.append(f"{len(queue['wals'])} logs{whose} to ship (position {last} in the newest)")
    if server["shipped_operations"] is not None:
        parts.append(f"{server['shipped_operations']} operations shipped")
    if server["age_ms"] is not None:
        parts.append(f"the last one was {server['age_ms']} ms old")
    if server["oldest_wal_ms"]:
        parts.append(f"the oldest log is {server['oldest_wal_ms'] / 1000:.0f} s old")
    return ", ".join(parts) or "nothing to ship"
