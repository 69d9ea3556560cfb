"""``python -m logferry.ops``: the same as the command ``logferry``."""

import sys

from logferry.ops.cli.main import main

sys.exit(main())
