"""The push-client and the generator as processes."""

from __future__ import annotations

import glob
import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from logferry.ops.demo.plan import RATE_MB_S, TOPIC, DemoPlan
from logferry.ops.demo.wait import stop_child
from logferry.ops.stack.processes import Child

_STOP_S: Final = 20
_REFUSED: Final = "Connection refused"
_EVENT: Final = re.compile(r"^\S+ [A-Z]+ (\S+)(.*)$")
_FIELD: Final = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|\S*)')


class PushClient:
    """A push-client that is killed and restarted on the same state folder; each run has its own log."""

    def __init__(self, plan: DemoPlan, urls: Sequence[str]) -> None:
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
        """Stops the client that follows the files and starts one that exits when all of them are recorded.

        Raises CommandError when the first one does not stop in order.
        """
        stop_child(self.child, _STOP_S)
        self.start("--once")

    def resumed(self) -> dict[str, int]:
        """Resume positions that the gateway gave to the present run, by source id."""
        found = {}
        for event, fields in _events(self.child.log):
            if event == "session":
                recorded = fields["recorded"]
                found[fields["source"]] = 0 if recorded == "None" else int(recorded)
        return found

    def repeated(self) -> tuple[int, int]:
        """Requests that the present run repeated: those cut off with unknown outcome, and those refused for a while."""
        retries = [fields for event, fields in _events(self.child.log) if event == "retry"]
        cut = sum(fields["status"] == "0" and _REFUSED not in fields["detail"] for fields in retries)
        return cut, len(retries) - cut


def _patterns(plan: DemoPlan) -> list[str]:
    """Patterns that match exactly the user's files, or the generated files and the rotated one."""
    if plan.files:
        return [glob.escape(str(path)) for path in plan.files]
    folder = glob.escape(str(plan.generated))
    return [f"{folder}/*.log", f"{folder}/*.log.1"]


def generator(plan: DemoPlan) -> Child:
    """Writes access logs until it is stopped, at a lower rate after its time; rotates one file in the middle."""
    command = [sys.executable, "-m", "logferry.ops.generate", "--dir", str(plan.generated), "--seed", str(plan.seed)]
    command += ["--rate", str(RATE_MB_S), "--rotate-at", str(plan.seconds / 2)]
    command += ["--calm-after", str(plan.seconds)]
    return Child("generator", command, plan.runs / "generator.log")


def _events(log: Path) -> list[tuple[str, dict[str, str]]]:
    """Log events of a push-client: name and fields. An incomplete last line is left out."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        if event := _EVENT.match(line):
            found.append((event[1], {name: _plain(value) for name, value in _FIELD.findall(event[2])}))
    return found


def _plain(value: str) -> str:
    return str(json.loads(value)) if value.startswith('"') else value
