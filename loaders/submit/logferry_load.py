"""``logferry load`` as a program for spark-submit, in a folder of its own: Python searches a script's folder first."""

import sys

from logferry.loaders.commands.load import main

if __name__ == "__main__":
    sys.exit(main())
