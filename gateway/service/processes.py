"""The workers of gateway or mirror on this host, each a process of its own.

A supervisor runs them all. Of one worker: start, health, reload by SIGHUP, and ordered stop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import uvloop
from aiohttp import web
from aiokafka.errors import KafkaError
from logferry.gateway import log
from logferry.gateway.config import ConfigError, Limits, ServiceConfig, Tls
from logferry.gateway.errors import CannotListen, Problem, WeakKafka
from logferry.gateway.http.auth import Gate, Right
from logferry.gateway.http.router import Call, Routes, json_response
from logferry.gateway.http.server import Server
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.lanes.ownership import LaneT, Ownership
from logferry.gateway.service.memory import return_freed_memory, reuse_memory
from logferry.gateway.service.preflight import broker_risks, check_abilities, connect_to_kafka
from logferry.gateway.tls import caller_context, kafka_options
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

WRONG_USE: Final = 2
SERVICE_AWAY: Final = 3
_RESTART_S: Final = 1.0
_REFUSED_S: Final = 4.0
BROKERS_S: Final = 30.0
_FILES_S: Final = 10.0

_Config = TypeVar("_Config", bound=ServiceConfig)


def run_service(
    name: str,
    text: str,
    argv: list[str] | None,
    load: Callable[[Path], _Config],
    serve: Callable[[_Config, int, Callable[[], _Config]], Coroutine[Any, Any, None]],
    module: str | None = None,
) -> int:
    """The command of a service: runs all workers, or one. ``serve`` gets the configuration, the worker, a reload.

    ``module``: with the service's ``__main__``; default: `logferry.` and its name.

    Exit status: 0 stopped in order, 2 wrong configuration or weak Kafka, 3 Kafka does not answer.
    """
    parser = argparse.ArgumentParser(
        prog=f"logferry {name}",
        description=f"example: logferry {name} --config {name}.toml\n\n{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the TOML configuration")
    parser.add_argument("--worker", type=int, metavar="I", help="run only this worker, in the foreground")
    args = parser.parse_args(argv)

    logging.getLogger().addHandler(_LibraryMessages(logging.WARNING))
    # Until the worker can reload its configuration; by default SIGHUP would end the process.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        config = load(args.config)
        if args.worker is None:
            return supervise(module or f"logferry.{name}", args.config, config.workers)
        if not 0 <= args.worker < config.workers:
            raise ConfigError(f"--worker {args.worker}: the configuration has workers 0 to {config.workers - 1}")
        reuse_memory()
        uvloop.run(serve(config, args.worker, partial(load, args.config)))
        return 0
    except (ConfigError, WeakKafka) as error:
        log.event("refused_to_start", reason=str(error))
        return WRONG_USE
    except CannotListen as error:
        log.event("cannot_listen", listen=error.listen, reason=str(error.reason))
        return WRONG_USE
    except (KafkaError, OSError) as error:
        log.event("kafka_away", reason=str(error) or type(error).__name__)
        return SERVICE_AWAY


class _LibraryMessages(logging.Handler):
    """What libraries log is an event, too; among it, the errors of tasks that nobody waits for."""

    def emit(self, record: logging.LogRecord) -> None:
        raised = None if record.exc_info is None else "".join(traceback.format_exception(*record.exc_info))
        log.event("library_message", logger=record.name, message=record.getMessage(), raised=raised)


def supervise(module: str, configuration: Path, workers: int) -> int:
    """Runs all workers. One that dies is restarted after a second.

    One that refuses its first start ends them all. One that refuses later, since Kafka or the configuration changed,
    is tried again: the others serve.
    """
    stopping = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopping
        stopping = True
        for child in children.values():
            child.terminate()

    def reload(_number: int, _frame: object) -> None:
        for child in children.values():
            child.send_signal(signal.SIGHUP)

    def start(worker: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, "--config", str(configuration), "--worker", str(worker)]
        return subprocess.Popen(command)

    children: dict[int, subprocess.Popen[bytes]] = {}
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGHUP, reload)
    children.update({worker: start(worker) for worker in range(workers)})
    restarted = set[int]()
    worst = 0
    while children:
        time.sleep(0.1)
        for worker, child in list(children.items()):
            status = child.poll()
            if status is None:
                continue
            del children[worker]
            if stopping:
                worst = max(worst, status if status > 0 else 0)
            elif status == WRONG_USE and worker not in restarted:
                worst = status
                stop(0, None)
            else:
                log.event("worker_died", worker=worker, status=status)
                restarted.add(worker)
                time.sleep(_RESTART_S if status != WRONG_USE else _REFUSED_S)
                children[worker] = start(worker)
    return worst


@dataclass(frozen=True, slots=True)
class Parts(Generic[LaneT]):
    """What a service is made of. ``before_close``: ends what keeps requests open."""

    ownership: Ownership[LaneT]
    routes: Routes
    limits: Limits
    before_close: Callable[[], Awaitable[None]] | None = None


async def serve_worker(
    config: _Config,
    worker: int,
    reload: Callable[[], _Config],
    make: Callable[[str, KafkaClient, Gate, AsyncExitStack], Awaitable[Parts[LaneT]]],
    take_over: Callable[[_Config], None] = lambda _: None,
) -> None:
    """Serves until SIGTERM or SIGINT; on SIGHUP reloads tokens and certificate, and what ``take_over`` does besides.

    ``make``: the service behind the worker's URL, with Kafka connected; what it puts on the stack is closed after the
    lanes. Raises KafkaError when Kafka can't be reached, WeakKafka or ConfigError.
    """
    # Thousands of requests are alive at once and none of them is garbage: looking for cycles less often made small
    # requests a third faster.
    gc.set_threshold(100_000, 50, 100)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gate = Gate(config)
    tls = None if config.tls is None else CallerTls(config.tls, gate)
    loop.add_signal_handler(signal.SIGHUP, partial(_reload, reload, gate, tls, take_over))
    url = config.url(worker)
    kafka = KafkaClient(kafka_options(config.kafka), url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kafka.close)
        await connect_to_kafka(kafka)
        parts = await make(url, kafka, gate, stack)
        ownership, routes = parts.ownership, parts.routes
        ownership.run_in_background(watch_brokers(kafka, config.accept_weak_kafka))
        ownership.run_in_background(return_freed_memory())
        server = Server(routes, parts.limits)
        # Stopping goes from the end: the lanes move to other workers, waiting requests are forwarded to them, and only
        # then the owners are no longer followed.
        stack.push_async_callback(ownership.stop)
        stack.push_async_callback(server.close)
        if parts.before_close is not None:
            stack.push_async_callback(parts.before_close)
        await server.listen(config.host, config.port(worker), None if tls is None else tls.context)
        if tls is not None:
            tls.server = server
            ownership.run_in_background(tls.watch())
        await ownership.start()
        stack.push_async_callback(ownership.leave)
        log.event("worker_started", url=url, dc=config.dc, worker=worker)
        if config.shows_tokens:
            log.event("tokens_unencrypted", listen=config.listen)
        ownership.failed.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if ownership.failed.done():
            ownership.failed.result()
        routes.is_leaving = True
        log.event("worker_stopping", url=url)
    log.event("worker_stopped", url=url)


async def watch_brokers(kafka: KafkaClient, accepted: Sequence[str]) -> None:
    """Sets ``kafka.risks``: one broker may have been down when the worker started, or return with other settings."""
    while True:
        await asyncio.sleep(BROKERS_S)
        with suppress(KafkaError, OSError, TimeoutError):  # what may not be read was logged at the start
            try:
                check_abilities(await kafka.abilities())
                kafka.risks = broker_risks(await kafka.broker_settings(), accepted)
            except WeakKafka as error:
                if str(error) not in kafka.risks:
                    log.event("broker_too_weak", reason=str(error))
                kafka.risks = [str(error)]


class CallerTls:
    """The certificate of the worker, the authorities of callers' certificates, and the list of revoked ones: read again
    at each reload, and when one of the last two has changed. ``server``: that which uses them, once it listens.
    """

    def __init__(self, tls: Tls, gate: Gate) -> None:
        self.server: Server | None = None
        self._gate, self._tls, self._content = gate, tls, _content(tls)
        self.context = caller_context(tls)
        self._renewing: asyncio.Task[None] | None = None

    def read(self, tls: Tls) -> Callable[[], asyncio.Task[None] | None]:
        """Checks the files; the result takes them over. Raises ConfigError or OSError.

        What was verified with other authorities, or another list, does not count any more: connections and streams end.
        So do those without a certificate, where one was not required before.
        """
        content = _content(tls)
        context = caller_context(tls)

        def take_over() -> asyncio.Task[None] | None:
            drops = content[2:] != self._content[2:]
            requires = tls.client_certificates == "required" != self._tls.client_certificates
            self._tls, self._content, self.context = tls, content, context
            self._gate.generation += drops
            if self.server is not None:
                self._renewing = asyncio.get_running_loop().create_task(
                    self.server.renew(context, drops=drops, requires=requires)
                )
            return self._renewing

        return take_over

    async def watch(self) -> None:
        """Takes over authorities and revocations that have changed, until cancelled. A bad file is one line of log."""
        failed: list[bytes | None] = []
        while True:
            await asyncio.sleep(_FILES_S)
            content = _content(self._tls)[2:]
            if content in (self._content[2:], failed):
                continue
            try:
                self.read(self._tls)()
            except (ConfigError, OSError) as error:
                failed = content
                log.event("configuration_not_reloaded", reason=str(error))
            else:
                log.event("certificates_reloaded")


def _content(tls: Tls) -> list[bytes | None]:
    """Of the files; None: there is none."""
    found: list[bytes | None] = []
    for path in (tls.certificate, tls.key, tls.client_ca, tls.client_crl):
        try:
            found.append(None if path is None else path.read_bytes())
        except OSError:
            found.append(None)
    return found


def _reload(
    reload: Callable[[], _Config], gate: Gate, tls: CallerTls | None, take_over: Callable[[_Config], None]
) -> None:
    """Connections stay open but those of certificates that may not be valid; a bad configuration changes nothing."""
    try:
        fresh = reload()
        renew = None if tls is None or fresh.tls is None else tls.read(fresh.tls)
        gate.replace(fresh.tokens, fresh.issuers)
        take_over(fresh)
        if renew is not None:
            renew()
    except (ConfigError, OSError, ValueError) as error:
        log.event("configuration_not_reloaded", reason=str(error))
    else:
        log.event("configuration_reloaded", tokens=[token.name for token in fresh.tokens])


@dataclass(frozen=True, slots=True)
class HealthApi(Generic[LaneT]):
    """The routes about the worker itself: whether it answers, whether it is ready, and its metrics."""

    ownership: Ownership[LaneT]
    registry: CollectorRegistry

    def add_to(self, routes: Routes) -> None:
        routes.add("GET", "/healthz", "healthz", self.healthz, Right.OPEN)
        routes.add("GET", "/readyz", "readyz", self.readyz, Right.OPEN)
        routes.add("GET", "/metrics", "metrics", self.metrics, Right.METRICS)

    async def healthz(self, call: Call) -> web.StreamResponse:
        return json_response({"status": "alive"})

    async def readyz(self, call: Call) -> web.StreamResponse:
        lanes = {str(number): lane.state for number, lane in sorted(self.ownership.lanes.items())}
        if self.ownership.is_settled:
            return json_response({"status": "ready", "lanes": lanes})
        waits = [f"lane {lane.number}: {lane.why}" for lane in self.ownership.lanes.values() if lane.state != "serving"]
        detail = "; ".join(waits) or "the group has not assigned the lanes yet"
        raise Problem("not-owner-yet", detail, lanes=lanes)

    async def metrics(self, call: Call) -> web.StreamResponse:
        # There are a dozen lines for each topic.
        body = await asyncio.to_thread(generate_latest, self.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
