"""``logferry load`` as a program for spark-submit, in a folder of its own: Python searches a script's folder first."""

from __future__ import annotations

import sys

from logferry.loaders.commands.load import main

if __name__ == "__main__":
    sys.exit(main())
