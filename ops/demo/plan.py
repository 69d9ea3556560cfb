"""What the demo runs, and where: names, durations, folders, the generator and the push-client."""

from __future__ import annotations

import glob
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from logferry.gateway.contract.names import full_topic
from logferry.loaders.location import Location
from logferry.ops.stack.processes import Child
from logferry.ops.stack.s3_server import BUCKET

DC: Final = "dc1"
OTHER_DC: Final = "dc2"
TOPIC: Final = "nginx"
FULL_TOPIC: Final = full_topic(DC, TOPIC)
PARTITIONS: Final = 4
WORKERS: Final = 2
LANES: Final = 8
RATE_MB_S: Final = 3.0
SEGMENT_S: Final = 10
_REFUSED: Final = "Connection refused"
_FIELD: Final = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|\S*)')


class DemoPlan:
    """``files``: absolute paths of the user's files; none: access logs are generated for at least ``seconds``, and
    ``is_live``: the files grow while they are sent, and their lines have times.

    Folders: ``stack`` of Kafka, gateways and mirrors, ``generated`` of the access logs, ``runs`` of the processes'
    logs. ``table``: a folder, too, or on the local S3 server.
    """

    def __init__(
        self, data: Path, files: Sequence[Path], seconds: int, seed: int, port: int, *, on_s3: bool = False
    ) -> None:
        self.on_s3 = on_s3
        self.data, self.files, self.seconds, self.seed, self.port = data, files, seconds, seed, port
        self.is_live = not files
        self.stack = data / "stack"
        self.table = Location.of(f"s3://{BUCKET}/{TOPIC}" if on_s3 else data / "warehouse" / TOPIC)
        self.generated, self.runs = data / "logs", data / "runs"

    def originals(self) -> list[Path]:
        """The files whose lines must be in the table, at this moment."""
        return list(self.files) or sorted(self.generated.glob("*.log*"))

    def generator(self) -> Child:
        """Writes access logs until it is stopped, at a lower rate after its time; rotates one file in the middle."""
        command = [sys.executable, "-m", "logferry.ops.generate", "--dir", str(self.generated)]
        command += ["--seed", str(self.seed), "--rate", str(RATE_MB_S)]
        command += ["--rotate-at", str(self.seconds / 2), "--calm-after", str(self.seconds)]
        return Child("generator", command, self.runs / "generator.log")


class PushClient:
    """A push-client that is killed and restarted on the same state folder; each run has its own log."""

    def __init__(self, plan: DemoPlan, urls: list[str]) -> None:
        given = [part for url in urls for part in ("--url", url)]
        self._command = [sys.executable, "-m", "logferry.client", *given, "--topic", TOPIC, "--verbose"]
        folder = glob.escape(str(plan.generated))
        files = [glob.escape(str(path)) for path in plan.files] or [f"{folder}/*.log", f"{folder}/*.log.1"]
        self._command += ["--state-dir", str(plan.data / "push-client"), *files]
        self._logs = plan.runs
        self.runs = 0
        self.child = Child("push-client", self._command, self._logs / "push-client.log")

    def start(self, *options: str) -> None:
        self.runs += 1
        self.child = Child("push-client", [*self._command, *options], self._logs / f"push-client-{self.runs}.log")
        self.child.start()

    def resumed(self) -> dict[str, int]:
        """Resume positions that the gateway gave to the present run, by source id."""
        found = {event["source"]: event["recorded"] for event in self._events("session")}
        return {source: 0 if recorded == "None" else int(recorded) for source, recorded in found.items()}

    def repeated(self) -> tuple[int, int]:
        """Requests that the present run repeated: those cut off with unknown outcome, and those refused for a while."""
        retries = [fields["status"] == "0" and _REFUSED not in fields["detail"] for fields in self._events("retry")]
        return sum(retries), len(retries) - sum(retries)

    def _events(self, name: str) -> Iterator[dict[str, str]]:
        """The fields of the events of this name in the present run's log. An incomplete last line is left out."""
        log = self.child.log
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        for line in text.split("\n")[:-1]:
            _, _, event = line.partition(" DEBUG ")
            if event.startswith(f"{name} "):
                fields = _FIELD.findall(event)
                yield {key: json.loads(value) if value.startswith('"') else value for key, value in fields}
