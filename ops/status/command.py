"""``logferry status``: what is wrong with a gateway or a mirror, why and since when, and where everything stands."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from logferry.gateway.api.schemas import Status
from logferry.ops.audit.render import console_for_output
from logferry.ops.cli import gateway_client as asking
from logferry.ops.cli.gateway_client import Gateway, Refused
from logferry.ops.cli.problems import Problem, Unavailable, WrongUse
from logferry.ops.config import Defaults
from logferry.ops.status import mirror
from logferry.ops.status.diagnosis import Service, Silent, judge
from logferry.ops.status.render import show, show_findings
from pydantic import ValidationError

WELL: Final = 0
WRONG: Final = 1
_TIMEOUT_S: Final = 10.0
_AT_ONCE: Final = 32

_EXAMPLE = """examples:
  logferry status
  logferry status --url https://gw1.example:8080,https://gw2.example:8080 --token-file admin.token --ca-file ca.pem
  logferry status --json
  logferry status --mirror http://127.0.0.1:8180

The token must be one that may administer everything (admin = ["*"]).
Exit status: 0 all is well, 1 something is wrong, 2 wrong use or not allowed, 3 no gateway answers.
"""


class _Unasked(Problem):
    """A worker that was left alone on purpose."""


def main(argv: list[str]) -> int:
    """0 all is well, 1 something is wrong. Raises Problem: wrong use or not allowed (2), no gateway answers (3)."""
    args = _arguments(argv)
    if args.mirror is not None:
        return _mirror(args)
    urls = [url.strip() for url in args.url.split(",")]
    service = look(urls, asking.token_of(args), asking.ca_file_of(args))
    at_s, findings = time.time(), judge(service)
    wrong = any(finding.wrong for finding in findings)
    if args.json:
        workers = {url: status.model_dump() for url, status in service.workers.items()}
        silent = {url: {"error": silent.reason} for url, silent in service.silent.items()}
        found = [finding.as_dict() for finding in findings]
        document = {"at_ms": int(at_s * 1000), "well": not wrong, "findings": found, "workers": workers | silent}
        print(json.dumps(document, ensure_ascii=False))
    else:
        show(service, findings, at_s, console_for_output())
    return WRONG if wrong else WELL


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="logferry status",
        description="Asks every worker of a data centre, and shows first what is wrong, why and since when.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    url_help = "any gateway worker, or several by commas; they tell of the others"
    options = [
        *asking.options(parser, url_help),
        parser.add_argument(
            "--mirror", metavar="URL", help="a mirror instead: any of its workers; they tell of the others"
        ),
        parser.add_argument("--json", action="store_true", help="everything, as one line of JSON"),
    ]
    Defaults("status").add_to(parser, options, argv)
    return parser.parse_args(argv)


def _mirror(args: argparse.Namespace) -> int:
    found = mirror.look([url.strip() for url in args.mirror.split(",")])
    at_s, findings = time.time(), mirror.judge(found)
    if args.json:
        print(json.dumps(mirror.as_dict(found, findings, at_s), ensure_ascii=False))
    else:
        console = console_for_output()
        dcs = ", ".join(sorted({worker.dc for worker in found.workers.values()}))
        show_findings(f"the mirror of {dcs}", findings, at_s, console)
        mirror.show_tables(found, console)
    return WRONG if any(finding.wrong for finding in findings) else WELL


def look(urls: Iterable[str], token: str | None, ca_file: Path | None) -> Service:
    """Asks the given workers, those that they know of, and so on.

    The token goes to no worker over a connection that is less protected than those that were given.

    Raises Unavailable when none of them answers, and WrongUse when they do not let us in.
    """
    asking_now = [Gateway(url, token, ca_file, _TIMEOUT_S) for url in urls]
    must_encrypt = token is not None and all(gateway.is_encrypted for gateway in asking_now)
    workers, silent, asked = dict[str, Status](), dict[str, Problem](), set[str]()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        while asking_now:
            for gateway, answer in zip(asking_now, threads.map(_ask, asking_now), strict=True):
                asked.add(gateway.url)
                if isinstance(answer, Status):
                    # Others may know it by another name than it was asked by.
                    asked.add(answer.url)
                    workers[answer.url] = answer
                else:
                    silent[gateway.url] = answer
            news = {url for worker in workers.values() for url in _known_to(worker)} - asked
            asking_now = [Gateway(url, token, ca_file, _TIMEOUT_S) for url in sorted(news)]
            if must_encrypt and (bare := [gateway for gateway in asking_now if not gateway.is_encrypted]):
                silent |= {gateway.url: _Unasked("the token would go to it unencrypted") for gateway in bare}
                asked |= {gateway.url for gateway in bare}
                asking_now = [gateway for gateway in asking_now if gateway.is_encrypted]
    if not workers:
        problems = list(silent.values())
        raise next((problem for problem in problems if isinstance(problem, WrongUse)), problems[0])
    return Service(workers, {url: Silent(str(p), not isinstance(p, _Unasked)) for url, p in silent.items()})


def _known_to(worker: Status) -> set[str]:
    return {*worker.group.members, *worker.group.owners.values()}


def _ask(gateway: Gateway) -> Status | Problem:
    try:
        # A newer worker may say more.
        return Status.model_validate(gateway.ask("GET", "/v1/status"), extra="ignore")
    except Refused as refused:
        if refused.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            return WrongUse(str(refused))
        return Unavailable(f"{gateway.url}: {refused}")
    except ValidationError:
        return Unavailable(f"what answers at {gateway.url} is no worker of a version that is known here")
    except Problem as problem:
        return problem


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
