"""``make soak``: random faults over the whole way for minutes, and a verdict on every chunk, line and row.

Exit status: 0 exact, 1 refuted (the folder with the evidence is kept), 2 wrong use or it could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from logferry.ops.cli.problems import CommandError
from logferry.ops.cli.terminal import StopRequested, stop_on_signals

from tests.soak.campaign import Campaign, CampaignOutcome
from tests.soak.plan import draw_faults

EXACT: Final = 0
REFUTED: Final = 1
COULD_NOT_RUN: Final = 2
_SHOWN: Final = 12


def main() -> int:
    args = _arguments()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    seconds = args.minutes * 60
    plan = list(draw_faults(seed, seconds, args.every))
    if args.plan:
        print(*plan, sep="\n")
        return EXACT
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    data = Path(tempfile.mkdtemp(prefix="logferry-soak-")) if args.data is None else args.data.absolute()
    samples = os.environ.get("LOGFERRY_SAMPLE_LOGS")
    print(f"seed {seed}, {args.minutes:g} minutes, {len(plan)} faults planned; data in {data}")
    # Kafka is away most of the time: what its client says of that is not news.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL + 1)
    keep = True
    try:
        data.mkdir(parents=True, exist_ok=True)
        with stop_on_signals(announce=b""):
            outcome = asyncio.run(Campaign(data, plan, seed, Path(samples) if samples else None).run(seconds))
        _report(outcome)
        keep = args.keep or bool(outcome.refuted)
        return REFUTED if outcome.refuted else EXACT
    except (CommandError, OSError, StopRequested) as error:
        print(f"could not run: {error}")
        return COULD_NOT_RUN
    finally:
        if keep:
            print(f"kept: {data}")
        else:
            shutil.rmtree(data, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="length of the load with faults (default: %(default)g)"
    )
    parser.add_argument("--seed", type=int, help="draws the plan of faults (default: another one each time)")
    parser.add_argument("--every", type=float, default=1.0, metavar="S", help="mean seconds between two faults")
    parser.add_argument("--plan", action="store_true", help="print the plan and end")
    parser.add_argument("--data", type=Path, help="folder for data and logs (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the folder, also of an exact campaign")
    return parser.parse_args()


def _report(outcome: CampaignOutcome) -> None:
    for title, counts in (("faults", outcome.done), ("skipped", outcome.skipped), ("restarts", outcome.restarts)):
        print(f"{title}: " + ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())))
    print(", ".join(f"{count:,} {name}" for name, count in outcome.counts.items()))
    print("longest times without an acknowledgement, of sources whose partition was healthy:")
    for silence, wrong in outcome.silences:
        of = f"{silence.healthy_s:.1f} s, {silence.source} in partition {silence.partition}"
        print(f"  {of}, from {silence.from_s:.1f} to {silence.to_s:.1f} s; active in that time:")
        print(*(f"    {text}" for text in wrong or ["nothing"]), sep="\n")
    for check, found in outcome.refuted.items():
        print(f"{check}: {len(found)} findings", *(f"  {text}" for text in found[:_SHOWN]), sep="\n")
    lasted = f"{outcome.done.total():,} faults in {outcome.seconds / 60:.1f} minutes"
    if outcome.refuted:
        print(f"REFUTED: {lasted}; {', '.join(outcome.refuted)}")
    else:
        print(f"exact: {lasted}, {outcome.counts['chunks']:,} chunks")


if __name__ == "__main__":
    sys.exit(main())
