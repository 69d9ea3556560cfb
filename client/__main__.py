"""``python -m logferry.client``: the same as ``logferry push``."""

import os
import signal
import sys

if not os.isatty(2):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # while the modules are loaded; what it asks for is read afterwards

from logferry.client.agent.main import main

sys.exit(main())
