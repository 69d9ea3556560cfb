"""``python -m logferry.ops.capacity``: hosts, brokers, disks, lanes and links for a company's figures.

It computes with the unit costs of `ops/docs/operations/sizing.md`, and asks nothing of any service.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Final

from logferry.ops.capacity.plan import BOUNDS, LOADER_MB, Ceiling, Need, Site, ceilings, notes, plan

_HELP: Final = {
    "tb_per_day": "TB of log lines a day, before compression, of all data centres",
    "peak_factor": "peak rate by mean rate",
    "data_centres": "data centres that take writes",
    "copies": "data centres that hold each record, with the one that took it",
    "outage_h": "hours that the lost data centre is away, all of them at the peak rate",
    "retention_days": "retention of the topics in Kafka",
    "readers": "times that all records are read over HTTP, beside loader and mirrors",
    "request_kib": "chunk data of one request of the writers",
    "replicas": "replicas of each partition",
    "stored_ratio": "stored bytes by bytes of log lines, before replication",
    "hosts": "hosts with a push-client",
    "files": "files with news on each of them",
    "parser": "parser of the tables",
    "cores": "cores of a gateway host, and of a broker",
    "disk_tb": "TB of disk of a broker",
    "disk_mb": "MB/s that the disks of a broker write and read",
    "nic_gbit": "Gbit/s of a host's network card",
    "link_gbit": "Gbit/s between the data centres, into one of them",
}
GROWTH: Final = 10


def main(argv: list[str] | None = None) -> int:
    """0 the figures fit, 1 a limit of capacity is passed, 2 wrong use."""
    parser = argparse.ArgumentParser(
        prog="python -m logferry.ops.capacity",
        description="What a rate takes, with one data centre lost at the peak. Figures of a part are those of one "
        "surviving data centre; loader and audit are those of the company.",
        epilog="Exit status: 0 the figures fit, 1 a limit of capacity is passed, 2 wrong use.",
    )
    for field in fields(Site):
        name, least = "--" + field.name.replace("_", "-"), BOUNDS.get(field.name)
        given: dict[str, Any] = {"help": _HELP[field.name]}
        if field.name == "tb_per_day":
            given |= {"required": True}
        else:
            given |= {"default": field.default, "help": f"{_HELP[field.name]} (default: %(default)s)"}
        kind = {"int": int, "float": float}.get(str(field.type), str)
        parser.add_argument(name, type=kind, metavar="N" if least else "|".join(LOADER_MB), **given)
    parser.add_argument("--json", action="store_true", help="print everything as one line of JSON")
    values = vars(parser.parse_args(argv))
    as_json = values.pop("json")
    try:
        site = Site(**values)
    except ValueError as error:
        parser.error(str(error))
    needs, limits = plan(site), ceilings(site)
    print(json.dumps(_document(site, needs, limits)) if as_json else _text(site, needs, limits))
    return int(limits[0].use > 1)


def grown(site: Site) -> list[Ceiling]:
    """The ceilings of ten times the rate, from ten times the hosts."""
    return ceilings(replace(site, tb_per_day=site.tb_per_day * GROWTH, hosts=site.hosts * GROWTH))


def _document(site: Site, needs: list[Need], limits: list[Ceiling]) -> dict[str, Any]:
    return {
        "given": asdict(site),
        "plan": [need._asdict() | {"value": _finite(need.value)} for need in needs],
        "limits": [_limit(one) for one in limits],
        "bottleneck": limits[0].name,
        "limits_at_10_times": [_limit(one) for one in grown(site)],
        "notes": notes(site),
    }


def _limit(one: Ceiling) -> dict[str, Any]:
    return one._asdict() | {"value": _finite(one.value), "use": _finite(one.use)}


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return None if math.isinf(value) else value


def _text(site: Site, needs: list[Need], limits: list[Ceiling]) -> str:
    later = {one.name: one.use for one in grown(site)}
    rows = [(need.part, need.what, f"{_figure(need.value)} {need.unit}", need.why) for need in needs]
    uses = [
        (
            *(one.name, one.kind, f"{_figure(one.value)} of {_figure(one.limit)} {one.unit}".rstrip()),
            *(_share(one.use), _share(later[one.name]), one.remedy),
        )
        for one in limits
    ]
    head = ("limit", "kind", "in use", "now", f"at {GROWTH} times", "remedy")
    first = grown(site)[0]
    lines = [*_table(("part", "quantity", "needed", "from"), rows), "", *_table(head, uses), ""]
    state = "passed" if limits[0].use > 1 else "fits"
    lines.append(f"bottleneck: {limits[0].name} ({_share(limits[0].use)}, {state})")
    lines.append(f"first at {GROWTH} times: {first.name} ({_share(first.use)})")
    return "\n".join([*lines, *(f"note: {text}" for text in notes(site))])


def _figure(value: float) -> str:
    if math.isinf(value):
        return "never"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}" if value < 1 else f"{value:.1f}"


def _share(use: float) -> str:
    return "never" if math.isinf(use) else f"{use:.0%}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, tuple("-" * width for width in widths), *rows]]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
