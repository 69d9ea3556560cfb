"""``python -m logferry.loaders``: the same as ``logferry load``."""

import sys

from logferry.loaders.commands.load import main

if __name__ == "__main__":
    sys.exit(main())
