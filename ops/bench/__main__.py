"""``make bench``, or ``python -m logferry.ops.bench [NAME,NAME ...]``: runs benchmarks and prints their figures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import isfunction
from typing import Final

from logferry.ops.bench.harness.figures import Figure, append_figure, print_figures
from logferry.ops.bench.harness.peers import PeerMissing
from logferry.ops.bench.suites import (
    audit,
    compact,
    delivery,
    fleet,
    gateway,
    hbase,
    load,
    mirror,
    overhead,
    push,
    receivers,
    takeover,
)

# Every public function of a suite is a benchmark.
BENCHMARKS: Final[dict[str, Callable[[], Figure]]] = {
    name: function
    for suite in (
        gateway,
        mirror,
        load,
        push,
        audit,
        overhead,
        compact,
        receivers,
        takeover,
        delivery,
        hbase,
        fleet,
    )
    for name, function in vars(suite).items()
    if isfunction(function) and function.__module__ == suite.__name__ and not name.startswith("_")
}


def main(argv: list[str]) -> int:
    names = [name for argument in argv for name in argument.split(",") if name] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; the names are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    figures = {}
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            figures[name] = BENCHMARKS[name]()
        except PeerMissing as missing:
            print(f"{name}: skipped: {missing}", file=sys.stderr)
            continue
        append_figure(name, figures[name])
    print_figures(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
