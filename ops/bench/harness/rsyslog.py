"""rsyslog as a peer of the push-client: ``imfile`` to ``omkafka`` from Debian's packages, configured for speed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

_MODULE_FOLDERS: Final = ("/usr/lib/x86_64-linux-gnu/rsyslog", "/usr/lib/aarch64-linux-gnu/rsyslog", "/usr/lib/rsyslog")

# A record is a line. A producer batch has up to 1 MiB and waits up to 50 ms. imfile saves its positions every 1,000
# lines: otherwise a kill would double all lines.
_CONFIGURATION: Final = """
global(workDirectory="{work}" net.enableDNS="off")
main_queue(queue.type="LinkedList" queue.size="100000" queue.dequeueBatchSize="4096")
module(load="imfile")
module(load="omkafka")
template(name="line" type="string" string="%msg%")
input(type="imfile" File="{pattern}" Tag="bench" PersistStateInterval="1000" ruleset="out" readMode="0")
ruleset(name="out") {{
  action(type="omkafka" topic="{topic}" broker=[{brokers}] template="line" key="bench"
    partitions.auto="on" resubmitOnFailure="on" keepFailedMessages="on" failedMsgFile="failed"
    confParam=["compression.codec=none", "queue.buffering.max.messages=200000", "queue.buffering.max.ms=50",
      "batch.num.messages=100000", "batch.size=1048576", "acks=all"])
}}
"""


class PeerMissing(Exception):
    """A peer of a benchmark is not installed; the text says how to install it."""


def find_rsyslogd() -> str:
    """The path of ``rsyslogd``. Raises `PeerMissing` when it, or its module for Kafka, is not there."""
    found = shutil.which("rsyslogd") or shutil.which("rsyslogd", path="/usr/sbin:/sbin")
    if found is None or not any((Path(folder) / "omkafka.so").exists() for folder in _MODULE_FOLDERS):
        raise PeerMissing("rsyslog with omkafka is not installed; on Debian: apt-get install rsyslog rsyslog-kafka")
    return found


def start(folder: Path, pattern: Path, topic: str, bootstrap: str) -> subprocess.Popen[bytes]:
    """Follows the files; restarted on the same folder, it resumes from its state."""
    folder.mkdir(parents=True, exist_ok=True)
    brokers = ",".join(f'"{broker}"' for broker in bootstrap.split(","))
    file = folder / "rsyslog.conf"
    file.write_text(_CONFIGURATION.format(work=folder, pattern=pattern, topic=topic, brokers=brokers))
    (folder / "pid").unlink(missing_ok=True)
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [find_rsyslogd(), "-n", "-f", str(file), "-i", str(folder / "pid")], stdout=log, stderr=log
        )
