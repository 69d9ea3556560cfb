"""``make datacenters``: two data centres on this machine, installed as the page *Production* says; one is cut off.

Network namespaces are the hosts, with 40 ms and 1 % loss between the data centres. At the full rate of logs a gateway
and a broker are killed, then the link is cut and mended. At the end `logferry audit` compares everything stored.

Exit status: 0 exact, 1 not so (the folder is kept), 2 wrong use, 3 it could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from logferry.ops.cli.problems import CommandError
from logferry.ops.cli.terminal import StopRequested, console_for_output, stop_on_signals
from logferry.ops.demo.view import View
from logferry.ops.runtime.jars import kafka_jars, spark_jars
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.datacenters import figures
from tests.datacenters.network import DELAY_MS, LOSS, Network, as_root
from tests.datacenters.plan import DCS, other
from tests.datacenters.site import Site
from tests.datacenters.story import LINK_DOWN, Outcome, Story, Times

EXACT, REFUTED, COULD_NOT_RUN, INTERRUPTED = 0, 1, 3, 130
_PHASE: Final = ("phase",)


def main() -> int:
    args = _arguments()
    as_root([sys.executable, "-m", "tests.datacenters", *sys.argv[1:]])
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    # The clients meet the faults, and repeat their requests.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL + 1)
    view = View(console_for_output())
    folder = Path(tempfile.mkdtemp(prefix="logferry-datacenters-"))
    status = COULD_NOT_RUN
    try:
        with stop_on_signals(announce=b""):
            kafka_jars()
            spark_jars()
            status = _run(args, folder, seed, view)
    except StopRequested:
        view.say("stopped; all processes and networks are gone")
        status = INTERRUPTED
    except CommandError as error:
        print(f"could not run: {error}", file=sys.stderr)
    finally:
        if args.keep or status in (REFUTED, COULD_NOT_RUN):
            view.say(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return status


def _run(args: argparse.Namespace, folder: Path, seed: int, view: View) -> int:
    times = Times(args.well, args.fault, args.cut, args.after, args.settle)
    with Network(folder) as network:
        link = f"{DELAY_MS} ms each way and {LOSS:.0%} loss between {' and '.join(DCS)}, by {network.emulation}"
        view.say(f"{len(network.hosts)} hosts as network namespaces; {link}; seed {seed}")
        network.enter(f"load1.{DCS[0]}.example")
        with Site(folder, network, args.rate, view.say) as site:
            asyncio.run(site.start())
            columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            with Progress(*columns, console=view.console, transient=True) as progress:
                story = Story(site, times, progress, view.say)
                outcome = story.run(seed)
            show(outcome, view.console)
            exact = True
            for dc in DCS:
                audit = site.audit(dc)
                exact = exact and audit.exit_status == 0
                view.say(f"audit of {dc} ended with status {audit.exit_status}:")
                view.console.print(audit.log_tail(), highlight=False, markup=False, soft_wrap=True)
    view.say("all processes and networks are gone")
    breaks = sum(int(note["breaks"]) for name, notes in outcome.notes.items() if "reader" in name for note in notes)
    if not story.is_loaded:
        why = f"the loader had not loaded everything after {args.settle:.0f} s: {story.load_text()}"
        view.say(f"NOT PROVEN: {why}; --settle waits longer, --rate writes less", "bold red")
        return REFUTED
    if exact and not breaks:
        view.say(
            "EXACT: every line is stored once, in its data centre, in the other one, and in the table", "bold green"
        )
        return EXACT
    view.say(f"NOT EXACT: see the audits; {breaks} chunks came out of order to readers", "bold red")
    return REFUTED


def show(outcome: Outcome, console: Console) -> None:
    """The figures, by phase."""
    phases = outcome.phases
    lasted = _table("phases", _PHASE, ("seconds",))
    for phase in phases:
        lasted.add_row(phase.name, f"{(phase.to_ms - phase.from_ms) / 1000:.0f}")
    console.print(lasted)
    for dc in DCS:
        table = _table(f"a writer in {dc}: one line after the other", _PHASE, ("recorded", "p50", "p99", "longest"))
        for phase in phases:
            table.add_row(phase.name, *figures.writer_cells(outcome.notes[f"{dc}/writer"], phase))
        console.print(table)
    for dc in DCS:
        for of in DCS:
            title = f"a reader in {dc} of what {of} writes" + (", the copy" if of != dc else "")
            table = _table(title, _PHASE, ("chunks", "longest silence", "p50 delay", "longest delay", "out of order"))
            notes = outcome.notes[f"{dc}/reader-of-{of}"]
            for phase in phases:
                table.add_row(phase.name, *figures.reader_cells(notes, phase))
            console.print(table)
    for here, dc in outcome.looks:
        table = _table(f"the console of {dc}, from {here}", _PHASE, ("looks", "no answer", "mirror's longest lag"))
        table.add_column("why the mirror waited")
        for phase in phases:
            table.add_row(phase.name, *figures.console_cells(outcome.looks[here, dc], phase))
        console.print(table)
    table = _table("the loader in dc1: rows added", _PHASE, (*DCS, "segments READY"))
    for phase in phases:
        table.add_row(phase.name, *figures.table_cells(outcome.table, phase))
    console.print(table)
    for text in _events(outcome):
        console.print(text, highlight=False)


def _events(outcome: Outcome) -> list[str]:
    cut = next(phase for phase in outcome.phases if phase.name == LINK_DOWN)
    found = []
    for dc in DCS:
        looks = outcome.looks[dc, dc]
        seen = next((look for look in looks if look.at_ms >= cut.from_ms and look.wait), None)
        if seen is not None:
            after = (seen.at_ms + seen.took_ms - cut.from_ms) / 1000
            found.append(f"console of {dc}: the mirror waits, seen {after:.1f} s after the cut: {seen.wait}")
        late = figures.caught_up_s(outcome.notes[f"{dc}/reader-of-{other(dc)}"], cut.to_ms)
        text = "not within the run" if late is None else f"{late:.1f} s after the link was back"
        found.append(f"copy of {other(dc)} in {dc}: up to date again {text}")
    for dc in DCS:
        for phase, text in figures.problems(outcome.looks[dc, dc], outcome.phases):
            found.append(f"console of {dc}, {phase or 'before'}: {text}")
    return found


def _table(title: str, texts: tuple[str, ...], numbers: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (*texts, *numbers):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make datacenters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--rate", type=float, default=0.2, metavar="MB_S", help="logs of each data centre (default: %(default)g)")
    option("--well", type=float, default=20, metavar="S", help="time before the faults (default: %(default)g)")
    option(
        "--fault",
        type=float,
        default=15,
        metavar="S",
        help="how long gateway and broker are dead (default: %(default)g)",
    )
    option("--cut", type=float, default=45, metavar="S", help="how long the link is cut (default: %(default)g)")
    option("--after", type=float, default=20, metavar="S", help="time at full rate afterwards (default: %(default)g)")
    option("--settle", type=float, default=240, metavar="S", help="longest wait for the loader (default: %(default)g)")
    option("--seed", type=int, help="of the logs (default: another one each time)")
    option("--keep", action="store_true", help="keep the folder of data and logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
