"""The push-client and the generator, as processes."""

from __future__ import annotations

import glob
import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from logferry.ops.demo.plan import RATE_MB_S, TOPIC, Plan
from logferry.ops.demo.wait import end
from logferry.ops.stack.processes import Child

_STOP_S: Final = 20
_NOBODY: Final = "Connection refused"
_EVENT: Final = re.compile(r"^\S+ [A-Z]+ (\S+)(.*)$")
_FIELD: Final = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|\S*)')


class PushClient:
    """One push-client that is killed and started again on the same state folder; each run has a log of its own."""

    def __init__(self, plan: Plan, urls: Sequence[str]) -> None:
        given = [part for url in urls for part in ("--url", url)]
        self._command = [sys.executable, "-m", "logferry.client", *given, "--topic", TOPIC, "--verbose"]
        self._command += ["--state-dir", str(plan.data / "push-client"), *_patterns(plan)]
        self._logs = plan.runs
        self.runs = 0
        self.child = Child("push-client", self._command, self._logs / "push-client.log")

    def start(self, *options: str) -> None:
        self.runs += 1
        log = self._logs / f"push-client-{self.runs}.log"
        self.child = Child("push-client", [*self._command, *options], log)
        self.child.start()

    def kill(self) -> None:
        self.child.send(signal.SIGKILL)

    def start_the_rest(self) -> None:
        """Ends the client that follows the files, in order, and starts one that ends when all of them is recorded.

        Raises Problem when the former does not end well.
        """
        end(self.child, _STOP_S)
        self.start("--once")

    def resumed(self) -> dict[str, int]:
        """Of the present run: where the gateway said that each source goes on, by sourceId."""
        found = {}
        for event, fields in _events(self.child.log):
            if event == "session":
                recorded = fields["recorded"]
                found[fields["source"]] = 0 if recorded == "None" else int(recorded)
        return found

    def repeated(self) -> tuple[int, int]:
        """Of the present run: requests that were cut off, their outcome unknown; those that were told to come again, or
        found nobody."""
        retries = [fields for event, fields in _events(self.child.log) if event == "retry"]
        cut = sum(fields["status"] == "0" and _NOBODY not in fields["detail"] for fields in retries)
        return cut, len(retries) - cut


def _patterns(plan: Plan) -> list[str]:
    """The user's files and nothing else, whatever their names; or what is generated, rotated files too."""
    if plan.files:
        return [glob.escape(str(path)) for path in plan.files]
    folder = glob.escape(str(plan.generated))
    return [f"{folder}/*.log", f"{folder}/*.log.1"]


def generator(plan: Plan) -> Child:
    """Writes access logs until it is stopped, few of them after its time; one file is rotated in the middle."""
    command = [
        sys.executable,
        "-m",
        "logferry.ops.generate.__main__",
        "--dir",
        str(plan.generated),
        "--seed",
        str(plan.seed),
    ]
    command += ["--rate", str(RATE_MB_S), "--rotate-at", str(plan.seconds / 2)]
    command += ["--calm-after", str(plan.seconds)]
    return Child("generator", command, plan.runs / "generator.log")


def _events(log: Path) -> list[tuple[str, dict[str, str]]]:
    """What a push-client told: event and fields. A line that is being written is left out."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        told = _EVENT.match(line)
        if told:
            found.append((told[1], {name: _plain(value) for name, value in _FIELD.findall(told[2])}))
    return found


def _plain(value: str) -> str:
    return str(json.loads(value)) if value.startswith('"') else value
