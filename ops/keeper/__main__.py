"""``logferry keeper --config FILE``: the process of the keeper."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from logferry.gateway import log
from logferry.gateway.config import ConfigError
from logferry.gateway.http.auth import Gate
from logferry.gateway.http.router import Routes
from logferry.gateway.http.server import Server
from logferry.gateway.kafka.client import KafkaClient
from logferry.gateway.service.preflight import connect_to_kafka
from logferry.gateway.service.processes import run_service
from logferry.gateway.tls import caller_context, kafka_options
from logferry.ops.keeper.config import KeeperConfig, load
from logferry.ops.keeper.keeper import Keeper
from logferry.ops.keeper.status_api import LIMITS, KeeperApi


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 2 wrong configuration, 3 Kafka is not there."""
    text = (
        "Watches the brokers of one Kafka cluster, their disks and replicas, and acts within its bounds.\n"
        "Without `act = true` it changes nothing. `logferry keeper status`, `plan`, `log`, `pause` and `resume` ask it."
    )
    return run_service("keeper", text, argv, load, serve, module="logferry.ops.keeper")


async def serve(config: KeeperConfig, worker: int, reload: Callable[[], KeeperConfig]) -> None:
    """Until SIGTERM or SIGINT. On SIGHUP tokens are reloaded; other settings take a restart. Raises KafkaError."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gate = Gate(config)
    loop.add_signal_handler(signal.SIGHUP, partial(_reload, reload, gate))
    context = None if config.tls is None else caller_context(config.tls)
    url = config.url(worker)
    kafka = KafkaClient(kafka_options(config.kafka), url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kafka.close)
        await connect_to_kafka(kafka)
        keeper, routes = Keeper(config, url, kafka), Routes(gate)
        KeeperApi(keeper).add_to(routes)
        server = Server(routes, LIMITS)
        stack.push_async_callback(server.close)
        await server.listen(config.host, config.port(worker), context)
        work = asyncio.create_task(keeper.run())
        stack.push_async_callback(keeper.stop)
        stack.push_async_callback(_cancelled, work)
        work.add_done_callback(lambda _: stop.set())
        log.event("worker_started", url=url, dc=config.dc, worker=worker)
        await stop.wait()
        if work.done():
            work.result()
        log.event("worker_stopping", url=url)
    log.event("worker_stopped", url=url)


async def _cancelled(work: asyncio.Task[None]) -> None:
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


def _reload(reload: Callable[[], KeeperConfig], gate: Gate) -> None:
    """An invalid configuration changes nothing."""
    try:
        fresh = reload()
        gate.replace(fresh.tokens, fresh.issuers)
    except (ConfigError, ValueError) as error:
        log.event("configuration_not_reloaded", reason=str(error))
    else:
        log.event("configuration_reloaded", tokens=[token.name for token in fresh.tokens])


if __name__ == "__main__":
    sys.exit(main())
