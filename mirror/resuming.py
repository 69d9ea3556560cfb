"""``logferry mirror resume``: says from where a partition that has stopped goes on."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request

from logferry.gateway.service.supervisor import SERVICE_AWAY, WRONG_USE

_TIMEOUT_S = 30.0


class _Redirected(urllib.request.HTTPRedirectHandler):
    """To the worker that has the lane, with the same body."""

    def redirect_request(self, request, file, code, message, headers, url):  # type: ignore[no-untyped-def]
        return urllib.request.Request(url, data=request.data, headers=dict(request.header_items()), method="POST")


def resume(argv: list[str]) -> int:
    """Exit status: 0 it goes on, 1 it cannot from there, 2 wrong use, 3 no worker of the mirror answers."""
    parser = argparse.ArgumentParser(
        prog="logferry mirror resume",
        description="Lets a partition go on that has stopped (the status of the mirror says why). What lies between "
        "where it stopped and where it goes on is not mirrored.",
        epilog="example: logferry mirror resume dc1.nginx 3 --from earliest --url http://127.0.0.1:8180",
    )
    parser.add_argument("topic", help="its full name")
    parser.add_argument("partition", type=int)
    parser.add_argument("--from", dest="start", required=True, metavar="OFFSET", help="an offset there, or earliest")
    parser.add_argument("--url", default="http://127.0.0.1:8180", help="a worker of the mirror (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.start != "earliest" and not args.start.isdigit():
        parser.error(f"--from: {args.start!r} is neither an offset nor earliest")
    start = args.start if args.start == "earliest" else int(args.start)
    body = json.dumps({"topic": args.topic, "partition": args.partition, "from": start}).encode()
    request = urllib.request.Request(f"{args.url.rstrip('/')}/v1/resume", data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.build_opener(_Redirected).open(request, timeout=_TIMEOUT_S) as answer:
            at = json.load(answer)["from"]
    except urllib.error.HTTPError as error:
        detail = json.load(error).get("detail", "") if "json" in error.headers.get("Content-Type", "") else str(error)
        print(f"logferry mirror resume: {detail}", file=sys.stderr)
        return {400: WRONG_USE, 409: 1}.get(error.code, SERVICE_AWAY)
    except (OSError, ValueError) as error:
        print(f"logferry mirror resume: no worker of the mirror answers at {args.url}: {error}", file=sys.stderr)
        return SERVICE_AWAY
    print(f"{args.topic}-{args.partition} goes on at {at}")
    return 0
