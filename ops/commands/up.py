"""``logferry up``: a local stack in the foreground, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path

from logferry.ops.cli.signals import Stopped, stopped_by_signals
from logferry.ops.config import Defaults
from logferry.ops.runtime.java import find_java
from logferry.ops.runtime.user_dirs import data_dir
from logferry.ops.stack.kafka_cluster import LONG_RUN
from logferry.ops.stack.stack import Stack

_PORT = 8080
_PORT_HELP = f"the first gateway worker's port, the others follow (default: {_PORT}; 0: free ones)"

_EXAMPLE = """examples:
  logferry up
  logferry up --dc dc1,dc2 --workers 2 --data /tmp/stack --json

With --config FILE the options come from the file's table [up]; what stands on the command line wins.
"""


def main(argv: list[str]) -> int:
    """Runs until it is told to stop; 0 then. Raises Problem for what the user can mend."""
    args = _arguments(argv)
    data = Path(args.data) if args.data else data_dir() / "up"
    try:
        with stopped_by_signals():
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
    except Stopped:
        pass
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="logferry up",
        description="Starts Kafka and the gateway on this machine, and mirrors between several data centres; prints"
        " their URLs when they answer, and stops all of it on Ctrl-C or SIGTERM. A process that dies is started again"
        " after a second.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    options = [
        option("--dc", default="dc1", metavar="NAMES", help="data centres, by commas (default: dc1)"),
        option("--data", metavar="DIR", help=f"where everything is kept (default: {data_dir() / 'up'})"),
        option("--port", type=int, default=_PORT, metavar="P", help=_PORT_HELP),
        option("--workers", type=int, default=1, metavar="N", help="gateway workers a data centre (default: 1)"),
        option("--brokers", type=int, default=1, metavar="N", help="Kafka brokers a data centre (default: 1)"),
        option("--lanes", type=int, default=8, metavar="L", help="lanes a data centre, for ever (default: 8)"),
        option("--json", action="store_true", help="print one line of JSON when ready"),
        option("--no-restart", action="store_true", help="leave a process that died as it is"),
    ]
    Defaults("up").add_to(parser, options, argv)
    return parser.parse_args(argv)


def _print_ready(stack: Stack, *, as_json: bool) -> None:
    facts = stack.describe()
    if as_json:
        print(json.dumps(facts), flush=True)
        return
    for dc, parts in facts.items():
        mirror = "".join(f"  mirror {url}" for url in stack.mirror_urls(dc))
        print(f"{dc}: gateway {' '.join(stack.urls(dc))}{mirror}  Kafka {parts['kafka']}")
    print(f"data and logs in {stack.data}; Ctrl-C stops it all", flush=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
