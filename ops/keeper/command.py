"""``logferry keeper``: the process, and ``status``, ``plan``, ``log``, ``pause`` and ``resume``, which ask one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from logferry.loaders.terminal import escape
from logferry.ops.cli.gateway_client import GatewayClient, add_gateway_options, token_of
from logferry.ops.cli.options import command_parser
from logferry.ops.cli.terminal import console_for_output
from logferry.ops.keeper.__main__ import main as serve
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

_TIMEOUT_S: Final = 20.0
_SHOWN: Final = 40
_URL: Final = "http://127.0.0.1:8390"
_STATUS: Final = """example: logferry keeper status --url http://127.0.0.1:8390

Exit status: 0 nothing is wrong, 1 something is, 2 wrong use or not allowed, 3 no keeper answers.
"""
_DONE: Final = """example: logferry keeper {name} --url http://127.0.0.1:8390{more}

Exit status: 0 done, 1 refused, 2 wrong use or not allowed, 3 no keeper answers.
"""


def main(argv: list[str]) -> int:
    """Exit status of the sub-command, or of the process. Raises CommandError."""
    name = argv[0] if argv else ""
    if name in _VIEWS:
        return _view(name, argv[1:])
    if name in ("pause", "resume"):
        return _set(name, argv[1:])
    return serve(argv)


def _view(name: str, argv: list[str]) -> int:
    text, show = _VIEWS[name]
    example = _STATUS if name == "status" else _DONE.format(name=name, more="")
    parser = command_parser(f"keeper {name}", "[OPTION ...]", text, example)
    add_gateway_options(parser, "URL of a keeper", _URL)
    parser.add_argument("--json", action="store_true", help="print everything as one line of JSON")
    args = parser.parse_args(argv)
    client = GatewayClient(args.url, token_of(args), args.ca_file, _TIMEOUT_S, "keeper")
    found = client.request("GET", "/v1/status")
    if args.json:
        print(json.dumps(found))
    else:
        show(found, console_for_output())
    return int(name == "status" and (found["error"] is not None or any(one["wrong"] for one in found["findings"])))


def _set(name: str, argv: list[str]) -> int:
    pauses = name == "pause"
    text = (
        "Pauses the acts of the keepers, also of those that stand by, and cancels the moves that they began."
        if pauses
        else "Lets the acting keeper act again."
    )
    example = _DONE.format(name=name, more=" --why 'disk 2 is being replaced'" if pauses else "")
    parser = command_parser(f"keeper {name}", "[OPTION ...]", text, example)
    add_gateway_options(parser, "URL of the keeper that acts", _URL)
    if pauses:
        parser.add_argument("--why", required=True, help="the reason, for the log and for others")
    args = parser.parse_args(argv)
    client = GatewayClient(args.url, token_of(args), args.ca_file, _TIMEOUT_S, "keeper")
    client.request("POST", f"/v1/{name}", {"why": args.why} if pauses else {})
    print("paused: nothing begins, moves under way are cancelled" if pauses else "resumed")
    return 0


# ---- output ------------------------------------------------------------------------------------------------------


def _show_status(found: Mapping[str, Any], console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    say(f"keeper {found['url']} of {found['dc']}: {_mode(found)}")
    if found["error"] is not None:
        say(f"  it cannot look at the cluster: {found['error']}", "bold red")
    for one in found["findings"]:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["since_ms"] / 1000))
        say(
            f"  {'✗' if one['wrong'] else '·'} {one['kind']}: {one['what']}, since {since}",
            "red" if one["wrong"] else "",
        )
        say(f"      {one['why']}")
    if found["findings_total"] > len(found["findings"]):
        say(f"  and {found['findings_total'] - len(found['findings'])} more")
    table = _table("broker", "directory", "size", "free", "growth", "full in", "replicas", "state")
    for one in found["dirs"]:
        state = f"failed: {one['error']}" if one["error"] else one["retired"] or "in service"
        rate, full = one["growth_bytes_per_s"], one["full_in_s"]
        table.add_row(
            str(one["broker"]),
            escape(one["dir"]),
            decimal(max(0, one["total_bytes"])),
            decimal(max(0, one["free_bytes"])),
            "" if rate is None else f"{rate:,.0f} B/s",
            "" if full is None else f"{full / 3600:,.1f} h",
            str(one["replicas"]),
            escape(state),
        )
    console.print(table)


def _mode(found: Mapping[str, Any]) -> str:
    if not found["acts"]:
        return "shows what it would do (act = false)"
    if found["paused"] is not None:
        return f"paused: {found['paused']}"
    if found["acting"] == found["url"]:
        return "acts"
    return f"stands by, {found['acting']} acts" if found["acting"] else "stands by"


def _show_plan(found: Mapping[str, Any], console: Console) -> None:
    for line in plan_lines(found):
        console.print(escape(line), highlight=False, soft_wrap=True)


def plan_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The plan as text: what is under way, what comes next, what is deleted, and what cannot be done."""
    yield f"{_mode(found)}; {found['moves_total']} moves of {decimal(found['moves_bytes'])} are planned"
    for title, moves in ("under way", found["under_way"]), ("planned", found["moves"][:_SHOWN]):
        for move in moves:
            (topic, number), source, target = move["tp"], move["source"], move["target"]
            ways = f"{source[0]}:{source[1]} -> {target[0]}:{target[1]}"
            yield f"  {title}: {topic}-{number}, {decimal(move['size_bytes'])}, {ways} ({move['why']})"
    if found["moves_total"] > _SHOWN:
        yield f"  and {found['moves_total'] - _SHOWN} more; --json lists more of them"
    for what, why in found["blocked"].items():
        yield f"  cannot move: {what}: {why}"
    for one in found["deletions"]:
        yield f"  delete in {one['dir']}: {one['why']}"
        for part in one["ranges"]:
            (topic, number), against = part["tp"], part["against"]
            needed = f", although {', '.join(against)} still needs some" if against else ""
            size = decimal(part["size_bytes"])
            yield f"    {topic}-{number}: offsets {part['start']} to {part['before'] - 1}, about {size}{needed}"
        if one["missing_bytes"]:
            held = f": {', '.join(one['held_by'])} still need the rest" if one["held_by"] else ""
            yield f"    {decimal(one['missing_bytes'])} more are needed than may be deleted{held}"


def _show_log(found: Mapping[str, Any], console: Console) -> None:
    for record in found["log"]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["at_ms"] / 1000))
        facts = {key: value for key, value in record.items() if key not in ("at_ms", "kind", "state", "pending")}
        console.print(escape(f"{at} {record['kind']} {json.dumps(facts)}"), highlight=False, soft_wrap=True)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        is_text: Sequence[str] = ("directory", "state")
        table.add_column(name, justify="left" if name in is_text else "right", overflow="fold")
    return table


_VIEWS: Final[dict[str, tuple[str, Callable[[Mapping[str, Any], Console], None]]]] = {
    "status": ("Shows what is wrong in the cluster, since when and why, and its disks.", _show_status),
    "plan": ("Shows the moves and deletions that are planned, those under way, and what cannot be done.", _show_plan),
    "log": ("Shows the newest acts, each with what was seen before it.", _show_log),
}
