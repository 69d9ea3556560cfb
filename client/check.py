"""``--check``: what would be sent, and why, as the watch sees it; nothing is sent and nothing is written."""

from __future__ import annotations

from pathlib import Path

from logferry.client.agent.config import Config
from logferry.client.agent.failover import Centres
from logferry.client.agent.watch import Watch
from logferry.client.events import tell
from logferry.client.files.checkpoint import Checkpoint, StateUnusable
from logferry.client.files.compressed import Compressed
from logferry.client.files.discover import left_out


def check(config: Config) -> int:
    """Writes a line a file to standard output; returns the exit status: 1 when one cannot be read or none is there."""
    try:
        checkpoint = Checkpoint.peek(Path(config.state_dir))
    except StateUnusable as error:
        tell("state-unusable", reason=error)
        return 2
    watch = Watch(config, checkpoint, Centres([centre.name for centre in config.data_centres], 1.0, 1.0))
    watch.tick(0.0)
    sent_bytes = 0
    paths = set()
    for source in watch.sources.values():
        if isinstance(source.reading, Compressed):
            path, left = source.reading.path, source.reading.end - source.reading.position
            sent_bytes += left
            paths.add(path)
            print(f"send  {path} -> {source.entry.topic}: {left} bytes, from position {source.reading.position}")
            continue
        if source.tail is None:
            print(f"over  {source.entry.last_path}: sent up to position {source.entry.position}, {source.name}")
            continue
        position = source.entry.position
        size = source.tail.size
        sent_bytes += max(size - position, 0)
        paths.add(source.tail.path)
        which = f"from position {position}" if source.why == "known" else f"as a new source: {source.why}"
        print(f"send  {source.tail.path} -> {source.entry.topic}: {max(size - position, 0)} bytes, {which}")
    for path, reason in watch.failed.items():
        print(f"fail  {path}: {reason}")
    for files in config.files:
        for path, reason in left_out(files.patterns, config.state_dir, files.exclude).items():
            if path not in paths:
                print(f"skip  {path}: {reason}")
    print(f"{len(paths)} files, {sent_bytes} bytes; where each goes on, the gateway says")
    watch.close()
    checkpoint.close()
    return 1 if watch.failed or not paths else 0
