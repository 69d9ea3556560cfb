"""``logferry doctor``: checks of this host's configuration, network, Kafka and disks, each with what to do about it.

It changes nothing, creates nothing, and prints no password, token or key.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from logferry.gateway.contract.names import visible
from logferry.ops.cli.options import command_parser
from logferry.ops.cli.problems import UsageError
from logferry.ops.doctor.callers import check_callers
from logferry.ops.doctor.cluster import check_cluster
from logferry.ops.doctor.host import check_cluster_network, check_gateway, check_host
from logferry.ops.doctor.role import ROLES, Check, Cluster, Role, State, Unreadable, read_role

FOLDER: Final = Path("/etc/logferry")
_AT_ONCE: Final = 16
_EXAMPLE: Final = """examples:
  logferry doctor
  logferry doctor --gateway gateway.toml --mirror mirror.toml
  logferry doctor --push push.toml --json

Run it on the host of the services, as their user. Without options it reads the files in /etc/logferry.
Exit status: 0 nothing is wrong, 1 something is wrong, 2 wrong use.
"""


def main(argv: list[str]) -> int:
    """0 nothing is wrong (warnings are possible), 1 something is wrong. Raises UsageError."""
    description = (
        "Checks configuration files, names, ports, certificates, rights and settings in Kafka, clocks, disks and "
        "versions, from this host. Says what to do about each finding."
    )
    parser = command_parser("doctor", "[OPTION ...]", description, _EXAMPLE)
    for name in ROLES:
        known = f"configuration of logferry {name} (default: {FOLDER / name}.toml if no option is given)"
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=known)
    parser.add_argument("--verbose", action="store_true", help="print the checks that found nothing, too")
    parser.add_argument("--json", action="store_true", help="print everything as one line of JSON")
    args = parser.parse_args(argv)
    files = {name: path for name in ROLES if (path := getattr(args, name)) is not None} or _installed()
    if not files:
        raise UsageError(f"no configuration is in {FOLDER}: name the files, as in --gateway gateway.toml")
    checks = list(diagnosis(files))
    print(json.dumps({"checks": [check._asdict() for check in checks]}) if args.json else _text(checks, args.verbose))
    return int(any(check.state == State.WRONG for check in checks))


def _installed() -> dict[str, Path]:
    return {name: path for name in ROLES if (path := FOLDER / f"{name}.toml").exists()}


def diagnosis(files: Mapping[str, Path]) -> Iterator[Check]:
    """The checks of all roles, by role. A file that cannot be used ends the checks of its role alone."""
    for name, path in files.items():
        try:
            role = read_role(name, path)
        except Unreadable as error:
            yield Check("configuration", f"{name}: {path}", State.WRONG, str(error), "correct the file")
            continue
        yield Check("configuration", f"{name}: {path}", State.OK, "the service takes it")
        yield from check_host(role)
        yield from check_callers(role)
        yield from _network(role)
        for cluster in role.clusters:
            yield from asyncio.run(_all(role, cluster))


def _network(role: Role) -> Iterator[Check]:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        yield from (
            check for found in threads.map(lambda one: list(check_gateway(role, one)), role.gateways) for check in found
        )
        asked = threads.map(lambda one: list(check_cluster_network(role, one)), role.clusters)
        yield from (check for found in asked for check in found)


async def _all(role: Role, cluster: Cluster) -> list[Check]:
    return [check async for check in check_cluster(role, cluster)]


def _text(checks: list[Check], verbose: bool) -> str:
    lines = []
    for check in checks:
        if check.state != State.OK or verbose:
            lines.append(visible(f"{check.state.upper():<8} {check.area:<13} {check.subject}: {check.text}"))
            lines += [visible(f"{'':<8} {'do':<13} {check.remedy}")] * bool(check.remedy)
    count = Counter(check.state for check in checks)
    lines.append(f"{count[State.WRONG]} wrong, {count[State.WARNING]} warnings, {count[State.OK]} ok")
    return "\n".join(lines)
