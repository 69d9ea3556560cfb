"""``make reference``: writes the generated pages of the documentation, ``ops/docs/reference``.

The pages are made from the code: commands from their parsers, settings from the models. A test makes them again and
compares, so a page cannot say what the code does not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.support.reference import commands, configuration

FOLDER: Final = Path(__file__).parents[3] / "ops" / "docs" / "reference"


def pages() -> dict[str, str]:
    """Each generated page by its file name."""
    return {**configuration.pages(), **commands.pages()}


def main() -> int:
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
