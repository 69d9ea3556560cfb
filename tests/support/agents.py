"""Agents as they are, with the configurations of the guide: rsyslog, syslog-ng and OpenTelemetry's collector.

A block of the guide is used as it stands there, with another address, token, file and folder. Nothing is installed
here; what is missing skips its tests by name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from logferry.ops.stack.processes import Child

GUIDE: Final = Path(__file__).parents[2] / "ops/docs/guides/agents.md"
_HOW: Final = {
    "rsyslogd": "Debian's package rsyslog",
    "syslog-ng": "tests/support/syslog_ng.sh unpacks Debian's",
    "otelcol": "tests/support/otelcol.yaml tells how it is built",
}


def find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")


def needs(program: str, module: str | None = None) -> Any:
    """A mark that skips a test without the program. ``module``: of rsyslog, which is a package of its own."""
    is_here = find(program) is not None
    if module is not None:
        is_here = is_here and any(Path("/usr/lib").glob(f"*/rsyslog/{module}.so"))
    what = program if module is None else f"{program} with {module}"
    return pytest.mark.skipif(not is_here, reason=f"{what} is not installed: {_HOW[program]}")


def block(name: str, replaced: Mapping[str, str], must: Collection[str] | None = None) -> str:
    """The block of the guide that begins with this name, with replacements in their order.

    ``must``: those that have to be found; by default all.
    """
    found = re.search(rf"^```\w+\n# {re.escape(name)}\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    text = found[1]
    for old, new in replaced.items():
        assert old in text or (must is not None and old not in must), f"{name}: {old}"
        text = text.replace(old, new)
    return text


def agent(kind: str, folder: Path, configuration: str) -> Child:
    """An agent in the foreground that keeps its state in the folder; started. ``kind``: the name of the program."""
    folder.mkdir(parents=True, exist_ok=True)
    program, file = find(kind), folder / f"{kind}.conf"
    assert program is not None, kind
    if kind == "rsyslogd":
        configuration = f'global(workDirectory="{folder}")\n{configuration}'
    file.write_text(configuration, encoding="utf-8")
    state = str(folder / kind)
    command = {
        "rsyslogd": [program, "-n", "-f", str(file), "-i", f"{state}.pid"],
        "syslog-ng": [
            *(program, "-F", "--no-caps", "-f", str(file), "-R", f"{state}.persist", "-p", f"{state}.pid"),
            *("-c", f"{state}.ctl"),
        ],
        "otelcol": [program, "--config", str(file)],
    }[kind]
    child = Child(kind, command, folder / f"{kind}.log")
    child.start()
    return child
