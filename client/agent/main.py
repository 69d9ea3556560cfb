"""The push-client's main loop, and its main function.

The main thread looks at the files, hands requests to threads, applies the answers and saves the checkpoint. ``--check``
prints what would be sent and why; it sends and writes nothing.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from logferry.client.agent.agent import Agent, layers_of
from logferry.client.agent.config import Config
from logferry.client.agent.status import MetricsPage, say, show_status
from logferry.client.agent.workers import BodySent, GivenConfig, JobResult, ProbeResult, Signals, Workers
from logferry.client.events import log_event, set_up
from logferry.client.files.checkpoint import Checkpoint, StateUnusable
from logferry.client.files.compressed import CompressedFile
from logferry.client.files.discover import left_out
from logferry.client.inputs.inputs import Inputs
from logferry.client.transport.cluster import Credentials, GatewayCluster
from logferry.client.transport.connections import Dialer
from logferry.client.transport.failover import FailoverPolicy

CREDENTIALS_EVERY_S = 5.0
END_GRACE_S = 5.0


def check(config: Config) -> int:
    """Prints a line a file. Returns the exit status: 1 if a file cannot be read or there is none."""
    try:
        checkpoint = Checkpoint.peek(Path(config.state_dir))
    except StateUnusable as error:
        log_event("state-unusable", reason=error)
        return 2
    for each in config.inputs:
        topics = " ".join(config.files[config.inputs.index(each)].topics)
        say(f"take  {each.kind} -> {topics}: as {each.source}")
    centres = FailoverPolicy([centre.name for centre in config.data_centres], 1.0, 1.0)
    layers = layers_of(config, checkpoint, centres, Inputs())
    watches = [layer.watch for layer in layers]
    for watch in watches:
        watch.tick(0.0)
    failed = {path: why for watch in watches for path, why in watch.failed.items()}
    ignored = {path for watch in watches for path in watch.search.ignored}
    sent_bytes = 0
    paths = set()
    for source in (source for watch in watches for source in watch.sources.values()):
        entry, reading, tail = source.entry, source.reading, source.tail
        if isinstance(reading, CompressedFile):
            path, left, is_known = reading.path, reading.end - entry.position, True
        elif tail is not None:
            path, left, is_known = tail.path, max(tail.size - entry.position, 0), source.why == "known"
        else:
            say(f"over  {entry.last_path}: sent up to position {entry.position}, {source.name}")
            continue
        sent_bytes += left
        paths.add(path)
        which = f"from position {entry.position}" if is_known else f"as a new source: {source.why}"
        say(f"send  {path} -> {entry.topic}: {left} bytes, {which}")
    for path, reason in failed.items():
        say(f"fail  {path}: {reason}")
    for path in sorted(ignored):
        say(f"skip  {path}: last written longer ago than --ignore-older-s")
    for files in config.files:
        for path, reason in left_out(files.patterns, config.state_dir, files.exclude, files.link_roots).items():
            if path not in paths and path not in ignored:
                say(f"skip  {path}: {reason}")
    say(f"{len(paths)} files, {sent_bytes} bytes; the gateway decides where each resumes")
    for layer in layers:
        layer.close()
    checkpoint.close()
    return 1 if failed or not (paths or config.inputs) else 0


def run(
    config: Config,
    checkpoint: Checkpoint,
    signals: Signals,
    workers: Workers,
    credentials: Credentials,
    page: MetricsPage | None = None,
    inputs: Inputs | None = None,
    has_changed: Callable[[], bool] = bool,
) -> int:
    """The main loop; returns the exit status. ``has_changed``: asked at SIGHUP; True ends the loop."""
    agent = Agent(config, checkpoint, time.monotonic(), inputs)
    agent.start_hints(workers.wake)
    may_end = config.once or not config.has_files
    next_tick = next_read = 0.0
    exit_status: int | None = None
    while exit_status is None and not signals.end:
        now = time.monotonic()
        if now >= next_tick:
            agent.tick(now)
            next_tick = now + config.linger_s
        else:
            agent.take_hints(now)
        if now >= next_read or signals.reread:
            is_asked, signals.reread = signals.reread, False
            if is_asked and has_changed():
                break
            if is_asked:
                agent.inputs.reload()
            if credentials.read(is_asked):
                agent.wake_all(now)
            next_read = now + CREDENTIALS_EVERY_S
        if page is not None:
            page.refresh(now, agent.metrics)
        for source, job in agent.jobs(now, workers.free):
            workers.start(source, job)
        dc = agent.centres.probe(now) if workers.may_probe else None
        if dc is not None:
            workers.probe(dc)
        exit_status = _status(agent, config, now) if may_end and agent.inputs.are_over else None
        result = workers.wait(next_tick - time.monotonic()) if exit_status is None else None
        if result is not None:
            _apply(agent, result)
    _end(agent, config, workers)
    if exit_status is None:
        exit_status = 1 if config.once and not agent.is_done() else 0
    log_event("stopped", status=exit_status, chunks=agent.chunks, bytes=agent.bytes)
    return exit_status


def _apply(agent: Agent, result: JobResult | BodySent | ProbeResult) -> None:
    if isinstance(result, ProbeResult):
        agent.centres.record(*result, time.monotonic())
    elif isinstance(result, BodySent):
        agent.sent(*result, time.monotonic())
    else:
        agent.finish(*result, time.monotonic())


def _status(agent: Agent, config: Config, now: float) -> int | None:
    """With --once, or when all inputs ended: the exit status; None while there is something to send."""
    if agent.is_done():
        return 1 if agent.failures() else 0
    if not config.once or now - agent.last_progress < config.timeout_s:
        return None
    log_event("gateway-timeout", seconds=config.timeout_s)
    return 1 if agent.failures() else 3


def _end(agent: Agent, config: Config, workers: Workers) -> None:
    """Waits a little for the answers under way. The next start asks the gateway about the others."""
    agent.inputs.close()
    deadline = time.monotonic() + END_GRACE_S
    while workers.free < config.threads and time.monotonic() < deadline:
        result = workers.wait(deadline - time.monotonic())
        if result is not None:
            _apply(agent, result)
    agent.remember(time.monotonic())
    agent.close()


def raise_file_limit() -> None:
    """A followed file stays open, so that a rotated one can be read to its end."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        log_event("file-limit", reason=error)


def main(argv: Sequence[str] | None = None) -> int:
    """``logferry push``: returns the exit status."""
    with Signals() as signals:
        try:
            given = GivenConfig(argv)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 2
        if given.config.status:
            return show_status(Path(given.config.state_dir), given.config.json)
        set_up(given.config.verbose)
        if given.config.check:
            return check(given.config)
        raise_file_limit()
        niceness = 0
        while True:
            config = given.config
            os.nice(max(config.nice - niceness, 0))
            niceness = max(config.nice, niceness)
            exit_status = _serve(config, signals, given.has_changed)
            if given.config is config:
                return exit_status


def _serve(config: Config, signals: Signals, has_changed: Callable[[], bool]) -> int:
    """Until the client ends, or is to begin again with another configuration."""
    page: MetricsPage | None = None
    with ExitStack() as open_ones:
        try:
            checkpoint = Checkpoint.open(Path(config.state_dir))
            open_ones.callback(checkpoint.close)
            inputs = Inputs.open(config.inputs, config.state_dir)
            open_ones.callback(inputs.close)
            if config.metrics_port:
                page = MetricsPage(config.metrics_port, config.metrics_host)
                open_ones.callback(page.close)
        except StateUnusable as error:
            log_event("state-unusable", reason=error)
            return 2
        except OSError as error:
            log_event("metrics-unusable", host=config.metrics_host, port=config.metrics_port, reason=error.strerror)
            return 2
        clusters = [GatewayCluster(centre.urls, centre.token) for centre in config.data_centres]
        dialer = Dialer(config.tls.ca_file, config.pins, config.proxies, config.tls.cert_file, config.tls.key_file)
        token_files = [centre.token_file for centre in config.data_centres]
        credentials = Credentials(clusters, token_files, dialer)
        workers = Workers(config.threads, clusters, config.compression, dialer)
        open_ones.callback(workers.close, END_GRACE_S)
        signals.serves(workers.wake)
        topics = " ".join(dict.fromkeys(topic for files in config.files for topic in files.topics))
        urls = " ".join(url for centre in config.data_centres for url in centre.urls)
        log_event("started", url=urls, topic=topics, state_dir=config.state_dir)
        return run(config, checkpoint, signals, workers, credentials, page, inputs, has_changed)
