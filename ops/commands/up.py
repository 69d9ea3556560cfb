"""``logferry up``: a local stack in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from contextlib import suppress
from pathlib import Path

from logferry.ops.cli.options import command_parser, parse_with_file
from logferry.ops.cli.terminal import StopRequested, stop_on_signals
from logferry.ops.runtime.java import data_dir, find_java
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.stack import Stack

_PORT = 8080
_PORT_HELP = f"port of the first gateway worker; the others follow (default: {_PORT}; 0: any free ports)"

_EXAMPLE = """examples:
  logferry up
  logferry up --dc dc1,dc2 --workers 2 --data /tmp/stack --json

With --config FILE, the table [up] of the file sets options; options on the command line win.
"""


def main(argv: list[str]) -> int:
    """Runs until a signal asks for the end; 0 then. Raises CommandError."""
    args = _arguments(argv)
    data = Path(args.data) if args.data else data_dir() / "up"
    with suppress(StopRequested), stop_on_signals():
        java = find_java()
        _say(f"Java {java.version}: {java.origin}")
        stack = Stack(
            data,
            dcs=[name.strip() for name in args.dc.split(",")],
            brokers=args.brokers,
            workers=args.workers,
            lanes=args.lanes,
            port=args.port,
            restart=not args.no_restart,
            jvm=LONG_RUN,
            mirrors=1,
            say=_say,
        )
        with stack:
            _print_ready(stack, as_json=args.json)
            threading.Event().wait()
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    description = (
        "Starts Kafka and a gateway on this machine, for several data centres with mirrors between them."
        " Prints the URLs when all of them answer; Ctrl-C or SIGTERM stops everything. A process that dies is restarted"
        " after one second."
    )
    parser = command_parser("up", "[OPTION ...]", description, _EXAMPLE)
    option = parser.add_argument
    options = [
        option("--dc", default="dc1", metavar="NAMES", help="data centres, separated by commas (default: dc1)"),
        option("--data", metavar="DIR", help=f"folder of all data and logs (default: {data_dir() / 'up'})"),
        option("--port", type=int, default=_PORT, metavar="P", help=_PORT_HELP),
        option("--workers", type=int, default=1, metavar="N", help="gateway workers per data centre (default: 1)"),
        option("--brokers", type=int, default=1, metavar="N", help="Kafka brokers per data centre (default: 1)"),
        option("--lanes", type=int, default=8, metavar="L", help="lanes of new data centres (default: 8)"),
        option("--json", action="store_true", help="print the URLs and process ids as one line of JSON"),
        option("--no-restart", action="store_true", help="do not restart a process that died"),
    ]
    return parse_with_file("up", parser, options, argv)


def _print_ready(stack: Stack, *, as_json: bool) -> None:
    facts = stack.describe()
    if as_json:
        print(json.dumps(facts), flush=True)
        return
    for dc, parts in facts.items():
        mirror = "".join(f"  mirror {url}" for url in stack.urls(dc, "mirror"))
        print(f"{dc}: gateway {' '.join(stack.urls(dc))}{mirror}  Kafka {parts['kafka']}")
    print(f"data and logs are in {stack.data}; Ctrl-C stops everything", flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
