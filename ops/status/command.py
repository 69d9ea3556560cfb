"""``logferry status``: current problems of a gateway, mirror or delivery with cause and duration, then its parts."""

from __future__ import annotations

import argparse
import http.client
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from logferry.gateway.api.diagnosis import AllWorkers, ServiceStatus, SilentWorker, as_document, diagnose
from logferry.gateway.api.status_schemas import Status
from logferry.ops.cli.gateway_client import GatewayClient, RequestRefused, add_gateway_options, token_of
from logferry.ops.cli.options import command_parser, parse_with_file
from logferry.ops.cli.problems import CommandError, Unavailable, UsageError
from logferry.ops.cli.terminal import console_for_output
from logferry.ops.status import deliver, mirror
from logferry.ops.status.render import print_status
from pydantic import ValidationError

S = TypeVar("S", Status, mirror.MirrorStatus, deliver.DeliverStatus)

WELL: Final = 0
WRONG: Final = 1
_TIMEOUT_S: Final = 10.0
_AT_ONCE: Final = 32

_EXAMPLE = """examples:
  logferry status
  logferry status --url https://gw1.example:8080,https://gw2.example:8080 --token-file admin.token --ca-file ca.pem
  logferry status --json
  logferry status --mirror http://127.0.0.1:8180
  logferry status --deliver http://127.0.0.1:8290

The token must have the right to administer all topics (admin = ["*"]).
Exit status: 0 no problem found, 1 a problem found, 2 wrong use or not allowed, 3 no gateway answers.
"""


class _Unasked(CommandError):
    """A worker that was not asked, to protect the token."""


def main(argv: list[str]) -> int:
    """0 no problem found, 1 a problem found. Raises UsageError (wrong use, not allowed) and Unavailable (no answer)."""
    args = _arguments(argv)
    found: ServiceStatus | mirror.Mirror | deliver.Delivery
    if args.mirror is not None and args.deliver is not None:
        raise UsageError("--mirror and --deliver: only one of them may be given")
    urls = [url.strip() for url in (args.mirror or args.deliver or args.url).split(",")]
    access = token_of(args), args.ca_file
    if args.mirror is not None:
        found = _query(urls, mirror.MirrorStatus, "mirror", lambda one: one.workers, *access)
        findings, show = mirror.diagnose_mirror(found), partial(mirror.print_mirror, found)
    elif args.deliver is not None:
        found = _query(urls, deliver.DeliverStatus, "deliver", lambda one: one.workers, *access)
        findings, show = deliver.diagnose_delivery(found), partial(deliver.print_delivery, found)
    else:
        found = query_workers(urls, *access)
        findings, show = diagnose(found), partial(print_status, found)
    at_s = time.time()
    if args.json:
        print(json.dumps(as_document(findings, at_s, found)))
    else:
        show(findings, at_s, console_for_output())
    return WRONG if any(finding.wrong for finding in findings) else WELL


def _arguments(argv: list[str]) -> argparse.Namespace:
    description = (
        "Queries every worker of a data centre. Prints current problems with cause and duration first, then"
        " workers, Kafka and lanes."
    )
    parser = command_parser("status", "[OPTION ...]", description, _EXAMPLE)
    url_help = "URL of any gateway worker, or several separated by commas; the command finds the others"
    mirror_help = "show a mirror instead: URL of any of its workers, or several separated by commas"
    deliver_help = "show the subscriptions of logferry deliver instead: URL of any of its workers, or several"
    options = [
        *add_gateway_options(parser, url_help),
        parser.add_argument("--mirror", metavar="URL", help=mirror_help),
        parser.add_argument("--deliver", metavar="URL", help=deliver_help),
        parser.add_argument("--json", action="store_true", help="print everything as one line of JSON"),
    ]
    return parse_with_file("status", parser, options, argv)


def query_workers(urls: Iterable[str], token: str | None, ca_file: str | None) -> ServiceStatus:
    """Queries the given gateway workers and all workers that these know.

    Raises Unavailable when none of them answers, and UsageError when the token is refused.
    """
    return _query(urls, Status, "gateway", lambda one: {*one.group.members, *one.group.owners.values()}, token, ca_file)


def _query(
    urls: Iterable[str],
    model: type[S],
    service: str,
    known_to: Callable[[S], Iterable[str]],
    token: str | None,
    ca_file: str | None,
) -> AllWorkers[S]:
    """If all given URLs are encrypted, the token is not sent over an unencrypted connection."""
    pending = [GatewayClient(url, token, ca_file, _TIMEOUT_S, service) for url in urls]
    must_encrypt = token is not None and all(worker.is_encrypted for worker in pending)
    workers, problems, asked = dict[str, S](), dict[str, CommandError](), set[str]()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        while pending:
            for worker, answer in zip(pending, threads.map(partial(_answer, model, service), pending), strict=True):
                asked.add(worker.url)
                if isinstance(answer, CommandError):
                    problems[worker.url] = answer
                else:
                    # Other workers may know it by another URL.
                    asked.add(answer.url)
                    workers[answer.url] = answer
            news = {url for status in workers.values() for url in known_to(status)} - asked
            pending = [GatewayClient(url, token, ca_file, _TIMEOUT_S, service) for url in sorted(news)]
            if must_encrypt and (bare := [worker for worker in pending if not worker.is_encrypted]):
                problems |= {worker.url: _Unasked("the token would go to it unencrypted") for worker in bare}
                asked |= {worker.url for worker in bare}
                pending = [worker for worker in pending if worker.is_encrypted]
    if not workers:
        refused = [problem for problem in problems.values() if isinstance(problem, UsageError)]
        raise refused[0] if refused else Unavailable("; ".join(map(str, problems.values())))
    silent = {url: SilentWorker(str(problem), not isinstance(problem, _Unasked)) for url, problem in problems.items()}
    return AllWorkers(workers, silent)


def _answer(model: type[S], service: str, worker: GatewayClient) -> S | CommandError:
    try:
        # A newer worker may send more fields.
        return model.model_validate(worker.request("GET", "/v1/status"), extra="ignore")
    except RequestRefused as refused:
        if refused.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            return UsageError(str(refused))
        return Unavailable(f"{worker.url}: {refused}")
    except ValidationError:
        return Unavailable(f"the server at {worker.url} is no {service} worker of a known version")
    except CommandError as problem:
        return problem
