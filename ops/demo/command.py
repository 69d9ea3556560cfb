"""``logferry demo``: the full pipeline on this machine, with kills and a final audit."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Final

from logferry.ops.cli.options import command_parser, parse_with_file
from logferry.ops.cli.problems import CommandError, UsageError
from logferry.ops.cli.terminal import StopRequested, console_for_output, stop_on_signals
from logferry.ops.demo import verdict
from logferry.ops.demo.plan import DC, LANES, OTHER_DC, WORKERS, DemoPlan
from logferry.ops.demo.story import Story
from logferry.ops.demo.view import View
from logferry.ops.runtime.jars import KAFKA, kafka_jars, spark_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.s3_server import S3Server
from logferry.ops.stack.stack import Stack

_REFUTED: Final = 1
_INTERRUPTED: Final = 130

_EXAMPLE: Final = """examples:
  logferry demo
  logferry demo --file /var/log/nginx/access.log /var/log/syslog
  logferry demo --seconds 20 --data /tmp/demo
  logferry demo --store s3

Exit status: 0 every line was delivered exactly once, 1 not so, 2 wrong use, 3 a process did not start or failed.
"""


def main(argv: list[str]) -> int:
    """0 if every line was delivered exactly once, else 1. Raises CommandError."""
    args = _arguments(argv)
    # The readers meet the demo's kills, and repeat their requests.
    logging.getLogger("logferry.client").setLevel(logging.CRITICAL)
    files = _files(args.file)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    view = View(console_for_output())
    keep = args.keep_data or args.data is not None
    plan = DemoPlan(_folder(args.data), files, args.seconds, seed, args.port, on_s3=args.store == "s3")
    try:
        with stop_on_signals(announce=b""):
            exact = _run(plan, view)
            keep = keep or not exact
            return 0 if exact else _REFUTED
    except StopRequested:
        return _INTERRUPTED
    except CommandError:
        keep = True
        raise
    finally:
        if keep and plan.stack.exists():
            _say_what_is_kept(plan, view)
        elif not args.data:
            shutil.rmtree(plan.data, ignore_errors=True)


def _run(plan: DemoPlan, view: View) -> bool:
    """Returns whether every line was delivered exactly once. All processes have ended when it returns or raises."""
    java = find_java()
    view.say(f"Java {java.version}: {java.origin}")
    kafka_jars()
    spark_jars(s3=plan.on_s3)
    versions = ", ".join(f"{name} {version(name)}" for name in ("aiokafka", "pyspark", "deltalake"))
    view.say(f"{KAFKA.name.replace('kafka-', 'Kafka ')}, {versions}, Python {platform.python_version()}")
    view.say(f"data in {plan.data}" + ("" if plan.files else f", seed {plan.seed}"))
    stack = Stack(plan.stack, [DC, OTHER_DC], workers=WORKERS, lanes=LANES, port=plan.port, mirrors=1, say=view.say)
    with _store(plan, view):
        with stack:
            view.say(f"ready: gateway {' '.join(stack.urls())}, Kafka {stack.cluster().bootstrap}", "green")
            with Story(plan, stack, view) as story:
                try:
                    story.run()
                    view.say("audit: compares Kafka, the table and the original files, then both data centres")
                    report = verdict.run_audit(plan, stack, view.console)
                except StopRequested:
                    view.say("stopping")
                    raise
                view.say(f"audit: done in {report.seconds:.1f} s")
        view.say("all processes are stopped")
        return verdict.print_summary(report, story, view.console)


@contextmanager
def _store(plan: DemoPlan, view: View) -> Iterator[None]:
    """The local S3 server, where the table is there. Its objects end with it."""
    if not plan.on_s3:
        yield
        return
    before = dict(os.environ)
    with S3Server(plan.runs) as server:
        os.environ.update(server.environment)
        view.say(f"S3 at {server.endpoint}; the table is {plan.table}")
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _say_what_is_kept(plan: DemoPlan, view: View) -> None:
    stack, table, generated = (shlex.quote(str(path)) for path in (plan.stack, plan.table, plan.generated))
    files = shlex.join(map(str, plan.files)) or f"{generated}/*"
    view.say(f"kept: {plan.data} (process logs in {plan.stack / 'logs'} and {plan.runs}); to look again:")
    audited = "" if plan.on_s3 else f"--table {table} "
    view.console.print(
        f"  logferry up --data {stack} --dc {DC},{OTHER_DC} --workers {WORKERS} --port 0\n"
        f"  logferry audit --config {stack}/{DC}/gateway.toml {audited}--file {files}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _arguments(argv: list[str]) -> argparse.Namespace:
    description = (
        "Sends logs through the full pipeline on this machine, file → gateway → Kafka → table, and by a"
        " mirror to a second data centre. Meanwhile it kills a gateway worker, the mirror, the push-client and a loader"
        " with SIGKILL. At the end an audit verifies that every line is in the table exactly once, and in the copy."
    )
    parser = command_parser("demo", "[OPTION ...]", description, _EXAMPLE)
    option = parser.add_argument
    files = "files to send instead of generated logs"
    option("--file", nargs="+", action="extend", default=[], metavar="PATH", help=files)
    store = "where the table is: a folder (default), or an S3 server that the demo starts, which keeps it in memory"
    port = "first port of the gateway workers (default: free ones)"
    options = [
        option("--store", choices=("folder", "s3"), default="folder", help=store),
        option("--data", metavar="DIR", help="new or empty folder, kept at the end (default: a temporary one)"),
        option("--keep-data", action="store_true", help="keep the folder of the data at the end"),
        option("--seconds", type=int, default=45, metavar="N", help="duration of the generator (default: 45)"),
        option("--port", type=int, default=0, metavar="P", help=port),
        option("--seed", type=int, metavar="N", help="seed of the generated logs (default: random, printed)"),
    ]
    args = parse_with_file("demo", parser, options, argv)
    if not 1 <= args.seconds <= 3600:
        parser.error("--seconds must be from 1 to 3600")
    return args


def _folder(given: str | None) -> Path:
    """The folder, created if missing. Raises UsageError unless it is empty."""
    if given is None:
        return Path(tempfile.mkdtemp(prefix="logferry-demo-"))
    folder = Path(given).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--data {given}: the folder is not empty; give a new or empty one")
    except OSError as error:
        raise UsageError(f"--data {given}: {error.strerror}") from None
    return folder


def _files(given: list[str]) -> tuple[Path, ...]:
    """Absolute paths, each file once. Raises UsageError for a file that is empty or cannot be read."""
    found: dict[tuple[int, int], Path] = {}
    for name in given:
        path = Path(os.path.abspath(name))  # noqa: PTH100 - resolve() would follow symbolic links
        try:
            with path.open("rb"):
                facts = path.stat()
        except OSError as error:
            raise UsageError(f"--file {name}: {error.strerror}") from None
        if not stat.S_ISREG(facts.st_mode) or not facts.st_size:
            raise UsageError(f"--file {name}: empty, or not a regular file")
        found.setdefault((facts.st_dev, facts.st_ino), path)
    return tuple(found.values())
