"""``python -m logferry.ops``: the same as the command ``logferry``."""

from logferry.ops.cli.main import program

program()
