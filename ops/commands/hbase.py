"""``logferry hbase``: the changes of HBase's tables into a topic, and the subscriptions that are there."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import signal
import threading
from collections.abc import Callable, Container, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

from logferry.client.events import set_up
from logferry.client.hbase.connector import Connector
from logferry.client.hbase.definition import ROOT, PeerDefinition, Unfit
from logferry.client.hbase.frames import CallFailed
from logferry.client.hbase.master import HBaseMaster
from logferry.client.hbase.progress import add_sizes, listed, logs_of, with_progress
from logferry.client.hbase.server import ServerLimits
from logferry.client.hbase.wal.folders import LocalStore, LogFolders
from logferry.client.hbase.wal.tail import TailOptions, tail_logs
from logferry.client.hbase.wal.web_hdfs import is_url, web_hdfs
from logferry.client.hbase.zookeeper import Address, Registry, Unanswered
from logferry.client.transport.cluster import GatewayCluster, cluster_of
from logferry.client.transport.connections import Dialer, proxies_of
from logferry.ops.cli.gateway_client import GatewayClient, token_of
from logferry.ops.cli.hbase_options import add_status_options, add_subscribe_options, add_tail_options, named
from logferry.ops.cli.options import command_parser
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError

_EXAMPLE: Final = """examples:
  logferry hbase subscribe orders_log --zookeeper zk1,zk2,zk3 --tables orders --topic orders --listen 10.0.0.5:16100
  logferry hbase list --zookeeper zk1,zk2,zk3
  logferry hbase pause orders_log --zookeeper zk1,zk2,zk3

Exit status: 0 done, 1 HBase refuses it, or status finds a problem, 2 wrong use, or HBase does not fit, 3 ZooKeeper or
HBase does not answer.
"""
_DESCRIPTION: Final = (
    "Writes each change of HBase's tables into a topic, once, and in order for each row. HBase ships its changes to a "
    "replication peer, which the first `subscribe` registers and each running one serves."
)
_SUBSCRIBE_EXAMPLE: Final = """example:
  logferry hbase subscribe orders_log --zookeeper zk1,zk2,zk3 --tables orders shop:items --families d \\
      --topic orders --url http://gateway:8080 --listen 10.0.0.5:16100

Run it as a service, and several with the same options: HBase ships to all of them. A column family needs
REPLICATION_SCOPE 1. Calls of HBase carry no password: let only region servers reach the port.
"""
_TAIL_EXAMPLE: Final = """example:
  logferry hbase tail orders_log --wals /hbase/WALs --old-wals /hbase/oldWALs --tables orders --topic orders \\
      --positions /var/lib/logferry/orders_log.json --url http://gateway:8080

Run it as a service, once. It exits with 1 if files of the log were gone before they were written.
"""
_EXAMPLES: Final = {"subscribe": _SUBSCRIBE_EXAMPLE, "tail": _TAIL_EXAMPLE}
_MIB: Final = 1 << 20
_SHOWN_REGIONS: Final = 10


def main(argv: list[str]) -> int:
    """0 done, 1 (status) something is wrong. Raises CommandError."""
    parser, chosen = _parser()
    args = parser.parse_args(argv)
    try:
        if args.action == "tail":
            return _tail(args)
        with Registry(args.zookeeper.split(","), args.hbase_folder) as registry:
            do: Callable[[argparse.Namespace, Registry], int] = chosen[args.action]
            return do(args, registry)
    except Unfit as error:
        raise UsageError(str(error)) from None
    except Unanswered as error:
        raise Unavailable(str(error)) from None
    except CallFailed as error:
        raise CommandError(f"HBase refuses it: {error.kind}: {error}") from None


def _parser() -> tuple[argparse.ArgumentParser, dict[str, Callable[[argparse.Namespace, Registry], int]]]:
    parser = command_parser("hbase", "ACTION [NAME] [OPTION ...]", _DESCRIPTION, _EXAMPLE)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    texts = {
        "subscribe": "serve a subscription; the first time, register it",
        "tail": "write the changes from the files of HBase's write-ahead log",
        "list": "print the subscriptions",
        "status": "print how far HBase has shipped, and what is wrong",
        "pause": "let HBase keep the changes until `resume`",
        "resume": "let HBase ship the changes again",
        "remove": "remove the subscription; HBase drops changes not shipped yet",
    }
    for action, text in texts.items():
        description, _, notes = _EXAMPLES.get(action, text).partition("\n\n")
        is_plain = action in ("list", "status")
        name = "" if is_plain else "NAME "
        source = "--wals DIR --old-wals DIR" if action == "tail" else "--zookeeper HOST,..."
        one = actions.add_parser(
            action,
            help=text,
            usage=f"logferry hbase {action} {name}{source} [OPTION ...]",
            description=description,
            epilog=notes or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if not is_plain:
            help_text = "for its log" if action == "tail" else "of the subscription, and of HBase's peer"
            one.add_argument("name", type=named, metavar="NAME", help=help_text)
        else:
            one.add_argument("--json", action="store_true", help="print one JSON object")
        if action == "tail":
            add_tail_options(one)
            continue
        one.add_argument(
            "--zookeeper", required=True, metavar="HOST[:PORT],...", help="servers of ZooKeeper, as HBase knows them"
        )
        one.add_argument(
            "--hbase-folder", default="/hbase", metavar="PATH", help="zookeeper.znode.parent of HBase (default: /hbase)"
        )
        if action == "subscribe":
            add_subscribe_options(one)
        if action == "status":
            add_status_options(one)
    return parser, {
        "subscribe": _subscribe,
        "list": _list,
        "status": _status,
        "pause": _pause,
        "resume": _resume,
        "remove": _remove,
    }


def _subscribe(args: argparse.Namespace, registry: Registry) -> int:
    host, _, port = args.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen: {args.listen!r} is not HOST:PORT")
    if args.advertise is None and host in ("0.0.0.0", "::"):
        raise UsageError("--advertise: name the host by which region servers reach this one, since --listen takes all")
    if not 1 <= args.call_mb <= args.memory_mb:
        raise UsageError("--call-mb: must be at least 1, and at most --memory-mb")
    limits = ServerLimits(args.call_mb * _MIB, args.memory_mb * _MIB)
    definition, cluster, dialer = _checked(args)
    set_up(args.verbose)
    listen = Address(host, int(port))
    advertise = args.advertise or host
    connector = Connector(
        args.name, definition, registry, cluster, dialer, listen, advertise, limits, args.metrics_port
    )
    stop = threading.Event()

    def end(*_: object) -> None:
        stop.set()
        registry.changed.set()

    _on_signal(end)
    try:
        connector.run(stop)
    except OSError as error:
        ports = f"--listen {args.listen}{f' or --metrics-port {args.metrics_port}' if args.metrics_port else ''}"
        raise UsageError(f"{ports}: {error.strerror or error}") from None
    return 0


def _checked(args: argparse.Namespace) -> tuple[PeerDefinition, GatewayCluster, Dialer]:
    filters = (tuple(args.families), tuple(args.qualifiers), tuple(args.row_prefixes), args.row_pattern)
    try:
        definition = PeerDefinition(args.topic, tuple(args.tables), *filters, args.format).check()
        cluster = cluster_of(args.url or "http://127.0.0.1:8080", token_of(args))
        return definition, cluster, Dialer(args.ca_file, proxies=proxies_of(os.environ))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None


def _on_signal(end: Callable[..., None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _tail(args: argparse.Namespace) -> int:
    """1: files of the log were lost."""
    definition, cluster, dialer = _checked(args)
    options = TailOptions(args.poll_s, args.positions, frozenset(args.leave_out))
    stop = threading.Event()
    _on_signal(lambda *_: stop.set())
    set_up(args.verbose)
    try:
        return int(tail_logs(args.name, definition, _log_folders(args), cluster, dialer, options, stop) > 0)
    except OSError as error:
        raise UsageError(str(error)) from None


def _log_folders(args: argparse.Namespace) -> LogFolders:
    """Raises UsageError."""
    folders = [args.wals, args.old_wals]
    if not any(map(is_url, folders)):
        return LogFolders(LocalStore(), *folders)
    try:
        user = args.hdfs_user or getpass.getuser()
        return LogFolders(*web_hdfs(folders, user, args.hdfs_token_file, Dialer(args.ca_file)))
    except (ValueError, OSError, KeyError) as error:  # KeyError: the user of this process has no name
        raise UsageError(f"--wals, --hdfs-user, --hdfs-token-file: {error}") from None


def _list(args: argparse.Namespace, registry: Registry) -> int:
    found = _all(registry)
    if args.json:
        print(json.dumps({"subscriptions": found}, ensure_ascii=False))
        return 0
    for one in found:
        filters = ", ".join(f"{name} {one[name]}" for name in ("families", "qualifiers", "row_prefixes") if one[name])
        print(
            f"{one['name']}: {one['state']}; {' '.join(one['tables'])} -> {one['topic']}{filters and f' ({filters})'}"
        )
        print(f"  connectors: {' '.join(one['connectors']) or 'none: HBase keeps the changes'}")
    if not found:
        print("no subscriptions")
    return 0


def _status(args: argparse.Namespace, registry: Registry) -> int:
    if (args.wals is None) != (args.old_wals is None):
        raise UsageError("--wals and --old-wals: name both folders")
    gateway = GatewayClient(args.url, token_of(args), args.ca_file) if args.url else None
    found = [_compared(one, registry, gateway) for one in _all(registry)]
    if args.wals is not None:
        folders = _log_folders(args)
        folders.check()
        try:
            sizes = folders.sizes({wal["wal"] for one in found for wal in logs_of(one)})
        except OSError as error:
            raise Unavailable(f"--wals {args.wals}: {error}") from None
        for one in found:
            add_sizes(one, sizes)
    _print_status(found, args.json)
    return int(any(one["problems"] for one in found))


def _compared(one: dict[str, Any], registry: Registry, gateway: GatewayClient | None) -> dict[str, Any]:
    """``one``: the subscription as `logferry hbase list` shows it. Adds what is known of its progress."""
    found = with_progress(one, registry)
    regions = found["pushed_seqnos"]
    return {**found, "recorded_seqnos": {} if gateway is None else _recorded(gateway, one["topic"], regions)}


def _recorded(gateway: GatewayClient, topic: str, regions: Container[str]) -> dict[str, int]:
    """The seqno that the gateway has recorded, of those regions of which it has one. Raises CommandError."""
    found: dict[str, int] = {}
    after: str | None = ""
    while after is not None:
        page = gateway.request("GET", f"/v1/topics/{topic}/sources?{urlencode({'after': after} if after else {})}")
        for source in page["sources"]:
            if source["source_id"] in regions and source["recorded_seqno"] is not None:
                found[source["source_id"]] = source["recorded_seqno"]
        after = page["next"]
    return found


def _print_status(found: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"subscriptions": found}, ensure_ascii=False))
        return
    for one in found:
        tables, connectors = " ".join(one["tables"]), " ".join(one["connectors"]) or "none"
        print(f"{one['name']}: {one['state']}; {tables} -> {one['topic']}; connectors: {connectors}")
        for server in one["servers"]:
            print(f"  {server['server']}: {_figures_shown(server)}")
        for connector, figures in one["connector_figures"].items():
            _print_connector(connector, figures)
        if one["recorded_seqnos"]:
            _print_compared(one["pushed_seqnos"], one["recorded_seqnos"])
        for problem in one["problems"]:
            print(f"  ! {problem}")
    if not found:
        print("no subscriptions")


def _print_connector(connector: str, figures: dict[str, Any]) -> None:
    if not figures:
        print(f"  connector {connector}: no figures yet")
        return
    text = f"{figures['calls']} calls done, {figures['failed_calls']} refused, {figures['chunks']} chunks recorded"
    if (age_ms := figures["change_age_ms"]) is not None:
        text += f", the last change {age_ms / 1000:.1f} s after HBase wrote it"
    print(f"  connector {connector}: {text}")
    for wait in figures["waits"]:
        at = datetime.fromtimestamp(wait["at_ms"] / 1000, UTC).isoformat(timespec="seconds")
        times = f" ({wait['times']} times)" if wait["times"] > 1 else ""
        print(f"    {wait['who']} last waited at {at}{times}: {wait['reason']}")


def _print_compared(shipped: dict[str, int], recorded: dict[str, int]) -> None:
    less = [region for region, seqno in recorded.items() if seqno < shipped[region]]
    print(f"  regions: {len(shipped)} in HBase, {len(recorded)} in the gateway, which has less of {len(less)}")
    for region in less[:_SHOWN_REGIONS]:
        print(f"    {region}: HBase has shipped {shipped[region]}, the gateway recorded {recorded[region]}")


def _figures_shown(server: dict[str, Any]) -> str:
    parts = []
    for queue in server["queues"]:
        whose = f" of {queue['taken_over_from']}" if queue["taken_over_from"] else ""
        last = queue["wals"][-1]["position"] if queue["wals"] else 0
        count = len(queue["wals"])
        left = "" if queue.get("left_bytes") is None else f", {queue['left_bytes']:,} bytes"
        parts.append(f"{count} log{'s' * (count != 1)}{whose} to ship{left} (position {last} in the newest)")
    if server["shipped_operations"] is not None:
        parts.append(f"{server['shipped_operations']} operations shipped")
    if server["age_ms"] is not None:
        parts.append(f"the last one was {server['age_ms']} ms old")
    if server["oldest_wal_ms"]:
        parts.append(f"the oldest log is {server['oldest_wal_ms'] / 1000:.0f} s old")
    return ", ".join(parts) or "nothing to ship"


def _all(registry: Registry) -> list[dict[str, Any]]:
    peers = HBaseMaster(registry.master).peers()
    return [listed(name, registry, peers.get(name)) for name in registry.names()]


def _pause(args: argparse.Namespace, registry: Registry) -> int:
    _own_peer(args.name, registry).disable_peer(args.name)
    print(f"{args.name} is paused: HBase keeps its changes, and their files, until `logferry hbase resume {args.name}`")
    return 0


def _resume(args: argparse.Namespace, registry: Registry) -> int:
    _own_peer(args.name, registry).enable_peer(args.name)
    print(f"{args.name} is active")
    return 0


def _remove(args: argparse.Namespace, registry: Registry) -> int:
    """The peer first: without its folder, HBase would look for the cluster without end."""
    master = HBaseMaster(registry.master)
    peer = master.peers().get(args.name)
    if peer is None and args.name not in registry.names():
        raise _unknown(args.name, registry)
    if peer is not None:
        _own_peer(args.name, registry).remove_peer(args.name)
    registry.remove(args.name)
    print(f"{args.name} is removed")
    return 0


def _own_peer(name: str, registry: Registry) -> HBaseMaster:
    """The master, once the peer is known to be a subscription's. Raises UsageError."""
    master = HBaseMaster(registry.master)
    peer = master.peers().get(name)
    if peer is None:
        raise _unknown(name, registry)
    if not peer.config.clusterkey.endswith(f":{ROOT}/{name}"):
        raise UsageError(f"the peer {name} of HBase is no subscription: it ships to {peer.config.clusterkey}")
    return master


def _unknown(name: str, registry: Registry) -> UsageError:
    return UsageError(f"there is no subscription {name}; there are: {', '.join(registry.names()) or 'none'}")
