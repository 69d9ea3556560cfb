"""The push-client as one file, ``logferry-push.pyz``, that any Python from 3.9 on runs: ``make push-client``.

It holds the client, the contract, and tomli, which reads TOML where Python itself does not (before 3.11). The same
sources make the same bytes: names in order, no times.
"""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_SHEBANG: Final = b"#!/usr/bin/env python3\n"
_MAIN: Final = b"""import sys

if sys.version_info < (3, 9):
    sys.exit("logferry-push needs Python 3.9 or newer, this is %d.%d" % sys.version_info[:2])

from logferry.client.agent import main

sys.exit(main())
"""


def build(target: Path) -> None:
    """Writes the file, executable, in one step: whoever runs the one before is not disturbed."""
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
    yield "LICENSE", (_ROOT / "LICENSE").read_bytes()
    ours = [*(_ROOT / "client").glob("*.py"), _ROOT / "gateway" / "__init__.py", _ROOT / "gateway" / "contract.py"]
    for path in ours:
        yield f"logferry/{path.relative_to(_ROOT)}", path.read_bytes()
    # tomli alone, without the compiled modules that its wheels for some Pythons hold beside the sources
    for part in importlib.metadata.files("tomli") or ():
        if part.suffix == ".py" or part.name == "LICENSE":
            yield f"tomli/{part.name}", part.read_binary()


def main() -> int:
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist/logferry-push.pyz")
    build(target)
    print(f"{target}: {target.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
