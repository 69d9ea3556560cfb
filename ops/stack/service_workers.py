"""Gateway and mirror workers as processes of the local stack."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from logferry.ops.cli.problems import CommandError, UsageError
from logferry.ops.stack.processes import Child

_ASK_TIMEOUT_S = 5.0
_EXIT_WRONG_USE = 2

Setting = str | int | float | bool | Sequence["Setting"] | Mapping[str, "Setting"]


class ServiceWorker:
    """One worker: its process, port and URL. Name and port stay the same over restarts."""

    def __init__(
        self, name: str, configuration: Path, number: int, port: int, log: Path, module: str = "logferry.gateway"
    ) -> None:
        command = [sys.executable, "-m", module, "--config", str(configuration), "--worker", str(number)]
        self.child = Child(name, command, log)
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        """Whether it serves its lanes."""
        return get(self.url, "/readyz")[0] == http.client.OK

    def startup_error(self) -> CommandError:
        """The error for a worker that ended before it was ready: UsageError if its configuration is wrong."""
        status = self.child.exit_status
        problem = self.child.failed(f"ended by itself with status {status}")
        return UsageError(str(problem)) if status == _EXIT_WRONG_USE else problem


def get(url: str, path: str) -> tuple[int, bytes]:
    """Status and body of one request on a new connection; 0 and nothing if the worker does not answer."""
    try:
        with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=_ASK_TIMEOUT_S)) as link:
            link.request("GET", path)
            answer = link.getresponse()
            return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""


def configuration(settings: Mapping[str, Setting]) -> str:
    """The settings as TOML: plain values first, then the tables, in the given order."""
    plain = [f"{name} = {_value(value)}" for name, value in settings.items() if not isinstance(value, Mapping)]
    tables = [f"\n[{name}]\n{configuration(value)}" for name, value in settings.items() if isinstance(value, Mapping)]
    return "\n".join([*plain, *tables]) + "\n"


def _value(value: Setting) -> str:
    """Strings, numbers and booleans have the same syntax in JSON and TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
