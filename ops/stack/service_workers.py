"""The workers of one data centre's gateway and mirror, as processes of the local stack."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from logferry.ops.cli.problems import Problem, WrongUse
from logferry.ops.stack.processes import Child

_ASK_TIMEOUT_S = 5.0
_EXIT_WRONG_USE = 2

Setting = str | int | float | bool | Sequence["Setting"] | Mapping[str, "Setting"]


class Worker:
    """One worker: its process, and where it listens. It keeps both its name and its port over restarts."""

    def __init__(
        self, name: str, configuration: Path, number: int, port: int, log: Path, module: str = "logferry.gateway"
    ) -> None:
        command = [sys.executable, "-m", module, "--config", str(configuration), "--worker", str(number)]
        self.child = Child(name, command, log)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        """Whether it answers that it serves its lanes."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ASK_TIMEOUT_S)
        try:
            link.request("GET", "/readyz")
            return link.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            link.close()

    def ended_early(self) -> Problem:
        """The error for a worker that ended before it was ready: its own word on what is wrong, and whose fault."""
        status = self.child.exit_status
        problem = self.child.failed(f"ended by itself with status {status}")
        return WrongUse(str(problem)) if status == _EXIT_WRONG_USE else problem


def configuration(settings: Mapping[str, Setting]) -> str:
    """The settings as TOML: plain values first, then the tables, in the order in which they are given."""
    plain = [f"{name} = {_value(value)}" for name, value in settings.items() if not isinstance(value, Mapping)]
    tables = [f"\n[{name}]\n{configuration(value)}" for name, value in settings.items() if isinstance(value, Mapping)]
    return "\n".join([*plain, *tables]) + "\n"


def _value(value: Setting) -> str:
    """JSON's text, numbers and booleans are TOML's, too."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
