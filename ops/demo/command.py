"""``logferry demo``: the whole way on this machine, while processes are killed, with a proof at the end."""

from __future__ import annotations

import argparse
import os
import platform
import random
import shlex
import shutil
import stat
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

from logferry.ops.cli.problems import Problem, WrongUse
from logferry.ops.cli.signals import Stopped, stopped_by_signals
from logferry.ops.config import Defaults
from logferry.ops.demo import verdict as proof
from logferry.ops.demo.plan import DC, LANES, OTHER_DC, WORKERS, Plan
from logferry.ops.demo.story import Story
from logferry.ops.demo.view import View
from logferry.ops.pins import KAFKA_VERSION
from logferry.ops.runtime.jars import kafka_jars, spark_jars
from logferry.ops.runtime.java import find_java
from logferry.ops.stack.stack import Stack
from rich.console import Console

_SECONDS: Final = 45
_WIDE: Final = 130
_REFUTED: Final = 1
_INTERRUPTED: Final = 130

_EXAMPLE: Final = """examples:
  logferry demo
  logferry demo --file /var/log/nginx/access.log /var/log/syslog
  logferry demo --seconds 20 --data /tmp/demo

Exit status: 0 the promise was kept, 1 it was not, 2 wrong use, 3 something did not start or ended by itself.
"""


def main(argv: list[str]) -> int:
    """0 if the verdict is yes, 1 if it is no. Raises Problem for what the user can mend."""
    args = _arguments(argv)
    files = _files(args.file)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    view = View(_console())
    keep = args.keep or args.data is not None
    plan = Plan(_folder(args.data), files, args.seconds, seed, args.port)
    try:
        with stopped_by_signals(announce=b""):
            exact = _run(plan, view)
            keep = keep or not exact
            return 0 if exact else _REFUTED
    except Stopped:
        return _INTERRUPTED
    except Problem:
        keep = True
        raise
    finally:
        if keep and plan.stack.exists():
            _say_what_is_left(plan, view)
        elif not args.data:
            shutil.rmtree(plan.data, ignore_errors=True)


def _console() -> Console:
    """Where there is no terminal, and nobody says how wide it is, the tables get the room that they need."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


def _run(plan: Plan, view: View) -> bool:
    """Whether the promise was kept. Nothing that was started runs any more when this returns or raises."""
    _set_up(view, plan)
    stack = Stack(plan.stack, [DC, OTHER_DC], workers=WORKERS, lanes=LANES, port=plan.port, mirrors=1, say=view.say)
    with stack:
        view.say(f"ready: gateway {' '.join(stack.urls())}, Kafka {stack.cluster().bootstrap}", "green")
        with Story(plan, stack, view) as story:
            try:
                story.tell()
                view.say("audit: Kafka, the table and the original files are read and compared, then both data centres")
                report, copy = proof.prove(plan, stack.cluster().bootstrap, view.console)
            except Stopped:
                view.say("stopping")
                raise
            view.say(f"audit: done in {report.seconds:.1f} s")
    view.say("all processes are stopped")
    return proof.end(plan, report, copy, story, view.console)


def _set_up(view: View, plan: Plan) -> None:
    java = find_java()
    view.say(f"Java {java.version}: {java.origin}")
    kafka_jars()
    spark_jars()
    versions = ", ".join(f"{name} {version(name)}" for name in ("aiokafka", "pyspark", "deltalake"))
    view.say(f"Kafka {KAFKA_VERSION}, {versions}, Python {platform.python_version()}")
    view.say(f"data in {plan.data}" + ("" if plan.files else f", seed {plan.seed}"))


def _say_what_is_left(plan: Plan, view: View) -> None:
    files = " ".join(shlex.quote(str(path)) for path in plan.files) or f"{shlex.quote(str(plan.generated))}/*"
    quoted = {name: shlex.quote(str(path)) for name, path in (("stack", plan.stack), ("table", plan.table))}
    view.say(f"kept: {plan.data} (logs of the processes in {plan.stack / 'logs'} and {plan.runs}); look again with")
    view.console.print(
        f"  logferry up --data {quoted['stack']} --dc {DC},{OTHER_DC} --workers {WORKERS} --port 0\n"
        f"  logferry audit --config {quoted['stack']}/{DC}/gateway.toml --table {quoted['table']} --file {files}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="logferry demo",
        description="Sends logs the whole way, file → gateway → Kafka → table, on this machine, and by a mirror to a"
        " second data centre. A gateway worker, the mirror, the push-client and a loader are killed by SIGKILL"
        " meanwhile. In the end an audit proves or refutes that every line is in the table once, and the copy alike.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--file", nargs="+", action="extend", default=[], metavar="PATH", help="send these instead of generated logs"
    )
    options = [
        option("--data", metavar="DIR", help="a new or empty folder that is kept (default: one that is removed)"),
        option("--keep", action="store_true", help="keep the folder"),
        option(
            "--seconds", type=int, default=_SECONDS, metavar="N", help="generate for so long (default: %(default)s)"
        ),
        option("--port", type=int, default=0, metavar="P", help="the first gateway worker's (default: free ones)"),
        option("--seed", type=int, metavar="N", help="of the generated logs (default: a random one, which is shown)"),
    ]
    Defaults("demo").add_to(parser, options, argv)
    args = parser.parse_args(argv)
    if not 1 <= args.seconds <= 3600:
        parser.error("--seconds: from 1 to 3600")
    return args


def _folder(given: str | None) -> Path:
    """Raises WrongUse unless it is new or empty."""
    if given is None:
        return Path(tempfile.mkdtemp(prefix="logferry-demo-"))
    folder = Path(given).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise WrongUse(f"--data {given}: the folder is not empty; give a new one, a demo begins with nothing")
    except OSError as error:
        raise WrongUse(f"--data {given}: {error.strerror}") from None
    return folder


def _files(given: list[str]) -> tuple[Path, ...]:
    """Each file once, by its absolute path. Raises WrongUse for what is not a file with something in it to read."""
    found: dict[tuple[int, int], Path] = {}
    for name in given:
        path = Path(os.path.abspath(name))  # noqa: PTH100 - resolve() would follow symbolic links
        try:
            with path.open("rb"):
                facts = path.stat()
        except OSError as error:
            raise WrongUse(f"--file {name}: {error.strerror}") from None
        if not stat.S_ISREG(facts.st_mode) or not facts.st_size:
            raise WrongUse(f"--file {name}: not a file with something in it")
        found.setdefault((facts.st_dev, facts.st_ino), path)
    return tuple(found.values())
