"""Builds the push-client as one file, ``logferry-push.pyz``, for any Python from 3.9 on: ``make push-client``.

It holds the client, the contract, the package's version, and tomli, which reads TOML before Python 3.11. The same
sources give the same bytes: members are sorted by name and carry no times.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]
_CONTRACT: Final = ("contract/__init__.py", "contract/names.py", "contract/chunk.py", "contract/syslog_frames.py")
_CLIENT: Final = ("", "agent", "files", "inputs", "transport")
_SHEBANG: Final = b"#!/usr/bin/env python3\n"
_MAIN: Final = b"""import sys

if sys.version_info < (3, 9):
    sys.exit("logferry-push needs Python 3.9 or newer, this is %d.%d" % sys.version_info[:2])

if sys.argv[1:] == ["--version"]:
    from logferry.client import __version__

    sys.exit(print("logferry", __version__))

import os
import signal

if not os.isatty(2):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # while the modules are loaded; what it asks for is read afterwards

from logferry.client.agent.main import main

sys.exit(main())
"""


def build(target: Path) -> None:
    """Writes the executable file and moves it to its place in one step: a running client is not disturbed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(target.name + ".new")
    with new.open("wb") as file:
        file.write(_SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in sorted(_members()):
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    new.chmod(0o755)
    new.replace(target)


def _members() -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", _MAIN
    yield "logferry/__init__.py", b""
    project = distribution("logferry")
    # In the source tree the metadata may be those of an egg-info folder, which has no license.
    license = _ROOT / "LICENSE"
    packed = "" if license.exists() else project.read_text("licenses/LICENSE") or ""
    yield "LICENSE", license.read_bytes() if license.exists() else packed.encode()
    metadata = f"Metadata-Version: 2.1\nName: logferry\nVersion: {project.version}\n"
    yield f"logferry-{project.version}.dist-info/METADATA", metadata.encode()
    ours = [path for folder in _CLIENT for path in (_ROOT / "client" / folder).glob("*.py")]
    ours += [_ROOT / "gateway" / name for name in ("__init__.py", *_CONTRACT)]
    for path in ours:
        yield f"logferry/{path.relative_to(_ROOT)}", path.read_bytes()
    # tomli's sources alone, without the compiled modules that some of its wheels add
    for part in distribution("tomli").files or ():
        if part.suffix == ".py" or part.name == "LICENSE":
            yield f"tomli/{part.name}", part.read_binary()


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist/logferry-push.pyz")
    build(target)
    print(f"{target}: {target.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
