"""``python -m logferry.client``: the same as ``logferry push``."""

import sys

from logferry.client.agent.agent import main

sys.exit(main())
