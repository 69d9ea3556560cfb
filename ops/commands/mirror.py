"""``logferry mirror``: the mirror's workers, and ``logferry mirror resume`` for a partition that has stopped."""

from __future__ import annotations

from typing import Any, Final

from logferry.mirror.__main__ import main as serve
from logferry.ops.cli.gateway_client import GatewayClient, Redirected, add_gateway_options, token_of
from logferry.ops.cli.options import command_parser
from logferry.ops.cli.problems import CommandError, Unavailable

_RESUME: Final = "/v1/resume"
_MOST_REDIRECTS: Final = 5
_EXAMPLE: Final = """example: logferry mirror resume dc1.nginx 3 --from earliest --url http://127.0.0.1:8180

Exit status: 0 resumed, 1 not possible at that offset, 2 wrong use or not allowed, 3 no worker of the mirror answers.
"""


def main(argv: list[str]) -> int:
    """Exit status of `resume`, or of the workers. Raises CommandError."""
    return resume(argv[1:]) if argv[:1] == ["resume"] else serve(argv)


def resume(argv: list[str]) -> int:
    """0 resumed. Raises CommandError, whose exit status is 1 (refused), 2 (wrong use) or 3 (no answer)."""
    description = (
        "Resumes a partition that has stopped; `logferry status --mirror` shows why. Records between the offset where "
        "it stopped and the given one are not mirrored. A token needs the right to administer everything."
    )
    parser = command_parser("mirror resume", "TOPIC PARTITION --from OFFSET [OPTION ...]", description, _EXAMPLE)
    parser.add_argument("topic", help="the topic by its full name, as dc1.nginx")
    parser.add_argument("partition", type=int, help="the number of the partition")
    parser.add_argument(
        "--from", dest="start", required=True, metavar="OFFSET", help="an offset in the remote data centre, or earliest"
    )
    add_gateway_options(parser, "URL of any worker of the mirror", "http://127.0.0.1:8180")
    args = parser.parse_args(argv)
    if args.start != "earliest" and not args.start.isdigit():
        parser.error(f"--from: {args.start!r} is neither an offset nor earliest")
    start = args.start if args.start == "earliest" else int(args.start)
    body = {"topic": args.topic, "partition": args.partition, "from": start}
    at = _resumed(args.url, token_of(args), args.ca_file, body)
    print(f"{args.topic}-{args.partition} resumes at {at}")
    return 0


def _resumed(url: str, token: str | None, ca_file: str | None, body: dict[str, Any]) -> int:
    """Asks the worker, and the one that has the lane. The token never goes from HTTPS to HTTP."""
    worker = GatewayClient(url, token, ca_file, service="mirror")
    for _ in range(_MOST_REDIRECTS):
        try:
            return int(worker.request("POST", _RESUME, body)["from"])
        except Redirected as moved:
            owner = GatewayClient(moved.location.removesuffix(_RESUME), token, ca_file, service="mirror")
            if worker.is_encrypted and not owner.is_encrypted:
                detail = f"{worker.url} names {owner.url}, which is not encrypted; ask that worker itself"
                raise CommandError(detail) from None
            worker = owner
        except (KeyError, ValueError):
            raise Unavailable(f"the server at {worker.url} is no mirror worker of a known version") from None
    raise Unavailable(f"more than {_MOST_REDIRECTS} redirects from {url}: the lane is moving; try again")
